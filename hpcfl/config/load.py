"""From YAML and `key=value` words to one validated configuration."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from hpcfl.config.key_errors import allowed, one_of, shown, unknown_key
from hpcfl.config.keys import (
    COMMON,
    GROUPS,
    OWN_KEYS,
    RESULT_NEUTRAL,
    SERVER_DEFAULTS,
    SHIFT_STRENGTHS,
    Chosen,
    ClientsConfig,
    CommConfig,
    Config,
    DataConfig,
    Optimiser,
    ServerConfig,
    Settings,
    TrainConfig,
    flatten,
    recorded_name,
)
from hpcfl.config.own_code import allow, class_code, is_own
from hpcfl.config.registry import DEFAULT_SOURCE, Registries, Registry
from hpcfl.config.yaml_text import parse_yaml
from hpcfl.errors import UserError

ADAM_LR = 0.001
"""Default of `train.lr` with a `train.optimiser`."""

DEFAULT_CLIENTS = 10
"""Number of clients if neither the user nor the data gives one."""

Group = TypeVar("Group", bound=Settings)

Need = tuple[str, bool, str]
"""A key, whether what it needs is there, and what that is."""


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


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the nested keys of a YAML file; UserError if it has no groups of keys."""
    try:
        tree = parse_yaml(path.read_bytes().decode())
    except OSError as error:
        hint = "give a YAML file, key=value such as train.rounds=50, or a command of hpcfl --help"
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
        for depth, group in enumerate(groups, start=1):
            if node.get(group) is None:
                node[group] = {}
            node = node[group]
            if not isinstance(node, dict):
                whole = ".".join(groups[:depth])
                raise UserError(f"{whole}={node} is a group of keys, such as {key}; leave {whole}={node} out")
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
    are left out last.
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
        if key not in but
    ]


def _own_file(given: dict[str, Any], registry: Registry, name_key: str = "name") -> dict[str, str]:
    """Remove the path of the user's own file from a group, and set the name.

    Returns the file's keys, or the digest of a class given to `hpcfl.run`; {} for neither.
    """
    group, _, path_key = registry.own_key.rpartition(".")
    path, name = given.pop(path_key, None), given.get(name_key)
    kind = "source" if name_key == "source" else group.removeprefix("data.")
    if path is None:
        if is_own(registry.own_key, str(name)):
            raise UserError(
                f"{group}.{name_key}={name} is a {kind} in your own file; also give "
                f"{registry.own_key}=FILE.py"
            )
        if (digest := class_code(registry.own_key, str(name))) is None:
            if "code" in given and name not in registry.known:
                raise UserError(
                    f"{group}.{name_key}={name} is a class that a script gave to hpcfl.run; call it again "
                    "with the same one, or look at the report.html that it wrote"
                )
            return {}
        # that of the class at hand: whoever resumes a run compares it with the recorded one
        given.pop("code", None)
        return {"code": digest}
    own, code = registry.add_own(str(path), given.pop("code", None))
    if recorded_name(str(given.get(name_key, own))) != recorded_name(own):
        raise UserError(
            f"{group}.{name_key}={name} does not go with {registry.own_key}={path}, whose {kind} is {own}; "
            "drop one"
        )
    given[name_key] = own
    return {path_key: str(Path(str(path)).resolve()), "code": code}


def _check_names(
    tree: Mapping[str, Any], given: dict[str, Any], kinds: dict[str, type[Settings]], registries: Registries
) -> None:
    """Raise UserError for a key that is in no group's class."""
    known = [*(f"{group}.name" for group in registries.by_group), *OWN_KEYS]
    known += [f"{group}.{key}" for group, kind in kinds.items() for key in kind.model_fields]
    unknown = [
        key for name in tree if name not in GROUPS for key in flatten({name: tree[name]}) or [str(name)]
    ]
    for group in kinds:
        for key, value in given[group].items():
            if (name := f"{group}.{key}") not in known or "." in key:
                unknown += flatten({name: value}) or [name]
    if unknown:
        value = flatten({**given, **tree}).get(unknown[0], "")
        raise UserError(unknown_key(unknown[0], value, known, registries.by_group))


def _check_needs(config: Config, sources: Registry) -> None:
    """Raise UserError for a key that needs another one, without which it would have no effect."""
    data, train = config.data, config.train
    for key, is_met, needed in (
        *_needs_of_data(data, config.partition.name, sources),
        *_needs_of_train(train, data),
        *_needs_of_clients(config.clients),
        *_needs_of_comm(config.comm),
        *_needs_of_server(config.server),
        *_needs_of_privacy(config),
    ):
        group, _, name = key.partition(".")
        value = getattr(getattr(config, group), name)
        if value is not None and not is_met:
            raise UserError(f"{key}={shown(value)} needs {needed}; set that, or {key}=null")
    if data.source == "csv" and config.partition.name == "given" and data.client_column is None:
        raise UserError(
            "data.partition.name=given with data.source=csv needs data.client_column=COLUMN, the client of "
            "each row; set that, or another data.partition.name"
        )
    if train.optimiser is not None and train.momentum:
        raise UserError(
            f"train.momentum={train.momentum:g} does not go with train.optimiser={train.optimiser}, which "
            "has train.beta1 instead; set train.momentum=0"
        )
    if config.run.eval_split == "val" and not data.val_fraction:
        raise UserError("run.eval_split=val needs validation samples: set data.val_fraction, such as 0.2")
    if data.clients is not None:
        # UserError if no client would be left to train
        data.num_unseen(data.clients)


def _needs_of_data(data: DataConfig, partition: str, sources: Registry) -> Iterator[Need]:
    readers = [name for name, source in sources.known.items() if source.path_names or source.read]
    is_given = partition == "given"
    yield "data.path", data.source in readers, f"data.source={' or '.join(readers)}"
    for key in ("target", "categorical", "missing", "client_column"):
        yield f"data.{key}", data.source == "csv", "data.source=csv"
    yield "data.client_column", is_given, "data.partition.name=given"
    yield "data.image_size", data.source == "domains", "data.source=domains"
    whole = "another data.partition.name than given, whose clients keep all their samples"
    if sources.known[data.source].samples_overlap:
        whole = "a data.source whose samples share no characters"
    for key, other in (("subset_fraction", "subset_per_class"), ("subset_per_class", "subset_fraction")):
        yield f"data.{key}", not is_given, whole
        yield f"data.{key}", getattr(data, other) is None, f"data.{other}=null"
    for key in ("shift_groups", "shift_strength"):
        yield f"data.{key}", data.shift is not None, "data.shift"
    if data.shift is not None:
        kind, largest = f"data.shift={data.shift}", SHIFT_STRENGTHS[data.shift][1]
        yield "data.shift_strength", data.shift_size <= largest, f"to be at most {largest:g} with {kind}"
        is_free = data.shift != "rotation" or data.shift_groups is None
        yield "data.shift_strength", is_free, f"data.shift_groups=null with {kind}"
    yield "data.label_noise_clients", bool(data.label_noise), "data.label_noise"


def _needs_of_train(train: TrainConfig, data: DataConfig) -> Iterator[Need]:
    yield "train.lr_decay_rounds", train.lr_decay < 1, "train.lr_decay below 1"
    yield "train.lr_end", train.lr_decay == 1, "train.lr_decay=1"
    yield "train.lr_end", (train.lr_end or 0) <= train.lr, "a train.lr that is not below it"
    yield "train.patience", data.val_fraction > 0, "data.val_fraction, such as 0.2"
    yield "train.unseen_epochs", bool(data.unseen_clients), "data.unseen_clients"
    for key in ("beta1", "beta2", "epsilon"):
        yield f"train.{key}", train.optimiser is not None, "train.optimiser=adam or adamw"


def _needs_of_clients(clients: ClientsConfig) -> Iterator[Need]:
    chooses = clients.sampling == "power_of_choice"
    yield "clients.candidates", chooses, "clients.sampling=power_of_choice"
    for key in ("slowness", "bytes_per_s", "deadline_s"):
        yield f"clients.{key}", clients.has_clock, "clients.step_s"


def _needs_of_comm(comm: CommConfig) -> Iterator[Need]:
    coding = ["float16", "int8", *(["topk"] if comm.directions == "up" else [])]
    for key in ("topk_ratio", "error_feedback"):
        yield f"comm.{key}", comm.codec == "topk", "comm.codec=topk"
    yield "comm.directions", comm.codec in coding, f"comm.codec={' or '.join(coding)}"


def _needs_of_server(server: ServerConfig) -> Iterator[Need]:
    for key in (key for key in ServerConfig.model_fields if key != "optimiser"):
        having = [name for name, constants in SERVER_DEFAULTS.items() if key in constants]
        yield f"server.{key}", server.optimiser in having, f"server.optimiser={' or '.join(having)}"


def _needs_of_privacy(config: Config) -> Iterator[Need]:
    privacy, train, data = config.privacy, config.train, config.data
    for key in ("clip", "noise", "delta"):
        yield f"privacy.{key}", privacy.unit is not None, "privacy.unit=client or sample"
    for key in ("clip", "noise"):
        is_there = getattr(privacy, key) is not None
        yield "privacy.unit", is_there, f"privacy.{key}, such as privacy.{key}=1"
    yield "privacy.unit", config.comm.codec == "none", "comm.codec=none"
    yield "privacy.unit", config.run.on_divergence == "stop", "run.on_divergence=stop"
    yield "privacy.unit", config.clients.sampling is None, "clients.sampling=uniform"
    yield "privacy.unit", train.patience is None, "train.patience=null"
    yield "privacy.unit", data.missing != "mean", "a data.missing other than mean"
    yield "privacy.unit", data.normalise != "standard", "a data.normalise other than standard"
    if privacy.unit == "client":
        are_all_there = "clients that are not lost: clients.drop_rate=0 and clients.deadline_s=null"
        yield "privacy.unit", not config.clients.loses_members, are_all_there
    if privacy.unit == "sample":
        yield "privacy.unit", train.precision == "float32", "train.precision=float32"


def _mapping(group: str, value: Any) -> dict[str, Any]:
    """Return a copy of a group of keys; an empty group in YAML has no keys."""
    if value is not None and not isinstance(value, Mapping):
        example = next(iter(COMMON[group].model_fields)) if group in COMMON else "name"
        raise UserError(
            f"{group}={value} is invalid: {group} is a group of keys, such as {group}.{example}; see "
            f"hpcfl list keys {group}"
        )
    return {str(key): entry for key, entry in (value or {}).items()}


def _validate(
    group: str, kind: type[Group], values: Mapping[str, Any], of_method: Mapping[str, Any]
) -> Group:
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
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            raise UserError(f"{group}: {first['msg'].removeprefix('Value error, ')}") from error
        key = str(first["loc"][0])
        if key not in values:
            raise UserError(f"{group}.{key} is not given and has no default; {rule(key)}") from error
        raise UserError(f"{group}.{key}={shown(values[key])} is invalid; {rule(key)}") from error
    for key, value in made:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UserError(f"{group}.{key}={shown(value)} is a number beyond 64 bits; {rule(key)}")
    return made


def _split(override: str) -> tuple[str, Any]:
    key, _, text = override.partition("=")
    if not key:
        raise UserError(f"{override!r} names no key; settings are key=value, such as train.rounds=50")
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
