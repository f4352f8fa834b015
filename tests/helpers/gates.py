"""Runs that wait in the middle of a round until a test lets them continue."""

from __future__ import annotations

from pathlib import Path

import pytest
from bits import run_here, tiny_settings, write_digits
from conftest import forgetting_own_code
from slurm import Job

from hpcfl.errors import FINISHED

GATED = '''"""FedAvg that waits in a round while there is a file `closed-ROUND` in the folder GATES."""

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

from hpcfl.communication.messages import Message
from hpcfl.methods.base import Params
from hpcfl.methods.fedavg import FedAvg
from hpcfl.training.client_group import ClientGroup


class GatedParams(Params):
    fails: bool = False
    """Whether the second round raises."""


class Gated(FedAvg):
    name = "gated"
    summary = "FedAvg that waits"
    Params: ClassVar[Any] = GatedParams

    def train(self, clients: ClientGroup, down: Message) -> Message:
        gates = Path(os.environ["GATES"])
        (gates / f"reached-{clients.round}").write_text(os.environ.get("SLURM_JOB_END_TIME", "unknown"))
        if self.params.fails and clients.round == 1:
            raise RuntimeError("a mistake of one's own")
        end_s = time.monotonic() + 120
        while (gates / f"closed-{clients.round}").exists() and time.monotonic() < end_s:
            if signal.getsignal(signal.SIGUSR1).__self__._requests:
                (gates / "signalled").touch()
            time.sleep(0.02)
        return super().train(clients, down)
'''


class Gates:
    """Where runs of the method above wait, round by round from 0."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.env = {"GATES": str(folder)}

    def close(self, *rounds: int) -> None:
        for number in rounds:
            (self.folder / f"closed-{number}").touch()

    def open(self, number: int) -> None:
        (self.folder / f"closed-{number}").unlink()

    def wait(self, number: int, job: Job) -> str:
        """Wait until a job's run is in a round, and return when it thinks that its time is up."""
        reached = self.folder / f"reached-{number}"
        job.until(lambda: reached.exists() and reached.read_text(), f"round {number}")
        end_time = reached.read_text()
        # the next wait is for another start
        reached.unlink()
        return end_time

    def wait_for_signal(self, job: Job) -> None:
        """Wait until the script has forwarded a signal to a rank that waits here."""
        job.until((self.folder / "signalled").exists, "the signal")
        assert "asked to stop" in job.output


def gated_settings(folder: Path) -> list[str]:
    """Return the settings of a tiny run of the method above, last of which is the method."""
    write_digits(folder / "digits.npz")
    (folder / "gated.py").write_text(GATED)
    settings = [*tiny_settings(folder / "digits.npz"), "run.checkpoint_every=1"]
    return [*settings, f"method.path={folder / 'gated.py'}"]


def run_uninterrupted(folder: Path, gated: list[str]) -> Path:
    """Run the method above in this process, without any gate closed, and return the run folder."""
    with pytest.MonkeyPatch.context() as patch, forgetting_own_code():
        patch.setenv("GATES", str(Gates(folder / "gates").folder))
        assert run_here(folder / "run", gated) == FINISHED
    return folder / "run"
