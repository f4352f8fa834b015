"""The launcher of a rank: its death ends the rank, and nothing else does."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import forked

from hpcfl.communication import presence
from hpcfl.communication.presence import ending_with_launcher


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_LOOK_AT_LAUNCHER_EVERY_S", 0.02)


def test_a_rank_without_a_file_descriptor_goes_on() -> None:
    def work() -> None:
        with ending_with_launcher():
            descriptor = os.open("/dev/null", os.O_RDONLY)
            # it has no room for another one
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor, hard))
            with pytest.raises(OSError, match="Too many open files"):
                os.open("/dev/null", os.O_RDONLY)
            time.sleep(0.3)

    assert os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1]) == 0


def test_a_rank_whose_launcher_is_killed_says_so_and_ends(tmp_path: Path) -> None:
    said, mark = tmp_path / "said", tmp_path / "mark"

    def rank() -> None:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
        with ending_with_launcher():
            mark.touch()
            time.sleep(60)

    def launch() -> None:
        forked(rank)
        time.sleep(60)

    launcher = forked(launch)
    wait_for(mark.exists)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    wait_for(lambda: said.read_text().endswith("\n"))
    assert said.read_text() == (
        f"hpcfl: error: the launcher of this rank (pid {launcher}) has died, so the rank ends; the last "
        "checkpoint stays, and the same command goes on from it\n"
    )


def wait_for(has_come: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not has_come():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
