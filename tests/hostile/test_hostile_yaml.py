"""A stranger's YAML: configurations, and table files with what they extend."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from mutations import Read, assert_refused_or_read, damaged_bytes, damaged_tree, sweep

from hpcfl.errors import BAD_INPUT, MAX_CHARACTERS, UserError, for_terminal
from hpcfl.main import main
from hpcfl.registries import load_config
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
    "a: !!bool x",
    "a: !!int ''",
    "a: 2001-99-99",
    "a: 1e99999",
    "a: &a {<<: *a}",
    "[" * 3000,
    "%YAML 9.9\n---\na: 1",
    "--- a\n--- b",
    "a: !!binary '%%'",
    "- !!omap [a: 1]",
    "a: b: c",
    "\x00",
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


@sweep
def test_a_configuration_is_read_or_refused(seeds: Sequence[int], tmp_path: Path) -> None:
    assert_refused_or_read(config_reader(tmp_path), seeds)


@sweep
def test_a_table_is_read_or_refused(seeds: Sequence[int], tmp_path: Path) -> None:
    assert_refused_or_read(table_reader(tmp_path), seeds)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: !!python/object/apply:os.mkdir [created]", "could not determine a constructor"),
        ("a: 2001-99-99", "month must be in 1..12"),
        ("run: {seed: 1}\nrun: {seed: 2}", "line 1: run is there twice; keep one"),
        ("\x00", "unacceptable character|control characters"),
    ],
)
def test_yaml_that_is_none_is_refused_and_runs_nothing(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=f"config.yaml is not YAML: .*({said})"):
        load_config(tmp_path / "config.yaml", [])
    assert not Path("created").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"extends": "a\0b"}, r"extends='a\\x00b' is invalid: it must be one line"),
        ({"": 1}, ": is an unknown key|:  is an unknown key"),
        ({"title": "\x1b[2J"}, "must be one line of text"),
        ({"rows": [{"label": "a" * 2000, "method": {"name": "local"}}]}, "at most 1000 characters"),
        ({"extends": "table.yaml"}, "leads back to this file"),
    ],
)
def test_mistakes_of_a_table_that_had_no_words(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("")
    (tmp_path / "table.yaml").write_bytes(_dump({**TABLE, **change}))
    with pytest.raises(UserError, match=said):
        Table(tmp_path / "table.yaml", [], tmp_path / "runs")


def test_an_error_is_one_line_that_a_terminal_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text('method: {name: "a\\e[2Jb\\u2028c\\u202e"}\n')
    assert main(["plan", str(tmp_path / "config.yaml")]) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert r"method.name=a\x1b[2Jb c\u202e is unknown" in line
    assert len(for_terminal(UserError("a" * 10**6))) < MAX_CHARACTERS + 10


@pytest.mark.parametrize("words", ["model.hidden=[2000000000]", f"model.hidden=[{2**62}]"])
def test_a_network_that_memory_does_not_hold_is_refused(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "model.name=mlp", words]) == BAD_INPUT
    assert "GB of memory are free; choose a smaller model" in capsys.readouterr().err


def test_clients_beyond_counting_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "data.clients=1000000000000"]) == BAD_INPUT
    assert "data.clients=1000000000000 are more than 10000000; lower it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["table", "table.yaml"],
        ["plan", "data.source=npz", f"data.path={'a' * 3000}"],
        ["plan", "data.source=pfllib", f"data.path={'a' * 3000}"],
        ["plan", "data.source=mnist", f"data.root={'a' * 3000}"],
    ],
    ids=["extends", "npz", "pfllib", "mnist"],
)
def test_a_name_that_no_file_can_have(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.yaml").write_text(yaml.safe_dump({"extends": "a" * 3000}))
    assert main(words) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith("hpcfl: error: ")
    assert error.count("\n") == 1
