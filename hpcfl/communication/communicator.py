"""The ranks of a run: shards, devices, collectives on flat buffers, waiting without load, abort.

The only module that imports mpi4py, and only where a launcher has started more than one rank.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
import traceback
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch

from hpcfl.communication.heartbeat import Heartbeat, die_with_launcher
from hpcfl.config.own_code import mistake_in_own_code
from hpcfl.errors import (
    FAULT,
    INTERRUPTED,
    ForcedStop,
    RankTimeoutError,
    StorageError,
    UserError,
    for_terminal,
)

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

Transfer = list["MPI.Request"]
"""A tensor on its way between two ranks."""

AT_THE_START = "at the start"

MAX_ELEMENTS = 2**27

# Number of ranks according to the launcher; SLURM's number counts only without mpirun in between.
_MPI_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_STEP_SIZE_VARIABLE = "SLURM_STEP_NUM_TASKS"

# MPI has no float16, and numbers are only moved
_MOVED_AS = {torch.float16: torch.int16, torch.bool: torch.uint8}

# heartbeats have another tag
_DATA_TAG = 0

# Measured with 9 ranks on 2 cores: 2 to 3 % of a core while idle, and megabytes as fast as blocking calls.
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_PAUSE_GROWTH = 1.5

_PASSING_ON_S = 0.2
_ABORT_STAGGER_S = 0.25
_LONGEST_STAGGER_S = 1.0
_ABORT_S = 5


def shard_of(num_items: int, worker: int, num_workers: int, unit: int = 1) -> range:
    """Return the items of one worker.

    Shards are contiguous, in worker order, and begin at multiples of `unit`; sizes differ by one unit at
    most, and surplus workers get nothing.
    """
    base, extra = divmod(-(-num_items // unit), num_workers)
    first = worker * base + min(worker, extra)
    start, stop = (units * unit for units in (first, first + base + (worker < extra)))
    return range(min(start, num_items), min(stop, num_items))


class Communicator:
    """The ranks of a run: rank 0 the server, the others workers; one rank alone is both.

    Clients (or any numbered items) live on the workers in contiguous shards. Collectives move flat CPU
    tensors of float16, float32, float64, int8, int32, int64, uint8 or bool; every call holds at most
    `max_elements` elements a piece, so counts of elements and of bytes fit MPI's 32-bit counts.

    A waiting rank sleeps between its checks of the request, and so leaves the cores to ranks that compute.
    """

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        """Wrap an MPI communicator; None is a serial world, which never uses MPI."""
        self._comm = comm
        self._max_elements = MAX_ELEMENTS
        self.rank: int = 0 if comm is None else comm.Get_rank()
        self.size: int = 1 if comm is None else comm.Get_size()
        self.is_server = self.rank == 0
        self.is_worker = self.rank > 0 or self.size == 1
        self.num_workers = max(1, self.size - 1)
        self.worker_index = 0 if self.size == 1 else self.rank - 1
        """The number of this worker; -1 on a server that is no worker."""
        self.workers_on_device = 1
        """Number of workers that share this rank's GPU, after `device` has chosen one."""
        self.host = socket.gethostname()
        self._phase = AT_THE_START
        self._heartbeat: Heartbeat | None = None
        self._ranks_of_node = [0] if comm is None else []

    def limit_pieces(self, max_elements: int) -> None:
        """Hold at most so many elements a piece from now on (`run.max_elements`), the same on all ranks."""
        self._max_elements = max_elements

    def begin_phase(self, phase: str) -> None:
        """Say what this rank does from now on, such as "in round 3": errors name it."""
        self._phase = phase

    @contextmanager
    def heartbeat_timeout(self, timeout_s: float | None) -> Iterator[None]:
        """A waiting rank raises RankTimeoutError after this many seconds without a heartbeat; None: never.

        A rank sends heartbeats while it waits, and when it calls `heartbeat`. Collective, also at the end and
        after a UserError, which must be raised on all ranks.
        """
        self._phase = AT_THE_START
        if self._comm is None or timeout_s is None:
            yield
            return
        hosts = self.all_gather(self.host)
        self._heartbeat = heartbeat = Heartbeat(self._comm, hosts, timeout_s)
        try:
            yield
        except UserError:
            self._heartbeat = None
            heartbeat.end(self._phase)
            raise
        self._heartbeat = None
        heartbeat.end(self._phase)

    def heartbeat(self) -> None:
        """Send a heartbeat to the other ranks, if one is due; costs almost nothing."""
        if self._heartbeat is not None:
            self._heartbeat.beat()

    def shard(self, num_items: int, worker: int | None = None, unit: int = 1) -> range:
        """Return the items of one worker (default: this rank's own; the pure server has none)."""
        worker = self.worker_index if worker is None else worker
        return range(0) if worker < 0 else shard_of(num_items, worker, self.num_workers, unit)

    def blocks(self, row_size: int, num_rows: int) -> list[slice]:
        """Split rows into blocks of at most `max_elements` numbers, and of at least one row."""
        step = max(1, self._max_elements // max(1, row_size))
        return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

    def homes(self, items: Sequence[int], num_items: int, unit: int = 1) -> list[int]:
        """Return the worker whose shard has each of the ids `items`."""
        stops = [self.shard(num_items, worker, unit).stop for worker in range(self.num_workers)]
        return [bisect_right(stops, item) for item in items]

    def device(self, setting: str) -> torch.device:
        """Choose this rank's device for `run.device` = auto, cpu or cuda. Collective.

        Workers of a node share its GPUs in turn; the server of a larger world takes none. Raises UserError on
        all ranks if the choice is cuda and a worker has no GPU.
        """
        workers = [rank for rank in self.ranks_of_node() if rank > 0]
        local_index, num_local = (workers.index(self.rank), len(workers)) if self.rank > 0 else (0, 1)

        def count_gpus() -> int:
            found = torch.cuda.device_count() if self.is_worker and setting != "cpu" else 0
            if setting == "cuda" and self.is_worker and not found:
                raise UserError(
                    f"run.device=cuda: rank {self.rank} on {self.host} sees no GPU; try run.device=auto"
                )
            return found

        num_gpus = run_collectively(self, count_gpus)
        if not num_gpus:
            return torch.device("cpu")
        self.workers_on_device = len(range(local_index % num_gpus, num_local, num_gpus))
        return torch.device("cuda", local_index % num_gpus)

    def ranks_of_node(self) -> list[int]:
        """Return the ranks on this rank's node: those with shared memory. The first call is collective."""
        if self._comm is None or self._ranks_of_node:
            return self._ranks_of_node
        from mpi4py import MPI

        self.barrier()
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        those, everyone = node.Get_group(), self._comm.Get_group()
        self._ranks_of_node = those.Translate_ranks(group=everyone)
        for made in (those, everyone, node):
            made.Free()
        return self._ranks_of_node

    def library(self) -> str:
        """Return name and version of the MPI library; empty in a serial world."""
        if self._comm is None:
            return ""
        from mpi4py import MPI

        # MPICH ends it with a null character
        return MPI.Get_library_version().splitlines()[0].rstrip("\0").strip()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous CPU tensor in place with rank 0's. Collective."""
        self._broadcast_array(_flat_array(tensor))

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank; the other ranks' argument is ignored. Collective."""
        payload = np.frombuffer(data or b"", np.uint8)
        length = np.array([payload.size], np.int64)
        self._broadcast_array(length)
        if not self.is_server:
            payload = np.empty(int(length[0]), np.uint8)
        self._broadcast_array(payload)
        return payload.tobytes()

    def scatter(self, send: torch.Tensor | None, counts: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Scatter rank 0's flat tensor in worker order; return this worker's part, a new tensor. Collective.

        `counts` holds the elements of each worker, the same on all ranks, at most `max_elements` together;
        `send` has their sum of elements, and is read on rank 0 only. The pure server gets an empty tensor.
        """
        rank_counts = self._rank_counts(counts)
        part = torch.empty(rank_counts[self.rank], dtype=dtype)
        message = None
        if self.is_server:
            assert send is not None
            source = _flat_array(send)
            message = [source, rank_counts]
            if self._comm is None:
                return part.copy_(send.detach().reshape(-1))
        assert self._comm is not None
        received = _flat_array(part)
        self._wait(self._comm.Iscatterv(message, received, root=0))
        return part

    def gather(self, send: torch.Tensor, counts: Sequence[int]) -> torch.Tensor | None:
        """Collect the workers' flat tensors on rank 0, in worker order; None elsewhere. Collective.

        `counts` holds the elements of each worker, at most `max_elements` together. The pure server sends an
        empty tensor, which states the dtype of the result.
        """
        rank_counts = self._rank_counts(counts)
        whole = torch.empty(sum(rank_counts), dtype=send.dtype) if self.is_server else None
        out = None if whole is None else _flat_array(whole)
        self._gather_array(_flat_array(send), rank_counts, out)
        return whole

    def exchange(
        self, send: Mapping[int, torch.Tensor], expected: Mapping[int, int]
    ) -> dict[int, torch.Tensor]:
        """Send flat uint8 tensors to other workers and return what they send, both by worker.

        `expected` holds the bytes that each of them sends. Every worker that is sent something, or sends
        something, must call.
        """
        received = {worker: torch.empty(size, dtype=torch.uint8) for worker, size in expected.items()}
        transfers = [self.start_receive(tensor, worker + 1) for worker, tensor in received.items()]
        transfers += [self.start_send(tensor, worker + 1) for worker, tensor in send.items()]
        for transfer in transfers:
            self.wait(transfer)
        return received

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Collect an entry of any length from every rank on rank 0, in rank order; else None. Collective."""
        lengths = np.zeros(self.size, np.int64)
        self._gather_array(np.array([len(data)], np.int64), [1] * self.size, lengths)
        whole = np.empty(lengths.sum(), np.uint8) if self.is_server else None
        self._gather_array(np.frombuffer(data, np.uint8), lengths.tolist(), whole)
        if whole is None:
            return None
        return [entry.tobytes() for entry in np.split(whole, np.cumsum(lengths)[:-1])]

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, which JSON can hold, in rank order on every rank. Collective."""
        found = self.gather_bytes(json.dumps(value).encode())
        whole = None if found is None else b"[%b]" % b",".join(found)
        values: list[Any] = json.loads(self.broadcast_bytes(whole))
        return values

    def start_send(self, tensor: torch.Tensor, rank: int) -> Transfer:
        """Start to send a contiguous CPU tensor to another rank, which must receive it.

        The tensor must not change before `wait`. Tensors between two ranks arrive in the order of their
        starts.
        """
        assert self._comm is not None
        pieces = self._pieces(_flat_array(tensor))
        return [self._comm.Isend(piece, rank, _DATA_TAG) for piece in pieces]

    def start_receive(self, tensor: torch.Tensor, rank: int) -> Transfer:
        """Start to overwrite a contiguous CPU tensor with the one that another rank sends."""
        assert self._comm is not None
        pieces = self._pieces(_flat_array(tensor))
        return [self._comm.Irecv(piece, rank, _DATA_TAG) for piece in pieces]

    def wait(self, transfer: Transfer) -> None:
        """Sleep until a tensor has arrived, or the sent tensor may change again."""
        for request in transfer:
            self._wait(request)

    def maximum(self, value: int) -> int:
        """Return the largest of all ranks' values (64 bits) on every rank. Collective."""
        return self.maxima([value])[0]

    def maxima(self, values: Sequence[int]) -> list[int]:
        """Return the largest of all ranks' values (64 bits), place by place, on every rank. Collective."""
        if self._comm is None:
            return list(values)
        from mpi4py import MPI

        own, largest = np.array(values, np.int64), np.empty(len(values), np.int64)
        self._wait(self._comm.Iallreduce(own, largest, op=MPI.MAX))
        return largest.tolist()

    def sum_on_server(self, tensor: torch.Tensor) -> None:
        """Replace rank 0's contiguous CPU tensor of int64 by the sum of all ranks'. Collective.

        MPI adds on the way, so about one such tensor reaches rank 0 for any number of ranks. Sums of integers
        do not depend on the order.
        """
        if self._comm is None:
            return
        from mpi4py import MPI

        for piece in self._pieces(_flat_array(tensor)):
            send, receive = (MPI.IN_PLACE, piece) if self.is_server else (piece, None)
            self._wait(self._comm.Ireduce(send, receive, op=MPI.SUM, root=0))

    def barrier(self) -> None:
        """Wait, without load on the core, until every rank has called it. Collective."""
        if self._comm is not None:
            self._wait(self._comm.Ibarrier())

    def abort(self, code: int = 1) -> NoReturn:
        """End all ranks at once with this exit code; a serial world leaves by SystemExit."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        if self._comm is not None:
            # MPICH waits for mpirun's answer, for ever where the link to it is cut
            signal.alarm(_ABORT_S)
            self._comm.Abort(code)
            # MPICH's call may return before mpirun has ended this process
            os._exit(code)
        raise SystemExit(code)

    def _rank_counts(self, counts: Sequence[int]) -> list[int]:
        """Convert counts per worker to counts per rank; raise UserError if the sum exceeds `max_elements`."""
        if sum(counts) > self._max_elements:
            error = UserError(
                f"run.max_elements={self._max_elements} is too small for a message; allowed: {sum(counts)} "
                "or more"
            )
            error.is_on_all_ranks = True
            raise error
        return list(counts) if self.size == 1 else [0, *counts]

    def _broadcast_array(self, array: np.ndarray) -> None:
        """Overwrite a flat array with rank 0's, piece by piece. Collective."""
        if self._comm is None:
            return
        for piece in self._pieces(array):
            self._wait(self._comm.Ibcast(piece, root=0))

    def _pieces(self, array: np.ndarray) -> Iterator[np.ndarray]:
        """Split a flat array into pieces of at most `max_elements`."""
        for start in range(0, array.size, self._max_elements):
            yield array[start : start + self._max_elements]

    def _gather_array(self, array: np.ndarray, rank_counts: Sequence[int], out: np.ndarray | None) -> None:
        """Collect flat arrays in `out` on rank 0; counts and `out` matter only there. Collective."""
        if self._comm is None:
            assert out is not None
            out[:] = array
            return
        message = None if out is None else [out, rank_counts]
        self._wait(self._comm.Igatherv(array, message, root=0))

    def _wait(self, request: MPI.Request) -> None:
        """Wait for a request; sleep longer and longer between checks."""
        pause_s = _FIRST_PAUSE_S
        if self._heartbeat is not None:
            self._heartbeat.begin_wait()
        while not request.Test():
            time.sleep(pause_s)
            pause_s = min(_PAUSE_GROWTH * pause_s, _LONGEST_PAUSE_S)
            if self._heartbeat is not None:
                self._heartbeat.beat(self._phase)


def open_world() -> Communicator:
    """Return the world of the ranks that the launcher started; serial, without MPI, if there is no launcher.

    Ranks die with the launcher.
    Raises UserError if the launcher started several ranks but MPI does not connect them.
    """
    num_launched = _num_launched()
    if num_launched == 1:
        return Communicator()
    comm, library = _import_comm_world()
    if comm.Get_size() > 1:
        die_with_launcher()
        return Communicator(comm)
    if num_launched is not None:
        raise _not_joined(
            f"the launcher started {num_launched} ranks, but each is alone in its MPI world", library
        )
    return Communicator()


def _num_launched() -> int | None:
    """Return how many ranks the launcher started: 1 without a launcher, None if unknown."""
    sizes = [int(os.environ[name]) for name in _MPI_SIZE_VARIABLES if name in os.environ]
    if sizes:
        return max(sizes)
    if _STEP_SIZE_VARIABLE in os.environ:
        return int(os.environ[_STEP_SIZE_VARIABLE])
    return None if "PMIX_RANK" in os.environ else 1


def _import_comm_world() -> tuple[MPI.Intracomm, str]:
    """Start MPI, and return the world and the library's version; raise UserError if it cannot be loaded."""
    with warnings.catch_warnings():
        # our own check explains more than mpi4py's warning about a foreign mpirun
        warnings.filterwarnings("ignore", message="suspicious MPI execution environment")
        try:
            import mpi4py

            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"the launcher started several ranks, but MPI cannot be loaded ({error}); load the cluster's "
                "MPI module or `pip install mpi4py mpich`"
            ) from error
        library = MPI.Get_library_version()
        if not MPI.Is_initialized():
            check_foreign_launcher(library)
            MPI.Init_thread()
    return MPI.COMM_WORLD, library


def check_foreign_launcher(library: str) -> None:
    """Raise UserError if this MPI cannot work with its launcher, and would end the process at its start."""
    given = set(os.environ)
    if {"PMIX_RANK", "PMI_RANK"} & given == {"PMIX_RANK"} and _srun_type(library) == "pmi2":
        raise _not_joined("the launcher speaks PMIx, which this MPICH was built without", library)
    # some Open MPIs support srun's PMI-2, none the PMI of MPICH's mpirun
    speaks = {"PMIX_RANK", "OMPI_COMM_WORLD_SIZE"} & given or (
        "PMI_RANK" in given and "MPI_LOCALNRANKS" not in given
    )
    if "Open MPI" in library and _STEP_SIZE_VARIABLE in given and not speaks:
        raise _not_joined("the launcher does not speak PMIx, which Open MPI needs", library)


def _srun_type(library: str) -> str:
    """Return the type for `srun --mpi` that fits an MPI library, from its version text."""
    # only MPICH's version text contains its build options
    return "pmi2" if "MPICH configure:" in library and "pmix" not in library else "pmix"


def _not_joined(what: str, library: str) -> UserError:
    return UserError(
        f"{what}; under SLURM use `srun --mpi={_srun_type(library)}` (see `srun --mpi=list`), elsewhere the "
        "mpirun of the MPI that `python -m mpi4py --mpi-lib-version` names"
    )


@contextmanager
def abort_on_exception(world: Communicator) -> Iterator[None]:
    """End all ranks when this one fails: without it the others would wait for it for ever.

    The failing rank prints its traceback, headed by rank and host, and aborts with exit code 1. Where
    several ranks fail at once, the lowest prints first and the others are usually gone before they do.
    UserError and SystemExit pass through; so does everything in a serial world, where Python does the same.
    RankTimeoutError, StorageError, ForcedStop and errors in a user's own file print one line and no
    traceback.
    """
    try:
        yield
    except (UserError, SystemExit):
        raise
    except ForcedStop as stop:
        abort_with_message(world, f"hpcfl: {stop}\n", stop.exit_code)
    except BaseException as error:
        if world.size == 1:
            raise
        if isinstance(error, KeyboardInterrupt):
            world.abort(INTERRUPTED)
        if isinstance(error, RankTimeoutError | StorageError):
            abort_with_message(world, f"hpcfl: error: {for_terminal(error)}\n", error.exit_code)
        if (line := mistake_in_own_code(error)) is not None:
            abort_with_message(world, f"hpcfl: error: {for_terminal(line)}\n", FAULT)
        header = f"rank {world.rank} of {world.size} on {world.host} failed, so all ranks stop"
        abort_with_message(world, f"{header}\n{traceback.format_exc()}", FAULT)


def abort_with_message(world: Communicator, text: str, code: int) -> NoReturn:
    """Print why this rank fails, and end all ranks; if several fail at once, the lowest rank prints first."""
    # whatever happens meanwhile, such as Ctrl-C or a full disk: the others wait for this rank
    try:
        time.sleep(min(world.rank * _ABORT_STAGGER_S, _LONGEST_STAGGER_S))
        sys.stderr.write(text)
        # mpirun may drop output that it has not yet forwarded when a rank aborts
        time.sleep(_PASSING_ON_S)
    finally:
        world.abort(code)


def run_collectively(world: Communicator, step: Callable[[], T]) -> T:
    """Call a function on every rank; a UserError on any of them is raised on all. Collective.

    All raise the error of the lowest rank that has one, so that they leave together, and one of them prints
    it.
    """
    own: UserError | None = None
    try:
        result = step()
    except UserError as error:
        own = error
    if not world.maximum(own is not None):
        return result
    text = _first_error(world.all_gather([world.host, str(own or "")]))
    shared = (UserError if own is None else type(own))(text)
    shared.is_on_all_ranks = True
    raise shared


def _first_error(errors: Sequence[tuple[str, str]]) -> str:
    """Return the first error, given host and error, or no text, by rank.

    It begins with rank and host if there are several hosts and some ranks have no error, unless it names a
    rank itself.
    """
    rank, host, error = next((rank, host, error) for rank, (host, error) in enumerate(errors) if error)
    is_local = len({host for host, _ in errors}) > 1 and not all(error for _, error in errors)
    is_placed = re.search(r"\brank \d+ on ", error) is not None
    return f"rank {rank} on {host}: {error}" if is_local and not is_placed else error


def _flat_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a flat NumPy view of a contiguous CPU tensor, in a type that MPI has; ValueError for others."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"MPI needs a contiguous CPU tensor, not {tensor.dtype} on {tensor.device}")
    flat = tensor.detach().view(-1)
    return flat.view(_MOVED_AS.get(flat.dtype, flat.dtype)).numpy()
