"""A stranger's YAML: configurations, and table files with what they extend."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from mutations import Read, assert_refused_or_read, damaged_bytes, damaged_tree, sweep

from hpcfl.config import load_config, read_yaml
from hpcfl.errors import BAD_INPUT, MOST_CHARACTERS, UserError, for_terminal
from hpcfl.main import main
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
        ("a: !!bool x", "a value that is none of its kind"),
        ("a: !!timestamp x", "a value that is none of its kind"),
        ("a: !!int ''", "a value that is none of its kind"),
        ("a: 2001-99-99", "month must be in 1..12"),
        ("run: {seed: 0x" + "f" * 20 + "}", "is a number beyond 64 bits"),
        ("run: {seed: 0x" + "f" * 9000 + "}", "a number of 9002 digits"),
        ("run: {seed: 1" + ":1" * 9000 + "}", "a number of 18001 digits"),
        ("&a [*a]", "nested more than 20 deep"),
        ("run: &a {seed: *a}", "nested more than 20 deep"),
        ("[" * 9000, "nested more than 20 deep"),
        (TEXTS[-1], "more than 20000 values"),
        ("a: 1\n" * 30_000, "more than 20000 values"),
        ("run: {seed: 1}\nrun: {seed: 2}", "line 1: run is there twice; keep one"),
        ("\x00", "unacceptable character"),
        ("%TAG ! tag:x,2026:\n" * 9000 + "--- {a: 1}", "a directive, which no configuration needs"),
    ],
)
def test_yaml_that_says_much_in_little_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=f"config.yaml is not YAML: .*{said}"):
        load_config(tmp_path / "config.yaml", [])
    assert not Path("created").exists()


def test_a_large_file_or_none_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b" " * (2**20 + 1))
    with pytest.raises(UserError, match=r"it has 1,048,577 bytes, allowed: 1,048,576"):
        load_config(path, [])
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="it is a pipe through which nothing comes"):
        load_config(path, [])
    with pytest.raises(UserError, match="it is a pipe or a device, and no file"):
        read_yaml(path)
    with pytest.raises(UserError, match="it is a pipe or a device, and no file"):
        load_config(Path("/dev/zero"), [])


@pytest.mark.parametrize(("size", "said"), [(100, ""), (2**20 + 1, "it has more bytes than 1,048,576")])
def test_a_configuration_comes_through_a_pipe(size: int, said: str) -> None:
    reader, writer = os.pipe()
    text = b"run: {seed: 7}\n"

    def write() -> None:
        with suppress(BrokenPipeError), open(writer, "wb") as file:
            # not in one piece
            time.sleep(0.05)
            file.write(text + b"\n" * (size - len(text)))

    thread = threading.Thread(target=write)
    thread.start()
    path = Path(f"/dev/fd/{reader}")
    if said:
        with pytest.raises(UserError, match=said):
            load_config(path, [])
    else:
        assert load_config(path, []).run.seed == 7
    os.close(reader)
    thread.join()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            f"run.seed={2**63}",
            f"run.seed={2**63} is not possible; allowed: a whole number >= 0 and <= {2**63 - 1}",
        ),
        (f"data.seed={'9' * 30}", f"data.seed={'9' * 30} is not possible"),
        (
            f"run.checkpoint_every={2**63}",
            f"run.checkpoint_every={2**63} is a number beyond 64 bits; allowed",
        ),
        ('run: {eval_every: "9223372036854775808"}', f"run.eval_every={2**63} is a number beyond 64 bits"),
    ],
)
def test_a_number_that_a_run_could_not_read_again_is_refused(words: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("" if "=" in words else words)
    with pytest.raises(UserError, match=said):
        load_config(tmp_path / "config.yaml", [words] if "=" in words else [])
    assert load_config(None, [f"run.seed={2**63 - 1}"]).run.seed == 2**63 - 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"extends": "a\0b"}, r"extends=a\\x00b is no file's name"),
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
    assert len(for_terminal(UserError("a" * 10**6))) < MOST_CHARACTERS + 10


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
