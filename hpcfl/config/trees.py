"""Configurations as nested keys, before they are validated: read, laid over each other, flattened."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcfl.config.choices import CHOICES, DEFAULT_SOURCE, default_name
from hpcfl.config.yaml_text import parse_yaml
from hpcfl.data.sources import SOURCES, add_own_source
from hpcfl.errors import UserError
from hpcfl.own_code import OWN_KEYS, allow


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the nested keys of a YAML file; UserError where there are none."""
    try:
        tree = parse_yaml(path.read_bytes().decode())
    except OSError as error:
        raise UserError(
            f"cannot read configuration file {path}: {error.strerror}; "
            "give a YAML file, key=value such as train.rounds=50, or a command of --help"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    if tree is not None and not isinstance(tree, dict):
        raise UserError(f"{path} holds no groups of keys, such as train: {{rounds: 50}}")
    return tree or {}


def lay_over(tree: Mapping[str, Any], more: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Return nested keys, overridden by other nested keys or by `key.sub=value` words.

    A Python file of the user's own that a word names may run (see `own_code.allow`), one that nested keys
    name may not. If they choose another method, partition, model or source, the options that the new one does
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
        _drop_foreign_options(changed, key, str(value))
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


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys as `a.b.c: value`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def _split(override: str) -> tuple[str, Any]:
    key, _, text = override.partition("=")
    if not key:
        raise UserError(f"{override!r} names no key; settings are key=value, such as train.rounds=50")
    try:
        return key, parse_yaml(text)
    except ValueError:
        return key, text


def _drop_foreign_options(tree: dict[str, Any], key: str, value: str) -> None:
    """Drop from `tree` the keys of another method, partition, model or source than `key=value` chooses."""
    group, _, last = key.rpartition(".")
    data = tree.get("data")
    if group == "data" and last in ("source", "reader"):
        if isinstance(data, dict) and not _is_same_source(data, last, value):
            for other in {"source", "reader", "code"} & data.keys():
                del data[other]
        return
    holder, here = data if group == "data.partition" else tree, group.rpartition(".")[2]
    there = holder.get(here) if isinstance(holder, dict) else None
    if group not in CHOICES or last not in ("name", "path") or not isinstance(there, dict):
        return
    assert isinstance(holder, dict)
    if last == "path" and value == "None":
        holder[here] = {} if "path" in there else there
        return
    choice = CHOICES[group]
    if last == "path":
        chosen, code = choice.add_own(value, None)
        is_same = there.get("code") == code
    else:
        # a file that names no model has one with batchnorm, whatever its source
        source = DEFAULT_SOURCE if group == "model" else str(holder.get("source", DEFAULT_SOURCE))
        own = choice.add_own(str(there["path"]), None)[0] if there.get("path") else None
        chosen = value
        is_same = chosen == there.get("name", own or default_name(group, source))
    if not is_same and chosen in choice.known:
        options = choice.options_of(chosen).model_fields
        holder[here] = {option: given for option, given in there.items() if option in options}


def _is_same_source(data: Mapping[str, Any], key: str, value: str) -> bool:
    """Whether `data.source` or `data.reader`, as `key` says, names the source that the keys have, or none."""
    if key == "reader":
        return value != "None" and add_own_source(value)[1] == data.get("code")
    own = add_own_source(str(data["reader"]))[0] if data.get("reader") else None
    return value not in SOURCES or value == data.get("source", own or DEFAULT_SOURCE)
