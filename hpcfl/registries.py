"""The registries of methods, partitions, models and sources, and a configuration that chooses from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hpcfl.config import load
from hpcfl.config.keys import ENVIRONMENT, Config, NetworkOptions, Params, PartitionOptions
from hpcfl.config.registry import Registries, Registry
from hpcfl.data.partitions import PARTITIONS, Partition
from hpcfl.data.sources import SOURCES, own_source
from hpcfl.errors import UserError
from hpcfl.methods import METHODS, own_method
from hpcfl.models import MODELS, Model

REGISTRIES = Registries(
    method=Registry(METHODS, "method.path", own_method, lambda method: method.Params, Params),
    source=Registry(SOURCES, "data.reader", own_source),
    partition=Registry(
        PARTITIONS,
        "data.partition.path",
        lambda file: file.only_instance(Partition),
        lambda partition: partition.options,
        PartitionOptions,
    ),
    model=Registry(
        MODELS,
        "model.path",
        lambda file: file.only_instance(Model, nn.Module),
        lambda model: model.options,
        NetworkOptions,
    ),
)


def load_config(path: Path | None, overrides: Sequence[str]) -> Config:
    """Read a YAML file and apply `key.sub=value` overrides (see `merge`).

    Raises UserError for an unreadable file, unknown keys or names, wrong types and impossible values.
    """
    return resolve(merge({} if path is None else read_keys(path), overrides))


def read_keys(path: Path) -> dict[str, Any]:
    """Return the nested keys of a YAML file; of the record of a run, those that are not defaults.

    A record has all keys. Its method's defaults would otherwise be taken for values that the user gave, and
    kept for another method.
    """
    tree = load.read_yaml(path)
    is_record = tree.pop(ENVIRONMENT, None) is not None
    return _without_defaults(tree) if is_record else tree


def _without_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """Return nested keys without the values that their method has by default; all for a file of one's own."""
    method, train = (
        tree[group] if isinstance(tree.get(group), dict) else {} for group in ("method", "train")
    )
    if "path" in method or method.get("name") not in [*REGISTRIES.method.known]:
        return tree
    # a default of train.lr depends on it
    optimiser = {key: value for key, value in train.items() if key == "optimiser" and value is not None}
    try:
        defaults = resolve({"method": {"name": method["name"]}, "train": optimiser}).tree()
    except UserError:
        # such as of a class of the caller's with a parameter that has no default
        return tree
    changed = dict(tree)
    for group, kept in (("method", {"name"}), ("train", optimiser), ("server", {})):
        if isinstance(keys := tree.get(group), dict):
            of_group = {key: value for key, value in defaults[group].items() if key not in kept}
            changed[group] = {key: value for key, value in keys.items() if of_group.get(key, ...) != value}
    return changed


def resolve(tree: Mapping[str, Any]) -> Config:
    """Validate nested keys and fill in defaults; raises UserError (see `load_config`)."""
    return load.resolve(tree, REGISTRIES)


def merge(tree: Mapping[str, Any], more: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Return nested keys, overridden by other nested keys or by `key.sub=value` words (see `load.merge`)."""
    return load.merge(tree, more, REGISTRIES)
