"""The registries of methods, partitions, models and sources, and a configuration that chooses from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
        lambda file: file.only_instance(Model),
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
    method = tree.get("method")
    if tree.pop(ENVIRONMENT, None) is None or not isinstance(method, dict):
        return tree
    name = method.get("name")
    if name in REGISTRIES.method.known and "path" not in method:
        train = tree.get("train")
        optimiser = train.get("optimiser") if isinstance(train, dict) else None
        # a default of train.lr depends on it
        given = {} if optimiser is None else {"optimiser": optimiser}
        try:
            defaults = resolve({"method": {"name": name}, "train": given}).tree()
        except UserError:
            # such as of a class of the caller's with a parameter that has no default
            return tree
        for group, kept in (("method", {"name"}), ("train", given), ("server", {})):
            of_group = defaults[group]
            if isinstance(keys := tree.get(group), dict):
                tree[group] = {
                    key: value
                    for key, value in keys.items()
                    if key in kept or of_group.get(key, ...) != value
                }
    return tree


def resolve(tree: Mapping[str, Any]) -> Config:
    """Validate nested keys and fill in defaults; raises UserError (see `load_config`)."""
    return load.resolve(tree, REGISTRIES)


def merge(tree: Mapping[str, Any], more: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Return nested keys, overridden by other nested keys or by `key.sub=value` words (see `load.merge`)."""
    return load.merge(tree, more, REGISTRIES)
