"""Processes that die, hang, receive signals or run out of memory.

Each test checks the message and the exit code; the same command then resumes the run, which ends with the
bits of an uninterrupted run.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from bits import (
    MUCH_STATE,
    completed_rounds,
    differing,
    kept_runs,
    run_here,
    start_run,
    tiny_settings,
)
from inject_fault import Fault
from processes import Launch, Mpirun, exit_code, until

from hpcfl.errors import BAD_INPUT, FINISHED, OUT_OF_MEMORY, STOPPED
from hpcfl.simulation import stopping

BRIEF_ROUNDS, LONG_ROUNDS = 8, 32
TIMEOUT_S = 3
SERVER, WORKER = "server", "worker"

COUNTS = {
    SERVER: {"gather": (8, 30), "write": (1, 90), "fsync": (1, 5), "rename": (1, 6), "csv": (2, 5)},
    WORKER: {"gather": (8, 30), "step": (4, 20)},
}
"""Points that a rank passes, and the first and last call at which a fault is injected: a round has
5 messages and a worker's 4 mini-batches, every second one a checkpoint of 34 datasets and 2 renames."""

IN_A_ROUND = Fault("kill", "step", 20)
IN_A_CHECKPOINT = Fault("kill", "write", 50)


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    return [*tiny_settings(digits), *MUCH_STATE]


@pytest.fixture(scope="module")
def uninterrupted(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function from a number of rounds to the folder of the uninterrupted run."""
    return kept_runs(
        tmp_path_factory.mktemp("uninterrupted"), lambda rounds: [*settings, f"train.rounds={rounds}"]
    )


Resume = Callable[[int], None]


@pytest.fixture
def resume(settings: list[str], uninterrupted: Callable[[int], Path], tmp_path: Path) -> Resume:
    """Return a function that resumes the run to its last round and compares it with the uninterrupted run."""

    def check(rounds: int) -> None:
        assert run_here(tmp_path / "run", [*settings, f"train.rounds={rounds}"]) == FINISHED
        assert not differing(uninterrupted(rounds), tmp_path / "run")

    return check


Launcher = Callable[..., Launch]


@pytest.fixture
def launch(settings: list[str], tmp_path: Path, mpirun_command: list[str]) -> Launcher:
    """Return a function that starts or resumes a run on some ranks, with or without a fault."""

    def started(ranks: int, rounds: int, fault: Fault | None = None, *keys: str) -> Launch:
        folder = tmp_path / "run"
        words = ["-m", "hpcfl.main"] if fault is None else replace(fault, above=os.getpid()).words()
        words += ["--quiet", "--out", str(folder), *settings, f"train.rounds={rounds}", *keys]
        return Launch([*mpirun_command, "-n", str(ranks), sys.executable, *words], folder)

    return started


# SIGKILL


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 4))]
"""The moments of a seed; further seeds take minutes."""


@pytest.mark.warns
@pytest.mark.parametrize("seed", SEEDS)
def test_a_serial_run_resumes_after_kills_at_seven_moments(
    settings: list[str], tmp_path: Path, resume: Resume, seed: int
) -> None:
    chance = random.Random(seed)
    folder, done = tmp_path / "run", 0
    points = [*COUNTS[SERVER].items(), *COUNTS[WORKER].items()]
    chance.shuffle(points)
    for point, (first, last) in points:
        fault = Fault("kill", point, chance.randint(first, last), after=chance.random() < 0.5)
        child = start_run(folder, [*settings, f"train.rounds={LONG_ROUNDS}"], fault.inject)
        assert exit_code(child) == -signal.SIGKILL, fault
        assert done <= (done := completed_rounds(folder)) < LONG_ROUNDS
    assert done > len(points) / 2
    resume(LONG_ROUNDS)


@pytest.mark.warns
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_resumes_after_server_worker_and_mpirun_are_killed(
    launch: Launcher, tmp_path: Path, resume: Resume, seed: int
) -> None:
    """Once one of them is killed, all ranks end within seconds and release the lock of the folder."""
    chance = random.Random(seed)
    folder, done = tmp_path / "run", 0
    victims = [("kill", WORKER, 3), ("kill", SERVER, 2)]
    victims += [("kill_mpirun", WORKER, 2), ("kill_launchers", SERVER, 2)]
    chance.shuffle(victims)
    for kind, role, ranks in victims:
        rank = 0 if role == SERVER else chance.randrange(1, ranks)
        point, (first, last) = chance.choice([*COUNTS[role].items()])
        fault = Fault(kind, point, chance.randint(first, last), rank, chance.random() < 0.5)
        with launch(ranks, LONG_ROUNDS, fault) as running:
            printed = running.end()
            assert running.process.returncode not in (FINISHED, BAD_INPUT, STOPPED), (fault, printed)
            assert running.is_gone()
        assert "Traceback" not in printed
        assert done <= (done := completed_rounds(folder)) < LONG_ROUNDS
    assert done > len(victims) / 2
    resume(LONG_ROUNDS)


# Signals


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_stops_a_run_and_later_ones_do_not_replace_its_exit_code(
    ranks: int, tmp_path: Path, launch: Launcher, resume: Resume, mpirun_command: list[str]
) -> None:
    # Open MPI's mpirun kills the ranks at SIGTERM, MPICH's dies of SIGUSR2
    number = signal.SIGUSR2 if "--oversubscribe" in mpirun_command else signal.SIGTERM
    with launch(ranks, LONG_ROUNDS) as running:
        running.wait_for_rounds(3)
        running.process.send_signal(number)
        log = tmp_path / "run" / "log.txt"
        until(lambda: "stopped early" in log.read_text(), "the end of the run")
        # MPI, torch and the interpreter take a second to end
        while running.process.poll() is None:
            time.sleep(0.05)
            running.process.send_signal(signal.SIGUSR1)
        running.end()
        assert running.process.returncode == STOPPED
    assert 3 <= completed_rounds(tmp_path / "run") < LONG_ROUNDS
    resume(LONG_ROUNDS)


STOPPED_AT_ONCE = (
    "hpcfl: stopped at once by a second signal, {}; the last checkpoint, if there is one, was kept; rerun "
    "the same command to resume\n"
)


def test_a_second_signal_during_a_checkpoint_stops_a_run_at_once(
    settings: list[str],
    tmp_path: Path,
    resume: Resume,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, mark = tmp_path / "run", tmp_path / "mark"
    fault = replace(IN_A_CHECKPOINT, kind="sleep", mark=str(mark))
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", 0.1)
    child = start_run(folder, [*settings, f"train.rounds={BRIEF_ROUNDS}"], fault.inject)
    until(mark.exists, "the fault")
    before = good(folder)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, number)
        time.sleep(0.2)
    assert exit_code(child) == 128 + signal.SIGTERM
    assert capfd.readouterr().err == STOPPED_AT_ONCE.format("SIGTERM")
    assert good(folder) == before
    assert not (folder / "checkpoint.tmp.h5").exists()
    resume(BRIEF_ROUNDS)


def test_a_second_signal_to_mpirun_stops_all_ranks_at_once(
    launch: Launcher, tmp_path: Path, resume: Resume
) -> None:
    folder, mark = tmp_path / "run", tmp_path / "mark"
    fault = replace(IN_A_ROUND, kind="sleep", rank=1, mark=str(mark))
    with launch(2, BRIEF_ROUNDS, fault) as running:
        running.wait_for(mark)
        before = good(folder)
        for _ in range(2):
            # both MPIs forward this signal every time
            running.process.send_signal(signal.SIGUSR1)
            time.sleep(1.2 * stopping.SAME_REQUEST_S)
        printed = running.end()
        assert running.process.returncode == 128 + signal.SIGUSR1
        assert running.is_gone()
    lines = {line for line in printed.splitlines(keepends=True) if line.startswith("hpcfl: ")}
    # Open MPI takes a while to end ranks, and meanwhile the next one may print the same line
    assert lines == {STOPPED_AT_ONCE.format("SIGUSR1")}
    assert "Traceback" not in printed
    assert good(folder) == before
    resume(BRIEF_ROUNDS)


def good(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the checkpoints of a run."""
    names = ("checkpoint.h5", "checkpoint.prev.h5")
    found = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
    assert found
    return found


# Ranks that do not answer


@pytest.mark.parametrize(
    ("ranks", "silent", "gather", "rounds"), [(3, 2, 100, LONG_ROUNDS), (2, 0, 29, BRIEF_ROUNDS)]
)
def test_a_rank_that_stops_answering_is_named(
    launch: Launcher, tmp_path: Path, resume: Resume, ranks: int, silent: int, gather: int, rounds: int
) -> None:
    """The job of a silent worker is suspended before for longer than the timeout, and continues."""
    folder, mark = tmp_path / "run", tmp_path / "mark"
    fault = Fault("stop", "gather", gather, silent, mark=str(mark))
    with launch(ranks, rounds, fault, f"run.timeout={TIMEOUT_S}") as running:
        if silent:
            running.wait_for_rounds(2)
            suspended = running.pids()
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in suspended:
                    os.kill(pid, number)
                time.sleep(TIMEOUT_S + 1 if number == signal.SIGSTOP else 0)
        running.wait_for(mark)
        began_s = time.monotonic()
        printed = running.end()
        assert time.monotonic() - began_s < TIMEOUT_S + 20
        assert running.process.returncode not in (FINISHED, BAD_INPUT, STOPPED)
        assert running.is_gone()
    lines = [line for line in printed.splitlines() if line.startswith("hpcfl: ")]
    place = f"rank {silent} on {socket.gethostname()}"
    opening = f"hpcfl: error: {place} has sent no heartbeat for {TIMEOUT_S} s (run.timeout) in round "
    assert len(lines) == 1
    assert lines[0].startswith(opening)
    assert "Traceback" not in printed
    assert 2 <= completed_rounds(folder) < rounds
    resume(rounds)


# Memory


@pytest.mark.parametrize(("ranks", "kind"), [(1, "no_memory_for_numpy"), (2, "no_memory_for_torch")])
def test_a_worker_out_of_memory_ends_all_ranks(
    settings: list[str], tmp_path: Path, mpirun: Mpirun, resume: Resume, ranks: int, kind: str
) -> None:
    fault = replace(IN_A_ROUND, kind=kind, rank=ranks - 1)
    words = ["--quiet", "--out", tmp_path / "run", *settings, f"train.rounds={BRIEF_ROUNDS}"]
    done = mpirun(ranks, *fault.words(), *words, check=False)
    assert done.returncode == OUT_OF_MEMORY
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("hpcfl: "))
    opening = f"hpcfl: error: rank {ranks - 1} on {socket.gethostname()} is out of memory; try more ranks"
    assert line.startswith(opening)
    assert "a smaller train.batch_size" in line
    assert "Traceback" not in done.stderr
    assert completed_rounds(tmp_path / "run") > 0
    resume(BRIEF_ROUNDS)
