"""What a run does, tried once in small: a file and a lock in the run folder, the data."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from hpcfl.checks.nodes import check_same_data
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.config.keys import Config
from hpcfl.data.arrays import digest_of
from hpcfl.errors import UserError
from hpcfl.formatting import readable_bytes
from hpcfl.setup.experiment import load_data
from hpcfl.storage.lock import holder, locked
from hpcfl.terminal import LOG

WRITTEN_BYTES = 2**24
LOOKS, PAUSE_S = 100, 0.1
"""For a file that another node wrote; a network file system may show it late."""


def check_folder(world: Communicator, out: Path) -> None:
    """Write a file where the run folder will be, and lock it, while all ranks look; remove both. Collective.

    Warns if file locks do not work; raises UserError on all ranks if rank 0 cannot write, or another rank
    does not see the file.
    """
    with ExitStack() as at_exit:
        made = run_collectively(world, lambda: str(_locked_folder(out, at_exit)) if world.is_server else "")
        folder = Path(world.broadcast_bytes(made.encode()).decode())
        sees_lock = run_collectively(world, lambda: _sees_lock(world, folder, out))
        # rank 0 keeps the lock and the folder until all have looked
        ranks = world.all_gather([world.host, sees_lock])
    without = [f"rank {rank} on {host}" for rank, (host, sees_lock) in enumerate(ranks) if not sees_lock]
    if without:
        LOG.warning(
            f"{out}: file locks do not work for {without[0]}, so that a second run in a folder may not be "
            "refused: name another folder with --out DIR, or make sure that no two runs share one"
        )


def _locked_folder(out: Path, at_exit: ExitStack) -> Path:
    """Make and lock a folder where the run folder would be made, and write there; `at_exit` removes it."""
    try:
        base = out.absolute()
        while not base.exists():
            base = base.parent
        made = tempfile.TemporaryDirectory(prefix=".hpcfl-doctor-", dir=base, ignore_cleanup_errors=True)
        folder = Path(at_exit.enter_context(made))
        rate, free = _write(folder / "numbers"), shutil.disk_usage(folder).free
        at_exit.enter_context(locked(folder))
    except OSError as error:
        raise UserError(
            f"cannot write in {out}: {error.strerror}; name a folder that can be written with --out DIR"
        ) from error
    print(f"folder: {out}: {readable_bytes(free)} free, written at {readable_bytes(rate)}/s", flush=True)
    return folder


def _write(path: Path) -> float:
    """Write a file, as a checkpoint is written, and return bytes per second until it is on the disk."""
    numbers = os.urandom(WRITTEN_BYTES)
    began_s = time.monotonic()
    with path.open("wb") as file:
        file.write(numbers)
        file.flush()
        os.fsync(file.fileno())
    return WRITTEN_BYTES / (time.monotonic() - began_s)


def _sees_lock(world: Communicator, folder: Path, out: Path) -> bool:
    """Return whether this rank sees that the folder is locked; raise UserError if it sees no lock file."""
    for _ in range(LOOKS):
        with suppress(OSError):
            owner, is_held = holder(folder)
            if owner:
                return is_held is True
        time.sleep(PAUSE_S)
    raise UserError(
        f"{out}: rank {world.rank} on {world.host} does not see what rank 0 wrote there, so that a run that "
        "is requeued to another node would start over: name a folder that all nodes share with --out DIR"
    )


def check_data(world: Communicator, config: Config) -> None:
    """Read the data on every rank, and print what they are; UserError where ranks differ. Collective."""
    arrays, parts = run_collectively(world, lambda: load_data(config))
    samples = f"{len(arrays.y)} samples of {arrays.num_classes} classes for {len(parts)} clients"
    print(f"data: {config.data.source}: {samples}", flush=True)
    check_same_data(world, digest_of(arrays))
