"""Reference of all keys: meaning, allowed values, and default.

Meanings are the docstrings below the keys. They are read from the source files only here: pydantic's
`use_attribute_docstrings` would read them at every start.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from hpcfl.config.key_errors import kind_in_words, shown, values_of
from hpcfl.config.keys import COMMON, Settings
from hpcfl.config.registry import DEFAULT_METHOD, DEFAULT_SOURCE
from hpcfl.data.sources import SOURCES
from hpcfl.methods import METHODS, Method
from hpcfl.registries import REGISTRIES

_CHOICES = REGISTRIES.by_group


@dataclass(frozen=True)
class Key:
    """One key of a group."""

    group: str
    """`train`, or `method.pfedla` for a key that belongs to this method."""
    name: str
    """Full name: `train.lr`, `method.embedding`."""
    meaning: str
    """Its docstring; "" where there is none."""
    kind: str
    """Allowed values: type and bounds, or names."""
    values: tuple[str, ...]
    """All allowed values, if these are words; else ()."""
    default: str | None
    """The default, as the user types it; None without a default."""


def keys() -> list[Key]:
    """Return all keys by group: those of every run, then those of each partition, model and method."""
    found = _keys_of_names_and_paths()
    found += [key for group, kind in COMMON.items() for key in _keys_of(group, group, kind)]
    for prefix in ("data.partition", "model", "method"):
        for name in _CHOICES[prefix].known:
            found += _keys_of(f"{prefix}.{name}", prefix, _CHOICES[prefix].options_of(name))
            if prefix == "method":
                found += _defaults_of(name)
    return found


def about(group: str) -> str:
    """Describe a group of keys: "" for those of every run, else the summary of its method, partition or
    model."""
    prefix, _, name = group.rpartition(".")
    if prefix not in _CHOICES:
        return ""
    known = _CHOICES[prefix].known[name]
    return str(known.summary if prefix == "method" else known.description)


def goes_with(method: type[Method]) -> dict[str, list[str]]:
    """Return the keys that a method supports and refuses beside its own, by these verbs."""
    optimiser = ["server.optimiser"] if method.traits.averages else []
    return {
        "supports": [*optimiser, *(f"privacy.unit={unit}" for unit in method.privacy_units)],
        "refuses": [f"train.{key}" for key in method.traits.refuses],
    }


def citation(group: str) -> str:
    """Return the paper that a method's file begins with; "" without one."""
    prefix, _, name = group.partition(".")
    if prefix != "method" or name not in METHODS:
        return ""
    text = inspect.getdoc(importlib.import_module(METHODS[name].__module__)) or ""
    opening = " ".join(text.partition("\n\n")[0].split())
    found = re.fullmatch(r"[\w -]+\. (.*\d{4})\.", opening)
    return found[1] if found else ""


def _keys_of_names_and_paths() -> list[Key]:
    """Return the keys that decide which other keys exist; no class of settings has them."""
    of_sources = [f"{source.partition} with {name}" for name, source in SOURCES.items() if source.partition]
    of_digits = f"{REGISTRIES.default_name('model', DEFAULT_SOURCE)} with {DEFAULT_SOURCE}"
    found = []
    for group, meaning, default in (
        ("method", "Method that is run", DEFAULT_METHOD),
        ("data.partition", "How samples are divided among clients", f"classes; {', '.join(of_sources)}"),
        ("model", "Network that clients train", f"lenet; {of_digits}"),
    ):
        names, top = tuple(_CHOICES[group].known), group.partition(".")[0]
        own = f"Python file of your own that defines the {group.rpartition('.')[2]}"
        found.append(Key(top, f"{group}.name", meaning, ", ".join(names), names, default))
        found.append(Key(top, f"{group}.path", own, "null or a text", (), "null"))
    reader = "Python file of your own that reads the source"
    return [*found, Key("data", "data.reader", reader, "null or a text", (), "null")]


def _keys_of(group: str, prefix: str, kind: type[Settings]) -> Iterator[Key]:
    """Yield the keys of a class of settings."""
    texts = _docstrings(kind)
    for name, field in kind.model_fields.items():
        meaning = (texts.get(name) or field.description or "").removesuffix(".") + _of_methods(group, name)
        default = None if field.is_required() else shown(field.default)
        of_source = (group, name) == ("data", "source")
        values = tuple(SOURCES) if of_source else values_of(field)
        words = ", ".join(values) if of_source else kind_in_words(field)
        yield Key(group, f"{prefix}.{name}", meaning, words, values, default)


def _of_methods(group: str, key: str) -> str:
    """Return the other defaults that methods have for a key of every run."""
    found = []
    for name, method in METHODS.items():
        others = method.traits.defaults.get(group, {})
        found += [f"{name} {shown(others[key])}"] if key in others else []
    return f". Default of {', '.join(found)}" if found else ""


def _defaults_of(method: str) -> Iterator[Key]:
    """Yield the general keys that have another default with a method."""
    for group, others in METHODS[method].traits.defaults.items():
        for key in _keys_of(f"method.{method}", group, COMMON[group]):
            if (name := key.name.partition(".")[2]) in others:
                yield replace(key, default=shown(others[name]))


@cache
def _docstrings(kind: type[Settings]) -> dict[str, str]:
    """Return the docstrings below the keys of a class and its bases, each as one line."""
    found: dict[str, str] = {}
    for holder in reversed(kind.__mro__[: kind.__mro__.index(Settings)]):
        for key, text in pairwise(_classes(holder.__module__)[holder.__name__].body):
            if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(key.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by name: to parse it once for each of them takes a second."""
    nodes = ast.walk(ast.parse(inspect.getsource(sys.modules[module])))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
