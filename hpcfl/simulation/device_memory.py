"""How many clients fit a device at once, and what to tell where they did not."""

from __future__ import annotations

import torch

from hpcfl.config import Config
from hpcfl.errors import UserError
from hpcfl.methods import Method
from hpcfl.training.batches import Batch
from hpcfl.training.engines import prepare
from hpcfl.training.forward import Forward

ON_A_CPU = 32
"""Clients of the batched engine at once where no device memory says how many."""
SHARE_OF_FREE = 0.5
"""Share of the free memory that is planned with: allocators, libraries and methods' tables take the rest."""
VECTORS = 10
"""Flat vectors of a client's model that a local round holds at once, at most: state, download, descents,
gradients and upload."""
PASSES = 3
"""Memory of a training step over the activations that it keeps: their gradients and work spaces, too."""


def clients_at_once(config: Config, method: Method, device: torch.device, sharing: int, most: int) -> int:
    """Return how many clients the batched engine takes at once.

    Where `run.clients_at_once` leaves it open, that is on CUDA the largest power of two that fits this rank's
    share of the free memory, `most` if all of its clients do.

    Args:
        sharing: ranks that share the device.
        most: clients of this rank.
    """
    if method.chain is not None:
        return 1
    if config.run.clients_at_once is not None:
        return config.run.clients_at_once
    if device.type != "cuda":
        return ON_A_CPU
    free, _ = torch.cuda.mem_get_info(device)
    fit = int(SHARE_OF_FREE * free / sharing) // bytes_of_client(method)
    # a power of two, so that a little more or less free memory does not change the bits
    return min(max(1, most), 1 << max(0, fit.bit_length() - 1))


def bytes_of_client(method: Method) -> int:
    """Return about how many bytes one client of the batched engine takes: its vectors and a training step."""
    context, kept = method.context, dict[int, int]()
    theta, buffers = method.layout.flatten(method.network)
    x = torch.zeros(context.train.batch_size, *context.image_shape)
    y = torch.zeros(len(x), dtype=torch.int64)
    forward = Forward(prepare(method.network), method.layout, buffers)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        method.timed_loss(forward, {"theta": theta.requires_grad_()}, Batch(slice(None), x, y, y))
    vectors = max(method.largest_row, method.layout.size) * theta.element_size()
    return VECTORS * vectors + PASSES * sum(kept.values())


def out_of_memory(config: Config, place: str, at_once: int) -> UserError:
    """Return the error for a device that has too little memory, with what to lower.

    `place` says which rank and device; `at_once` is how many clients trained together.
    """
    smaller = f"train.batch_size={max(2, config.train.batch_size // 2)} (it is {config.train.batch_size})"
    options = [smaller, "fewer ranks on a GPU", "or run.device=cpu"]
    if at_once > 1:
        options.insert(0, f"run.clients_at_once={at_once // 2} (it was {at_once})")
    return UserError(f"{place} is out of memory; try {', '.join(options)}; rounds up to the checkpoint stay")
