"""The file system of the run folder: what a run does there, done once in small, and cleaned up."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import numpy as np
import torch

from hpcfl.checks.finding import Checked, gathered
from hpcfl.communication.communicator import Communicator
from hpcfl.errors import UserError
from hpcfl.registries import load_config
from hpcfl.storage.checkpoint import CheckpointStore
from hpcfl.storage.lock import LOCK_NAME, FolderLock, holder
from hpcfl.storage.snapshot import DataRecord, Header, LayoutRecord, LedgerTable, Rows, Snapshot

PREFIX = ".hpcfl-doctor-"
MANY = 2**22
"""Numbers in the checkpoint that is written: 16 MB."""
TOKEN_NAME = "token"
SEEN_WITHIN_S = 10.0
"""How long another node may take to see a new file."""
LEAST_FREE_BYTES = 1e9
SLOW_BYTES_A_S = 5e6

ASK_FOR_LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(3)
"""
"""Ends with 3 where another process holds the lock."""


def check_folder(world: Communicator, out: Path) -> Checked:
    """Try what a run does in its folder. Collective; says something on rank 0, and leaves nothing behind."""
    checked = Checked()
    with ExitStack() as at_exit:
        made = ""
        if world.is_server:
            made = _made(out, checked, at_exit)
        made = world.broadcast_bytes(made.encode()).decode()
        if not made:
            return checked
        folder = Path(made)
        if world.is_server:
            _tried(folder, out, checked, at_exit)
        # the lock, if there is one, is rank 0's until all have looked
        world.barrier()
        told = gathered(world, {"host": world.host} if world.is_server else _seen_from_here(world, folder))
        for rank, found in enumerate(told[1:], 1):
            _judge(rank, found, out, checked)
        world.barrier()
    return checked


def _made(out: Path, checked: Checked, at_exit: ExitStack) -> str:
    """Make a folder where the run folder would be made; return its path, or nothing where that fails."""
    base = out.absolute()
    at_exit.enter_context(_interruptible())
    try:
        while not base.exists():
            base = base.parent
        folder = base / f"{PREFIX}{secrets.token_hex(4)}"
        # before it is there: a signal may come at any moment
        at_exit.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        checked.lines.append(f"folder: {out}: nothing can be written")
        checked.error(
            f"cannot write in {base}: {error.strerror}; name a folder that can be written with --out DIR"
        )
        return ""
    return str(folder)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end Python as SIGINT does, so that what was made is removed."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _tried(folder: Path, out: Path, checked: Checked, at_exit: ExitStack) -> None:
    """Write, read back, lock, rename and measure on rank 0."""
    try:
        usage = shutil.disk_usage(folder)
        write_s, read_s = _checkpoint(folder)
        (folder / f"{TOKEN_NAME}.tmp").write_text(TOKEN_NAME)
        os.replace(folder / f"{TOKEN_NAME}.tmp", folder / TOKEN_NAME)
    except (OSError, ValueError, UserError) as error:
        checked.error(
            f"{out}: a checkpoint cannot be written and read back ({error}); name another folder with "
            "--out DIR"
        )
        return
    rates = [4 * MANY / seconds for seconds in (write_s, read_s)]
    checked.lines.append(
        f"folder: {out}: {_kind(folder)}, {usage.free / 1e9:.3g} GB free; a checkpoint of "
        f"{4 * MANY / 1e6:.0f} MB written, synced, verified and renamed at {rates[0] / 1e6:.0f} MB/s, read "
        f"at {rates[1] / 1e6:.0f} MB/s"
    )
    if usage.free < LEAST_FREE_BYTES:
        checked.error(
            f"{out} has {usage.free / 1e9:.2g} GB free: delete something, or name another folder with "
            "--out DIR (hpcfl plan says what a run takes)"
        )
    if min(rates) < SLOW_BYTES_A_S:
        checked.warning(f"{out} is slow: name a folder on a faster file system with --out DIR")
    if _kind(folder) in ("tmpfs", "ramfs"):
        checked.warning(
            f"{out} is in memory, and gone when the node restarts: name another folder with --out DIR"
        )
    _lock(folder, out, checked, at_exit)


def _checkpoint(folder: Path) -> tuple[float, float]:
    """Write a checkpoint twice, so that one becomes the previous, and load it; return both seconds."""
    numbers = torch.arange(MANY, dtype=torch.float32)
    snapshot = Snapshot(
        Header("doctor", 1, load_config(None, []).yaml()),
        LayoutRecord((), ()),
        DataRecord((1, 1, 1), "uint8", 1.0, (0.0,), (1.0,), 1, (1,)),
        {"numbers": numbers},
        {},
        Rows({}, []),
        lambda: {"accuracy": np.zeros((1, 1))},
        lambda: {"metrics": LedgerTable(np.zeros((1, 1)), ["round"])},
    )
    store = CheckpointStore(folder)
    began_s = time.monotonic()
    for _ in range(2):
        store.save(snapshot)
    write_s = (time.monotonic() - began_s) / 2
    began_s = time.monotonic()
    loaded = store.load()
    if loaded is None or not torch.equal(loaded.server["numbers"], numbers):
        raise ValueError("it reads back otherwise than it was written")
    loaded.close()
    return write_s, time.monotonic() - began_s


def _lock(folder: Path, out: Path, checked: Checked, at_exit: ExitStack) -> None:
    """Take the lock of a run folder, and ask for it from another process."""
    no_locks = (
        f"{out}: this file system has no locks, so that a second run in a folder may not be refused: name "
        "another folder with --out DIR, or see to it yourself that no two runs share one"
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        at_exit.enter_context(FolderLock(folder))
    if told:
        checked.warning(no_locks)
        return
    command = [sys.executable, "-c", ASK_FOR_LOCK, str(folder / LOCK_NAME)]
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, check=False, timeout=30, stdin=subprocess.DEVNULL)
        if done.returncode == 3:
            return
    checked.warning(no_locks)


def _seen_from_here(world: Communicator, folder: Path) -> dict[str, object]:
    """Tell whether this rank sees what rank 0 wrote, and its lock."""
    until_s = time.monotonic() + SEEN_WITHIN_S
    sees = False
    # a network file system may show a new file late
    while not sees and time.monotonic() < until_s:
        with suppress(OSError):
            sees = (folder / TOKEN_NAME).read_text() == TOKEN_NAME
        if not sees:
            time.sleep(0.1)
    is_locked = False
    if sees:
        with suppress(OSError):
            is_locked = holder(folder).is_seen
    return {"host": world.host, "sees": sees, "is_locked": is_locked}


def _judge(rank: int, found: dict[str, object], out: Path, checked: Checked) -> None:
    """Say what another rank did not see."""
    place = f"rank {rank} on {found['host']}"
    if any(finding.text.startswith(f"{out}: ") for finding in checked.findings):
        return
    if not found["sees"]:
        checked.error(
            f"{out}: {place} does not see what rank 0 wrote there, so that a run that is requeued to another "
            "node would start over: name a folder that all nodes share with --out DIR"
        )
    elif not found["is_locked"]:
        checked.warning(
            f"{out}: {place} does not see rank 0's lock, so that a second run from there is not refused: see "
            "to it yourself that no two runs share a folder"
        )


def _kind(folder: Path) -> str:
    """Return the type of the file system, such as nfs4; "unknown" where the system does not tell."""
    table = Path("/proc/self/mounts")
    best = ("", "unknown")
    for line in table.read_text().splitlines() if table.exists() else ():
        _, place, kind, *_ = line.split()
        if folder.is_relative_to(place) and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]
