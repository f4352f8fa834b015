"""Runs under mpirun that go on in the background while a test does something to them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import REPOSITORY, clean_environment, kill_tree

from hpcfl.storage.lock import holder

PATIENCE_S = 120
GONE_WITHIN_S = 10


class Launch:
    """A run under mpirun that goes on in the background."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._folder, self._metrics = folder, folder / "metrics.csv"
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
        self._wait_until(lambda: self.rows() >= count, f"{count} rounds")

    def wait_for(self, mark: Path) -> None:
        """Wait until a strike has made its mark; the run must not end before."""
        self._wait_until(mark.exists, mark.name)

    def _wait_until(self, has_come: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not has_come():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                pytest.fail(f"{what} did not come in {self.rows()} rounds:\n{self.end()}")
            time.sleep(0.01)

    def end(self) -> str:
        """Wait for the end of all that writes to the terminal and return what was printed."""
        try:
            return self.process.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            kill_tree(self.process.pid)
            left = self.pids()
            pytest.fail(f"no end after {PATIENCE_S} s, left are {left}:\n{self.process.communicate()[0]}")

    def pids(self) -> list[int]:
        """Return all processes that have the run folder in their command line, mpirun and ranks."""
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = file.read_bytes().split(b"\0")
            except OSError:
                continue
            if os.fsencode(self._folder) in words:
                found.append(int(file.parent.name))
        return found

    def is_gone(self) -> bool:
        """Whether none of its processes is left a few seconds from now: dying takes a moment."""
        deadline_s = time.monotonic() + GONE_WITHIN_S
        # one that dies has lost its command line before it loses its lock
        while (self.pids() or holder(self._folder).is_seen) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return not (self.pids() or holder(self._folder).is_seen)

    def rows(self) -> int:
        return self._metrics.read_text().count("\n") - 1 if self._metrics.exists() else 0
