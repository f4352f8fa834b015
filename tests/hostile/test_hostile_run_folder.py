"""A stranger's run folder, by what is typed to look at it."""

from __future__ import annotations

import os
import random
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from mutations import NUMBERS, Read, assert_refused_or_read, code_or_refusal, damaged_bytes, sweep
from test_hostile_checkpoint import SMALL, make_run
from test_hostile_yaml import hostile_yaml

from hpcfl import load_run
from hpcfl.errors import BAD_INPUT, FINISHED, UserError
from hpcfl.main import main

TABLES = ("metrics.csv", "clients.csv", "bytes.csv", "partition.csv")
CELLS = (
    "",
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1e308",
    "0.5",
    "1_0",
    " 1",
    "\u0661",
    "a",
    '"',
    "\x1b[2J",
    "1" * 400,
)


def hostile_table(whole: bytes, draw: random.Random) -> bytes:
    """Return a CSV file with other bytes, cells, columns or rows."""
    if draw.random() < 0.4:
        return damaged_bytes(whole, draw)
    rows = [line.split(",") for line in whole.decode().splitlines()]
    for _ in range(draw.choice((1, 1, 2))):
        row, kind = draw.randrange(len(rows)), draw.randrange(5)
        at = draw.randrange(len(rows[0]))
        if kind <= 1 and at < len(rows[row]):
            rows[row][at] = draw.choice((*CELLS, str(draw.choice(NUMBERS))))
        elif kind == 2:
            for one in rows:
                del one[at : at + 1]
        elif kind == 3:
            rows.insert(row, list(draw.choice(rows)))
        elif len(rows) > 1:
            del rows[row]
    return "".join(",".join(row) + "\n" for row in rows).encode()


def run_folder_reader(folder: Path) -> Read:
    good = make_run(folder / "made")
    np.savez(folder / "images.npz", x=np.zeros((2, 1, 8, 8), np.float32))
    hostile = folder / "hostile"
    record = yaml.safe_load((good / "config.yaml").read_text())
    commands = (
        ["watch", "--once", str(hostile)],
        ["report", str(hostile), "--out", str(folder / "page.html")],
        ["report", str(hostile), str(good), "--out", str(folder / "page.html")],
        ["compare", str(hostile), str(good)],
        ["export", str(hostile), "--client", "0", "--out", str(folder / "out")],
        [
            "predict",
            str(hostile),
            str(folder / "images.npz"),
            "--client",
            "1",
            "--out",
            str(folder / "p.csv"),
        ],
    )

    def read(seed: int) -> object:
        draw = random.Random(seed)
        shutil.rmtree(hostile, ignore_errors=True)
        shutil.copytree(good, hostile)
        kind, name = draw.randrange(8), draw.choice(TABLES)
        if kind <= 3:
            (hostile / name).write_bytes(hostile_table((good / name).read_bytes(), draw))
        elif kind == 4:
            (hostile / "config.yaml").write_bytes(hostile_yaml(record, draw))
        elif kind == 5:
            (hostile / "log.txt").write_bytes(damaged_bytes((good / "log.txt").read_bytes(), draw))
        elif kind == 6:
            (hostile / "checkpoint.h5").write_bytes(
                damaged_bytes((good / "checkpoint.h5").read_bytes(), draw)
            )
        else:
            what = draw.choice((*TABLES, "config.yaml", "log.txt", "checkpoint.h5", ".lock"))
            (hostile / what).unlink()
            if draw.random() < 0.5:
                (hostile / what).mkdir()
        return code_or_refusal(lambda: main(draw.choice(commands)), FINISHED)

    return read


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("hostile") / "made")


@sweep
def test_a_run_folder_is_read_or_refused(seeds: Sequence[int], made: Path) -> None:
    assert_refused_or_read(run_folder_reader(made.parent), seeds)


METHOD = """
import os

from hpcfl.methods.fedavg import FedAvg

os.mkdir("created")


class Own(FedAvg):
    pass
"""


@pytest.fixture
def with_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run folder that brings the Python file that it says it was made with."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    (tmp_path / "own.py").write_text(METHOD)
    assert main(["--quiet", "--out", str(folder), *SMALL[3:], "method.path=own.py"]) == FINISHED
    Path("created").rmdir()
    (tmp_path / "own.py").rename(folder / "own.py")
    record = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(record.replace(str(tmp_path / "own.py"), str(folder / "own.py")))
    return folder


@pytest.mark.usefixtures("own_code_forgotten")
def test_a_run_s_own_code_is_run_only_where_the_user_names_it(
    with_own_code: Path, own_code_is_new: None, capsys: pytest.CaptureFixture[str]
) -> None:
    own = with_own_code / "own.py"
    images = with_own_code.parent / "images.npz"
    np.savez(images, x=np.zeros((2, 1, 8, 8), np.uint8))
    commands = [
        ["report", str(with_own_code)],
        ["compare", str(with_own_code), str(with_own_code)],
        ["export", str(with_own_code), "--client", "0", "--out", "out"],
        ["predict", str(with_own_code), str(images), "--client", "0"],
        ["plan", str(with_own_code / "config.yaml")],
        ["--out", "again", str(with_own_code / "config.yaml")],
    ]
    Path("table.yaml").write_text(
        yaml.safe_dump({"title": "t", "seeds": [0], "rows": [{"method": {"path": str(own)}}]})
    )
    for command in [*commands, ["table", "table.yaml", "--plan"]]:
        assert main(command) == BAD_INPUT
        (line,) = capsys.readouterr().err.splitlines()
        place = "table.yaml, row 1 (own): " if command[0] == "table" else ""
        assert line == (
            f"hpcfl: error: {place}method.path={own}: refused to run this Python file, which your command "
            "does not name; read it, then add "
            f"--own-code {own} (in Python: own_code=...)"
        )
    with pytest.raises(UserError, match="refused to run this Python file"):
        load_run(with_own_code)
    # looking at it needs no code
    assert main(["watch", "--once", str(with_own_code)]) == FINISHED
    assert not Path("created").exists()
    other = with_own_code.parent / "other.py"
    other.write_text(METHOD + "# other\n")
    assert main([*commands[0], "--own-code", str(other)]) == BAD_INPUT
    assert not Path("created").exists()
    assert load_run(with_own_code, own_code=[own]).config.method.name == "own"
    assert Path("created").exists()


@pytest.mark.usefixtures("own_code_forgotten")
@pytest.mark.parametrize("how", ["report", "plan", "doctor", "load_run"])
def test_naming_own_code_lets_it_run(
    how: str, with_own_code: Path, own_code_is_new: None, capsys: pytest.CaptureFixture[str]
) -> None:
    own = str(with_own_code / "own.py")
    if how == "report":
        assert main(["report", str(with_own_code), "--own-code", own]) == FINISHED
    elif how == "plan":
        # as ever, where it is run
        assert main(["plan", *SMALL[3:], f"method.path={own}"]) == FINISHED
    elif how == "doctor":
        config = str(with_own_code / "config.yaml")
        assert main(["doctor", config, "--own-code", own, "train.rounds=0"]) == BAD_INPUT
        assert "train.rounds=0 is invalid" in capsys.readouterr().err
    else:
        assert load_run(with_own_code, own_code=own).config.method.name == "own"
    assert Path("created").exists()


@pytest.fixture
def own_code_is_new(with_own_code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget, as another process would not know it, that the run's file has run here."""
    from hpcfl.config import own_code
    from hpcfl.methods import METHODS

    METHODS.pop("own")
    own_code._added.clear()
    own_code._allowed.clear()
    for name in [name for name in sys.modules if name.startswith(own_code.OWN_MODULE)]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "name",
    [".lock", "log.txt", "metrics.csv", "config.yaml.tmp", "checkpoint.tmp.h5", "events.out.tfevents.1"],
)
@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_a_link_in_a_run_folder_is_not_written_through(
    name: str, fresh: list[str], made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, mine = shutil.copytree(made, tmp_path / "run"), tmp_path / "mine"
    mine.write_text("mine")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(mine)
    assert main(["--quiet", "--out", str(folder), *SMALL, "train.rounds=3", *fresh]) == BAD_INPUT
    said = capsys.readouterr().err
    assert (
        f"{folder / name} is a link, a pipe or a device, which no run makes, and would be written to" in said
    )
    assert mine.read_text() == "mine"


def test_a_link_of_one_s_own_is_left_alone(made: Path, tmp_path: Path) -> None:
    folder, mine = shutil.copytree(made, tmp_path / "run"), tmp_path / "mine"
    mine.write_text("mine")
    (folder / "notes.txt").symlink_to(mine)
    assert main(["--quiet", "--out", str(folder), *SMALL, "run.report=false"]) == FINISHED
    assert mine.read_text() == "mine"


def test_a_page_is_not_written_through_a_link(made: Path, tmp_path: Path) -> None:
    folder, mine = shutil.copytree(made, tmp_path / "run"), tmp_path / "mine"
    mine.write_text("mine")
    (folder / "report.html").symlink_to(mine)
    assert main(["report", str(folder)]) == FINISHED
    assert mine.read_text() == "mine"
    assert not (folder / "report.html").is_symlink()
    (folder / f".report.html.{socket.gethostname()}-{os.getpid()}").symlink_to(mine)
    assert main(["report", str(folder)]) == BAD_INPUT
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "change", "command"),
    [
        ("metrics.csv", lambda text: text.replace("accuracy_mean", "accuracy_meaning"), "watch"),
        ("metrics.csv", lambda text: text.replace("\n2,", "\nnan,"), "report"),
        ("clients.csv", lambda text: text.replace("accuracy,", "nothing,"), "compare"),
        ("metrics.csv", lambda text: text.replace(",0\n", ",nan\n"), "report"),
        ("clients.csv", lambda text: text.replace(",0\n", ",inf\n"), "compare"),
        ("bytes.csv", lambda text: text.replace("direction", "way"), "report"),
    ],
)
def test_a_table_that_no_run_writes_is_named(
    name: str, change: Any, command: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(made, tmp_path / "run")
    before = (folder / name).read_text()
    (folder / name).write_text(change(before))
    assert (folder / name).read_text() != before
    extra = {"watch": ["--once"], "compare": [str(made)], "report": ["--out", str(tmp_path / "page.html")]}
    assert main([command, str(folder), *extra[command]]) == BAD_INPUT
    assert f"{folder / name}, line " in capsys.readouterr().err


def test_a_log_cannot_command_a_terminal(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(made, tmp_path / "run")
    with (folder / "log.txt").open("a") as file:
        file.write("2026-01-01 00:00:00 \x1b]0;owned\x07 round " + "9" * 5000 + "/1 \n")
    assert main(["watch", "--once", str(folder)]) == FINISHED
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert r"\x1b]0;owned\x07" in said
