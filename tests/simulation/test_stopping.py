"""Stop requests, with real signals."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from hpcfl.simulation.stopping import StopFlag

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


@pytest.fixture
def flag() -> Iterator[StopFlag]:
    stop_flag = StopFlag()
    yield stop_flag
    stop_flag.restore()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_requests_a_stop(flag: StopFlag, number: signal.Signals) -> None:
    assert not flag.requested
    signal.raise_signal(number)
    assert flag.requested


def test_only_a_second_sigint_interrupts(flag: StopFlag) -> None:
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_restore_brings_the_old_handlers_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    flag = StopFlag()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    flag.restore()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.mark.parametrize(
    ("end_in_s", "needed_s", "short"), [(100, 50, False), (100, 150, True), (-5, 0, True), (None, 1e9, False)]
)
def test_time_is_short_before_the_end_of_the_job(
    monkeypatch: pytest.MonkeyPatch, end_in_s: int | None, needed_s: float, short: bool
) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    if end_in_s is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + end_in_s))
    flag = StopFlag()
    flag.restore()
    assert flag.time_is_short(needed_s) is short


def test_an_unreadable_end_time_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "Unknown")
    flag = StopFlag()
    flag.restore()
    assert not flag.time_is_short(1e9)
