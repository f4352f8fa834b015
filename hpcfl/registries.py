"""The registries of methods, partitions, models and sources, and a configuration that chooses from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcfl.config import load
from hpcfl.config.keys import ENVIRONMENT, Config, DataConfig
from hpcfl.config.registry import Registries, Registry
from hpcfl.data.partitions import PARTITIONS, add_own_partition
from hpcfl.data.sources import SOURCES, add_own_source
from hpcfl.methods import METHODS, add_own_method
from hpcfl.models import MODELS, add_own_model

REGISTRIES = Registries(
    method=Registry(METHODS, lambda method: method.Params, add_own_method),
    partition=Registry(PARTITIONS, lambda partition: partition.options, add_own_partition),
    model=Registry(MODELS, lambda model: model.options, add_own_model),
    source=Registry(SOURCES, lambda source: DataConfig, add_own_source),
)


def load_config(path: Path | None, overrides: Sequence[str]) -> Config:
    """Read a YAML file and apply `key.sub=value` overrides (see `merge`).

    Raises UserError for an unreadable file, unknown keys or names, wrong types and impossible values.
    """
    return resolve(merge({} if path is None else read_keys(path), overrides))


def read_keys(path: Path) -> dict[str, Any]:
    """Return the nested keys of a YAML file, without the environment that a run has written into it."""
    tree = load.read_yaml(path)
    tree.pop(ENVIRONMENT, None)
    return tree


def resolve(tree: Mapping[str, Any]) -> Config:
    """Validate nested keys and fill in defaults; raises UserError (see `load_config`)."""
    return load.resolve(tree, REGISTRIES)


def merge(tree: Mapping[str, Any], more: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Return nested keys, overridden by other nested keys or by `key.sub=value` words (see `load.merge`)."""
    return load.merge(tree, more, REGISTRIES)
