"""What is wrong with a method's class (TypeError), or with the settings of a run of it (UserError)."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Sequence
from typing import Any, get_args

import torch
from pydantic import TypeAdapter, ValidationError

from hpcfl.config.key_errors import shown
from hpcfl.config.keys import PrivacyUnit, ServerConfig, TrainConfig
from hpcfl.errors import UserError
from hpcfl.methods.buffers import Buffers
from hpcfl.methods.context import Context
from hpcfl.methods.traits import Traits
from hpcfl.parameters import Layer

OF_TWO_PHASES = ("needs_request", "client_request", "server_response")
"""Hooks of `TwoPhaseMethod`, which a plain method does not call."""

FORMER = {
    "derived": "a Diagnostic(..., of_server=..., in_checkpoints=True)",
    "server_diagnostics": "Diagnostic(..., of_server=...)",
    "client_diagnostics": "Diagnostic(..., of_clients=...)",
    "finetuned": "finetune",
    "local_gradient": "finetune, or training_gradient of FedPer and its like",
    "make_layers": "self.layers = ... in __init__",
}
"""Names that were hooks, and what replaces each."""

_TRAITS = TypeAdapter(Traits)


def check_class(kind: type[Any], base: type[Any]) -> None:
    """Raise TypeError for a class of `base`, Method, that contradicts itself or misspells a name."""
    members = [name for name in {**vars(base), **base.__annotations__} if name[0] != "_"]
    for name in vars(kind):
        if name[0] == "_" or name in members or hasattr(super(kind, kind), name):
            continue
        if name in OF_TWO_PHASES and kind.__module__ != base.__module__:
            raise TypeError(f"{kind.__name__}.{name} is never called; derive the class from TwoPhaseMethod")
        near = difflib.get_close_matches(name, members, n=1, cutoff=0.79)
        if name in Traits.__dataclass_fields__:
            near = [f"traits.{name}"]
        if name in FORMER:
            near = [FORMER[name]]
        if near:
            raise TypeError(
                f"{kind.__name__}.{name} is not a hook; did you mean {near[0]}? If not, name it _{name}"
            )
    _check_arguments(kind, base)
    own_name = vars(kind).get("name", kind.__name__)
    if not isinstance(own_name, str) or not re.fullmatch(r"[\w.+-]+", own_name):
        raise TypeError(f"{kind.__name__}.name cannot be {own_name!r}; allowed: letters, digits and _ . + -")
    if wrong := [unit for unit in kind.privacy_units if unit not in get_args(PrivacyUnit)]:
        units = ", ".join(get_args(PrivacyUnit))
        raise TypeError(f"{kind.__name__}.privacy_units has {wrong[0]!r}; allowed: {units}")
    if "client" in kind.privacy_units and hasattr(kind, "client_request"):
        raise TypeError(f"{kind.__name__}.privacy_units names client, and requests get no noise; remove it")
    if not isinstance(kind.traits, Traits):
        raise TypeError(f"{kind.__name__}.traits is not a Traits; write traits = FedAvg.traits.replace(...)")
    if not isinstance(kind.diagnostics, tuple):
        raise TypeError(f"{kind.__name__}.diagnostics is not a tuple; write (Diagnostic(...),) with a comma")
    _check_traits(kind)
    of_rule, of_module = (
        next(owner for owner in kind.__mro__ if name in vars(owner)) for name in ("predict", "as_module")
    )
    is_right, needs = {
        "network": (of_rule is of_module is base, "neither predict nor as_module of its own"),
        "module": (of_rule is of_module is not base, "both predict and as_module, from the same class"),
        "rule": (of_rule is not base, "predict of its own"),
    }[kind.traits.predicts_by]
    if not is_right:
        raise TypeError(f"{kind.__name__}.traits.predicts_by={kind.traits.predicts_by} needs {needs}")
    names = [diagnostic.name for diagnostic in kind.diagnostics]
    if len(names) > len(set(names)):
        raise TypeError(f"{kind.__name__} has two diagnostics of one name: {', '.join(names)}")


def _check_arguments(kind: type[Any], base: type[Any]) -> None:
    """Raise TypeError for a hook that does not take the arguments that it is called with."""
    for name, own in vars(kind).items():
        hook = getattr(base, name, None)
        if name[0] == "_" or not (inspect.isfunction(own) and inspect.isfunction(hook)):
            continue
        parameters = inspect.signature(hook).parameters
        try:
            inspect.signature(own).bind(*parameters)
        except TypeError:
            raise TypeError(
                f"{kind.__name__}.{name} does not take ({', '.join(parameters)}), with which it is called"
            ) from None


def _check_traits(kind: type[Any]) -> None:
    """Raise TypeError for a value that a trait cannot have."""
    try:
        _TRAITS.validate_python(vars(kind.traits))
    except ValidationError as error:
        first = error.errors()[0]
        name, value = first["loc"][0], first["input"]
        raise TypeError(f"{kind.__name__}.traits.{name} cannot be {value!r}: {first['msg']}") from None
    traits: Traits = kind.traits
    for name, given, group in (
        ("refuses", traits.refuses, TrainConfig),
        ("train_defaults", traits.train_defaults, TrainConfig),
        ("server_defaults", traits.server_defaults, ServerConfig),
    ):
        if unknown := given.keys() - group.model_fields:
            raise TypeError(f"{kind.__name__}.traits.{name} has {min(unknown)!r}, which is not a key")


def check_settings(method: str, traits: Traits, context: Context) -> None:
    """Raise UserError if a key of a run does not go with a method of these traits."""
    train, optimiser = context.train, context.server.optimiser
    if train.buffers not in (None, *traits.buffers):
        raise UserError(
            f"train.buffers={train.buffers} does not go with method.name={method}; "
            f"allowed: {', '.join(traits.buffers)}"
        )
    for key, reason in traits.refuses.items():
        value, default = getattr(train, key), TrainConfig.model_fields[key].default
        if value != default:
            raise UserError(
                f"train.{key}={shown(value)} does not go with method.name={method}, {reason}; "
                f"allowed: {shown(default)}"
            )
    if optimiser is not None and not traits.averages:
        raise UserError(
            f"server.optimiser={optimiser} does not go with method.name={method}, whose server averages no "
            "model; set server.optimiser=null"
        )
    if traits.needs_body or traits.linear_head:
        check_body(method, context)
    if traits.linear_head:
        check_linear_head(method, context)


def check_private(method: str, units: Sequence[PrivacyUnit], context: Context, buffers: Buffers) -> None:
    """Raise UserError if `privacy.unit` would promise what does not hold."""
    unit = context.privacy.unit
    if unit is None:
        return
    key = f"privacy.unit={unit}"
    if unit not in units:
        raise UserError(
            f"{key} does not go with method.name={method}, whose clients' messages it would not make "
            "private; `hpcfl list` shows the methods that it goes with; a class of your own has privacy_units"
        )
    if unit == "sample" and buffers.layout.buffer_size:
        raise UserError(
            f"{key} needs a model without running statistics such as BatchNorm's, which mix the samples of a "
            f"mini-batch, and model.name={context.model_name} has {buffers.layout.buffers[0].name} here; set "
            "model.batchnorm=false, with resnet18 or mobilenetv2 model.groupnorm=8, or use another model"
        )
    if buffers.has_policy("average"):
        raise UserError(f"{key} needs train.buffers=local: running statistics would be sent as they are")


def check_body(method: str, context: Context) -> None:
    """Raise UserError unless the configured model has layers before its head, and no parameter of both."""
    if not context.layout.body.stop:
        raise UserError(
            f"method.name={method} needs a feature extractor and a head, and model.name="
            f"{context.model_name} has no layers before its head here; use another model (see `hpcfl list`), "
            "or with mlp a hidden layer, such as model.hidden=[64]"
        )
    of_body = {id(parameter): name for name, parameter in context.network.body.named_parameters()}
    for name, parameter in context.network.head.named_parameters():
        if id(parameter) in of_body:
            raise UserError(
                f"method.name={method} divides the model into body and head, and body."
                f"{of_body[id(parameter)]} and head.{name} of model.name={context.model_name} are one "
                "parameter; share parameters within the body only, or use a method that does not divide"
            )


def check_linear_head(method: str, context: Context) -> None:
    """Raise UserError unless the configured model's head is one linear layer with a bias."""
    head = [slot.shape for slot in context.layout.parameters if slot.name.startswith("head.")]
    if [len(shape) for shape in head] != [2, 1]:
        raise UserError(
            f"method.name={method} needs a network whose head is one linear layer with a bias, and that of "
            f"model.name={context.model_name} is another; use one that has, such as any of `hpcfl list`"
        )


def check_num_layers(layers: Sequence[Layer], key: str, number: int) -> None:
    """Raise UserError if `number`, the value of `method.<key>`, is more than there are layers."""
    if number > len(layers):
        names = ", ".join(layer.name for layer in layers)
        raise UserError(
            f"method.{key}={number} is more than the model's {len(layers)} layers ({names}); "
            f"allowed: up to {len(layers)}"
        )


def check_equal_starts(context: Context, key: str, count: int) -> None:
    """Raise UserError if the `different_starts` that `method.<key>`, `count`, needs would all be equal.

    If a file gives the initial weights of the body only, draws still differ in their heads, as in the code of
    FedEM's authors. This difference is sufficient.
    """
    if count > 1 and context.weights_are_given and torch.equal(*context.different_starts(2)):
        raise UserError(
            f"method.{key}={count} needs models that start differently, and model.weights starts all alike; "
            f"drop model.weights, or use method.{key}=1"
        )
