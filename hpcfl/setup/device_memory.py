"""What fits in a device's memory: the clients' state, how many clients at once; the message if it did not.

A device is shared by `sharing` ranks. `state_bytes` are those of a rank's part that `for_device` returns.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpcfl.communication.communicator import Communicator, abort_with_message
from hpcfl.errors import OUT_OF_MEMORY, OutOfMemoryError
from hpcfl.methods import Method
from hpcfl.methods.base import State
from hpcfl.training.batches import Batch
from hpcfl.training.engines import training_copy
from hpcfl.training.forward import Forward
from hpcfl.training.losses import cross_entropy_loss

ON_A_CPU = 32
"""Clients at once in the batched engine on a CPU."""
SHARE_OF_FREE = 0.5
"""Share of the free memory planned for the clients in training."""
STATE_SHARE = 0.25
"""Largest share of the free memory that `run.state=auto` gives to the clients' state. It is not taken from
SHARE_OF_FREE, so that this choice does not change how many clients train at once, nor the bits; allocators,
libraries and methods' tables take the rest."""
VECTORS = 10
"""Flat vectors of a client's model that a local round holds at once, at most: state, download, descents,
gradients and upload."""
OF_ADAM = 4
"""The same that Adam adds: two moments for each of two descents."""
_IN_WORDS = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "not enough memory")
"""Texts of torch's errors for a process out of memory: torch has an exception class only for a GPU."""
PASSES = 3
"""Memory of a training step divided by its stored activations: gradients and workspaces come on top."""


def for_device(method: Method, state: State) -> State:
    """Return the part of the clients' state that a GPU may keep: all but the rows of `ShardedRows`."""
    sharded = method.sharded.state if method.sharded else None
    return {name: rows for name, rows in state.items() if name != sharded}


def state_device(setting: str, device: torch.device, sharing: int, state_bytes: int) -> torch.device:
    """Return where a rank keeps its clients' state during a run: on the device it trains on, or on the CPU.

    `setting` is `run.state`.
    """
    cpu = torch.device("cpu")
    if device.type != "cuda" or setting == "host":
        return cpu
    if setting == "device" or state_bytes <= STATE_SHARE * _free_bytes(device, sharing):
        return device
    return cpu


def clients_at_once(
    setting: int | None, method: Method, device: torch.device, sharing: int, most: int, state_bytes: int = 0
) -> int:
    """Return how many clients the batched engine takes at once; `setting` is `run.clients_at_once`.

    On CUDA the default is the largest power of two that fits this rank's share of the free memory, `most` if
    all of its clients do. `state_bytes` is 0 where the state stays on the CPU.
    """
    if method.sequential is not None:
        return 1
    if setting is not None:
        return setting
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
    x = context.sample.zeros(max(context.clients.batch_size or [context.train.batch_size]))
    y = torch.zeros(len(x), dtype=torch.int64)
    forward = Forward(training_copy(context.network), context.layout, buffers)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        cross_entropy_loss(forward, {"theta": theta.requires_grad_()}, Batch(slice(None), x, y, y))
    size = method.layout.size
    activations = sum(kept.values()) * max(1.0, size / context.layout.size)
    vectors = VECTORS + (OF_ADAM if context.train.optimiser else 0)
    return vectors * size * theta.element_size() + round(PASSES * activations)


def _free_bytes(device: torch.device, sharing: int) -> float:
    """Return a rank's share of what is free on a CUDA device."""
    free, _ = torch.cuda.mem_get_info(device)
    return free / sharing


@contextmanager
def report_out_of_memory(world: Communicator) -> Iterator[None]:
    """Turn a failed allocation of this rank into OutOfMemoryError; of several ranks, it ends all."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            what = "the GPU of "
            smaller = "fewer ranks on a GPU, run.state=host, a smaller run.clients_at_once, run.device=cpu"
        elif isinstance(error, MemoryError) or any(words in str(error).lower() for words in _IN_WORDS):
            what = ""
            smaller = (
                "more ranks on more nodes (each worker keeps the samples and the state of its clients), "
                "fewer ranks on a node, more memory for the job (under SLURM --mem or --mem-per-cpu)"
            )
        else:
            raise
        # frees the memory of the failed calls, so that the message can be printed
        traceback.clear_frames(error.__traceback__)
        text = (
            f"{what}rank {world.rank} on {world.host} is out of memory; try {smaller}, or, as another run, a "
            "smaller train.batch_size; the newest checkpoint, if there is one, is kept"
        )
        if world.size == 1:
            raise OutOfMemoryError(text) from None
        # the other ranks may wait for this one
        abort_with_message(world, f"hpcfl: error: {text}\n", OUT_OF_MEMORY)
