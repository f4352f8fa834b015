"""What a run cannot do with its configuration, method and machine: refused before any of it is made."""

from __future__ import annotations

import copy
from collections import Counter

import torch

from hpcfl.communication.communicator import Communicator
from hpcfl.config import Config
from hpcfl.errors import UserError
from hpcfl.machine import memory_bytes
from hpcfl.methods import Method
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.training.engines import has_bfloat16

SMALL_SHARE, MANY_CLIENTS = 0.01, 1000
"""A server has room for a state of fewer clients than this, whose models take so small a share of its memory:
it keeps some tens of models a client at the most."""


def check_chain(method: Method, num_workers: int) -> None:
    """Raise UserError where several workers would train clients that come one after the other."""
    if method.sequential is not None and num_workers > 1:
        raise UserError(
            f"{method.sequential} trains a round's clients one after the other, and {num_workers} workers "
            "would train them side by side; start one or two ranks, or drop it"
        )


def check_slow_precision(config: Config, is_elsewhere: bool) -> None:
    """Raise UserError where bfloat16 would be emulated, many times slower, or has no part in training."""
    if config.train.precision == "float32":
        return
    asked, instead = f"train.precision={config.train.precision}", "use train.precision=float32"
    if is_elsewhere:
        raise UserError(
            f"{asked} is for the loop engine on a CPU; {instead}, or run.engine=loop run.device=cpu"
        )
    if not has_bfloat16():
        raise UserError(
            f"{asked}: this processor has neither AVX-512 BF16 nor AMX, and would take many times as long; "
            f"{instead}"
        )


def too_large(method: Method) -> str | None:
    """Say why the server's state does not fit in the memory here, and what to do; None where it does."""
    count, memory = method.context.num_clients, memory_bytes()
    if count < MANY_CLIENTS and 4 * count * method.layout.size < SMALL_SHARE * memory:
        return None
    parts = state_bytes(method)
    whole = sum(parts.values())
    if whole <= memory:
        return None
    of_parts = ", ".join(f"{part} {size / 1e9:.3g} GB" for part, size in parts.items())
    num_clients = count + len(method.context.num_samples_of_unseen)
    return (
        f"method.name={method.name} with data.clients={num_clients} keeps {whole / 1e9:.3g} GB on the server "
        f"({of_parts}), and this machine, or its job, has {memory / 1e9:.3g} GB; use fewer clients, a larger "
        f"machine, or what `hpcfl list keys method.{method.name}` has to make it smaller"
    )


def state_bytes(method: Method) -> dict[str, int]:
    """Return the bytes of the server's state at the start by part, without making it; {} if nobody knows.

    It is made on torch's meta device, which has shapes and no numbers; a method of one's own may need those.
    """
    shapes = copy.deepcopy(method)
    shapes.network.to("meta")
    shapes.context.forget_numbers()
    found: Counter[str] = Counter()
    try:
        with torch.device("meta"):
            state = MethodAdapter(shapes).initial_server()
    except (NotImplementedError, RuntimeError, TypeError):
        return {}
    for name, tensor in state.items():
        found[name.partition("/")[0]] += tensor.nbytes
    return dict(found)


def check_large_state(method: Method, world: Communicator) -> None:
    """Refuse a state that does not fit in the server's memory, before any of it is made."""
    if world.is_server and (reason := too_large(method)):
        raise UserError(reason)


def check_single_samples(config: Config, method: Method) -> None:
    """Refuse clients of one training sample where BatchNorm cannot make statistics of one."""
    num_samples = torch.cat([method.context.num_samples, method.context.num_samples_of_unseen])
    client = int(num_samples.argmin())
    if num_samples[client] < method.context.fewest_samples:
        raise UserError(
            f"model.name={config.model.name} cannot train on one sample, and client {client} has no more: "
            "give clients more samples (data.per_client, or fewer data.clients), or use a model without "
            "BatchNorm"
        )


def check_small_blocks(config: Config, method: Method) -> None:
    """Refuse blocks that cannot hold a client's model, or a few figures of every client.

    Larger messages of a client are refused where they are sent.
    """
    most_clients = max(method.context.num_clients, len(method.context.num_samples_of_unseen))
    most_figures = max(5, len(method.layers)) * most_clients
    smallest = max(method.layout.size, method.layout.buffer_size, most_figures)
    if config.run.max_elements < smallest:
        raise UserError(
            f"run.max_elements={config.run.max_elements} is too small for this model and these clients; "
            f"allowed: {smallest} or more"
        )
