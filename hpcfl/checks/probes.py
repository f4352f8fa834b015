"""What a run does, tried once in small: messages, a file and a lock in the run folder, the data."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from hpcfl.checks.findings import Findings
from hpcfl.checks.nodes import check_same_data, place
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.communication.interconnect import measured
from hpcfl.config.keys import Config
from hpcfl.data.arrays import digest_of
from hpcfl.errors import UserError
from hpcfl.formatting import readable_bytes, readable_seconds
from hpcfl.setup.experiment import load_data
from hpcfl.storage.lock import holder, locked

WRITTEN_BYTES = 2**24
LOOKS, PAUSE_S = 100, 0.1
"""For a file that another node wrote; a network file system may show it late."""


def check_messages(world: Communicator) -> None:
    """Send numbers to all ranks and back, and print how fast messages are. Collective."""
    if world.size == 1:
        return
    network = measured(world)
    if not world.is_server:
        return
    rates = {"its node": network.node_bytes_a_s, "other nodes": network.link_bytes_a_s}
    measures = [
        f"{readable_bytes(rate)}/s between rank 0 and {where}" for where, rate in rates.items() if rate
    ]
    latency = readable_seconds(network.latency_s or 0.0)
    print(f"messages: {latency} for a short one; {', '.join(measures)}", flush=True)


def check_folder(world: Communicator, out: Path, found: Findings) -> None:
    """Write a file and take a lock, which all ranks look for; remove both again. Collective."""
    with ExitStack() as at_exit:
        made = ""
        if world.is_server:
            try:
                folder = _new_folder(out, at_exit)
                rate = _write(folder)
                at_exit.enter_context(locked(folder))
                free = shutil.disk_usage(folder).free
                print(
                    f"folder: {out}: {readable_bytes(free)} free, written at {readable_bytes(rate)}/s",
                    flush=True,
                )
                made = str(folder)
            except OSError as error:
                found.errors.append(
                    f"cannot write in {out}: {error.strerror or error}; name a folder that can be written "
                    "with --out DIR"
                )
        made = world.broadcast_bytes(made.encode()).decode()
        if not made:
            return
        owner, is_held = _see_lock(Path(made))
        facts = {"rank": world.rank, "host": world.host, "sees": bool(owner), "is_locked": is_held}
        # rank 0 keeps the lock and the folder until all have looked
        ranks = world.all_gather(facts)
    blind = [place(rank) for rank in ranks if not rank["sees"]]
    unlocked = [place(rank) for rank in ranks if not rank["is_locked"]]
    if blind:
        found.errors.append(
            f"{out}: {blind[0]} does not see what rank 0 wrote there, so that a run that is requeued to "
            "another node would start over: name a folder that all nodes share with --out DIR"
        )
    elif unlocked:
        found.warnings.append(
            f"{out}: file locks do not work for {unlocked[0]}, so that a second run in a folder may not be "
            "refused: name another folder with --out DIR, or make sure that no two runs share one"
        )


def _new_folder(out: Path, at_exit: ExitStack) -> Path:
    """Make a folder where the run folder would be made; `at_exit` removes it."""
    base = out.absolute()
    while not base.exists():
        base = base.parent
    made = tempfile.TemporaryDirectory(prefix=".hpcfl-doctor-", dir=base, ignore_cleanup_errors=True)
    return Path(at_exit.enter_context(made))


def _write(folder: Path) -> float:
    """Write a file, as a checkpoint is written, and return bytes per second until it is on the disk."""
    numbers = os.urandom(WRITTEN_BYTES)
    began_s = time.monotonic()
    with (folder / "numbers").open("wb") as file:
        file.write(numbers)
        file.flush()
        os.fsync(file.fileno())
    return WRITTEN_BYTES / (time.monotonic() - began_s)


def _see_lock(folder: Path) -> tuple[str, bool | None]:
    """Return whose lock this rank sees; nobody's where it sees none in time."""
    for _ in range(LOOKS):
        with suppress(OSError):
            owner, is_held = holder(folder)
            if owner:
                return owner, is_held
        time.sleep(PAUSE_S)
    return "", False


def check_data(world: Communicator, config: Config, found: Findings) -> None:
    """Read the data on every rank, and print what they are. Collective."""
    try:
        arrays, parts = run_collectively(world, lambda: load_data(config))
    except UserError as error:
        found.errors.append(str(error))
        return
    samples = f"{len(arrays.y)} samples of {arrays.num_classes} classes for {len(parts)} clients"
    print(f"data: {config.data.source}: {samples}", flush=True)
    try:
        check_same_data(world, digest_of(arrays))
    except UserError as error:
        found.errors.append(str(error))
