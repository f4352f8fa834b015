"""A stranger's YAML: configurations, and table files with what they extend."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml
from mutations import Read, damaged_bytes, damaged_tree

from hpcfl.config import load_config
from hpcfl.tables.cells import Table

CONFIG = load_config(None, ["data.clients=3", "method.name=pfedla"]).tree() | {
    "environment": {"ranks": ["a cpu"]}
}
TABLE: dict[str, Any] = {
    "title": "A small table",
    "size": "small",
    "source": "nowhere",
    "seeds": [0, 1],
    "config": "base.yaml",
    "settings": {"train": {"rounds": 2}},
    "columns": [
        {"label": "few", "data": {"clients": 3}},
        {"sweep": {"key": "train.lr", "values": [0.1, 0.2]}},
    ],
    "rows": [
        {"method": {"name": "pfedla"}, "published": {"few": 61.4}, "tuned": "train.lr"},
        {
            "label": "alone",
            "method": {"name": "local"},
            "without": ["lr = 0.2"],
            "published_bytes": {"few": 9},
        },
    ],
    "compare": [
        ["pfedla", "alone"],
        {"rows": ["pfedla", "alone"], "columns": ["few"], "at": "after_training"},
    ],
    "show": ["accuracy"],
    "figure": [
        {"draw": "heat_maps", "quantity": "alpha", "layers": {"few": ["conv1"]}, "rounds": [1, "last"]},
        {"draw": "curves", "client": 0},
        {"draw": "bars", "accuracy": "best"},
    ],
}
TEXTS = (
    "a: !!python/object/apply:os.system [touch created]",
    "!!python/name:os.system",
    "a: !!bool x",
    "a: !!timestamp x",
    "a: !!int ''",
    "a: 2001-99-99",
    "a: 0x" + "f" * 5000,
    "a: " + "1:" * 5000 + "1",
    "a: 1e99999",
    "&a [*a]",
    "&a {b: *a}",
    "a: &a {<<: *a}",
    "[" * 3000,
    "{a: " * 3000,
    "? " * 3000,
    "a: |\n" + " " * 9000,
    "%YAML 9.9\n---\na: 1",
    "--- a\n--- b",
    "a: !!binary '%%'",
    "!!set {a, b}",
    "- !!omap [a: 1]",
    "\ufeffa: 1",
    "a: b: c",
    "\x00",
    "\n".join(["a: &a0 [x, x]", *(f"a{n}: &a{n + 1} [*a{n}, *a{n}, *a{n}, *a{n}]" for n in range(30))]),
)


def hostile_yaml(tree: dict[str, Any], draw: random.Random) -> bytes:
    kind = draw.randrange(10)
    if kind == 0:
        return draw.choice(TEXTS).encode()
    if kind <= 2:
        return damaged_bytes(_dump(tree), draw)
    made = damaged_tree(tree, draw)
    # aliases where a part is there twice, and other ways to write the same
    return _dump(made, default_flow_style=draw.random() < 0.2)


def _dump(tree: Any, **style: Any) -> bytes:
    text: str = yaml.dump(
        tree, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False, **style
    )
    return text.encode()


def config_reader(folder: Path) -> Read:
    def read(seed: int) -> object:
        (folder / "config.yaml").write_bytes(hostile_yaml(CONFIG, random.Random(seed)))
        config = load_config(folder / "config.yaml", [])
        return config.yaml(), config.run_name()

    return read


def table_reader(folder: Path) -> Read:
    (folder / "base.yaml").write_text("data: {clients: 4}\n")
    (folder / "under.yaml").write_text(yaml.safe_dump(TABLE))

    def read(seed: int) -> object:
        draw = random.Random(seed)
        tree = (
            {"extends": "under.yaml", "rows": ["alone", *TABLE["rows"][:1]]} if draw.random() < 0.2 else TABLE
        )
        (folder / "table.yaml").write_bytes(hostile_yaml(tree, draw))
        table = Table(folder / "table.yaml", [], folder / "runs")
        for cell in table.cells:
            assert (folder / "runs") in cell.folder.parents, cell.folder
            assert ".." not in cell.folder.relative_to(folder).parts
        return table

    return read
