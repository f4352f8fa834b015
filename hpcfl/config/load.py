"""From YAML and `key=value` words to one validated configuration."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from hpcfl.config.key_errors import allowed, one_of, shown, unknown_key
from hpcfl.config.keys import (
    COMMON,
    GROUPS,
    OWN_KEYS,
    RESULT_NEUTRAL,
    SERVER_DEFAULTS,
    SHIFT_STRENGTHS,
    Chosen,
    Config,
    Optimiser,
    ServerConfig,
    Settings,
    flatten,
    recorded_name,
)
from hpcfl.config.own_code import OF_PYTHON, allow, class_code, is_own
from hpcfl.config.registry import DEFAULT_SOURCE, Registries, Registry
from hpcfl.config.yaml_text import parse_yaml
from hpcfl.errors import UserError

ADAM_LR = 0.001
"""Default of `train.lr` with a `train.optimiser`."""

DEFAULT_CLIENTS = 10
"""Number of clients if neither the user nor the data gives one."""

NEEDS = (
    ("data.target data.categorical data.missing data.client_column", "data.source=csv"),
    ("data.client_column", "data.partition.name=given"),
    ("data.image_size", "data.source=domains"),
    ("data.subset_fraction", "data.subset_per_class=null"),
    ("data.shift_groups data.shift_strength", "data.shift"),
    ("data.label_noise_clients", "data.label_noise"),
    ("train.lr_end", "train.lr_decay=1.0"),
    ("train.unseen_epochs", "data.unseen_clients"),
    ("train.momentum", "train.optimiser=sgd"),
    ("train.beta1 train.beta2 train.epsilon", "train.optimiser=adam or adamw"),
    ("clients.candidates", "clients.sampling=power_of_choice"),
    ("clients.slowness clients.bytes_per_s clients.deadline_s", "clients.step_s"),
    ("comm.topk_ratio comm.error_feedback", "comm.codec=topk"),
    ("privacy.clip privacy.noise privacy.delta", "privacy.unit=client or sample"),
    ("privacy.unit", "privacy.clip"),
    ("privacy.unit", "privacy.noise"),
    ("privacy.unit", "comm.codec=none"),
    ("privacy.unit", "run.on_divergence=stop"),
    ("privacy.unit", "clients.sampling=uniform"),
    ("privacy.unit", "train.patience=null"),
)
"""Keys, and what they need: a key that is not null, or one with these values."""
NAMES_OF_NULL = {"train.optimiser": "sgd", "clients.sampling": "uniform"}


def resolve(tree: Mapping[str, Any], registries: Registries) -> Config:
    """Validate nested keys and fill in defaults.

    Raises UserError for unknown keys or names, wrong types and impossible values.
    """
    if {"extends", "rows"} & set(tree):
        raise UserError("extends and rows are keys of a table file, which is run by hpcfl table FILE.yaml")
    given = {name: _mapping(name, tree.get(name)) for name in GROUPS}
    data, choices = given["data"], registries.by_group
    given["data.partition"] = _mapping("data.partition", data.pop("partition", None))
    source_file = _own_file(data, registries.source, "source")
    files = {group: _own_file(given[group], registry) for group, registry in choices.items()}
    source = one_of("data.source", data.get("source", DEFAULT_SOURCE), registries.source.known)
    names = {}
    for group, registry in choices.items():
        name = given[group].pop("name", registries.default_name(group, source))
        names[group] = one_of(f"{group}.name", name, registry.known)
    if registries.partition.known[names["data.partition"]].counts is not None and data.get("clients") is None:
        data["clients"] = DEFAULT_CLIENTS
    of_method = registries.method.known[names["method"]].traits.defaults
    if given["train"].get("optimiser") in get_args(Optimiser):
        of_method = of_method | {"train": of_method["train"] | {"lr": ADAM_LR}}
    for group, others in of_method.items():
        given[group] = others | given[group]
    kinds = COMMON | {group: registry.options_of(names[group]) for group, registry in choices.items()}
    _check_names(tree, given, kinds, registries)
    made: dict[str, Any] = {
        group: _validate(group, kind, given[group], of_method.get(group, {})) for group, kind in kinds.items()
    }
    for group in choices:
        made[group] = Chosen(names[group], made[group], files[group])
    config = Config(partition=made.pop("data.partition"), source_file=source_file, **made)
    _check_needs(config, registries.source)
    return config


def read_yaml(
    path: Path,
    hint: str = "give a YAML file, key=value such as train.rounds=50, or a command of hpcfl --help",
) -> dict[str, Any]:
    """Return the nested keys of a YAML file; UserError if it has no groups of keys, or, with the hint, cannot
    be read."""
    try:
        tree = parse_yaml(path.read_bytes().decode())
    except OSError as error:
        if isinstance(error, IsADirectoryError) and (path / "config.yaml").exists():
            hint = f"to resume this run, type hpcfl run {path}/config.yaml --out {path}"
        raise UserError(f"cannot read {path}: {error.strerror}; {hint}") from error
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
        allow_named(dict(pairs))
    for key, value in pairs:
        _drop_foreign_options(changed, key, value, registries)
    for key, value in pairs:
        node = changed
        *groups, last = key.split(".")
        for group in groups:
            if node.get(group) is None:
                node[group] = {}
            node = node[group]
            if not isinstance(node, dict):
                raise UserError(f"{key} needs a group of keys, not {group}={node}; leave {group}={node} out")
        node[last] = value
    return changed


def allow_named(keys: Mapping[str, Any]) -> None:
    """Allow the user's own Python files that keys name to run (see `own_code.allow`)."""
    for key in OWN_KEYS:
        if keys.get(key) is not None:
            allow(key, str(keys[key]))


def differences(old: Mapping[str, Any], new: Mapping[str, Any], but: Collection[str] = ()) -> list[str]:
    """Name the keys that change results and differ between two configurations, with both values.

    A key that only one of them has belongs to another `name`; it is left out unless nothing else differs. A
    key that is null counts as missing, so a run can be resumed after an update that adds keys. Those of `but`
    may differ.
    """
    before, after = flatten(old), flatten(new)
    missing = "(not set)"
    changed = [
        key
        for key in {**before, **after}
        if key not in RESULT_NEUTRAL and key not in but and before.get(key) != after.get(key)
    ]
    common = [key for key in changed if key in before and key in after]
    return [
        f"{key}: {shown(before.get(key, missing))} there, {shown(after.get(key, missing))} here"
        for key in common or changed
    ]


def _own_file(given: dict[str, Any], registry: Registry, name_key: str = "name") -> dict[str, str]:
    """Remove the path of the user's own file from a group, and set the name.

    Returns the file's keys, or the digest of a class given to `hpcfl.run`; {} for neither.
    """
    group, _, path_key = registry.own_key.rpartition(".")
    path, name = given.pop(path_key, None), given.get(name_key)
    if path is None:
        if is_own(registry.own_key, str(name)):
            raise UserError(
                f"{group}.{name_key}={name} is in a file of your own; also give {registry.own_key}=FILE.py"
            )
        if digest := class_code(registry.own_key, str(name)):
            # that of the class at hand: whoever resumes a run compares it with the recorded one
            given.pop("code", None)
            return {"code": digest}
        if ("code" in given or str(name).startswith(OF_PYTHON)) and str(name) not in registry.known:
            raise UserError(
                f"{group}.{name_key}={name} is what a script gave to hpcfl.run; call it again with the same, "
                "or look at the report.html that it wrote"
            )
        return {}
    own, file = registry.add_own(str(path), given.pop("code", None))
    if recorded_name(str(given.get(name_key, own))) != recorded_name(own):
        raise UserError(
            f"{group}.{name_key}={name} does not go with {registry.own_key}={path}, which is {own}; drop one"
        )
    given[name_key] = own
    return {path_key: str(file.path.resolve()), "code": file.code}


def _check_names(
    tree: Mapping[str, Any], given: dict[str, Any], kinds: dict[str, type[Settings]], registries: Registries
) -> None:
    """Raise UserError for a key that is in no group's class."""
    known = [*(f"{group}.name" for group in registries.by_group), *OWN_KEYS]
    known += [f"{group}.{key}" for group, kind in kinds.items() for key in kind.model_fields]
    unknown = {str(name): value for name, value in tree.items() if name not in GROUPS}
    for group in kinds:
        for key, value in given[group].items():
            if (name := f"{group}.{key}") not in known or "." in key:
                unknown[name] = value
    if unknown:
        key, value = next(iter((flatten(unknown) or unknown).items()))
        raise UserError(unknown_key(key, value, known, registries.by_group))


def _check_needs(config: Config, sources: Registry) -> None:
    """Raise UserError for a key that needs another one, without which it would have no effect."""
    values = flatten(config.tree())
    plain = [(keys, _is_met(needed, values), needed) for keys, needed in NEEDS]
    for keys, is_met, needed in (*plain, *_needs_of_data(config, sources), *_needs_of_training(config)):
        for key in keys.split():
            group, _, name = key.partition(".")
            value, default = values[key], COMMON[group].model_fields[name].default
            if value != default and not is_met:
                raise UserError(f"{key}={shown(value)} needs {needed}; set that, or {key}={shown(default)}")


def _is_met(needed: str, values: Mapping[str, Any]) -> bool:
    key, _, allowed_values = needed.partition("=")
    value = NAMES_OF_NULL.get(key) if values[key] is None else values[key]
    return shown(value) in allowed_values.split(" or ") if allowed_values else value is not None


def _needs_of_data(config: Config, sources: Registry) -> Iterator[tuple[str, bool, str]]:
    """Yield keys, whether what they need is there, and what that is."""
    data = config.data
    readers = [name for name, source in sources.known.items() if source.path_names or source.read]
    yield "data.path", data.source in readers, f"data.source={' or '.join(readers)}"
    whole = "another data.partition.name than given, whose clients keep all their samples"
    if sources.known[data.source].samples_overlap:
        whole = "a data.source whose samples share no characters"
    yield "data.subset_fraction data.subset_per_class", config.partition.name != "given", whole
    if data.shift is not None:
        kind, largest = f"data.shift={data.shift}", SHIFT_STRENGTHS[data.shift][1]
        yield "data.shift_strength", data.shift_size <= largest, f"to be at most {largest:g} with {kind}"
        is_free = data.shift != "rotation" or data.shift_groups is None
        yield "data.shift_strength", is_free, f"data.shift_groups=null with {kind}"
    yield "privacy.unit", data.missing != "mean", "a data.missing other than mean"
    yield "privacy.unit", data.normalise != "standard", "a data.normalise other than standard"


def _needs_of_training(config: Config) -> Iterator[tuple[str, bool, str]]:
    train, comm, unit = config.train, config.comm, config.privacy.unit
    yield "train.lr_decay_rounds", train.lr_decay < 1, "train.lr_decay below 1"
    yield "train.lr_end", (train.lr_end or 0) <= train.lr, "a train.lr that is not below it"
    yield "train.patience run.eval_split", config.data.val_fraction > 0, "data.val_fraction, such as 0.2"
    coding = ["float16", "int8", *(["topk"] if comm.directions == "up" else [])]
    yield "comm.directions", comm.codec in coding, f"comm.codec={' or '.join(coding)}"
    for key in (key for key in ServerConfig.model_fields if key != "optimiser"):
        having = [name for name, constants in SERVER_DEFAULTS.items() if key in constants]
        yield f"server.{key}", config.server.optimiser in having, f"server.optimiser={' or '.join(having)}"
    are_all_there = "clients that are not lost: clients.drop_rate=0 and clients.deadline_s=null"
    yield "privacy.unit", unit != "client" or not config.clients.loses_members, are_all_there
    yield "privacy.unit", unit != "sample" or train.precision == "float32", "train.precision=float32"


def _mapping(group: str, value: Any) -> dict[str, Any]:
    """Return a copy of a group of keys; an empty group in YAML has no keys."""
    if value is not None and not isinstance(value, Mapping):
        hint = f"see hpcfl list keys {group}"
        if isinstance(value, str) and group in ("method", "model"):
            hint = f"write {group}.name={value}, in a YAML file {group}: {{name: {value}}}"
        raise UserError(f"{group}={value} is invalid: it is a group of keys; {hint}")
    return {str(key): entry for key, entry in (value or {}).items()}


def _validate(
    group: str, kind: type[Settings], values: Mapping[str, Any], of_method: Mapping[str, Any]
) -> Settings:
    """Return the keys of a group as an object of their class; `of_method`: defaults that a method changes."""

    def rule(key: str) -> str:
        return allowed(kind.model_fields[key], of_method.get(key))

    for key, value in values.items():
        annotation = kind.model_fields[key].annotation
        # pydantic would take true for 1
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise UserError(f"{group}.{key}={shown(value)} is invalid; {rule(key)}")
    try:
        made = kind.model_validate(values)
        made.model_dump(mode="json")
    except PydanticSerializationError as error:
        raise UserError(f"{group}: {error}, so config.yaml cannot have it; give it another type") from error
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            raise UserError(f"{group}: {first['msg'].removeprefix('Value error, ')}") from error
        key = str(first["loc"][0])
        if first["type"] == "missing":
            raise UserError(f"{group}.{key} is not given and has no default; {rule(key)}") from error
        value = values.get(key, first["input"])
        raise UserError(f"{group}.{key}={shown(value)} is invalid; {rule(key)}") from error
    for key, value in made:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UserError(f"{group}.{key}={shown(value)} is a number beyond 64 bits; {rule(key)}")
    return made


def _split(override: str) -> tuple[str, Any]:
    key, _, text = override.partition("=")
    try:
        return key, parse_yaml(text)
    except ValueError:
        return key, text


def _drop_foreign_options(tree: dict[str, Any], key: str, value: Any, registries: Registries) -> None:
    """Drop from `tree` the keys of another method, partition, model or source than `key=value` chooses."""
    group, _, last = key.rpartition(".")
    there: Any = tree
    for name in group.split("."):
        there = there.get(name) if isinstance(there, dict) else None
    registry, others = registries.by_group.get(group), set[str]()
    if not isinstance(there, dict):
        return
    if key == "data.reader" or (key == "data.source" and value != there.get("source")):
        others = {"source", "reader", "code"}
    elif registry is not None and last == "path" and value is None:
        others = set(there) if "path" in there else set()
    elif registry is not None and (last == "path" or (last == "name" and value != there.get("name"))):
        chosen = value if last == "name" else registry.add_own(str(value))[0]
        if chosen in [*registry.known]:
            others = there.keys() - registry.options_of(chosen).model_fields.keys()
    for name in others:
        there.pop(name, None)
