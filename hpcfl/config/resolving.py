"""From nested keys to one validated configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from hpcfl.communication.settings import CommConfig
from hpcfl.config.choices import CHOICES, DEFAULT_SOURCE, default_name
from hpcfl.config.schema import (
    ENVIRONMENT,
    GROUPS,
    RESULT_NEUTRAL,
    Config,
    DataConfig,
    RunConfig,
)
from hpcfl.config.trees import flatten, lay_over, read_yaml
from hpcfl.config.wording import allowed, one_of, shown, unknown_key
from hpcfl.data.partitions import DEFAULT_CLIENTS, PARTITIONS
from hpcfl.data.sources import SOURCES, add_own_source
from hpcfl.errors import UserError
from hpcfl.methods import METHODS
from hpcfl.own_code import is_own
from hpcfl.settings import Settings
from hpcfl.training.settings import TrainConfig


def load_config(path: Path | None, overrides: Sequence[str]) -> Config:
    """Read a YAML file and apply `key.sub=value` overrides (see `lay_over`).

    Raises UserError for an unreadable file, unknown keys or names, wrong types and impossible values.
    """
    tree = {} if path is None else read_yaml(path)
    tree.pop(ENVIRONMENT, None)
    return resolve(lay_over(tree, overrides))


def resolve(tree: Mapping[str, Any]) -> Config:
    """Validate nested keys and fill in defaults; raises UserError (see `load_config`)."""
    unknown = [
        key for name in tree if name not in GROUPS for key in flatten({name: tree[name]}) or [str(name)]
    ]
    given = {name: _mapping(name, tree.get(name)) for name in GROUPS}
    data = given["data"]
    given["data.partition"] = _mapping("data.partition", data.pop("partition", None))
    own = {"data": _own_source(data)} | {group: _own_file(group, given[group]) for group in CHOICES}
    source = one_of("data.source", data.get("source", DEFAULT_SOURCE), list(SOURCES))
    names = {
        group: one_of(
            f"{group}.name", given[group].pop("name", default_name(group, source)), list(choice.known)
        )
        for group, choice in CHOICES.items()
    }
    if data.get("clients") is None and PARTITIONS[names["data.partition"]].counts is not None:
        data["clients"] = DEFAULT_CLIENTS
    given["train"] = METHODS[names["method"]].traits.train_defaults | given["train"]
    options = {group: choice.options_of(names[group]) for group, choice in CHOICES.items()}
    kinds: dict[str, type[Settings]] = {
        "method": options["method"],
        "data": DataConfig,
        "data.partition": options["data.partition"],
        "model": options["model"],
        "train": TrainConfig,
        "comm": CommConfig,
        "run": RunConfig,
    }
    known = [f"{group}.{key}" for group in CHOICES for key in ("name", "path")] + ["data.reader"]
    known += [f"{group}.{key}" for group, kind in kinds.items() for key in kind.model_fields]
    unknown += [f"{group}.{key}" for group in kinds for key in given[group] if f"{group}.{key}" not in known]
    if unknown:
        value = flatten({**tree, **given}).get(unknown[0], "")
        raise UserError(unknown_key(unknown[0], value, known, GROUPS))
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
        made["comm"],
        made["run"],
        own,
    )
    _refuse_contradictions(config)
    _refuse_idle_unseen(config)
    _refuse_idle_coding(config.comm)
    return config


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Name the keys that change results and differ between two configuration trees, with both values.

    A key that only one of them has belongs to another `name`; it is left out unless nothing else differs. One
    that is null is as if it was not there, so that a run goes on when a newer version knows more keys.
    """
    before, after = flatten(old), flatten(new)
    missing = "(not set)"
    changed = [
        key for key in {**before, **after} if key not in RESULT_NEUTRAL and before.get(key) != after.get(key)
    ]
    common = [key for key in changed if key in before and key in after]
    return [
        f"{key}: {shown(before.get(key, missing))} there, {shown(after.get(key, missing))} here"
        for key in common or changed
    ]


def _own_file(group: str, given: dict[str, Any]) -> dict[str, str]:
    """Take the path of the user's own file out of a group, and set the name; {} where there is none."""
    path = given.pop("path", None)
    if path is None:
        name = given.get("name")
        if is_own(f"{group}.path", str(name)):
            kind = group.removeprefix("data.")
            raise UserError(
                f"{group}.name={name} is a {kind} in a file; name it as well: {group}.path=FILE.py"
            )
        return {}
    name, code = CHOICES[group].add_own(str(path), given.pop("code", None))
    if given.setdefault("name", name) != name:
        raise UserError(
            f"{group}.name={given['name']} does not go with {group}.path={path}, whose "
            f"{group.removeprefix('data.')} is {name}; drop one"
        )
    return {"path": str(Path(str(path)).resolve()), "code": code}


def _own_source(data: dict[str, Any]) -> dict[str, str]:
    """Take the user's own reader out of `data.*`, and set the source; {} where there is none."""
    reader = data.pop("reader", None)
    if reader is None:
        if is_own("data.reader", str(data.get("source"))):
            raise UserError(
                f"data.source={data['source']} is a source in a file; name it as well: data.reader=FILE.py"
            )
        return {}
    name, code = add_own_source(str(reader), data.pop("code", None))
    if data.setdefault("source", name) != name:
        raise UserError(
            f"data.source={data['source']} does not go with data.reader={reader}, whose source is {name}; "
            "drop one"
        )
    return {"reader": str(Path(str(reader)).resolve()), "code": code}


def _refuse_contradictions(config: Config) -> None:
    """Raise UserError where keys that are possible do not go together."""
    data, source = config.data, config.data.source
    subsets = {
        f"data.{key}": value
        for key in ("subset_per_class", "subset_fraction")
        if (value := getattr(data, key)) is not None
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
    if config.run.eval_split == "val" and not data.val_fraction:
        raise UserError("run.eval_split=val needs validation samples: set data.val_fraction, such as 0.2")
    if data.path is not None and SOURCES[source].path_names is None:
        readers = " or ".join(name for name, known in SOURCES.items() if known.path_names is not None)
        raise UserError(
            f"data.path={data.path} is only for data.source={readers}, not {source}; set or drop both"
        )


def _refuse_idle_unseen(config: Config) -> None:
    """Raise UserError where keys of unseen clients do nothing, or leave no client to train."""
    data, epochs = config.data, config.train.unseen_epochs
    if epochs is not None and not data.unseen_clients:
        raise UserError(
            f"train.unseen_epochs={epochs} needs unseen clients: set data.unseen_clients, such as 0.2, or "
            "train.unseen_epochs=null"
        )
    if data.clients is not None:
        data.num_unseen(data.clients)


def _refuse_idle_coding(comm: CommConfig) -> None:
    """Raise UserError where keys of `comm.*` do nothing with the codec, or it cannot do as they say."""
    if comm.keep is not None and comm.codec != "topk":
        raise UserError(
            f"comm.keep={comm.keep} is only for comm.codec=topk, not {comm.codec}; set comm.codec=topk, or "
            "comm.keep=null"
        )
    if comm.memory is not None and comm.codec != "topk":
        raise UserError(
            f"comm.memory={shown(comm.memory)} is only for comm.codec=topk, not {comm.codec}; set "
            "comm.codec=topk, or comm.memory=null"
        )
    if comm.directions is not None and comm.codec == "none":
        raise UserError(
            f"comm.directions={comm.directions} needs a codec: set comm.codec=float16, int8 or topk, or "
            "comm.directions=null"
        )
    if comm.codec == "topk" and comm.directions not in (None, "up"):
        raise UserError(
            f"comm.directions={comm.directions} does not go with comm.codec=topk, which codes what clients "
            "learnt and so goes up only; allowed: up, or null for what the codec allows"
        )


def _mapping(group: str, value: Any) -> dict[str, Any]:
    """Return a copy of a group of keys; one that is left empty in YAML has none."""
    if value is not None and not isinstance(value, Mapping):
        example = {"data": "source", "train": "rounds", "comm": "codec", "run": "seed"}
        key = f"{group}.{example.get(group, 'name')}"
        raise UserError(f"{group}={value!r} must be a group of keys, such as {key}=...")
    return {str(key): entry for key, entry in (value or {}).items()}


def _validate(group: str, kind: type[Settings], values: Mapping[str, Any]) -> Settings:
    for key, value in values.items():
        annotation = kind.model_fields[key].annotation
        # pydantic would take true for 1
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise UserError(
                f"{group}.{key}={shown(value)} is not possible; {allowed(kind.model_fields[key])}"
            )
    try:
        made = kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            raise UserError(f"{group}: {first['msg'].removeprefix('Value error, ')}") from error
        key = str(first["loc"][0])
        if key not in values:
            raise UserError(
                f"{group}.{key} is not given and has no default; {allowed(kind.model_fields[key])}"
            ) from error
        raise UserError(
            f"{group}.{key}={shown(values[key])} is not possible; {allowed(kind.model_fields[key])}"
        ) from error
    for key, value in made:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UserError(
                f"{group}.{key}={shown(value)} is a number beyond 64 bits; {allowed(kind.model_fields[key])}"
            )
    return made
