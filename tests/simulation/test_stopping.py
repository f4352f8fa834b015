"""Stop requests, with real signals."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bits import run_here, tiny_settings

from hpcfl.communication.communicator import Communicator
from hpcfl.errors import FINISHED, ForcedStop
from hpcfl.methods.base import State
from hpcfl.simulation import round_loop, stopping
from hpcfl.simulation.checkpointing import Saver
from hpcfl.simulation.evaluation import Evaluator
from hpcfl.simulation.stopping import STOP_SIGNALS, StopFlag
from hpcfl.storage.ledger import Evaluation


@pytest.fixture
def flag(monkeypatch: pytest.MonkeyPatch) -> Iterator[StopFlag]:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    stop_flag = StopFlag()
    yield stop_flag
    stop_flag.restore()


@pytest.mark.parametrize("first", STOP_SIGNALS)
@pytest.mark.parametrize("second", STOP_SIGNALS)
def test_a_signal_requests_a_stop_and_a_second_one_stops_at_once(
    flag: StopFlag, monkeypatch: pytest.MonkeyPatch, first: signal.Signals, second: signal.Signals
) -> None:
    assert not flag.is_requested(Communicator(), 0)
    signal.raise_signal(first)
    assert flag.is_requested(Communicator(), 0)
    # as a terminal and a launcher deliver it, and a launcher may turn it into another
    for again in (first, second):
        signal.raise_signal(again)
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", 0.0)
    with pytest.raises(ForcedStop, match=f"by a second signal, {second.name};") as stopped:
        signal.raise_signal(second)
    assert stopped.value.exit_code == 128 + second


def test_in_a_slurm_job_the_time_limit_is_no_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM after the warning, as the whole job gets it: twice, from its launcher and from SLURM."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", 0.05)
    flag = StopFlag()
    try:
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(0.06)
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        time.sleep(0.06)
        with pytest.raises(ForcedStop):
            signal.raise_signal(signal.SIGTERM)
    finally:
        flag.restore()


@pytest.mark.parametrize(
    ("end_in_s", "needed_s", "short"), [(100, 50, False), (100, 150, True), (-5, 0, True), (None, 1e9, False)]
)
@pytest.mark.parametrize("jump_s", [0.0, -86400.0, 86400.0])
def test_a_stop_is_due_shortly_before_the_end_of_the_job(
    monkeypatch: pytest.MonkeyPatch, end_in_s: int | None, needed_s: float, short: bool, jump_s: float
) -> None:
    """Also if the clock jumps. An end that is not a time counts as none."""
    end = "Unknown" if end_in_s is None else str(int(time.time()) + end_in_s)
    monkeypatch.setenv("SLURM_JOB_END_TIME", end)
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    flag, clock = StopFlag(), time.time
    assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    flag.restore()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    monkeypatch.setattr(time, "time", lambda: clock() + jump_s)
    assert flag.is_requested(Communicator(), needed_s) is short


def test_a_run_needs_its_longest_round_and_checkpoint_and_some_more_to_stop(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stopping.notice_s(100, 20) == 1.5 * 120 + 10
    needed: list[tuple[float, float]] = []
    evaluate, save, clock, passed = Evaluator.evaluate, Saver.save, time.monotonic, [0.0]

    def slow_evaluation(self: Evaluator, server: State, done: int) -> Evaluation:
        passed[0] += 300 * (done == 2)
        return evaluate(self, server, done)

    def slow_save(self: Saver, server: State, done: int, with_models: bool) -> None:
        passed[0] += 200 * (done == 2)
        save(self, server, done, with_models)

    def notice_s(round_s: float, save_s: float) -> float:
        needed.append((round_s, save_s))
        return 0.0

    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed[0])
    monkeypatch.setattr(Evaluator, "evaluate", slow_evaluation)
    monkeypatch.setattr(Saver, "save", slow_save)
    monkeypatch.setattr(round_loop, "notice_s", notice_s)
    keys = ["method.name=fedavg", "train.rounds=4", "run.eval_every=1", "run.checkpoint_every=1"]
    assert run_here(tmp_path / "run", [*tiny_settings(digits), *keys]) == FINISHED
    (first, of_first), (second, of_second), (third, of_third) = needed
    assert of_first == 0 < of_second < 200 < of_third
    assert 0 < first < 300 < second == third
