"""From YAML and `key=value` words to one validated configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from hpcfl.config.keys import (
    COMMON,
    ENVIRONMENT,
    GROUPS,
    RESULT_NEUTRAL,
    SERVER_DEFAULTS,
    Chosen,
    CommConfig,
    Config,
    ServerConfig,
    Settings,
    flatten,
)
from hpcfl.config.messages import allowed, one_of, shown, unknown_key
from hpcfl.config.own_code import OWN_KEYS, allow, is_own
from hpcfl.config.registry import DEFAULT_SOURCE, Registries, Registry
from hpcfl.config.yaml_text import parse_yaml
from hpcfl.errors import UserError

RENAMED = {
    "comm.keep": "comm.topk_ratio",
    "comm.memory": "comm.error_feedback",
    "run.tensorboard": "run.tracker=tensorboard",
}
"""Keys of earlier versions and their present names; with a value if that has changed too."""

DEFAULT_CLIENTS = 10
"""Number of clients if neither the user nor the data gives one."""

Group = TypeVar("Group", bound=Settings)


def load_config(path: Path | None, overrides: Sequence[str], registries: Registries) -> Config:
    """Read a YAML file and apply `key.sub=value` overrides (see `merge`).

    Raises UserError for an unreadable file, unknown keys or names, wrong types and impossible values.
    """
    tree = {} if path is None else read_yaml(path)
    tree.pop(ENVIRONMENT, None)
    return resolve(merge(tree, overrides, registries), registries)


def resolve(tree: Mapping[str, Any], registries: Registries) -> Config:
    """Validate nested keys and fill in defaults; raises UserError (see `load_config`)."""
    unknown = [
        key for name in tree if name not in GROUPS for key in flatten({name: tree[name]}) or [str(name)]
    ]
    given = {name: _mapping(name, tree.get(name)) for name in GROUPS}
    data = given["data"]
    given["data.partition"] = _mapping("data.partition", data.pop("partition", None))
    choices = registries.by_group
    source_file = _own_source(data, registries.source)
    files = {group: _own_file(group, given[group], choices[group]) for group in choices}
    source = one_of("data.source", data.get("source", DEFAULT_SOURCE), list(registries.source.known))
    names = {
        group: one_of(
            f"{group}.name",
            given[group].pop("name", registries.default_name(group, source)),
            list(registry.known),
        )
        for group, registry in choices.items()
    }
    if (
        data.get("clients") is None
        and choices["data.partition"].known[names["data.partition"]].counts is not None
    ):
        data["clients"] = DEFAULT_CLIENTS
    traits = registries.method.known[names["method"]].traits
    given["train"] = traits.train_defaults | given["train"]
    given["server"] = traits.server_defaults | given["server"]
    kinds = COMMON | {group: registry.options_of(names[group]) for group, registry in choices.items()}
    known = [f"{group}.{key}" for group in choices for key in ("name", "path")] + ["data.reader"]
    known += [f"{group}.{key}" for group, kind in kinds.items() for key in kind.model_fields]
    unknown += [f"{group}.{key}" for group in kinds for key in given[group] if f"{group}.{key}" not in known]
    if unknown:
        value = flatten({**tree, **given}).get(unknown[0], "")
        if new := RENAMED.get(unknown[0]):
            key, has_value, _ = new.partition("=")
            raise UserError(
                f"{unknown[0]} is now called {key}; write {new if has_value else f'{key}={shown(value)}'}"
            )
        raise UserError(unknown_key(unknown[0], value, known, choices))
    chosen: dict[str, Chosen[Any]] = {
        group: Chosen(names[group], _validate(group, kinds[group], given[group]), files[group])
        for group in choices
    }
    common: dict[str, Any] = {group: _validate(group, kind, given[group]) for group, kind in COMMON.items()}
    config = Config(
        method=chosen["method"],
        partition=chosen["data.partition"],
        model=chosen["model"],
        source_file=source_file,
        **common,
    )
    _check_contradictions(config, registries.source)
    _check_idle_unseen(config)
    _check_idle_coding(config.comm)
    _check_idle_server(config.server)
    return config


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the nested keys of a YAML file; UserError if it has no groups of keys."""
    try:
        tree = parse_yaml(path.read_bytes().decode())
    except OSError as error:
        raise UserError(
            f"cannot read configuration file {path}: {error.strerror}; "
            "give a YAML file, key=value such as train.rounds=50, or a command of hpcfl --help"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    if tree is not None and not isinstance(tree, dict):
        raise UserError(f"{path} holds no groups of keys, such as train: {{rounds: 50}}")
    return tree or {}


def merge(
    tree: Mapping[str, Any], more: Mapping[str, Any] | Sequence[str], registries: Registries
) -> dict[str, Any]:
    """Return nested keys, overridden by other nested keys or by `key.sub=value` words.

    The user's own Python file may run if a word names it (see `own_code.allow`), but not if only nested keys
    name it. If the overrides choose another method, partition, model or source, options that the new one does
    not have are dropped, so the user need not unset them.
    """
    changed = copy.deepcopy(dict(tree))
    if isinstance(more, Mapping):
        pairs = list(flatten(more).items())
    else:
        pairs = [_split(override) for override in more]
        for key, value in pairs:
            if key in OWN_KEYS and value is not None:
                allow(key, str(value))
    for key, value in pairs:
        _drop_foreign_options(changed, key, str(value), registries)
    for key, value in pairs:
        node = changed
        *groups, last = key.split(".")
        for group in groups:
            if node.get(group) is None:
                node[group] = {}
            node = node[group]
            if not isinstance(node, dict):
                raise UserError(f"{key}={value}: {group} is set to {node!r} and cannot hold keys; drop one")
        node[last] = value
    return changed


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Name the keys that change results and differ between two configurations, with both values.

    A key that only one of them has belongs to another `name`; it is left out unless nothing else differs. A
    key that is null counts as missing, so a run can be resumed after an update that adds keys.
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


def _own_file(group: str, given: dict[str, Any], registry: Registry) -> dict[str, str]:
    """Remove the path of the user's own file from a group, and set the name; {} if the group has no path."""
    path = given.pop("path", None)
    if path is None:
        name = given.get("name")
        if is_own(f"{group}.path", str(name)):
            kind = group.removeprefix("data.")
            raise UserError(
                f"{group}.name={name} is a {kind} in your own file; also give {group}.path=FILE.py"
            )
        return {}
    name, code = registry.add_own(str(path), given.pop("code", None))
    if given.setdefault("name", name) != name:
        raise UserError(
            f"{group}.name={given['name']} does not go with {group}.path={path}, whose "
            f"{group.removeprefix('data.')} is {name}; drop one"
        )
    return {"path": str(Path(str(path)).resolve()), "code": code}


def _own_source(data: dict[str, Any], sources: Registry) -> dict[str, str]:
    """Remove the user's own reader from `data.*`, and set the source; {} if there is no reader."""
    reader = data.pop("reader", None)
    if reader is None:
        if is_own("data.reader", str(data.get("source"))):
            raise UserError(
                f"data.source={data['source']} is a source in your own file; also give data.reader=FILE.py"
            )
        return {}
    name, code = sources.add_own(str(reader), data.pop("code", None))
    if data.setdefault("source", name) != name:
        raise UserError(
            f"data.source={data['source']} does not go with data.reader={reader}, whose source is {name}; "
            "drop one"
        )
    return {"reader": str(Path(str(reader)).resolve()), "code": code}


def _check_contradictions(config: Config, sources: Registry) -> None:
    """Raise UserError for keys that contradict each other."""
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
        if config.partition.name == "given":
            raise UserError(
                f"{key}={value} does not go with partition given, whose clients keep all their samples; "
                "drop it, or choose another partition"
            )
    if config.run.eval_split == "val" and not data.val_fraction:
        raise UserError("run.eval_split=val needs validation samples: set data.val_fraction, such as 0.2")
    if data.path is not None and sources.known[source].path_names is None:
        readers = " or ".join(name for name, known in sources.known.items() if known.path_names is not None)
        raise UserError(
            f"data.path={data.path} is only for data.source={readers}, not {source}; set or drop both"
        )


def _check_idle_unseen(config: Config) -> None:
    """Raise UserError if keys of unseen clients have no effect, or leave no client to train."""
    data, epochs = config.data, config.train.unseen_epochs
    if epochs is not None and not data.unseen_clients:
        raise UserError(
            f"train.unseen_epochs={epochs} needs unseen clients: set data.unseen_clients, such as 0.2, or "
            "train.unseen_epochs=null"
        )
    if data.clients is not None:
        data.num_unseen(data.clients)


def _check_idle_coding(comm: CommConfig) -> None:
    """Raise UserError if keys of `comm.*` have no effect with the codec, or if the codec does not support
    them."""
    if comm.topk_ratio is not None and comm.codec != "topk":
        raise UserError(
            f"comm.topk_ratio={comm.topk_ratio} is only for comm.codec=topk, not {comm.codec}; "
            "set comm.codec=topk, or comm.topk_ratio=null"
        )
    if comm.error_feedback is not None and comm.codec != "topk":
        raise UserError(
            f"comm.error_feedback={shown(comm.error_feedback)} is only for comm.codec=topk, not "
            f"{comm.codec}; set comm.codec=topk, or comm.error_feedback=null"
        )
    if comm.directions is not None and comm.codec == "none":
        raise UserError(
            f"comm.directions={comm.directions} needs a codec: set comm.codec=float16, int8 or topk, or "
            "comm.directions=null"
        )
    if comm.codec == "topk" and comm.directions not in (None, "up"):
        raise UserError(
            f"comm.directions={comm.directions} does not go with comm.codec=topk, which compresses uploads "
            "only; allowed: up, or null"
        )


def _check_idle_server(server: ServerConfig) -> None:
    """Raise UserError where keys of `server.*` do nothing with the optimiser."""
    for key, value in server.model_dump(exclude={"optimiser"}, exclude_none=True).items():
        having = [name for name, constants in SERVER_DEFAULTS.items() if key in constants]
        if server.optimiser not in having:
            raise UserError(
                f"server.{key}={shown(value)} is only for server.optimiser={' or '.join(having)}, not "
                f"{server.optimiser or 'none'}; set server.optimiser={having[0]}, or server.{key}=null"
            )


def _mapping(group: str, value: Any) -> dict[str, Any]:
    """Return a copy of a group of keys; an empty group in YAML has no keys."""
    if value is not None and not isinstance(value, Mapping):
        example = {"data": "source", "train": "rounds", "server": "optimiser", "comm": "codec", "run": "seed"}
        key = f"{group}.{example.get(group, 'name')}"
        raise UserError(f"{group}={value!r} must be a group of keys, such as {key}=...")
    return {str(key): entry for key, entry in (value or {}).items()}


def _validate(group: str, kind: type[Group], values: Mapping[str, Any]) -> Group:
    for key, value in values.items():
        annotation = kind.model_fields[key].annotation
        # pydantic would take true for 1
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise UserError(f"{group}.{key}={shown(value)} is invalid; {allowed(kind.model_fields[key])}")
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
            f"{group}.{key}={shown(values[key])} is invalid; {allowed(kind.model_fields[key])}"
        ) from error
    for key, value in made:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UserError(
                f"{group}.{key}={shown(value)} is a number beyond 64 bits; {allowed(kind.model_fields[key])}"
            )
    return made


def _split(override: str) -> tuple[str, Any]:
    key, _, text = override.partition("=")
    if not key:
        raise UserError(f"{override!r} names no key; settings are key=value, such as train.rounds=50")
    try:
        return key, parse_yaml(text)
    except ValueError:
        return key, text


def _drop_foreign_options(tree: dict[str, Any], key: str, value: str, registries: Registries) -> None:
    """Drop from `tree` the keys of another method, partition, model or source than `key=value` chooses."""
    group, _, last = key.rpartition(".")
    data, choices = tree.get("data"), registries.by_group
    if group == "data" and last in ("source", "reader"):
        if isinstance(data, dict) and not _is_same_source(data, last, value, registries.source):
            for other in {"source", "reader", "code"} & data.keys():
                del data[other]
        return
    holder, here = data if group == "data.partition" else tree, group.rpartition(".")[2]
    there = holder.get(here) if isinstance(holder, dict) else None
    if group not in choices or last not in ("name", "path") or not isinstance(there, dict):
        return
    assert isinstance(holder, dict)
    if last == "path" and value == "None":
        holder[here] = {} if "path" in there else there
        return
    choice = choices[group]
    if last == "path":
        chosen, code = choice.add_own(value, None)
        is_same = there.get("code") == code
    else:
        # a file that names no model has one with batchnorm, whatever its source
        source = DEFAULT_SOURCE if group == "model" else str(holder.get("source", DEFAULT_SOURCE))
        own = choice.add_own(str(there["path"]), None)[0] if there.get("path") else None
        chosen = value
        is_same = chosen == there.get("name", own or registries.default_name(group, source))
    if not is_same and chosen in choice.known:
        options = choice.options_of(chosen).model_fields
        holder[here] = {option: given for option, given in there.items() if option in options}


def _is_same_source(data: Mapping[str, Any], key: str, value: str, sources: Registry) -> bool:
    """Whether `data.<key>=value` names the source that `data` already has, or an unknown source."""
    if key == "reader":
        return value != "None" and sources.add_own(value, None)[1] == data.get("code")
    own = sources.add_own(str(data["reader"]), None)[0] if data.get("reader") else None
    return value not in sources.known or value == data.get("source", own or DEFAULT_SOURCE)
