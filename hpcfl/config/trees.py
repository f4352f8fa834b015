"""Configurations as nested keys, before they are validated: read, laid over each other, flattened."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hpcfl.config.choices import CHOICES, DEFAULT_SOURCE, default_name
from hpcfl.data.sources import SOURCES
from hpcfl.errors import UserError


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


def lay_over(tree: Mapping[str, Any], more: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Return nested keys, overridden by other nested keys or by `key.sub=value` words.

    If these choose another method, partition or model, the options that the new one does not have are
    dropped, so the user need not unset them.
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
        return key, yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return key, text


def _drop_foreign_options(tree: dict[str, Any], key: str, value: str) -> None:
    """Drop from `tree` the keys of another method, partition, model or source than `key=value` chooses."""
    data = tree.get("data")
    if isinstance(data, dict) and (key == "data.reader" or (key == "data.source" and value in SOURCES)):
        for other in {"source", "reader", "code"} & data.keys():
            del data[other]
        return
    group, _, last = key.rpartition(".")
    if group not in CHOICES or last not in ("name", "path"):
        return
    choice = CHOICES[group]
    holder = data if group == "data.partition" else tree
    here = group.rpartition(".")[2]
    there = holder.get(here) if isinstance(holder, dict) else None
    if not isinstance(holder, dict) or not isinstance(there, dict):
        return
    if last == "path":
        chosen, code = choice.add_own(value, None)
        is_same = there.get("code") == code
    else:
        # a file that names no model has one with batchnorm, whatever its source
        source = DEFAULT_SOURCE if group == "model" else str(holder.get("source", DEFAULT_SOURCE))
        chosen = value
        is_same = there.get("name", None if "path" in there else default_name(group, source)) == chosen
    if not is_same and chosen in choice.known:
        options = choice.options_of(chosen).model_fields
        holder[here] = {option: given for option, given in there.items() if option in options}
