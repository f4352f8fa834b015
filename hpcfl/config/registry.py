"""Registries: the known methods, partitions, models and sources, which `hpcfl.registries` passes to the
configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcfl.config.keys import Settings
from hpcfl.config.own_code import OwnFile, check_options, run_own_file

DEFAULT_METHOD, DEFAULT_SOURCE = "pfedla", "digits"
DEFAULT_MODEL = "lenet"
"""For all sources but the default one."""


@dataclass(frozen=True)
class Registry:
    """Objects of one kind by name, to which the user's own files add."""

    known: dict[str, Any]
    own_key: str
    """The key that names such a file, as `method.path`."""
    find: Callable[[OwnFile], Any]
    """Returns the one object of this kind that a file defines; raises UserError."""
    options: Callable[[Any], type[Settings]] | None = None
    """Returns the class of keys that belong to an object; None if no keys do."""
    base: type[Settings] = Settings
    """What these classes derive from."""

    def options_of(self, name: str) -> type[Settings]:
        """Return the class of keys of the object with this name."""
        assert self.options is not None
        return self.options(self.known[name])

    def add_own(self, path: str, expected: str | None = None) -> tuple[str, OwnFile]:
        """Add what a file defines, a class under its `name`, another object under the file's.

        `expected` is the digest that a run has recorded. Returns the name (see `OwnFile.add_to`) and the
        file.

        Raises UserError where there is no such file, its digest is not the expected one, it does not run, or
        it does not define one object of this kind with a name and keys of its own.
        """
        file = run_own_file(self.own_key, path, expected)
        found = self.find(file)
        if self.options is not None:
            check_options(file.place, self.own_key.rpartition(".")[0], self.options(found), self.base)
        name = vars(found)["name"] if isinstance(found, type) else file.path.stem
        return file.add_to(self.known, name, found, is_recorded=expected is not None), file


@dataclass(frozen=True)
class Registries:
    """The registries of all that a configuration chooses by name."""

    method: Registry
    source: Registry
    partition: Registry
    model: Registry

    @property
    def by_group(self) -> dict[str, Registry]:
        """Those that are chosen by the `name` of a group of keys."""
        return {"method": self.method, "data.partition": self.partition, "model": self.model}

    def default_name(self, group: str, source: str) -> str:
        """Return a group's default `name` with this data.source."""
        if group == "method":
            return DEFAULT_METHOD
        if group == "model":
            return "digits_cnn" if source == DEFAULT_SOURCE else DEFAULT_MODEL
        known = self.source.known.get(source)
        return (known.partition if known else None) or "classes"
