"""The pages of docs/ that are made from the code: a page a method, and the reference of keys.

    python tests/helpers/docs_pages.py        writes them

A method's page is the docstring of its file, its keys, and what it sent in its golden run.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterable
from functools import cache
from itertools import groupby
from pathlib import Path
from textwrap import dedent
from typing import Any

from bits import SPECIAL

from hpcfl.commands.reference import Key, about, citation, goes_with, keys
from hpcfl.formatting import markdown
from hpcfl.methods import METHODS, Method
from hpcfl.registries import load_config
from hpcfl.results.run import scored_when

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAPERS = ("pfedla", "heurpfedla", "pfedmb", "fedmn", "fedafk")
"""The methods that the project was built around; they come first."""


@cache
def pages() -> dict[Path, str]:
    """Return the text of every generated page."""
    known = keys()
    folder = DOCS / "methods"
    found = {folder / f"{name}.md": method_page(name, known) for name in METHODS}
    return found | {folder / "README.md": overview(), DOCS / "keys.md": keys_page(known)}


def overview() -> str:
    """Return the page that lists all methods."""
    names = [*PAPERS, *sorted(set(METHODS) - set(PAPERS))]
    rows = (
        (
            f"[`{name}`]({name}.md)",
            METHODS[name].summary,
            scored_when(name, load_config(None, [f"method.name={name}"]).train),
            *(f"{ratio:.2f}" for ratio in traffic(name)),
            *cost(name),
            citation(f"method.{name}"),
        )
        for name in names
    )
    return (
        "# Methods\n\n"
        "Each method is one file, `hpcfl/methods/NAME.py`. It opens with the citation, the update rules and\n"
        "the choices that the paper leaves open; these pages are made from the files.\n"
        "`hpcfl run method.name=NAME` runs one, and `hpcfl list keys method.NAME` prints its own keys.\n\n"
        "`scored`: when in a round the model is scored that `accuracy_mean` reports, as in the method's\n"
        "paper ([all moments](../concepts.md#which-model-is-scored-and-when)). The four columns of\n"
        "numbers are ratios to `fedavg`, which has 1. `down` and `up`: bytes that a client receives and\n"
        "sends in a small run of `digits_cnn` with BatchNorm and the settings on the method's page;\n"
        "other networks have other ratios. `round` and\n"
        "`evaluation`: time of a round of one local epoch, and of an evaluation, on one core\n"
        "(`hpcfl bench --parts methods`).\n\n"
        + markdown(
            [("name", "what it does", "scored", "down", "up", "round", "evaluation", "defined in"), *rows]
        )
    )


def method_page(name: str, known: Iterable[Key]) -> str:
    """Return the page of a method."""
    _, *blocks = docstring(name).split("\n\n")
    parts = [f"# {name}", f"{METHODS[name].summary[0].upper()}{METHODS[name].summary[1:]}."]
    paper = citation(f"method.{name}")
    parts += [f"{paper}."] if paper else []
    for block in blocks:
        parts += as_markdown(block)
    own = [key for key in known if key.group == f"method.{name}"]
    parts += ["## Keys", keys_table(own) if own else "It has no keys of its own.\n"]
    parts[-1] = parts[-1].rstrip("\n")
    parts += ["## What it sends", sends(name)]
    parts += ["## What goes with it", goes_with_text(METHODS[name])]
    code = f"[`hpcfl/methods/{name}.py`](../../hpcfl/methods/{name}.py)"
    return "\n\n".join(parts) + f"\n\nThe code: {code}.\n"


def goes_with_text(method: type[Method]) -> str:
    """Return what a method supports and refuses, and why."""
    supported = [f"`{key}`" for key in goes_with(method)["supports"]]
    lines = [f"It supports {', '.join(supported)}."] if supported else []
    of_reason: dict[str, list[str]] = {}
    for key, reason in method.traits.refuses.items():
        of_reason.setdefault(reason, []).append(f"`train.{key}`")
    lines += [f"It refuses {', '.join(names)}, as a method {reason}." for reason, names in of_reason.items()]
    units = [f"`privacy.unit={unit}`" for unit in ("client", "sample") if unit not in method.privacy_units]
    if units:
        lines.append(f"It refuses {' and '.join(units)}, which would not make private what it sends.")
    return "\n".join(lines)


def keys_page(known: Iterable[Key]) -> str:
    """Return the reference of all keys but those of the methods."""
    parts = [
        "# Keys",
        "All options of a run are keys. A YAML file sets them; `key=value` on the command line overrides\n"
        "the file. `hpcfl list keys` prints all keys of your version of hpcfl. The keys of a method are\n"
        "on [its page](methods/README.md).",
    ]
    others = (key for key in known if not key.group.startswith("method."))
    for group, of_group in groupby(sorted(others, key=lambda key: key.group), key=lambda key: key.group):
        parts += [
            f"## {group}",
            *([f"{about(group)}."] if about(group) else []),
            keys_table(of_group).rstrip("\n"),
        ]
    return "\n\n".join(parts) + "\n"


def keys_table(found: Iterable[Key]) -> str:
    """Return keys as a table of Markdown."""
    rows = (
        (f"`{key.name}`", escaped(key.meaning), escaped(key.kind), f"`{key.default}`" if key.default else "")
        for key in found
    )
    return markdown([("key", "meaning", "allowed", "default"), *rows])


def docstring(name: str) -> str:
    """Return the docstring of a method's file."""
    return inspect.getdoc(importlib.import_module(METHODS[name].__module__)) or ""


def as_markdown(block: str) -> list[str]:
    """Return a block of a docstring as Markdown: equations as code, named choices as a list."""
    lines = block.splitlines()
    if all(line.startswith("    ") for line in lines):
        return [f"```text\n{dedent(block)}\n```"]
    first, _, rest = block.partition(":")
    title = ["## Choices"] if first.startswith("Choice") else []
    if lines[0].endswith(":") and lines[1:2] and lines[1].startswith("  "):
        return [*title, f"{escaped(lines[0])}", named_choices(lines[1:])]
    if first not in ("Choices", "Choice"):
        return [*title, escaped(block)]
    text = escaped(rest.strip())
    # a symbol, such as w or h_0, stays as it is
    return [*title, text if re.match(r"\w\b|\w+_", text) else text[0].upper() + text[1:]]


def named_choices(lines: list[str]) -> str:
    """Return lines such as `  sign   Delta points downhill` as a list."""
    entries = []
    for line in lines:
        named = re.match(r"  (\S(?:.*?\S)?)  +(\S.*)", line)
        entries.append(
            f"- **{escaped(named[1])}**: {escaped(named[2])}" if named else f"  {escaped(line.strip())}"
        )
    return "\n".join(entries)


def escaped(text: str) -> str:
    """Return text in which Markdown finds no tags and no emphasis, but in its code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else part.replace("<", "&lt;").replace("*", r"\*") for part in parts
    )


@cache
def read_json(path: str) -> Any:
    """Return a file of the repository."""
    return json.loads((REPOSITORY / path).read_text())


def traffic(name: str) -> list[float]:
    """Return the bytes that a method's clients receive and send over FedAvg's, by the golden runs."""
    golden = read_json("tests/golden.json")["methods"]
    return [golden[name][way][-1] / golden["fedavg"][way][-1] for way in ("bytes_down", "bytes_up")]


def with_settings(name: str) -> str:
    """Return the method's own settings in the golden runs, if they differ from the defaults."""
    own = [word for word in SPECIAL.get(name, ()) if word.startswith("method.")]
    return f" with {' '.join(f'`{word}`' for word in own)}" if own else ""


def cost(name: str) -> list[str]:
    """Return a method's time of a round and of an evaluation over FedAvg's; empty if not measured."""
    if name == "fedavg":
        return ["1.0", "1.0"]
    for ratio in read_json("configs/tables/results/bench_methods.json")["ratios"]:
        if ratio["name"] == f"{name}: round / FedAvg's":
            return [f"{ratio['value']:.1f}", f"{ratio['parts']['evaluation']:.1f}"]
    return ["", ""]


def sends(name: str) -> str:
    """Return how much a method sends."""
    ways = traffic(name)
    return (
        f"In a small run of `digits_cnn` with BatchNorm{with_settings(name)}, a client receives "
        f"{ways[0]:.2f} times and sends {ways[1]:.2f} times\n"
        "the model parameters that it does with `fedavg`. `bytes.csv` of a run has the bytes by round,\n"
        "direction and layer."
    )


if __name__ == "__main__":
    (DOCS / "methods").mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
