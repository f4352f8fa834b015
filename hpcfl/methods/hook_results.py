"""What is wrong with what a hook returned or changed: TypeError or ValueError, with the hook's name.

`hook` is the hook's name in errors, such as FedAvg.train. Shapes: C clients, P trainable numbers, L layers,
K classes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hpcfl.communication.messages import Message
from hpcfl.parameters import ParameterLayout, Tensors
from hpcfl.training.optimiser import Trained

_NAME = r"(?!\.)[^/]+(/(?!\.)[^/]+)*"
"""Names of tensors; checkpoints have a group for what is before a slash."""

_TYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
}

Kinds = dict[str, tuple[torch.dtype, torch.Size]]
"""Type and shape of tensors, by name."""


def check_message(hook: str, value: Message, count: int, layout: ParameterLayout, num_layers: int) -> None:
    """Check a hook's message for `count` clients: its rows, its models and its masks of layers."""
    if not isinstance(value, Message):
        raise TypeError(
            f"{hook} returned a {type(value).__name__}; return Message(shared={{...}}, per_client={{...}})"
        )
    if twice := sorted(value.shared.keys() & value.per_client.keys()):
        raise ValueError(f"{hook} returned {', '.join(twice)} both as shared and as per_client; give one")
    check_tensors(hook, value.shared)
    check_rows(hook, value.per_client, count, ", or under `shared` a tensor that all have in common")
    tensors = value.tensors
    theta, size, kind = tensors.get("theta"), layout.size, torch.get_default_dtype()
    if theta is not None and (not theta.dim() or theta.shape[-1] != size or theta.dtype != kind):
        raise ValueError(
            f"{hook} returned 'theta' of {_described(theta.dtype, theta.shape)}; expected: {size} numbers of "
            f"type {kind} in the last axis"
        )
    check_tensors(hook, value.layer_mask)
    for name, mask in value.layer_mask.items():
        if name not in tensors:
            names = ", ".join(tensors) or "none"
            raise ValueError(f"{hook} returned a layer_mask of {name!r}, which is not sent; sent: {names}")
        if not tensors[name].dim() or tensors[name].shape[-1] != size:
            raise ValueError(
                f"{hook} returned a layer_mask of {name!r}, which does not consist of layers; expected: "
                f"{size} numbers in its last axis"
            )
        if mask.dtype != torch.bool or [*mask.shape] not in ([num_layers], [count, num_layers]):
            raise ValueError(
                f"{hook} returned a layer_mask of {_described(mask.dtype, mask.shape)}; expected: torch.bool "
                f"of shape [{num_layers}], or [{count}, {num_layers}] client by client"
            )


def check_tensors(hook: str, tensors: Tensors) -> None:
    """Raise TypeError unless names are words and values are tensors."""
    if not isinstance(tensors, dict):
        raise TypeError(f"{hook} returned a {type(tensors).__name__}; return a dictionary of tensors by name")
    for name, value in tensors.items():
        if not isinstance(name, str) or not re.fullmatch(_NAME, name):
            raise TypeError(
                f"{hook}: a tensor is named {name!r}; names are words, or words joined by a slash"
            )
        if not isinstance(value, Tensor):
            wanted = "clients.sgd(...).theta" if isinstance(value, Trained) else "a torch.Tensor"
            raise TypeError(f"{hook}: {name!r} is a {type(value).__name__}; give {wanted}")
        if value.requires_grad:
            raise TypeError(f"{hook}: {name!r} has a graph for gradients; give {name}.detach()")
        check_type(hook, name, value)


def check_rows(hook: str, tensors: Tensors, count: int, instead: str = "") -> None:
    """Raise TypeError or ValueError unless a hook's tensors have a row for each of `count` clients; `instead`
    ends the error: what else can be done."""
    check_tensors(hook, tensors)
    for name, rows in tensors.items():
        if not rows.dim() or len(rows) != count:
            raise ValueError(
                f"{hook} returned {name!r} of shape {[*rows.shape]} for {count} clients; give a row to each"
                + instead
            )


def check_state(hook: str, state: Tensors) -> None:
    """Raise TypeError or ValueError for tensors that no checkpoint can hold."""
    check_tensors(hook, state)
    for name, value in state.items():
        parents = (name[: slash.start()] for slash in re.finditer("/", name))
        if parent := next((parent for parent in parents if parent in state), None):
            raise ValueError(f"{hook}: {parent!r} and {name!r} exclude each other; rename one")
        if not value.dim():
            raise ValueError(
                f"{hook}: {name!r} is a single number; checkpoints hold tensors with an axis, such as "
                "torch.zeros(1)"
            )


def check_type(hook: str, name: str, value: Tensor) -> None:
    """Raise TypeError for a tensor that no message and no checkpoint can hold."""
    if value.layout != torch.strided or value.dtype not in _TYPES:
        raise TypeError(
            f"{hook}: {name!r} is of type {value.dtype} ({value.layout}); messages and checkpoints hold "
            "dense tensors of booleans, integers, float16, float32 or float64"
        )


def separate(state: Tensors) -> None:
    """Give tensors that share memory some of their own: after a resume, a change of one is no change of the
    other."""
    places: set[int] = set()
    for name, value in state.items():
        place = value.untyped_storage().data_ptr()
        if place in places:
            state[name] = value.clone()
        # tensors without numbers, and those of a plan, have no memory
        places |= {place} - {0}


def check_same_alone(hook: str, client: int, rows: Tensors, alone: Tensors) -> None:
    """Raise ValueError if the last of some clients has another state than alone: ranks group clients anew."""
    last = {name: row[-1:].numpy(force=True) for name, row in rows.items()}
    own = {name: row.numpy(force=True) for name, row in alone.items()}
    for name in [*last, *own]:
        same = name in last and name in own and last[name].dtype == own[name].dtype
        if not same or last[name].shape != own[name].shape or last[name].tobytes() != own[name].tobytes():
            raise ValueError(
                f"{hook} returned another {name!r} for client {client} alone than for it among others; a "
                "client's state may depend on its id only, even in the last bits: each rank calls the hook "
                "for its own clients"
            )


def kinds(state: Tensors) -> Kinds:
    """Return types and shapes of tensors."""
    return {name: (value.dtype, value.shape) for name, value in state.items()}


def misfit(expected: Kinds, found: Kinds, growing: Collection[str] = ()) -> str | None:
    """Name an expected tensor that is missing, or has another type, or another shape and is not `growing`.

    None if there is none; tensors that are not expected are fine.
    """
    for name, (dtype, shape) in expected.items():
        there = found.get(name)
        if there is None or there[0] != dtype or (there[1] != shape and name not in growing):
            return name
    return None


def check_kinds(hook: str, before: Kinds, state: Tensors, growing: Collection[str] = ()) -> None:
    """Raise TypeError or ValueError if a hook changed types or shapes of a state, or dropped a tensor.

    Shapes of the `growing` tensors may change. A checkpoint of such a state could not be resumed.
    """
    check_state(hook, state)
    after = kinds(state)
    name = misfit(before, after, growing)
    if name is None:
        return
    if name not in after:
        raise ValueError(f"{hook} dropped {name!r} from the state; a resumed run would not find it")
    raise ValueError(
        f"{hook} changed {name!r} from {_described(*before[name])} to {_described(*after[name])}; a resumed "
        "run needs what the state had at the start (of the server's, traits.growing_state names tensors "
        "whose shape may change)"
    )


@contextmanager
def unchanged(hook: str, messages: Sequence[Message], others: Tensors) -> Iterator[None]:
    """Raise TypeError at the end of the block if a tensor of the messages was changed in place, or one of the
    others, which are compared by torch's count alone: they are too large to add up."""
    tensors = {
        f"{name!r} of its message": tensor for message in messages for name, tensor in message.tensors.items()
    }
    before = {name: _fingerprint(tensor) for name, tensor in tensors.items()}
    counts = {name: _version(tensor) for name, tensor in others.items()}
    yield
    changed = [name for name, tensor in tensors.items() if _fingerprint(tensor) != before[name]]
    changed += [name for name, tensor in others.items() if _version(tensor) != counts[name]]
    if changed:
        raise TypeError(
            f"{hook} changed {changed[0]} in place, which others read too, such as the next clients; change "
            "a copy of it, such as .clone()"
        )


@contextmanager
def unchanged_state(hook: str, server: Tensors) -> Iterator[None]:
    """Raise TypeError at the end of the block if the server's state was changed, in place or by name."""
    before = {name: (id(value), _version(value)) for name, value in server.items()}
    yield
    after = {name: (id(value), _version(value)) for name, value in server.items()}
    for name in [*before, *after]:
        if before.get(name) != after.get(name):
            raise TypeError(
                f"{hook} changed server[{name!r}]: results would depend on run.eval_every; change the state "
                "in aggregate or end_round"
            )


def check_probabilities(hook: str, found: Tensor, num_samples: int, num_classes: int) -> None:
    """Raise TypeError or ValueError unless a tensor has probabilities of classes [n, K]; nan may be there."""
    if not isinstance(found, Tensor):
        raise TypeError(f"{hook} returned a {type(found).__name__}; return a torch.Tensor")
    if [*found.shape] != [num_samples, num_classes]:
        raise ValueError(
            f"{hook} returned shape {[*found.shape]}; expected: probabilities [{num_samples}, {num_classes}] "
            f"of {num_samples} samples and {num_classes} classes"
        )
    if bool((found < -0.01).any() | ((found.sum(dim=1) - 1).abs() > 0.01).any()):
        raise ValueError(
            f"{hook} returned rows that are not probabilities; expected: numbers from 0 on with sum 1, "
            "such as logits.softmax(dim=1)"
        )


def _version(value: object) -> int | None:
    """Return how often torch has seen a tensor change in place; None where it does not count."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _fingerprint(tensor: Tensor) -> tuple[int | None, float | None]:
    """Return what tells whether a tensor was changed in place.

    Its version does not count changes through `.data`, `.numpy()` or `vector_to_parameters`; its sum shows
    them, and on a GPU it would wait.
    """
    is_added = tensor.device.type == "cpu" and tensor.numel() and not tensor.is_complex()
    total = tensor.sum().item() if is_added else None
    # nan does not equal itself
    return _version(tensor), total if total == total else None


def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"shape {[*shape]} and type {dtype}"
