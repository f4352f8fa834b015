"""The configuration of a run: YAML and key=value in, one validated, frozen object out."""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from hpcfl.data.partitions import DEFAULT_CLIENTS, PARTITIONS
from hpcfl.data.sources import SOURCES
from hpcfl.errors import UserError
from hpcfl.methods import METHODS, Params, add_own_method, is_own
from hpcfl.models import MODELS, NetworkOptions
from hpcfl.training.settings import TrainConfig

DEFAULT_METHOD, DEFAULT_PARTITION, DEFAULT_SOURCE = "pfedla", "classes", "digits"

ENVIRONMENT = "environment"
"""The part of a run folder's config.yaml that says where and how; ignored where it is read."""

GROUPS = ("method", "data", "model", "train", "run")


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class DataConfig(_Group):
    """The keys under `data.*`, without the partition's."""

    source: str = "digits"
    """Where samples come from; see `hpcfl list`."""
    root: str = "data"
    """Folder of downloaded data sets; changes no result."""
    path: str | None = None
    """File of source `npz`; folder of sources `femnist` and `pfllib`."""
    layout: Literal["NHWC", "NCHW"] | None = None
    """Axis order of source `npz`; other sources know theirs."""
    split: str = "mnist"
    """EMNIST's split."""
    clients: int | None = Field(None, ge=1)
    """Number of clients N; default: 10, or with partition `given` all that the source has."""
    per_client: int | None = Field(None, ge=2)
    """Samples a client, all splits together; default: the most that is equal for all."""
    test_fraction: float = Field(0.3, gt=0, lt=1)
    """Share of a client's samples for testing."""
    val_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of a client's training samples cut off for validation."""
    subset_per_class: int | None = Field(None, ge=1)
    """Use a seeded, class-balanced subset of the source."""
    subset_fraction: float | None = Field(None, gt=0, le=1)
    """Use a seeded share of the source, drawn whatever the classes, so that their shares stay as they are."""
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
    """Numbers in one block of a message; changes no result."""


RESULT_NEUTRAL = ("data.root", "method.path", "run.checkpoint_every", "run.max_elements")
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
    own: Mapping[str, str] = field(default_factory=dict)
    """Of a method of the user's own: `path` of its file, and `code`, a digest of it that changes results."""

    @property
    def data_seed(self) -> int:
        return self.run.seed if self.data.seed is None else self.data.seed

    def tree(self) -> dict[str, Any]:
        """Return the configuration as it stands in YAML, every default written out."""
        partition = {"name": self.partition, **self.partition_options.model_dump()}
        return {
            "method": {"name": self.method, **self.own, **self.params.model_dump()},
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
    """Return the nested keys of a YAML file with `key.sub=value` overrides put in (see `lay_over`)."""
    tree = {} if path is None else read_yaml(path)
    tree.pop(ENVIRONMENT, None)
    return lay_over(tree, overrides)


def lay_over(tree: Mapping[str, Any], more: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Return nested keys with others, or `key.sub=value` words, put in.

    Where these name another method, partition or model, options that the new one does not know are dropped:
    naming it is enough.
    """
    changed = copy.deepcopy(dict(tree))
    pairs = flatten(more).items() if isinstance(more, Mapping) else [_split(override) for override in more]
    for key, value in pairs:
        _drop_foreign_options(changed, key, str(value))
    for key, value in pairs:
        node = changed
        *groups, last = key.split(".")
        for group in groups:
            if node.get(group) is None:
                node[group] = {}
            node = node[group]
            if not isinstance(node, dict):
                raise UserError(f"{key}={value}: {group} is set to {node!r} and cannot hold keys")
        node[last] = value
    return changed


def resolve(tree: Mapping[str, Any]) -> Config:
    """Validate nested keys and fill in defaults; raises UserError (see `load_config`)."""
    unknown = [
        key for name in tree if name not in GROUPS for key in flatten({name: tree[name]}) or [str(name)]
    ]
    groups = {name: _mapping(name, tree.get(name)) for name in GROUPS}
    method, data, model = groups["method"], groups["data"], groups["model"]
    partition = _mapping("data.partition", data.pop("partition", None))
    source = _one_of("data.source", data.get("source", DEFAULT_SOURCE), SOURCES)
    own = _own_method(method)
    names = {
        "method": _one_of("method.name", method.pop("name", DEFAULT_METHOD), METHODS),
        "data.partition": _one_of(
            "data.partition.name", partition.pop("name", _default_partition(source)), PARTITIONS
        ),
        "model": _one_of("model.name", model.pop("name", _default_model(source)), MODELS),
    }
    if data.get("clients") is None and PARTITIONS[names["data.partition"]].counts is not None:
        data["clients"] = DEFAULT_CLIENTS
    chosen = METHODS[names["method"]]
    kinds: dict[str, type[BaseModel]] = {
        "method": chosen.Params,
        "data": DataConfig,
        "data.partition": PARTITIONS[names["data.partition"]].options,
        "model": MODELS[names["model"]].options,
        "train": TrainConfig,
        "run": RunConfig,
    }
    given = groups | {"data.partition": partition, "train": chosen.train_defaults | groups["train"]}
    known = [*(f"{group}.name" for group in names), "method.path"]
    known += [f"{group}.{key}" for group, kind in kinds.items() for key in kind.model_fields]
    unknown += [f"{group}.{key}" for group in kinds for key in given[group] if f"{group}.{key}" not in known]
    if unknown:
        raise UserError(_unknown_key(unknown[0], flatten({**tree, **given}).get(unknown[0], ""), known))
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
        own,
    )
    subsets = {
        f"data.{key}": value
        for key in ("subset_per_class", "subset_fraction")
        if (value := getattr(config.data, key)) is not None
    }
    if len(subsets) == 2:
        both = " and ".join(f"{key}={value}" for key, value in subsets.items())
        raise UserError(f"{both} are two ways to take a subset; drop one, or set it to null")
    for key, value in subsets.items():
        if config.partition == "given":
            raise UserError(
                f"{key}={value} does not go with partition given, whose clients keep all their samples; "
                "drop it, or choose another partition"
            )
    if config.run.eval_split == "val" and not config.data.val_fraction:
        raise UserError("run.eval_split=val needs validation samples: set data.val_fraction, such as 0.2")
    if config.data.path is not None and SOURCES[source].path_names is None:
        readers = " or ".join(name for name, known in SOURCES.items() if known.path_names is not None)
        raise UserError(
            f"data.path={config.data.path} is only for data.source={readers}, not {source}; set or drop both"
        )
    return config


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Name the keys that change results and differ between two configuration trees, with both values.

    A key that only one of them has belongs to another `name`; it is left out unless nothing else differs.
    """
    before, after = flatten(old), flatten(new)
    missing = "(not set)"
    changed = [
        key
        for key in {**before, **after}
        if key not in RESULT_NEUTRAL and before.get(key, missing) != after.get(key, missing)
    ]
    common = [key for key in changed if key in before and key in after]
    return [
        f"{key}: {_shown(before.get(key, missing))} there, {_shown(after.get(key, missing))} here"
        for key in common or changed
    ]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys as `a.b.c: value`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def _own_method(method: dict[str, Any]) -> dict[str, str]:
    """Take the file of the user's own method out of its group, and set the name; {} where there is none."""
    path = method.pop("path", None)
    if path is None:
        name = method.get("name")
        if name in METHODS and is_own(METHODS[name]):
            raise UserError(f"method.name={name} is a method in a file; name it as well: method.path=FILE.py")
        return {}
    name, digest = add_own_method(str(path), method.pop("code", None))
    if method.setdefault("name", name) != name:
        raise UserError(
            f"method.name={method['name']} does not go with method.path={path}, whose method is {name}; "
            "drop one"
        )
    return {"path": str(Path(str(path)).resolve()), "code": digest}


def _default_model(source: str) -> str:
    return "digits_cnn" if source == "digits" else "lenet"


def _default_partition(source: str) -> str:
    own = SOURCES[source].partition if source in SOURCES else None
    return own or DEFAULT_PARTITION


def _split(override: str) -> tuple[str, Any]:
    key, _, text = override.partition("=")
    if not key:
        raise UserError(f"{override!r} names no key; settings are key=value, such as train.rounds=50")
    try:
        return key, yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return key, text


def _drop_foreign_options(tree: dict[str, Any], key: str, value: str) -> None:
    """Forget options that a file sets for another method, partition or model than `key=value` asks for."""
    holder: Any
    options: dict[str, type[BaseModel]]
    if key == "method.path":
        _keep_known_options(tree, *add_own_method(value))
        return
    if key == "method.name":
        method = tree.get("method")
        if isinstance(method, dict) and "path" in method and value in METHODS:
            _keep_known_options(tree, value)
            return
        holder, group, default = tree, "method", DEFAULT_METHOD
        options = {name: method.Params for name, method in METHODS.items()}
    elif key == "data.partition.name":
        holder, group = tree.get("data"), "partition"
        source = holder.get("source", DEFAULT_SOURCE) if isinstance(holder, dict) else DEFAULT_SOURCE
        default = _default_partition(str(source))
        options = {name: kind.options for name, kind in PARTITIONS.items()}
    elif key == "model.name":
        # a file that names no model has one with batchnorm, whatever its source
        holder, group, default = tree, "model", _default_model(DEFAULT_SOURCE)
        options = {name: model.options for name, model in MODELS.items()}
    else:
        return
    there = holder.get(group) if isinstance(holder, dict) else None
    if isinstance(there, dict) and value in options and there.get("name", default) != value:
        holder[group] = {name: v for name, v in there.items() if name in options[value].model_fields}


def _keep_known_options(tree: dict[str, Any], name: str, code: str | None = None) -> None:
    """Forget what a file says of the method, but for options that another one knows, or the same code's."""
    there = tree.get("method")
    if isinstance(there, dict) and (code is None or there.get("code") != code):
        known = METHODS[name].Params.model_fields
        tree["method"] = {option: value for option, value in there.items() if option in known}


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the nested keys of a YAML file; UserError where there are none."""
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(
            f"cannot read configuration file {path}: {error.strerror}; "
            "give a YAML file, key=value such as train.rounds=50, or a command of --help"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "").split())
        raise UserError(f"{path} is not YAML: {reason}") from error
    if tree is not None and not isinstance(tree, dict):
        raise UserError(f"{path} holds no groups of keys, such as train: {{rounds: 50}}")
    return tree or {}


def _mapping(group: str, value: Any) -> dict[str, Any]:
    """Return a copy of a group of keys; one that is left empty in YAML has none."""
    if value is not None and not isinstance(value, Mapping):
        example = {"method": "name", "model": "name", "data": "source", "train": "rounds", "run": "seed"}
        key = f"{group}.{example.get(group, 'name')}"
        raise UserError(f"{group}={value!r} must be a group of keys, such as {key}=...")
    return {str(key): entry for key, entry in (value or {}).items()}


def _one_of(key: str, value: Any, allowed: Iterable[str]) -> str:
    names = list(allowed)
    if value not in names:
        near = difflib.get_close_matches(str(value), names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{key}={value} is unknown; allowed: {', '.join(names)}{hint}")
    return str(value)


def _unknown_key(key: str, value: Any, known: Sequence[str]) -> str:
    group = key.rpartition(".")[0]
    owners: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        for option in method.Params.model_fields:
            owners.setdefault(f"method.{option}", []).append(f"method.name={name}")
    for name, kind in PARTITIONS.items():
        for option in kind.options.model_fields:
            owners.setdefault(f"data.partition.{option}", []).append(f"data.partition.name={name}")
    for name, model in MODELS.items():
        for option in model.options.model_fields:
            owners.setdefault(f"model.{option}", []).append(f"model.name={name}")
    near = difflib.get_close_matches(key, [*known, *owners, *GROUPS], n=1, cutoff=0.0)[0]
    place = "" if near in known or near in GROUPS else f" of {' or '.join(owners[near])}"
    siblings = [name for name in known if name.rpartition(".")[0] == group]
    return (
        f"{key}={_shown(value)} is an unknown key; the nearest known one is {near}{place}; "
        f"allowed: {', '.join(siblings or GROUPS)}"
    )


def _validate(group: str, kind: type[BaseModel], values: Mapping[str, Any]) -> BaseModel:
    for key, value in values.items():
        # pydantic would take true for 1
        if isinstance(value, bool) and kind.model_fields[key].annotation is not bool:
            raise UserError(
                f"{group}.{key}={_shown(value)} is not possible; {_allowed(kind.model_fields[key])}"
            )
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        if key not in values:
            raise UserError(
                f"{group}.{key} is not given and has no default; {_allowed(kind.model_fields[key])}"
            ) from error
        raise UserError(
            f"{group}.{key}={_shown(values[key])} is not possible; {_allowed(kind.model_fields[key])}"
        ) from error


def _allowed(field: FieldInfo) -> str:
    """Say what a key may be: its type, bounds and default."""
    kind = f"{_in_words(field.annotation)} {_bounds(field.metadata)}".strip()
    return f"allowed: {kind}" + ("" if field.is_required() else f" (default: {_shown(field.default)})")


def _bounds(limits: Iterable[Any]) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return " and ".join(
        f"{sign} {getattr(limit, name)}"
        for limit in limits
        for name, sign in signs.items()
        if hasattr(limit, name)
    )


def _shown(value: Any) -> str:
    """Write a value as a user types it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _in_words(annotation: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(annotation)))
    if get_origin(annotation) is list:
        return f"a list, each entry {_in_words(get_args(annotation)[0])}"
    if get_origin(annotation) is Annotated:
        kind, *given = get_args(annotation)
        limits = [limit for item in given for limit in getattr(item, "metadata", [item])]
        return f"{_in_words(kind)} {_bounds(limits)}".strip()
    return words.get(annotation, str(annotation))
