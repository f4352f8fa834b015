"""Disks that are full or fail, folders that vanish, files that are cut or come from elsewhere.

Each test checks the message, what is kept, and that the same command resumes the run, which ends with the
bits of an uninterrupted run.
"""

from __future__ import annotations

import functools
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from bits import differing, read_csv, refused, round_of, run_disturbed, run_here, start_run, tiny_settings
from mutations import sign
from processes import REPOSITORY, Mpirun, exit_code, give_up_capabilities, run_tree

from hpcfl.errors import BAD_INPUT, FINISHED, STORAGE_ERROR
from hpcfl.main import main
from hpcfl.registries import load_config
from hpcfl.storage import checkpoint
from hpcfl.storage.hdf5 import SCHEMA
from hpcfl.storage.runfolder import RunFolder
from hpcfl.storage.snapshot import Snapshot

Capture = pytest.CaptureFixture[str]
Resume = Callable[[Path], None]
ROUNDS = 4
OF_ROUND_2 = "the last good checkpoint is of round 2"
NOT_WRITTEN = "{}: the checkpoint of round 3 cannot be written"
WRITABLE = "make the folder writable"
FREE = "free space on the disk (see df -h and your quota)"
FOREIGN = "pid 7 on another-node, job 12345"
LOCK = f"{FOREIGN}\n"
SAME_COMMAND = "rerun the same command"
AGAIN = f"{SAME_COMMAND} to resume"
START_OVER = f"there is no checkpoint yet; {FREE} and {SAME_COMMAND} to start over"
IF_MOVED = " (with --out DIR, if the folder has another path now)"
LOST = "was moved or deleted, or lost its .lock, while this run wrote it"
CHECKPOINTS = ("checkpoint.h5", "checkpoint.prev.h5")


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    keys = ["run.checkpoint_every=1", f"train.rounds={ROUNDS}"]
    return [*tiny_settings(digits), "method.name=heurpfedla", *keys]


@pytest.fixture(scope="module")
def uninterrupted(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert run_here(folder, settings) == FINISHED
    return folder


@pytest.fixture(scope="module")
def unfinished(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with checkpoints after rounds 1 and 2, which is to be copied."""
    folder = tmp_path_factory.mktemp("unfinished") / "run"
    assert run_disturbed(2, folder, settings, lambda: os._exit(9)) == 9
    assert [round_of(folder / name) for name in CHECKPOINTS] == [2, 1]
    return folder


@pytest.fixture
def copied(unfinished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unfinished, tmp_path / "run"))


@pytest.fixture
def resume(settings: list[str], uninterrupted: Path) -> Resume:
    """Return a function that resumes the run of a folder, and checks its bits at the end."""

    def check(folder: Path) -> None:
        assert run_here(folder, settings) == FINISHED
        assert not differing(uninterrupted, folder)

    return check


@pytest.fixture
def small_disk(uninterrupted: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a disk with room for two checkpoints of three; skip the test where that is not allowed."""
    size = int(2.5 * (uninterrupted / "checkpoint.prev.h5").stat().st_size)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def names_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_checkpoints_of_two_rounds(folder: Path) -> None:
    assert [round_of(folder / name) for name in CHECKPOINTS] == [2, 1]
    assert "checkpoint.tmp.h5" not in names_of(folder)


def fill(disk: Path) -> None:
    """Leave no byte of a disk free."""
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def limit_files(size: int) -> None:
    """Let no file grow beyond some bytes: what a quota does, to any user, with another word for it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def the_error(capfd: Capture) -> str:
    """Return the one line that was printed."""
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("hpcfl: error: ")
    return line


# Full disks, and disks that fail


def test_a_full_disk_ends_all_ranks_and_keeps_the_checkpoint(
    settings: list[str], resume: Resume, small_disk: Path, mpirun: Mpirun
) -> None:
    folder = small_disk / "run"
    ended = mpirun(2, "-m", "hpcfl.main", "--quiet", "--out", folder, *settings, check=False)
    assert ended.returncode == STORAGE_ERROR, ended.stderr
    (error,) = (line for line in ended.stderr.splitlines() if line.startswith("hpcfl: "))
    assert error == (
        f"hpcfl: error: {folder}: the checkpoint of round 3 cannot be written: No space left on device; "
        f"{OF_ROUND_2}; {FREE} and {AGAIN}"
    )
    assert "Traceback" not in ended.stderr
    assert_checkpoints_of_two_rounds(folder)
    remount(small_disk, "size=100m")
    resume(folder)


def test_a_run_is_refused_if_the_disk_has_no_room_for_its_lock(
    settings: list[str], resume: Resume, unfinished: Path, small_disk: Path, capfd: Capture
) -> None:
    folder = shutil.copytree(unfinished, small_disk / "run")
    fill(small_disk)
    # twice: what the first attempt held is free again
    for _ in range(2):
        assert run_here(folder, settings) == STORAGE_ERROR
        expected = f"cannot write the run folder {folder}: No space left on device; {FREE} and {SAME_COMMAND}"
        assert the_error(capfd).endswith(expected)
    remount(small_disk, "ro")
    assert run_here(folder, settings) == STORAGE_ERROR
    expected = f"cannot write the run folder {folder}: Read-only file system; {WRITABLE} and {SAME_COMMAND}"
    assert the_error(capfd).endswith(expected)
    assert run_here(small_disk / "new", settings) == BAD_INPUT
    assert the_error(capfd).endswith("Read-only file system; name another with --out DIR")
    remount(small_disk, "rw,size=100m")
    (small_disk / "filler").unlink()
    resume(folder)


def make_read_only(folder: Path) -> None:
    give_up_capabilities()
    folder.chmod(0o555)


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda _: limit_files(500_000), f"{NOT_WRITTEN}: File too large; {OF_ROUND_2}; {FREE} and {AGAIN}"),
        (make_read_only, f"{NOT_WRITTEN}: Permission denied; {OF_ROUND_2}; {WRITABLE} and {AGAIN}"),
        (lambda folder: (folder / ".lock").unlink(), f"{{}} {LOST}; {OF_ROUND_2}; {AGAIN}{IF_MOVED}"),
    ],
    ids=["quota", "read-only", "lock"],
)
def test_a_fault_at_a_checkpoint_ends_the_run(
    settings: list[str],
    resume: Resume,
    tmp_path: Path,
    capfd: Capture,
    act: Callable[[Path], object],
    expected: str,
) -> None:
    """If the lock is gone, another run may have started meanwhile."""
    folder = tmp_path / "run"
    assert run_disturbed(2, folder, settings, lambda: act(folder)) == STORAGE_ERROR
    assert the_error(capfd) == f"hpcfl: error: {expected.format(folder)}"
    assert_checkpoints_of_two_rounds(folder)
    folder.chmod(0o755)
    resume(folder)


def test_without_a_checkpoint_the_same_command_starts_over(
    settings: list[str], resume: Resume, tmp_path: Path, capfd: Capture
) -> None:
    folder = tmp_path / "run"
    assert run_disturbed(0, folder, settings, lambda: limit_files(100_000)) == STORAGE_ERROR
    assert the_error(capfd).endswith(
        f"the checkpoint of round 1 cannot be written: File too large; {START_OVER}"
    )
    resume(folder)


def test_a_quota_in_the_middle_of_a_line_ends_the_run(
    settings: list[str], resume: Resume, tmp_path: Path, capfd: Capture
) -> None:
    folder = tmp_path / "run"
    metrics = folder / "metrics.csv"
    code = run_disturbed(2, folder, settings, lambda: limit_files(metrics.stat().st_size + 40))
    assert code == STORAGE_ERROR
    assert the_error(capfd) == (
        f"hpcfl: error: {folder}: its CSV files cannot be written: File too large; {OF_ROUND_2}; {FREE} and "
        f"{AGAIN}"
    )
    *whole, half = metrics.read_text().split("\n")
    assert (len(whole), len(half)) == (3, 40)
    resume(folder)


def test_a_run_continues_without_log_tracker_and_page_with_a_warning(
    settings: list[str], uninterrupted: Path, tmp_path: Path, capfd: Capture
) -> None:
    """The log, TensorBoard's events and the report."""
    folder = tmp_path / "run"

    def disturb() -> None:
        (folder / "report.html").mkdir()
        (folder / "log.txt").unlink()
        (folder / "log.txt").symlink_to("/dev/full")
        full = os.open("/dev/full", os.O_WRONLY)
        for entry in Path("/proc/self/fd").iterdir():
            if "tfevents" in os.readlink(entry):
                os.dup2(full, int(entry.name))
                return
        raise LookupError("no events")

    keys = [*settings, "run.tracker=tensorboard", "run.report=true"]
    assert run_disturbed(2, folder, keys, disturb) == FINISHED
    # a warning goes to the log as well
    events, log, report = capfd.readouterr().err.splitlines()
    assert events == (
        f"hpcfl: warning: {folder}: run.tracker=tensorboard has failed: No space left on device; the run "
        "continues without, and its next start sends what is missing"
    )
    assert log == (
        f"hpcfl: warning: {folder}: log.txt cannot be written: No space left on device; the run continues "
        "without"
    )
    assert report.startswith("hpcfl: warning: no report: ")
    assert not differing(uninterrupted, folder)


# Folders that are gone


@pytest.mark.parametrize("then", ["moved", "replaced", "deleted"])
def test_a_folder_that_is_moved_or_deleted_ends_the_run(
    settings: list[str], resume: Resume, tmp_path: Path, capfd: Capture, then: str
) -> None:
    """One that is moved keeps what it has, and what replaces it is not changed."""
    folder, moved = tmp_path / "run", tmp_path / "moved"

    def disturb() -> None:
        if then == "deleted":
            shutil.rmtree(folder)
        else:
            folder.rename(moved)
        if then == "replaced":
            folder.mkdir()
            (folder / ".lock").write_text(LOCK)

    assert run_disturbed(2, folder, settings, disturb) == STORAGE_ERROR
    assert the_error(capfd) == f"hpcfl: error: {folder} {LOST}; {OF_ROUND_2}; {AGAIN}{IF_MOVED}"
    if then == "replaced":
        assert names_of(folder) == {".lock"}
        assert (folder / ".lock").read_text() == LOCK
    else:
        assert not folder.exists()
    resume(moved)


# Two runs in one folder


def test_a_lock_of_a_dead_job_on_another_node_is_taken_over_with_a_warning(
    resume: Resume, copied: Path, capfd: Capture
) -> None:
    (copied / ".lock").write_text(LOCK)
    resume(copied)
    assert capfd.readouterr().err == (
        f"hpcfl: warning: {copied} was locked by {FOREIGN}. This machine cannot see whether it still runs "
        "(see squeue, or ps on that machine), so this run takes over; if it does run, it will stop soon, "
        "with exit code 74\n"
    )
    assert (copied / ".lock").read_text() == ""


def test_a_run_whose_folder_another_has_taken_over_ends(
    settings: list[str], tmp_path: Path, capfd: Capture
) -> None:
    """The other run took it for dead, because its node did not answer for a while."""
    folder = tmp_path / "run"
    disturb = functools.partial((folder / ".lock").write_text, LOCK)
    assert run_disturbed(2, folder, settings, disturb) == STORAGE_ERROR
    assert the_error(capfd).startswith(
        f"hpcfl: error: {folder} was taken over by {FOREIGN} while this run wrote it; {OF_ROUND_2}; "
    )
    assert (folder / ".lock").read_text() == LOCK
    assert_checkpoints_of_two_rounds(folder)
    # the line of round 3 would be in the other's files
    assert len((folder / "metrics.csv").read_text().splitlines()) == 3


def test_a_checkpoint_is_not_written_to_a_folder_that_another_run_takes_over(
    settings: list[str], tmp_path: Path, capfd: Capture
) -> None:
    """The other run's checkpoints stay, and the one that it may be writing."""
    folder = tmp_path / "run"

    def prepare() -> None:
        write = checkpoint.write_snapshot

        def overtaken(path: Path, snapshot: Snapshot) -> None:
            write(path, snapshot)
            if snapshot.round == 3:
                (folder / ".lock").write_text(LOCK)

        checkpoint.write_snapshot = overtaken

    assert exit_code(start_run(folder, settings, prepare)) == STORAGE_ERROR
    assert the_error(capfd).startswith(f"hpcfl: error: {folder} was taken over by {FOREIGN} while this run ")
    rounds = [round_of(folder / name) for name in (*CHECKPOINTS, "checkpoint.tmp.h5")]
    assert rounds == [2, 1, 3]


# Clocks, and places for passing files


def test_jumps_of_clocks_and_file_times_change_nothing(
    settings: list[str], uninterrupted: Path, copied: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's clock is set forward and back by days during a run; files have times of other clocks."""
    true_time, day_s = time.time, 86_400
    jumps = iter(range(1_000_000))
    for number, path in enumerate(sorted(copied.iterdir())):
        os.utime(path, (0, true_time() + (-1) ** number * 300 * day_s))
    monkeypatch.setattr(time, "time", lambda: true_time() + (-1) ** next(jumps) * 3 * day_s)
    assert main(["watch", str(copied)]) == FINISHED
    assert run_here(copied, [*settings, "run.tracker=tensorboard"]) == FINISHED
    assert main(["watch", str(copied)]) == FINISHED
    assert next(jumps) > 3
    assert capfd.readouterr().err == ""
    wall_s = [float(row["wall_s"]) for row in read_csv(copied / "metrics.csv")]
    assert wall_s == sorted(wall_s)
    assert wall_s[-1] < 1000
    assert not differing(uninterrupted, copied)


def test_a_full_or_missing_tmp_changes_nothing(
    settings: list[str], uninterrupted: Path, tmp_path: Path, mpirun_command: list[str]
) -> None:
    """TMPDIR does not exist, and /tmp, /var/tmp and the working folder take no file.

    Open MPI needs a place for files of its own: beside it one rank alone is tried.
    """
    if shutil.which("unshare") is None or any(str(p).startswith("/tmp/") for p in (REPOSITORY, sys.prefix)):
        pytest.skip("/tmp cannot be hidden here")
    (digits,) = (word for word in settings if word.startswith("data.path="))
    shutil.copy(digits.removeprefix("data.path="), tmp_path / "digits.npz")
    keys = " ".join(word for word in settings if word != digits)
    launcher = "" if "--oversubscribe" in mpirun_command else f"{shlex.join(mpirun_command)} -n 2 "
    script = f"""
        mount --bind {tmp_path} /mnt && mount -t tmpfs -o nr_inodes=1 tmpfs /tmp || exit 99
        mount -t tmpfs -o nr_inodes=1 tmpfs /var/tmp || exit 99
        cd /tmp && export TMPDIR=/nonexistent && ! touch x 2>/dev/null || exit 98
        ! {sys.executable} -c 'import tempfile; tempfile.gettempdir()' 2>/dev/null || exit 97
        {launcher}{sys.executable} -m hpcfl.main --quiet --out /mnt/run {keys} data.path=/mnt/digits.npz
    """
    ended = run_tree(["unshare", "--mount", "bash", "-c", script], check=False)
    if "unshare failed" in ended.stderr or ended.returncode == 99:
        pytest.skip("/tmp cannot be hidden here")
    assert (ended.returncode, ended.stderr) == (FINISHED, "")
    assert not differing(uninterrupted, tmp_path / "run")


# Cut and damaged files


@pytest.mark.parametrize("kept", [0.4, 0.9])
def test_a_run_resumes_if_only_the_older_checkpoint_is_whole(
    settings: list[str], resume: Resume, copied: Path, capfd: Capture, kept: float
) -> None:
    for name in ("config.yaml", "metrics.csv", "partition.csv"):
        shutil.copy(copied / name, copied / f".{name}.node-7")
    for path in copied.iterdir():
        if path.name != "checkpoint.prev.h5":
            os.truncate(path, int(kept * path.stat().st_size))
    resume(copied)
    printed = capfd.readouterr().err
    newest, previous = (copied / name for name in CHECKPOINTS)
    assert f"hpcfl: warning: {newest} is damaged (its bytes do not match the SHA-256 at its start)" in printed
    assert f"; taking {previous}, round 1\n" in printed
    assert f"hpcfl: warning: {copied / 'config.yaml'} is damaged, and is written again\n" in printed
    assert not list(copied.glob(".*.node-7"))
    assert load_config(copied / "config.yaml", []).tree() == load_config(None, settings).tree()


def test_a_folder_without_config_yaml_is_resumed(resume: Resume, copied: Path, capfd: Capture) -> None:
    (copied / "config.yaml").unlink()
    resume(copied)
    expected = f"hpcfl: warning: {copied / 'config.yaml'} is missing, and is written again\n"
    assert expected in capfd.readouterr().err


def test_a_truncated_config_yaml_is_written_again(
    settings: list[str], resume: Resume, copied: Path, capfd: Capture
) -> None:
    whole = (copied / "config.yaml").read_bytes()
    config = load_config(None, settings)
    for length in range(0, len(whole), 97):
        (copied / "config.yaml").write_bytes(whole[:length])
        RunFolder(copied, config, uses_total_rounds=True).check(fresh=False)
    for length in (len(whole) // 2, whole.index(b"ranks:") + len(b"ranks:\n"), len(whole) - 2):
        (copied / "config.yaml").write_bytes(whole[:length])
        resume(copied)
        assert "config.yaml is damaged, and is written again" in capfd.readouterr().err


# Checkpoints from elsewhere


def make_older(path: Path) -> None:
    """Make a checkpoint one of another version, whose metrics had fewer columns."""
    with h5py.File(path, "r+", locking=False) as file:
        file.attrs["schema"] = 1
        values, columns = file["ledger/metrics"][()], file["ledger/metrics"].attrs["columns"]
        del file["ledger/metrics"]
        file["ledger/metrics"] = values[:, :-3]
        file["ledger/metrics"].attrs["columns"] = columns[:-3]
    sign(path)


OVER = "or add --fresh to move the folder aside and start over"


def test_a_checkpoint_of_another_run_is_refused(
    settings: list[str], resume: Resume, copied: Path, tmp_path: Path, capfd: Capture
) -> None:
    own = (copied / "checkpoint.h5").read_bytes()
    other = [*settings, "method.name=fedavg", "train.lr=0.01", "train.rounds=1"]
    assert run_here(tmp_path / "other", other) == FINISHED
    shutil.copy(tmp_path / "other" / "checkpoint.h5", copied)
    error = refused(capfd, "--quiet", "--out", copied, *settings)
    changed = "method.name: fedavg there, heurpfedla here; train.lr: 0.01 there, 0.05 here"
    assert f"{copied / 'checkpoint.h5'} is of another run than config.yaml ({changed}" in error
    assert error.endswith(f"; restore this run's own checkpoint, {OVER}")
    (copied / "checkpoint.h5").write_bytes(own)
    resume(copied)


def test_an_unfinished_run_of_another_version_is_refused(
    settings: list[str], copied: Path, capfd: Capture
) -> None:
    make_older(copied / "checkpoint.h5")
    before = {name: (copied / name).read_bytes() for name in names_of(copied) - {".lock"}}
    assert refused(capfd, "--quiet", "--out", copied, *settings) == (
        f"hpcfl: error: {copied / 'checkpoint.h5'} was written by another version of hpcfl (schema 1, "
        f"now {SCHEMA}) and cannot be resumed; finish the run with that version, {OVER}; report, compare, "
        "export and predict can read it"
    )
    assert {name: (copied / name).read_bytes() for name in names_of(copied) - {".lock"}} == before
    assert main(["--quiet", "--out", str(copied), *settings, "--fresh"]) == FINISHED


def test_a_finished_run_of_an_older_schema_can_be_read(
    settings: list[str], uninterrupted: Path, tmp_path: Path, capfd: Capture
) -> None:
    older = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    make_older(older / "checkpoint.h5")
    line = refused(capfd, "--quiet", "--out", older, *settings)
    assert line.endswith("; report, compare, export and predict can read it")
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 7, 7, 1), np.float32))
    for words in (
        ["report", older],
        ["compare", older, uninterrupted],
        ["export", older, "--client", 1, "--out", tmp_path / "client1"],
        ["predict", older, "--client", 1, tmp_path / "x.npz", "--out", tmp_path / "labels.csv"],
        ["watch", older],
    ):
        assert main(list(map(str, words))) == FINISHED
    assert capfd.readouterr().err == ""
