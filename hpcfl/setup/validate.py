"""Checks of configuration, method and machine before a run is built."""

from __future__ import annotations

import copy
from collections import Counter

import torch

from hpcfl.config.keys import Config, PrivacyConfig
from hpcfl.data.arrays import Arrays
from hpcfl.data.shard import is_normalised_by_training
from hpcfl.errors import UserError
from hpcfl.formatting import readable_bytes
from hpcfl.machine import memory_bytes
from hpcfl.methods import Context, Method
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.privacy import accounting_library
from hpcfl.training.engines import has_bfloat16

SMALL_SHARE, MANY_CLIENTS = 0.01, 1000
"""With fewer clients than this, whose models take so small a share of the memory, the server's state is not
checked: it has some tens of models per client at most."""


def check_chain(method: Method, num_workers: int) -> None:
    """Raise UserError if several workers would train clients that must train one after the other, or if a
    clock would time these as if they trained at the same time."""
    if method.sequential is None:
        return
    if num_workers > 1:
        raise UserError(
            f"{method.sequential} trains a round's clients one after the other and needs a single worker, "
            f"not {num_workers}: start one or two ranks, or remove this key"
        )
    if method.context.clients.step_s is not None:
        raise UserError(
            f"{method.sequential} trains a round's clients one after the other, and the clock of clients."
            "step_s times clients that train at the same time; remove one of these keys"
        )


def check_settings_of_data(config: Config, arrays: Arrays, method: Method) -> None:
    """Raise UserError for settings that do not go with the clients or their samples."""
    _check_single_samples(method)
    _check_private_data(config.privacy, is_normalised_by_training(arrays, config.data.normalise))
    _check_candidates(method.context)


def _check_candidates(context: Context) -> None:
    """Raise UserError if a cohort has more members than there are candidates."""
    count, size = context.clients.candidates, context.train.cohort_size(context.num_clients)
    if count is not None and count < size:
        raise UserError(
            f"clients.candidates={count} are too few for the {size} clients of a round; set "
            f"clients.candidates={size} or more, or lower train.participation"
        )


def check_slow_precision(precision: str, is_elsewhere: bool) -> None:
    """Raise UserError if bfloat16 would be emulated, many times slower, or would not be used."""
    if precision == "float32":
        return
    asked, instead = f"train.precision={precision}", "use train.precision=float32"
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
    """Return why the server's state does not fit in memory, and what to do; None if it fits."""
    count, memory = method.context.num_clients, memory_bytes()
    if count < MANY_CLIENTS and 4 * count * method.layout.size < SMALL_SHARE * memory:
        return None
    parts = state_bytes(method)
    whole = sum(parts.values())
    if whole <= memory:
        return None
    of_parts = ", ".join(f"{part} {readable_bytes(size)}" for part, size in parts.items())
    num_clients = count + len(method.context.num_samples_of_unseen)
    return (
        f"method.name={method.name} with data.clients={num_clients} keeps {readable_bytes(whole)} on the "
        f"server ({of_parts}), and this machine, or its job, has {readable_bytes(memory)}; use fewer "
        f"clients, a larger machine, or what `hpcfl list keys method.{method.name}` has to make it smaller"
    )


def state_bytes(method: Method) -> dict[str, int]:
    """Return the bytes of the server's state at the start by part, without allocating it; {} if unknown.

    It is made on torch's meta device, which has shapes and no numbers; a user's own method may need those.
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


def _check_private_data(privacy: PrivacyConfig, is_scaled_by_training: bool) -> None:
    """Raise UserError if `privacy.unit` is set, and samples are normalised by what is to be hidden, or the
    accountant is not installed."""
    if privacy.unit is None:
        return
    accounting_library()
    if is_scaled_by_training:
        raise UserError(
            f"privacy.unit={privacy.unit} would not hide the means and deviations by which "
            "data.normalise=auto scales these samples; set data.normalise=none, or numbers that are public"
        )


def _check_single_samples(method: Method) -> None:
    """Raise UserError for clients with one training sample if BatchNorm cannot compute statistics of one."""
    num_samples = torch.cat([method.context.num_samples, method.context.num_samples_of_unseen])
    client = int(num_samples.argmin())
    if num_samples[client] < 2 and method.context.fewest_samples == 2:
        raise UserError(
            f"model.name={method.context.model_name} cannot train on one sample, and client "
            f"{client} has no more: give clients more samples (data.per_client, or fewer data.clients), or "
            "use a model without BatchNorm"
        )
