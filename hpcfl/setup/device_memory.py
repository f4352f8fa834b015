"""What fits a device, the clients' state and how many clients at once, and what to tell where it did not."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from hpcfl.communication.communicator import Communicator, abort_saying
from hpcfl.config import Config
from hpcfl.errors import OUT_OF_MEMORY, OutOfMemoryError
from hpcfl.methods import Method
from hpcfl.methods.base import State
from hpcfl.training.batches import Batch
from hpcfl.training.engines import prepare
from hpcfl.training.forward import Forward
from hpcfl.training.losses import cross_entropy_loss

ON_A_CPU = 32
"""Clients of the batched engine at once where no device memory says how many."""
SHARE_OF_FREE = 0.5
"""Share of the free memory that clients at work are planned with."""
STATE_SHARE = 0.25
"""Largest share of the free memory that `run.state=auto` gives to the clients' state. It is not taken from
SHARE_OF_FREE, so that this choice does not change how many clients train at once, nor the bits; allocators,
libraries and methods' tables take the rest."""
VECTORS = 10
"""Flat vectors of a client's model that a local round holds at once, at most: state, download, descents,
gradients and upload."""
_IN_WORDS = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "not enough memory")
"""How torch's parts say that the memory of a process has ended: only a GPU's has an exception of its own."""
PASSES = 3
"""Memory of a training step over the activations that it keeps: their gradients and work spaces, too."""


def for_device(method: Method, state: State) -> State:
    """Return the part of the clients' state that a GPU may keep: all but the rows of `ShardedRows`."""
    return {name: rows for name, rows in state.items() if name != method.sharded_state}


def bytes_for_device(method: Method, state: State) -> int:
    """Return the bytes of that part."""
    return sum(rows.nbytes for rows in for_device(method, state).values())


def state_device(config: Config, device: torch.device, sharing: int, state_bytes: int) -> torch.device:
    """Return where a rank keeps its clients' state during a run: on the device it trains on, or on the CPU.

    Args:
        sharing: ranks that share the device.
        state_bytes: see `bytes_for_device`.
    """
    cpu = torch.device("cpu")
    if device.type != "cuda" or config.run.state == "host":
        return cpu
    if config.run.state == "device" or state_bytes <= STATE_SHARE * _free_bytes(device, sharing):
        return device
    return cpu


def clients_at_once(
    config: Config, method: Method, device: torch.device, sharing: int, most: int, state_bytes: int = 0
) -> int:
    """Return how many clients the batched engine takes at once.

    Where `run.clients_at_once` leaves it open, that is on CUDA the largest power of two that fits this rank's
    share of the free memory, `most` if all of its clients do.

    Args:
        sharing: ranks that share the device.
        most: clients of this rank.
        state_bytes: what the state that this rank will keep on the device takes.
    """
    if method.sequential is not None:
        return 1
    if config.run.clients_at_once is not None:
        return config.run.clients_at_once
    if device.type != "cuda":
        return ON_A_CPU
    free = _free_bytes(device, sharing)
    planned = min(SHARE_OF_FREE * free, (SHARE_OF_FREE + STATE_SHARE) * free - state_bytes)
    fit = max(0, int(planned)) // bytes_of_client(method)
    # a power of two, so that a little more or less free memory does not change the bits
    return min(max(1, most), 1 << max(0, fit.bit_length() - 1))


def bytes_of_client(method: Method) -> int:
    """Return about how many bytes one client of the batched engine takes: its vectors and a training step.

    A method's own network keeps as much more than the configured one as it has more numbers.
    """
    context, kept = method.context, dict[int, int]()
    theta, buffers = context.layout.flatten(context.network)
    x = torch.zeros(context.train.batch_size, *context.image_shape)
    y = torch.zeros(len(x), dtype=torch.int64)
    forward = Forward(prepare(context.network), context.layout, buffers)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        cross_entropy_loss(forward, {"theta": theta.requires_grad_()}, Batch(slice(None), x, y, y))
    size = method.layout.size
    activations = sum(kept.values()) * max(1.0, size / context.layout.size)
    return VECTORS * size * theta.element_size() + round(PASSES * activations)


def _free_bytes(device: torch.device, sharing: int) -> float:
    """Return a rank's share of what is free on a CUDA device that `sharing` ranks share."""
    free, _ = torch.cuda.mem_get_info(device)
    return free / sharing


@contextmanager
def report_out_of_memory(config: Config, world: Communicator) -> Iterator[None]:
    """Tell the user where the memory of this rank's process does not suffice.

    Raises OutOfMemoryError; a rank among several ends all.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        # what the failed calls hold makes room for the words
        traceback.clear_frames(error.__traceback__)
        smaller = max(2, config.train.batch_size // 2)
        abort_out_of_memory(
            world,
            f"rank {world.rank} on {world.host} is out of memory; try more ranks on more nodes (each worker "
            "keeps the samples and the state of its clients), fewer ranks on a node, more memory for the job "
            f"(under SLURM --mem or --mem-per-cpu), or, as another run, train.batch_size={smaller} (it is "
            f"{config.train.batch_size}); rounds up to the checkpoint stay",
        )


def abort_out_of_memory(world: Communicator, text: str) -> NoReturn:
    """Raise OutOfMemoryError; a rank among several ends all with its exit code, as they may wait for it."""
    if world.size == 1:
        raise OutOfMemoryError(text) from None
    abort_saying(world, f"hpcfl: error: {text}\n", OUT_OF_MEMORY)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _IN_WORDS)


def out_of_memory(config: Config, place: str, at_once: int, state_bytes: int) -> str:
    """Return what is told of a GPU that has too little memory, with what to lower.

    `place` says which rank and device; `at_once` is how many clients trained together, and `state_bytes` what
    the state that this rank keeps on the device takes.
    """
    smaller = f"train.batch_size={max(2, config.train.batch_size // 2)} (it is {config.train.batch_size})"
    options = [smaller, "fewer ranks on a GPU", "or run.device=cpu"]
    if at_once > 1:
        options.insert(0, f"run.clients_at_once={at_once // 2} (it was {at_once})")
    if state_bytes:
        options.insert(0, f"run.state=host (the clients' state takes {state_bytes / 1e9:.2g} GB of it)")
    return f"{place} is out of memory; try {', '.join(options)}; rounds up to the checkpoint stay"
