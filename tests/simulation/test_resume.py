"""A run that is stopped, killed, damaged or prolonged ends with the bits of an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

import h5py
import pytest
from bits import (
    CODED,
    MEETS_ALL_SOON,
    VARIANTS,
    differing,
    method_settings,
    run_here,
    run_killed_in_round,
    tiny_settings,
    write_digits,
)
from conftest import REPOSITORY, clean_environment, kill_tree

from hpcfl.main import BAD_INPUT, FINISHED, STOPPED
from hpcfl.methods import METHODS

ROUNDS = 3
LONG_ROUNDS = 60
PATIENCE_S = 120

SPECIAL = {
    "fedmn-pretrained": ["method.pretrain_rounds=1"],
    "heurpfedla-sharded": ["method.server=sharded", "method.heads=low_rank"],
}
"""FedMN whose first round is another than those after it, and models and codes that are kept elsewhere."""

LONG = [
    "method.name=heurpfedla",
    "train.participation=0.6",
    f"train.rounds={LONG_ROUNDS}",
    "run.checkpoint_every=2",
]
"""A run with state on server and clients that lasts long enough to be caught in the middle."""


REMEMBERED = [case for case in CODED if case.endswith("-topk")]
"""Cases whose clients keep what a codec has not sent."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    digits = tmp_path_factory.mktemp("digits") / "digits.npz"
    write_digits(digits)
    return [*tiny_settings(digits), *MEETS_ALL_SOON]


@pytest.fixture(scope="module")
def undisturbed(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a method to the folder of its run from the first round to the last."""
    base = tmp_path_factory.mktemp("undisturbed")

    @cache
    def folder(method: str) -> Path:
        assert run_here(base / method, [*settings, *short(method)]) == FINISHED
        return base / method

    return folder


@pytest.fixture(scope="module")
def long_run(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long") / "run"
    assert run_here(folder, [*settings, *LONG]) == FINISHED
    return folder


def short(method: str) -> list[str]:
    """Return settings, of a method, a variant or a case of SPECIAL, whose first round is not evaluated."""
    return [*method_settings(method), *SPECIAL.get(method, []), "train.participation=0.6", "run.eval_every=2"]


def completed_rounds(folder: Path) -> int:
    newest, older = folder / "checkpoint.h5", folder / "checkpoint.prev.h5"
    # a kill between the two renames leaves the older one alone
    with h5py.File(newest if newest.exists() else older, "r", locking=False) as file:
        return int(file.attrs["round"])


# Stops at every round boundary


@pytest.mark.parametrize("method", [*METHODS, *VARIANTS, *REMEMBERED, *SPECIAL])
def test_stopped_or_prolonged_at_every_round_boundary(
    undisturbed: Callable[[str], Path],
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """The last boundary is the end of a shorter run, where a method can be prolonged."""
    expected = undisturbed(method)
    uses_rounds = METHODS[method.partition("-")[0]].schedule_uses_rounds
    shorter = ROUNDS if uses_rounds else ROUNDS - 1
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time())))
    for done in range(1, ROUNDS):
        code = run_here(tmp_path / "run", [*settings, *short(method), f"train.rounds={shorter}"])
        assert code == (FINISHED if done == shorter else STOPPED)
        assert completed_rounds(tmp_path / "run") == done
    assert run_here(tmp_path / "run", [*settings, *short(method)]) == FINISHED
    assert not differing(expected, tmp_path / "run")


@pytest.mark.parametrize("method", [*METHODS, *VARIANTS, *REMEMBERED, "heurpfedla-sharded"])
def test_killed_in_the_middle_of_the_last_round(settings: list[str], tmp_path: Path, method: str) -> None:
    """SIGKILL while the last of all clients trains, under full participation."""
    keys = [*settings, *short(method), "train.participation=1", "run.checkpoint_every=1"]
    run_killed_in_round(ROUNDS - 1, tmp_path / "run", keys)
    assert completed_rounds(tmp_path / "run") == ROUNDS - 1
    for folder in ("run", "undisturbed"):
        assert run_here(tmp_path / folder, keys) == FINISHED
    assert not differing(tmp_path / "undisturbed", tmp_path / "run")


def test_prolonged_round_by_round_past_an_evaluation_off_schedule(
    undisturbed: Callable[[str], Path], settings: list[str], tmp_path: Path
) -> None:
    for rounds in range(1, ROUNDS + 1):
        keys = [*settings, *short("heurpfedla"), f"train.rounds={rounds}"]
        assert run_here(tmp_path / "run", keys) == FINISHED
    assert not differing(undisturbed("heurpfedla"), tmp_path / "run")


@pytest.mark.parametrize("method", [name for name, kind in METHODS.items() if kind.schedule_uses_rounds])
def test_schedules_over_all_rounds_cannot_be_prolonged(
    settings: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str
) -> None:
    assert run_here(tmp_path / "run", [*settings, *short(method), "train.rounds=1"]) == FINISHED
    assert run_here(tmp_path / "run", [*settings, *short(method), "train.rounds=2"]) == BAD_INPUT
    (error,) = capfd.readouterr().err.splitlines()
    assert "train.rounds" in error


def test_killed_between_the_last_checkpoint_and_clients_csv(
    undisturbed: Callable[[str], Path], settings: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert run_here(folder, [*settings, *short("fedavg")]) == FINISHED
    (folder / "clients.csv").unlink()
    assert run_here(folder, [*settings, *short("fedavg")]) == FINISHED
    assert not differing(undisturbed("fedavg"), folder)


def test_killed_before_config_yaml_was_in_place(
    undisturbed: Callable[[str], Path], settings: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").touch()
    (folder / "config.yaml.tmp").write_text("method:\n  na")
    assert run_here(folder, [*settings, *short("fedavg")]) == FINISHED
    assert not differing(undisturbed("fedavg"), folder)


# Damaged checkpoints


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.Random(0).randrange(len(content))] ^= 1
    path.write_bytes(content)


@pytest.fixture
def stopped_run(settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a pFedLA run with checkpoints after rounds 1 and 2 of 3."""
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_JOB_END_TIME", str(int(time.time())))
        for _ in range(2):
            assert run_here(tmp_path / "run", [*settings, *short("pfedla")]) == STOPPED
    return tmp_path / "run"


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
@pytest.mark.filterwarnings("always:.*going on from")
def test_a_damaged_checkpoint_falls_back_to_the_previous(
    undisturbed: Callable[[str], Path],
    settings: list[str],
    stopped_run: Path,
    capfd: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
) -> None:
    damage(stopped_run / "checkpoint.h5")
    assert run_here(stopped_run, [*settings, *short("pfedla")]) == FINISHED
    warning = capfd.readouterr().err
    assert warning.startswith(f"hpcfl: warning: {stopped_run / 'checkpoint.h5'} is ")
    assert f"going on from {stopped_run / 'checkpoint.prev.h5'}, round 1" in warning
    assert warning.count("\n") == 1
    assert not differing(undisturbed("pfedla"), stopped_run)


def test_two_damaged_checkpoints_are_refused(
    settings: list[str], stopped_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damaged = {stopped_run / "checkpoint.h5": truncate, stopped_run / "checkpoint.prev.h5": flip_a_bit}
    for path, damage in damaged.items():
        damage(path)
    before = {path: path.read_bytes() for path in damaged}
    assert run_here(stopped_run, [*settings, *short("pfedla")]) == BAD_INPUT
    error = capfd.readouterr().err
    assert error.startswith("hpcfl: error: ")
    assert error.count("\n") == 1
    assert all(str(path) in error for path in damaged)
    assert before == {path: path.read_bytes() for path in damaged}


# Signals and kills under mpirun


class Launch:
    """A run under mpirun that goes on in the background."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._metrics = folder / "metrics.csv"
        self._metrics.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPOSITORY,
            env=clean_environment(),
        )

    def wait_for_rounds(self, count: int) -> None:
        """Wait until metrics.csv has at least `count` rows; the run must not end before."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self._rows() < count:
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                pytest.fail(f"{self._rows()} of {count} rounds:\n{self.end()}")
            time.sleep(0.01)

    def end(self) -> str:
        """Wait for the end and return what was printed."""
        try:
            return self.process.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            kill_tree(self.process.pid)
            pytest.fail(f"no end after {PATIENCE_S} s:\n{self.process.communicate()[0]}")

    def pid_of(self, rank: int) -> int:
        """Return the process of a rank, a descendant of mpirun."""
        names = {f"{variable}={rank}" for variable in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")}
        for pid in descendants(self.process.pid):
            if names & set(Path(f"/proc/{pid}/environ").read_text().split("\0")):
                return pid
        raise LookupError(f"mpirun has no rank {rank}")

    def _rows(self) -> int:
        return self._metrics.read_text().count("\n") - 1 if self._metrics.exists() else 0


def descendants(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            yield child
            yield from descendants(child)


Launcher = Callable[[int], AbstractContextManager[Launch]]


@pytest.fixture
def launch(settings: list[str], tmp_path: Path, mpirun_command: list[str]) -> Launcher:
    """Return a context manager that starts the long run, or goes on with it, on some ranks."""

    @contextmanager
    def started(ranks: int) -> Iterator[Launch]:
        folder = tmp_path / "run"
        python = [sys.executable, "-m", "hpcfl.main", "--quiet", "--out", str(folder), *settings, *LONG]
        running = Launch([*mpirun_command, "-n", str(ranks), *python], folder)
        try:
            yield running
        finally:
            kill_tree(running.process.pid)
            running.process.communicate()

    return started


def test_killed_ranks(long_run: Path, tmp_path: Path, launch: Launcher) -> None:
    chance = random.Random(0)
    done = 0
    for rank in (chance.randrange(3), 0):
        with launch(3) as running:
            running.wait_for_rounds(done + chance.randrange(3, 7))
            time.sleep(chance.uniform(0, 0.1))
            os.kill(running.pid_of(rank), signal.SIGKILL)
            running.end()
            assert running.process.returncode not in (FINISHED, BAD_INPUT, STOPPED)
        assert done < completed_rounds(tmp_path / "run") < LONG_ROUNDS
        done = completed_rounds(tmp_path / "run")
    with launch(3) as running:
        assert running.end() == ""
        assert running.process.returncode == FINISHED
    assert not differing(long_run, tmp_path / "run")


def test_signals_a_second_start_and_fewer_ranks(
    long_run: Path,
    settings: list[str],
    tmp_path: Path,
    launch: Launcher,
    mpirun_command: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    is_openmpi = "--oversubscribe" in mpirun_command
    with launch(3) as running:
        running.wait_for_rounds(3)
        running.process.send_signal(signal.SIGUSR1)
        running.end()
        assert running.process.returncode == STOPPED
    stopped_at = completed_rounds(tmp_path / "run")
    assert 3 <= stopped_at < LONG_ROUNDS
    with launch(3) as running:
        running.wait_for_rounds(stopped_at + 2)
        assert run_here(tmp_path / "run", [*settings, *LONG]) == BAD_INPUT
        assert "in use by pid" in capfd.readouterr().err
        running.wait_for_rounds(stopped_at + 4)
        # Open MPI's mpirun kills the ranks at SIGTERM, MPICH's dies of SIGUSR2.
        running.process.send_signal(signal.SIGUSR2 if is_openmpi else signal.SIGTERM)
        running.end()
        assert running.process.returncode == STOPPED
    assert stopped_at + 4 <= completed_rounds(tmp_path / "run") < LONG_ROUNDS
    with launch(2) as running:
        assert running.end() == ""
        assert running.process.returncode == FINISHED
    assert not differing(long_run, tmp_path / "run")
