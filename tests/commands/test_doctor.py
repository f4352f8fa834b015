"""What `hpcfl doctor` says of a machine, alone and as ranks, with real faults; it leaves nothing behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bits import write_digits
from processes import Mpirun, clean_environment, run_tree

from hpcfl.checks.alike import compare
from hpcfl.checks.finding import Checked, Finding, last_line, ranges
from hpcfl.checks.ranks import _cores, _devices, _family, _memory, _slurm, _world
from hpcfl.errors import BAD_INPUT, FINISHED, INTERRUPTED
from hpcfl.main import main

SECTIONS = ("versions: ", "MPI: ", "cores: ", "threads: ", "devices: ", "folder: ")


def test_alone_it_is_fine_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["doctor", "--out", str(tmp_path / "runs" / "deep"), "data.per_client=40"]) == FINISHED
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    for section in (*SECTIONS, "data: digits: 1797 samples of 10 classes for 10 clients"):
        assert sum(line.startswith(section) for line in lines) == 1, section
    assert re.search(r"^versions: hpcfl \S+, python 3\.\S+, torch \S+, .*, HDF5 \d", out)
    assert re.search(
        r"^folder: .*/deep: \w+, [\d.e+]+ GB free; a checkpoint of 17 MB written", out, re.MULTILINE
    )
    assert lines[-1].startswith("OK")
    assert list(tmp_path.iterdir()) == []


RANKS_PROGRAM = """
import json, os, sys
from hpcfl.communication.communicator import open_world
from hpcfl.main import main

folder, faults = sys.argv[1:]
rank = open_world().rank
codes = [main(["doctor", "--out", folder, "data.source=npz", "data.path=digits.npz", "data.layout=NHWC"])]
print("AGAIN", flush=True)
# what is wrong with one rank alone
if rank == 2:
    os.chdir(folder)
if rank == 1:
    os.environ["OMP_NUM_THREADS"] = str(4 * os.cpu_count())
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
codes.append(main(["doctor", "--out", folder, "data.source=npz", "data.path=digits.npz", "data.layout=NHWC"]))
with open(f"{faults}/codes{rank}.json", "w") as file:
    json.dump(codes, file)
"""


def test_three_ranks_and_faults_of_one_of_them(mpirun: Mpirun, tmp_path: Path) -> None:
    write_digits(tmp_path / "digits.npz")
    runs, told = tmp_path / "runs", tmp_path / "told"
    runs.mkdir()
    told.mkdir()
    done = mpirun(3, "-c", RANKS_PROGRAM, runs, told, cwd=tmp_path)
    assert list(runs.iterdir()) == []
    codes = [json.loads((told / f"codes{rank}.json").read_text()) for rank in range(3)]
    assert codes == [[FINISHED, BAD_INPUT]] * 3
    fine, faulty = re.split(r"^(?:AGAIN\n)+", done.stdout, maxsplit=1, flags=re.MULTILINE)
    for section in (*SECTIONS, "data: npz: 1797 samples", "collectives, a number and 4 MB: broadcast "):
        assert sum(line.startswith(section) for line in fine.splitlines()) == 1, section
    assert re.search(r"ranks by node: \S+ 0-2$", fine, re.MULTILINE)
    assert re.search(r"broadcast [\d.e-]+ ms and \d+ MB/s, scatter .*, gather [\d.e-]+ ms and \d+ MB/s", fine)
    assert fine.splitlines()[-1].startswith("OK")
    assert "data: " not in faulty
    (line,) = done.stderr.splitlines()
    assert line.startswith("hpcfl: error: to fix: (1) ")
    cores = os.cpu_count() or 1
    if cores > 1:
        assert (
            f"2 workers of 1 thread(s) are pinned to 1 of {cores} cores: ask SLURM for --cpus-per-task=1"
            in line
        )
    assert re.search(
        rf"rank 1 on \S+ has OMP_NUM_THREADS={4 * cores}, and 3 rank\(s\) there have 1 cores: ", line
    )
    assert "type export OMP_NUM_THREADS=1" in line
    assert re.search(r"rank 2 on \S+: .*digits\.npz", line)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """Make a folder that cannot be written, for root either."""
    folder = tmp_path / "read_only"
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("root writes everywhere, and cannot mount a read-only file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["doctor", *map(str, words)]) == BAD_INPUT
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("hpcfl: error: to fix: ")
    return err


def test_a_read_only_folder_and_data_that_are_not_there(
    read_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--out", read_only / "runs", "data.source=npz", "data.path=missing.npz", "data.layout=NHWC")
    err = refused(capsys, *words)
    assert f"cannot write in {read_only}: " in err
    assert "name a folder that can be written with --out DIR" in err
    assert "missing.npz" in err


def test_a_name_that_is_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / (300 * "x")
    told = f"cannot write in {out}: File name too long; name a folder that can be written with --out DIR"
    assert told in refused(capsys, "--out", out)
    assert main(["--out", str(out)]) == BAD_INPUT
    said = f"hpcfl: error: {out}: File name too long; name another folder with --out DIR\n"
    assert capsys.readouterr().err == said


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lockf(descriptor: int, command: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    assert main(["doctor", "--out", str(tmp_path)]) == FINISHED
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("OK with warnings: ")
    no_locks = "this file system has no locks, so that a second run in a folder may not be refused"
    assert f"{tmp_path}: {no_locks}" in last
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_doctor_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpcfl.main", "doctor", "--out", str(tmp_path)]
    with subprocess.Popen(
        command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as doctor:
        until_s = time.monotonic() + 60
        while not list(tmp_path.iterdir()) and doctor.poll() is None and time.monotonic() < until_s:
            time.sleep(0.001)
        met = bool(list(tmp_path.iterdir()))
        doctor.send_signal(signal.SIGTERM)
        said = doctor.communicate(timeout=60)[1]
    assert met
    assert (doctor.returncode, said) == (INTERRUPTED, b"")
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_whose_ranks_are_alone_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    command = [sys.executable, "-m", "hpcfl.main", "doctor", "--out", str(tmp_path)]
    done = run_tree(command, env={"PMI_SIZE": "4"}, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (BAD_INPUT, "")
    assert done.stderr.startswith("hpcfl: error: the launcher started 4 ranks, but each is alone")
    assert "srun --mpi=pm" in done.stderr


# What is said of other machines, from what their ranks tell


def rank(number: int, **changes: object) -> dict[str, object]:
    versions = {"torch": "2.6", "HDF5": "1.14"}
    common = {"rank": number, "host": f"node{number // 4}", "node": number // 4, "clock": 1000.0, "gpus": 0}
    common |= {"boot": str(number // 4), "works": number > 0, "device": "cpu", "memory": 8e9}
    return common | {"mpi": "MPICH 4.3", "versions": versions} | changes


def findings(checked: Checked) -> list[str]:
    return [finding.text for finding in checked.findings]


def test_nodes_that_differ_are_told_with_rank_and_host() -> None:
    checked = Checked()
    told = [rank(0), rank(1), rank(4, versions={"torch": "2.5", "HDF5": "1.14"}, mpi="Open MPI 5")]
    compare(told, checked)
    _world(told, checked, {})
    assert findings(checked) == [
        "rank 4 on node1 has torch 2.5 (rank 0: 2.6): activate the same environment on every node",
        "rank 4 on node1 has Open MPI 5, rank 0 MPICH 4.3: load the same MPI on every node",
    ]
    assert checked.lines[-1] == "MPI: MPICH 4.3; ranks by node: node0 0-1, node1 4"


def test_clocks_that_are_apart_and_two_nodes_of_one_name_are_told() -> None:
    checked = Checked()
    told = [rank(0), rank(1, clock=1059.0), rank(4, clock=939.0), rank(5), rank(8, host="node0")]
    compare(told, checked)
    assert findings(checked) == [
        "the clock of node1 is 61 s behind that of node0, rank 0's: times in log.txt may be wrong, and a run "
        "may not see when its SLURM job ends; set the clocks (see timedatectl)",
        "node0 is the name of two nodes, that of rank(s) 0-1 and that of rank(s) 8: errors and the lock of a "
        "run folder cannot tell them apart; give each a name of its own (hostnamectl)",
    ]
    assert not any(finding.is_error for finding in checked.findings)
    fine = Checked()
    compare([rank(0), rank(4, clock=1059.0)], fine)
    assert fine.findings == []


def test_more_workers_than_cores_are_told_node_by_node() -> None:
    one, two = Checked(), Checked()
    cores = {"cores": [0, 1], "all_cores": 2}
    node = [rank(number, **cores) for number in range(4)]
    _cores(node, 1, 4, one)
    _cores(node, 1, 8, two)
    told = "node0: 3 workers of 1 thread(s) take turns on 2 cores: "
    assert findings(one) == [f"{told}mpirun -n 3 is as fast"]
    assert findings(two) == [f"{told}2 workers there are as fast"]
    pinned = Checked()
    _cores([rank(number, **(cores | {"all_cores": 8})) for number in range(4)], 1, 4, pinned)
    assert findings(pinned) == [
        "node0: 3 workers of 1 thread(s) are pinned to 2 of 8 cores: ask SLURM for --cpus-per-task=1, or "
        "type mpirun --bind-to none"
    ]


def test_gpus_that_are_missing_or_idle_are_told() -> None:
    checked = Checked()
    gpu = {"device": "cuda:0", "gpus": 4}
    _devices([rank(0), rank(1, **gpu), rank(2, **(gpu | {"device": "cuda:1"})), rank(4)], checked)
    assert checked.lines == ["devices: rank 1 cuda:0, rank 2 cuda:1"]
    assert findings(checked) == [
        "node0: 2 of 4 GPUs are used: start 5 ranks, or ask for fewer",
        "rank 4 on node1 sees no GPU where other workers do: ask SLURM for --gpus-per-node on every node, "
        "or set run.device=cpu",
    ]


def test_little_memory_and_a_job_that_ends_are_told() -> None:
    checked = Checked()
    _memory([rank(0), rank(1, memory=0.4e9)], checked)
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "9",
        "SLURM_JOB_END_TIME": str(int(time.time()) + 300),
    }
    _slurm(environment | {"SLURM_MEM_PER_CPU": "500"}, 3, checked)
    _slurm({"SLURM_JOB_ID": "7"}, 3, checked)
    _slurm({}, 3, checked)
    texts = findings(checked)
    assert texts[0].startswith(
        "node0: 0.4 GB of memory for 2 rank(s): ask SLURM for more (--mem-per-cpu, see "
    )
    assert re.fullmatch(r"the job ends in (299|300) s: submit one with a longer --time", texts[1])
    assert texts[2].startswith("the job has 9 tasks, and 3 rank(s) run: type mpirun -n 9 hpcfl doctor, or ")
    assert texts[3].startswith(
        "SLURM_JOB_END_TIME is not set, so that a run stops in time only if signalled: "
    )
    assert len(texts) == 4
    assert re.fullmatch(
        r"SLURM: job 7, 9 tasks, ends in 0:0(4:59|5:00), mem per cpu 500 MB", checked.lines[1]
    )


def test_launchers_and_libraries_of_one_family_go_together() -> None:
    families = {
        "MPICH": (
            "MPICH Version: 5.0.2",
            "HYDRA build details:",
            "Intel(R) MPI Library 2021",
            "MVAPICH2 2.3",
        ),
        "Open MPI": ("mpirun (Open MPI) 5.0.3", "Open MPI v4.1.6, package", "mpirun (PRRTE) 3.0"),
    }
    for family, texts in families.items():
        assert {_family(text) for text in texts} == {family}


def test_the_last_line_is_one() -> None:
    slow, broken = Finding("a is slow", is_error=False), Finding("b is broken: type c")
    assert last_line([]) == "OK"
    assert last_line([slow]) == "OK with warnings: a is slow"
    assert last_line([slow, slow]) == "OK with warnings: (1) a is slow (2) a is slow"
    assert last_line([slow, broken]) == "to fix: b is broken: type c"
    assert ranges([3, 0, 1, 2, 7]) == "0-3,7"
