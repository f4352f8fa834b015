"""The configuration of a run: YAML and key=value in, one validated, frozen object out."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpcfl.data.partitions import PARTITIONS
from hpcfl.data.sources import SOURCES
from hpcfl.errors import UserError
from hpcfl.methods import METHODS, Params
from hpcfl.models import MODELS, NetworkOptions
from hpcfl.training import TrainConfig

DEFAULT_METHOD, DEFAULT_PARTITION = "pfedla", "classes"


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class DataConfig(_Group):
    """The keys under `data.*`, without the partition's."""

    source: str = "digits"
    """Where samples come from; see `hpcfl list`."""
    root: str = "data"
    """Folder of downloaded data sets; changes no result."""
    path: str | None = None
    """File of source `npz`."""
    layout: Literal["NHWC", "NCHW"] | None = None
    """Axis order of source `npz`."""
    split: str = "mnist"
    """EMNIST's split."""
    clients: int = Field(10, ge=1)
    """Number of clients N."""
    per_client: int | None = Field(None, ge=2)
    """Samples a client, all splits together; default: the most that is equal for all."""
    test_fraction: float = Field(0.3, gt=0, lt=1)
    """Share of a client's samples for testing."""
    val_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of a client's training samples cut off for validation."""
    subset_per_class: int | None = Field(None, ge=1)
    """Use a seeded, class-balanced subset of the source."""
    normalise: str | list[list[float]] = "auto"
    """`auto` (the source's constants), `none`, `half`, a source's name, or [[means], [deviations]]."""
    seed: int | None = Field(None, ge=0)
    """Seed of subset and partition; default: run.seed."""


class RunConfig(_Group):
    """The keys under `run.*`."""

    seed: int = Field(0, ge=0)
    """Seed of everything random."""
    eval_every: int = Field(1, ge=1)
    """Rounds between evaluations; the last round always has one. Changes no training result."""
    eval_split: Literal["test", "val"] = "test"
    """What evaluations score: choose hyper-parameters on val, report on test."""
    checkpoint_every: int = Field(10, ge=1)
    """Rounds between checkpoints; the last round always has one. Changes no result."""
    engine: Literal["auto", "loop", "batched"] = "auto"
    """Local training client by client, or many clients as one computation; auto: batched on CUDA."""
    clients_at_once: int = Field(32, ge=1)
    """Clients in one computation of the batched engine."""
    threads: int = Field(1, ge=1)
    """CPU threads a rank; another number gives other bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where workers train; auto: a GPU if there is one."""
    max_elements: int = Field(2**27, ge=1, lt=2**28)
    """Numbers in one block of a message."""


RESULT_NEUTRAL = ("data.root", "run.checkpoint_every")
"""Keys that may differ between a run folder and the command that resumes it."""


@dataclass(frozen=True)
class Config:
    """A validated configuration."""

    method: str
    params: Params
    data: DataConfig
    partition: str
    partition_options: BaseModel
    model: str
    model_options: NetworkOptions
    train: TrainConfig
    run: RunConfig

    @property
    def data_seed(self) -> int:
        return self.run.seed if self.data.seed is None else self.data.seed

    def tree(self) -> dict[str, Any]:
        """Return the configuration as it stands in YAML, every default written out."""
        partition = {"name": self.partition, **self.partition_options.model_dump()}
        return {
            "method": {"name": self.method, **self.params.model_dump()},
            "data": {**self.data.model_dump(), "partition": partition},
            "model": {"name": self.model, **self.model_options.model_dump()},
            "train": self.train.model_dump(),
            "run": self.run.model_dump(),
        }

    def yaml(self) -> str:
        return yaml.safe_dump(self.tree(), sort_keys=False)

    def short_hash(self) -> str:
        """Return 8 hexadecimal digits over all keys that change results, `train.rounds` left out."""
        keys = {
            k: v for k, v in flatten(self.tree()).items() if k not in RESULT_NEUTRAL and k != "train.rounds"
        }
        return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:8]

    def run_name(self) -> str:
        return f"{self.method}-{self.data.source}-s{self.run.seed}-{self.short_hash()}"


def load_config(path: Path | None, overrides: Sequence[str]) -> Config:
    """Read a YAML file and apply `key.sub=value` overrides.

    Raises UserError for an unreadable file, unknown keys or names, wrong types and impossible values.
    """
    return resolve(parse(path, overrides))


def parse(path: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the nested keys of a YAML file with `key.sub=value` overrides put in."""
    tree = {} if path is None else _read_yaml(path)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(
                f"{override!r} is neither a configuration file nor key=value, such as train.rounds=50"
            )
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        node = tree
        *groups, last = key.split(".")
        for group in groups:
            node = node.setdefault(group, {})
            if not isinstance(node, dict):
                raise UserError(f"{key}: {group} is a value, not a group of keys")
        node[last] = value
    return tree


def resolve(tree: Mapping[str, Any]) -> Config:
    """Validate nested keys and fill in defaults; raises UserError (see `load_config`)."""
    tree = {name: dict(_mapping(name, group)) for name, group in tree.items()}
    data = tree.get("data", {})
    partition = dict(_mapping("data.partition", data.pop("partition", {})))
    model, method, train = tree.get("model", {}), tree.get("method", {}), tree.get("train", {})
    source = _one_of("data.source", data.get("source", "digits"), SOURCES)
    names = {
        "method": _one_of("method.name", method.pop("name", DEFAULT_METHOD), METHODS),
        "data.partition": _one_of(
            "data.partition.name", partition.pop("name", DEFAULT_PARTITION), PARTITIONS
        ),
        "model": _one_of("model.name", model.pop("name", _default_model(source)), MODELS),
    }
    chosen = METHODS[names["method"]]
    kinds: dict[str, type[BaseModel]] = {
        "method": chosen.Params,
        "data": DataConfig,
        "data.partition": PARTITIONS[names["data.partition"]].options,
        "model": NetworkOptions,
        "train": TrainConfig,
        "run": RunConfig,
    }
    given = {
        "method": method,
        "data": data,
        "data.partition": partition,
        "model": model,
        "train": chosen.train_defaults | train,
        "run": tree.get("run", {}),
    }
    known = [f"{group}.name" for group in names]
    known += [f"{group}.{key}" for group, kind in kinds.items() for key in kind.model_fields]
    _refuse_unknown([group for group in tree if group not in kinds], known)
    for group, values in given.items():
        _refuse_unknown([f"{group}.{k}" for k in values if k not in kinds[group].model_fields], known)
    made: dict[str, Any] = {group: _validate(group, kind, given[group]) for group, kind in kinds.items()}
    config = Config(
        names["method"],
        made["method"],
        made["data"],
        names["data.partition"],
        made["data.partition"],
        names["model"],
        made["model"],
        made["train"],
        made["run"],
    )
    if config.run.eval_split == "val" and not config.data.val_fraction:
        raise UserError("run.eval_split=val needs validation samples: set data.val_fraction, such as 0.2")
    return config


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Name the keys that change results and differ between two configuration trees, with both values."""
    before, after = flatten(old), flatten(new)
    keys = [key for key in {**before, **after} if key not in RESULT_NEUTRAL]
    missing = "(not set)"
    return [
        f"{key}: {before.get(key, missing)} there, {after.get(key, missing)} here"
        for key in keys
        if before.get(key, missing) != after.get(key, missing)
    ]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys as `a.b.c: value`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def _default_model(source: str) -> str:
    return "digits_cnn" if source == "digits" else "lenet"


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise UserError(f"cannot read configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    return dict(_mapping(str(path), tree))


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{name}={value!r} must be a group of keys, such as {name}.name=...")
    return value


def _one_of(key: str, value: Any, allowed: Iterable[str]) -> str:
    names = list(allowed)
    if value not in names:
        near = difflib.get_close_matches(str(value), names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{key}={value} is unknown; allowed: {', '.join(names)}{hint}")
    return str(value)


def _refuse_unknown(keys: Sequence[str], known: Sequence[str]) -> None:
    if not keys:
        return
    near = difflib.get_close_matches(keys[0], known, n=1, cutoff=0.0)[0]
    raise UserError(f"{keys[0]} is an unknown key; the nearest known one is {near}")


def _validate(group: str, kind: type[BaseModel], values: Mapping[str, Any]) -> BaseModel:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = f"{group}.{first['loc'][0]}" if first["loc"] else group
        value = values.get(str(first["loc"][0])) if first["loc"] else values
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise UserError(f"{key}={value} is not possible: {reason}") from error
