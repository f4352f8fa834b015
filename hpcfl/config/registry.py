"""Registries: the known methods, partitions, models and sources, which `hpcfl.registries` passes to the
configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpcfl.config.keys import Settings

DEFAULT_METHOD, DEFAULT_SOURCE = "pfedla", "digits"


@dataclass(frozen=True)
class Registry:
    """Objects of one kind by name, and the keys that belong to each."""

    known: Mapping[str, Any]
    options: Callable[[Any], type[Settings]]
    """Returns the class of keys of a known object."""
    add_own: Callable[[str, str | None], tuple[str, str]]
    """Adds the object that a user's file defines; takes path and expected digest, returns name and digest."""

    def options_of(self, name: str) -> type[Settings]:
        """Return the class of keys of the object with this name."""
        return self.options(self.known[name])


@dataclass(frozen=True)
class Registries:
    """The registries of all that a configuration chooses by name."""

    method: Registry
    partition: Registry
    model: Registry
    source: Registry

    @property
    def by_group(self) -> dict[str, Registry]:
        """Those that are chosen by the `name` of a group of keys."""
        return {"method": self.method, "data.partition": self.partition, "model": self.model}

    def default_name(self, group: str, source: str) -> str:
        """Return a group's default `name` with this data.source."""
        if group == "method":
            return DEFAULT_METHOD
        if group == "model":
            return "digits_cnn" if source == DEFAULT_SOURCE else "lenet"
        known = self.source.known.get(source)
        return (known.partition if known else None) or "classes"
