"""`hpcfl table`: cells are ordinary runs; a table is resumed, shares work, and refuses mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import h5py
import numpy as np
import pytest
import yaml
from bits import differing, read_csv, refused, run_here, time_is_up, tiny_settings
from processes import REPOSITORY, Mpirun, files_up_to, forked

from hpcfl import errors
from hpcfl.commands import table as table_command
from hpcfl.config.keys import ENVIRONMENT, Config
from hpcfl.errors import FINISHED, STOPPED
from hpcfl.main import main
from hpcfl.methods import METHODS
from hpcfl.storage.lock import locked
from hpcfl.tables.cells import Table

ROUNDS = 3
TABLE = """
title: Two methods on digits
seeds: [0, 1]
settings:
  train: {lr: 0.05}
  run: {eval_every: 2}
rows:
  - {method: {name: fedavg}}
  - label: HeurpFedLA, k = 2
    method: {name: heurpfedla, head_init: default, k: 2}
    train: {participation: 0.6, lr: 0.1}
    tuned: train.lr of 0.05, 0.1
"""
FEDAVG = ["method.name=fedavg", "train.lr=0.05"]
HEURPFEDLA = ["method.name=heurpfedla", "method.k=2", "method.head_init=default"]
HEURPFEDLA += ["train.participation=0.6", "train.lr=0.1"]
ALONE = {
    f"{slug}-s{seed}": [*settings, f"run.seed={seed}"]
    for seed in (0, 1)
    for slug, settings in (("fedavg", FEDAVG), ("heurpfedla-k-2", HEURPFEDLA))
}
"""What the cells are, in their order, when typed as single runs."""
OUTPUTS = ["diagnostics.csv", "table.csv", "table.md", "table.tex"]
SPEEDS = dict.fromkeys(("client_steps_per_s", "wall_s"))


class Two:
    """The words of a table, which are typed and whose output is read."""

    def __init__(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        self.words, self._capsys = words, capsys
        self.file, *self.settings = words

    def printed(self) -> tuple[str, str]:
        """Return what has been printed since the last look."""
        return self._capsys.readouterr()

    def finish(self, folder: Path, *words: str) -> str:
        """Run a table to its end in a folder, and return what it prints."""
        self.printed()
        assert table(folder, *words) == FINISHED
        out, err = self.printed()
        assert err == ""
        return out

    def refusal(self, folder: Path, *words: str | Path) -> str:
        """Return the line with which a table is refused in a folder."""
        return refused(self._capsys, "table", *words, "--out", folder)


@pytest.fixture(scope="module")
def words(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the table and the settings of all its cells."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "two.yaml").write_text(TABLE)
    return [str(folder / "two.yaml"), *tiny_settings(digits)]


@pytest.fixture
def two(words: list[str], capsys: pytest.CaptureFixture[str]) -> Two:
    return Two(words, capsys)


@pytest.fixture(scope="module")
def whole(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert table(folder, *words, "--quiet") == FINISHED
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "out"))


@pytest.fixture
def half(copied: Path) -> Path:
    """Return a copy of the table's folder without its first and last cell."""
    for name in ("fedavg-s0", "heurpfedla-k-2-s1"):
        shutil.rmtree(copied / name)
    return copied


def table(folder: Path, *words: str) -> int:
    return main(["table", *words, "--out", str(folder)])


def changed(settings: list[str]) -> str:
    """Return what the title has of settings: neither file nor folder of the data, device and page."""
    return f"with {', '.join(settings[3:-2])}"


def begun(out: str) -> list[int]:
    """Return the numbers of the cells that a table has run."""
    return [int(number) for number in re.findall(r"^cell (\d)/\d:", out, re.MULTILINE)]


def figures(folder: Path) -> list[dict[str, str]]:
    return read_csv(folder / "table.csv")


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the bytes and the time of change of every file of every cell."""
    found = [path for path in sorted(folder.glob("*/**/*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


PARTS_LEFT = "when all parts have ended, repeat the command without --part: it runs what is still missing"


# What the cells are, and the table


def test_a_cell_equals_a_single_run(words: list[str], whole: Path, tmp_path: Path) -> None:
    assert sorted(path.name for path in whole.iterdir()) == sorted([*ALONE, *OUTPUTS])
    for name in ("fedavg-s0", "heurpfedla-k-2-s1"):
        assert run_here(tmp_path / name, [*words[1:], "run.eval_every=2", *ALONE[name]]) == FINISHED
        assert not differing(whole / name, tmp_path / name)
        trees = [yaml.safe_load((base / name / "config.yaml").read_text()) for base in (whole, tmp_path)]
        environments = [tree.pop(ENVIRONMENT) for tree in trees]
        assert trees[0] == trees[1]
        assert environments[0]["command"].startswith("hpcfl table ")


def test_diagnostics_summarise_the_history_of_methods(whole: Path) -> None:
    lines = read_csv(whole / "diagnostics.csv")
    # evaluations after rounds 2 and 3
    kinds = {(line["label"], line["seed"], line["round"], line["quantity"]) for line in lines}
    label, rounds = "HeurpFedLA, k = 2", ("2", "3")
    assert kinds == set(product([label], "01", rounds, ["alpha", "retained_rounds"]))
    with h5py.File(whole / "heurpfedla-k-2-s1" / "checkpoint.h5", "r") as file:
        weights, retained = (file["history"][name][-1] for name in ("alpha", "retained_rounds"))
    last = [line for line in lines if (line["seed"], line["round"]) == ("1", "3")]
    counts = [float(line["value"]) for line in last if line["quantity"] == "retained_rounds"]
    assert counts == pytest.approx(retained.mean(axis=0), rel=1e-5)
    # the initial heads already distinguish layers
    cohort = 4
    assert retained.sum() == cohort * 2 * ROUNDS
    own = [float(line["value"]) for line in last if line["clients"] == "itself"]
    assert own == pytest.approx(np.einsum("clc->lc", weights).mean(axis=1), rel=1e-5)


def test_rows_with_another_number_of_rounds_are_marked(two: Two, tmp_path: Path) -> None:
    longer = tmp_path / "longer.yaml"
    longer.write_text(TABLE.replace("lr: 0.1}", "lr: 0.1, rounds: 4}"))
    others = [word for word in two.settings if word != f"train.rounds={ROUNDS}"]
    assert table(tmp_path / "out", str(longer), *others, "data.clients=2", "--part", "9/9") == FINISHED
    lines = two.printed()[0].splitlines()
    assert [line for line in lines if line.startswith("Seeds 0, 1; rounds 30 or 4; clients 2; ")]
    at = [line.startswith("method ") for line in lines].index(True)
    header, first, second = (re.split(" {2,}", line) for line in lines[at : at + 3])
    assert header[-2:] == ["rounds", "tuned on validation samples"]
    assert (first[-1], second[-2]) == ("30", "4")


COLUMNS_BY_ROWS = """
title: Two columns
seeds: [0, 1]
settings: {train: {lr: 0.05}}
columns:
  - {label: all, train: {participation: 1.0}}
  - {label: "A half!", train: {participation: 0.5}}
rows:
  - {method: {name: fedavg}, published: {all: 50}}
  - {method: {name: local}, without: [all]}
compare: [[fedavg, local]]
"""


def test_columns_are_run_seed_by_seed(two: Two, tmp_path: Path) -> None:
    path = tmp_path / "columns.yaml"
    path.write_text(COLUMNS_BY_ROWS)
    options = ["--rounds", "2", "--write-results"]
    name = Table(path, two.settings, rounds=2).result_name
    earlier = tmp_path / "results" / f"{name}_diagnostics.csv"
    earlier.parent.mkdir()
    earlier.touch()
    out = two.finish(tmp_path / "out", str(path), *two.settings, *options)
    names = ("fedavg, all", "fedavg, A half!", "local, A half!")
    assert re.findall(r"^cell (\d/6: \w+, .*? seed \d)", out, re.MULTILINE) == [
        f"{number}/6: {name} seed {seed}"
        for number, (seed, name) in enumerate(product((0, 1), names), start=1)
    ]
    assert f"# Two columns (shrunk: at most 2 rounds instead of 3; {changed(two.settings)})\n" in out
    # a table with other settings has files of its own: claims are judged by those without
    assert re.fullmatch("columns-2rounds-[0-9a-f]{8}", name)
    results = tmp_path / "results" / f"{name}.csv"
    assert results.read_text() == (tmp_path / "out" / "table.csv").read_text()
    assert not earlier.exists()
    rows = read_csv(results)
    assert [f"{row['label']}, {row['column']}" for row in rows] == list(names)
    assert rows[0]["title"].startswith("Two columns (shrunk: at most 2 rounds instead of 3; ")
    [line] = read_csv(tmp_path / "out" / "differences.csv")
    assert (line["column"], line["seeds"], line["clients_and_seeds"]) == ("A half!", "2", "14")


# Chosen cells, and columns without data

OF_TWO_SOURCES = """
title: Two sources
seeds: [0, 1]
settings: {train: {lr: 0.05}}
columns:
  - {label: "digits, all"}
  - {label: "photos, all", data: {source: cifar10}}
rows:
  - {method: {name: fedavg}}
  - {method: {name: local}}
compare: [[fedavg, local]]
"""


@pytest.fixture
def of_two(two: Two, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Two:
    """Return a table of two sources, of which one is not here."""
    file = tmp_path / "two.yaml"
    file.write_text(OF_TWO_SOURCES)
    settings = [*two.settings[3:], "train.rounds=1", f"data.root={tmp_path / 'nowhere'}"]
    return Two([str(file), *settings], capsys)


def accuracies(folder: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the accuracies of two seeds by row and column."""
    rows = figures(folder)
    return {(row["label"], row["column"]): (row["accuracy_seed_0"], row["accuracy_seed_1"]) for row in rows}


def test_only_chosen_cells_are_run_and_all_that_are_finished_are_shown(two: Two, tmp_path: Path) -> None:
    path, folder = tmp_path / "columns.yaml", tmp_path / "out"
    path.write_text(COLUMNS_BY_ROWS)
    own = [str(path), *two.settings, "train.rounds=1"]
    out = two.finish(folder, *own, "--column", "half", "--row", "local", "--part", "2/2")
    assert out.startswith(f"0 of 1 cells are finished, in {folder}\n")
    assert begun(out) == [2]
    assert "\ncell 2/2: local, A half! seed 1\n" in out
    assert f"1 of 2 cells are missing\n  local, A half! seed 0, in {folder / 'a-half' / 'local-s0'}\n" in out
    assert out.splitlines()[-1] == PARTS_LEFT
    # a column of which nothing is finished is in the overview only
    assert "\nA half!:\n" in out
    assert "\nall:\n" not in out
    before, files_before = accuracies(folder), files(folder)
    (tmp_path / "results").touch()
    # the table is printed before
    assert table(folder, *own, "--no-run", "--write-results") == errors.BAD_INPUT
    advice = "File exists; make it writable, or copy the table file elsewhere"
    assert f"cannot write the table in {tmp_path / 'results'}: {advice}" in two.printed()[1]
    (tmp_path / "results").unlink()
    out = two.finish(folder, *own, "--no-run", "--write-results")
    assert "\ncell " not in out
    assert "missing" in out
    assert files(folder) == files_before
    results = read_csv(tmp_path / "results" / f"{Table(path, own[1:]).result_name}.csv")
    assert [row["seeds"] for row in results] == ["0", "0", "1"]
    out = two.finish(folder, *own, "--column", "all", "--write-results")
    assert begun(out) == [1, 2]
    assert "cell 2/2: fedavg, all seed 1  time left 0:00:" in out
    assert "cells are missing" not in out
    found = accuracies(folder)
    assert all(found["fedavg", "all"])
    # what was finished before is not lost, and what was not chosen is missing
    assert found["local", "A half!"] == before["local", "A half!"] != ("", "")
    assert found["fedavg", "A half!"] == ("", "")
    results = read_csv(tmp_path / "results" / f"{Table(path, own[1:]).result_name}.csv")
    assert [row["seeds"] for row in results] == ["2", "0", "1"]


def test_a_column_without_data_is_skipped_and_reported(of_two: Two, tmp_path: Path) -> None:
    words, folder = of_two.words, tmp_path / "out"
    for more in ([], ["--plan"], ["--part", "2/2"]):
        message = of_two.refusal(folder, *words, "--column", "photos", *more)
        assert f"hpcfl: error: {words[0]}, column photos, all: cifar10 is not in" in message
    planned = of_two.finish(folder, *words, "--plan")
    run = of_two.finish(folder, *words, "--row", "fedavg")
    reason = f"not run: cifar10 is not in '{tmp_path / 'nowhere'}' (no folder cifar-10-batches-py)"
    assert f"photos, all:\n{reason}: fetch it where there is a network with: hpcfl data fetch" in planned
    assert "4 cells, " in planned
    assert run.splitlines()[0] == f"0 of 4 cells are finished, in {folder}"
    assert run.splitlines()[1].startswith(f"photos, all: {reason}")
    assert begun(run) == [1, 3]
    assert "\ncell 3/4: fedavg, digits, all seed 1" in run
    assert "2 of 4 cells are missing\n" in run
    assert "--part" not in run
    assert f"\nphotos, all: {reason}" in (folder / "table.md").read_text()
    assert [line["seeds"] for line in read_csv(folder / "differences.csv")] == ["0", "0"]


def test_each_column_names_its_own_data_file(of_two: Two, digits: Path, tmp_path: Path) -> None:
    words, file = of_two.words, tiny_settings(digits)[:3]
    folder = tmp_path / "out"
    assert table(folder, *words, *file, "--column", "photos", "--quiet") == FINISHED
    data = yaml.safe_load((folder / "photos-all" / "local-s1" / "config.yaml").read_text())["data"]
    assert (data["source"], data["path"]) == ("npz", file[1].partition("=")[2])
    of_photos = accuracies(folder)["local", "photos, all"]
    assert table(folder, *words, "--column", "digits", "--quiet") == FINISHED
    data = yaml.safe_load((folder / "digits-all" / "local-s1" / "config.yaml").read_text())["data"]
    assert (data["source"], data["path"]) == ("digits", None)
    # neither this command nor one for all columns loses the cells of the file that they do not name
    assert accuracies(folder)["local", "photos, all"] == of_photos != ("", "")
    shutil.rmtree(folder / "photos-all" / "local-s1")
    before = files(folder / "digits-all")
    # a cell that is not finished needs the file again
    out = of_two.finish(folder, *words)
    assert out.startswith("7 of 8 cells are finished")
    assert "photos, all: not run: cifar10 is not in" in out
    assert accuracies(folder)["local", "photos, all"] == (of_photos[0], "")
    assert table(folder, *words, *file, "--column", "photos", "--quiet") == FINISHED
    assert accuracies(folder)["local", "photos, all"] == of_photos
    assert files(folder / "digits-all") == before
    assert [line["seeds"] for line in read_csv(folder / "differences.csv")] == ["2", "2"]
    # another file is another run
    other = [file[0], f"{file[1]}.other", *file[2:]]
    assert "data.path" in of_two.refusal(folder, *words, *other, "--column", "photos")


# Resuming


def test_parts_run_at_the_same_time_and_the_table_is_done(two: Two, whole: Path, tmp_path: Path) -> None:
    def start(part: str) -> int:
        return forked(lambda: table(tmp_path, *two.words, "--quiet", "--part", part))

    children = [start("1/2"), start("2/2")]
    assert [os.waitpid(child, 0)[1] for child in children] == [FINISHED] * 2
    before = files(tmp_path)
    out = two.finish(tmp_path, *two.words)
    title = f"# Two methods on digits ({changed(two.settings)})"
    assert out.startswith(f"4 of 4 cells are finished, in {tmp_path}\n\n{title}\n\nSeeds 0, 1;")
    assert "cell 1/4" not in out
    assert "missing" not in out
    assert files(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*ALONE, *OUTPUTS])
    for name in ALONE:
        assert not differing(whole / name, tmp_path / name)


def test_a_mistake_in_a_method_of_one_s_own_does_not_stop_the_other_cells(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from hpcfl.methods.fedavg import FedAvg\n"
        "class Own(FedAvg):\n    def train(self, clients, down):\n        return down['thta']\n"
    )
    rows = f"rows:\n  - {{method: {{path: {own}}}}}\n  - {{method: {{name: fedavg}}}}\n"
    (tmp_path / "own.yaml").write_text(f"title: Own\nseeds: [0]\n{rows}")
    words = [str(tmp_path / "own.yaml"), *tiny_settings(digits), "--own-code", str(own), "--quiet"]
    assert table(tmp_path / "out", *words) == errors.BAD_INPUT
    warning, error = capsys.readouterr().err.splitlines()
    cell = f"{tmp_path}/own.yaml, row 1 (own), seed 0: {own}, line 4, in train: KeyError: "
    assert warning.startswith(f"hpcfl: warning: {cell}")
    assert error.startswith(f"hpcfl: error: {cell}")
    assert [row["seeds"] for row in figures(tmp_path / "out")] == ["0", "1"]


def test_a_table_with_a_failed_cell_finishes_the_other_cells(two: Two, copied: Path, tmp_path: Path) -> None:
    folder, damaged = copied, copied / "fedavg-s0"
    (damaged / "clients.csv").unlink()
    (damaged / "checkpoint.h5").write_bytes(b"half a file")
    (damaged / "checkpoint.prev.h5").unlink(missing_ok=True)
    shutil.rmtree(copied / "heurpfedla-k-2-s1")
    assert table(folder, *two.words) == errors.BAD_INPUT
    out, err = two.printed()
    assert "1 of 4 cells are missing\n" in out
    assert f"  fedavg seed 0, in {damaged}\n" in out
    assert not list(copied.glob(".*.running"))
    warning, error = err.splitlines()
    cell = f"{two.file}, row 1 (fedavg), seed 0: {damaged}/checkpoint.h5"
    assert warning.startswith(f"hpcfl: warning: {cell}")
    assert warning.endswith("; continuing with the other cells")
    assert error.startswith(f"hpcfl: error: {cell}")
    assert [row["seeds"] for row in figures(folder)] == ["1", "2"]
    shutil.rmtree(damaged)
    assert table(folder, *two.words, "--quiet") == FINISHED
    assert [row["seeds"] for row in figures(folder)] == ["2", "2"]


@pytest.mark.parametrize("begins_at_the_same_moment", [False, True])
def test_a_cell_that_another_command_runs_is_left_to_it(
    two: Two, half: Path, monkeypatch: pytest.MonkeyPatch, begins_at_the_same_moment: bool
) -> None:
    folder, held, run = half / "fedavg-s0", ExitStack(), table_command.run
    note = half / f".{folder.name}.running"

    def begin() -> None:
        folder.mkdir()
        note.write_text("running")
        held.enter_context(locked(folder))

    def beaten(config: Config, cell: Path, *more: Any, **options: Any) -> Any:
        if cell == folder:
            begin()
        return run(config, cell, *more, **options)

    if begins_at_the_same_moment:
        monkeypatch.setattr(table_command, "run", beaten)
    else:
        begin()
    out = two.finish(half, *two.words)
    assert note.exists()
    held.close()
    monkeypatch.undo()
    assert re.search(rf"^cell 1/4: fedavg seed 0 is in use by pid {os.getpid()} on ", out, re.MULTILINE)
    assert "cell 4/4: HeurpFedLA, k = 2 seed 1\n" in re.sub("  time left.*", "", out)
    assert "1 of 4 cells are missing\n" in out
    assert table(half, *two.words, "--quiet") == FINISHED
    assert [row["seeds"] for row in figures(half)] == ["2", "2"]


@pytest.mark.parametrize(("text", "line"), [("", 2), ("client,accuracy\n0,0.5\n", 1)])
def test_a_damaged_file_is_written_again_or_named(two: Two, copied: Path, text: str, line: int) -> None:
    file = copied / "fedavg-s0" / "clients.csv"
    whole = file.read_bytes()
    file.write_text(text)
    damage = f"{file}, line {line}: damaged; restore the file"
    assert damage in two.finish(copied, *two.words, "--no-run")
    error = two.refusal(copied, *two.words, "--no-run", "--write-results", "--quiet")
    assert f"no results are written: {damage}" in error
    assert "missing" not in two.finish(copied, *two.words)
    assert file.read_bytes() == whole
    file.write_text(text)
    (copied / "fedavg-s0" / "checkpoint.h5").unlink()
    (copied / "fedavg-s0" / "checkpoint.prev.h5").unlink(missing_ok=True)
    before = files(copied)
    error = two.refusal(copied, *two.words)
    assert damage in error
    assert "rerun the run's command with --fresh" in error
    assert files(copied) == before
    assert "missing" not in two.finish(copied, *two.words, "--fresh")


def test_files_of_an_earlier_table_file_do_not_stay(words: list[str], copied: Path) -> None:
    for name in ("differences.csv", "diagnostics.csv"):
        (copied / name).write_text("earlier\n")
    mine = {"figure.tex", "figure.pdf", "figure_1.svg", "my_differences.csv"}
    for name in mine:
        (copied / name).write_text("mine\n")
    (copied / "figure.2-s0").mkdir()
    assert table(copied, *words, "--quiet") == FINISHED
    left = {path.name for path in copied.iterdir() if path.is_file()}
    assert left == {"table.md", "table.tex", "table.csv", "diagnostics.csv"} | mine
    assert "earlier" not in (copied / "diagnostics.csv").read_text()
    (copied / "differences.csv").mkdir()
    assert table(copied, *words, "--quiet") == FINISHED


def test_a_full_disk_is_named_when_the_table_is_written(two: Two, copied: Path) -> None:
    before = files(copied)
    with files_up_to(0):
        assert table(copied, *two.words) == errors.STORAGE_ERROR
    error = two.printed()[1]
    assert f"cannot write the table in {copied}: File too large; free space on the disk" in error
    assert "rerun the same command" in error
    assert files(copied) == before


def test_a_cell_that_has_diverged_is_marked(words: list[str], copied: Path, tmp_path: Path) -> None:
    changed = tmp_path / "two.yaml"
    changed.write_text(TABLE.replace("lr: 0.1}", "lr: 1.0e+9}"))
    assert table(copied, str(changed), *words[1:], "--fresh", "--seeds", "0", "--quiet") == errors.DIVERGED
    assert "| HeurpFedLA, k = 2 | diverged | " in (copied / "table.md").read_text()
    assert list(figures(copied)[0])[-1] == "accuracy_seed_0"
    assert table(copied, *words, "--fresh", "--quiet") == FINISHED
    assert "diverged" not in (copied / "table.md").read_text()


def raising(monkeypatch: pytest.MonkeyPatch, fault: BaseException) -> None:
    """Let each run of FedAvg end with a fault in its first round."""

    def raise_it(*arguments: Any) -> None:
        raise fault

    monkeypatch.setattr(METHODS["fedavg"], "aggregate", raise_it)


def test_a_cell_without_memory_leaves_others(two: Two, half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, MemoryError())
    assert table(half, *two.words) == errors.OUT_OF_MEMORY
    out, err = two.printed()
    assert begun(out) == [1, 4]
    assert "1 of 4 cells are missing\n" in out
    assert "is out of memory; try more ranks" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("fault", "order"),
    [
        (RuntimeError("of a mistake of its own"), [4, 1]),
        (errors.StorageError("the disk is full"), [1, 4]),
        (errors.ForcedStop(signal.SIGTERM), [1, 4]),
    ],
)
def test_a_cell_whose_run_died_is_run_last_and_an_interrupted_one_next(
    two: Two,
    half: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    order: list[int],
) -> None:
    monkeypatch.setenv("HPCFL_JOB_NOTES", str(tmp_path))
    with pytest.MonkeyPatch.context() as patch, suppress(SystemExit, RuntimeError):
        raising(patch, fault)
        table(half, *two.words)
    assert begun(two.printed()[0]) == [1]
    assert (tmp_path / "cell").read_text() == f"{half / 'fedavg-s0'}\n"
    assert begun(two.finish(half, *two.words)) == order
    assert not list(half.glob(".*.running"))
    # the job script knows by this that all cells have had their turn
    assert (tmp_path / "cell").read_text() == "\n"


def test_a_signal_stops_not_only_the_cell(two: Two, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"

    def look(number: int, frame: FrameType | None) -> None:
        if (folder / "heurpfedla-k-2-s0" / "metrics.csv").exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.kill(os.getpid(), signal.SIGUSR1)

    previous = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        assert table(folder, *two.words) == STOPPED
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert sorted(path.name for path in folder.glob("*-s?")) == ["fedavg-s0", "heurpfedla-k-2-s0"]
    # the cell that was stopped is gone on with first
    assert two.printed()[0].count("stopped early with a checkpoint; resume with\n") == 1
    assert begun(two.finish(folder, *two.words)) == [2, 3, 4]
    for name in ALONE:
        assert not differing(whole / name, folder / name)


def test_cells_that_lack_their_last_files_are_resumed(words: list[str], whole: Path, copied: Path) -> None:
    (copied / "fedavg-s0" / "clients.csv").unlink()
    # as a run leaves it that is killed before its last evaluation
    metrics = copied / "fedavg-s1" / "metrics.csv"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    shutil.rmtree(copied / "heurpfedla-k-2-s0")
    before = {name: what for name, what in files(copied).items() if name.startswith("heurpfedla")}
    assert table(copied, *words, "--quiet") == FINISHED
    for name in ALONE:
        assert not differing(whole / name, copied / name)
    assert before.items() <= files(copied).items()


def test_more_rounds_are_resumed_and_quiet_prints_nothing(two: Two, copied: Path) -> None:
    assert table(copied, *two.words, "train.rounds=4", "--quiet") == FINISHED
    assert tuple(two.printed()) == ("", "")
    assert [row["rounds"] for row in figures(copied)] == ["4", "4"]
    assert not list(copied.glob("*.old*"))


def test_cells_of_other_settings_are_refused_or_made_anew(two: Two, copied: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.yaml"
    changed.write_text(TABLE.replace("lr: 0.1}", "lr: 0.2}"))
    before = files(copied)
    shown = two.finish(copied, *two.words, "train.rounds=1", "--no-run")
    assert shown.count("where a run has other settings (train.rounds: 3 there, 1 here)") == 4
    for part in ("1/2", "2/2"):
        message = two.refusal(copied, changed, *two.settings, "--part", part)
        assert f"{changed}, row 2 (HeurpFedLA, k = 2), seed 0: {copied}" in message
        assert "(train.lr: 0.1 there, 0.2 here)" in message
        assert "--fresh" in message
    assert files(copied) == before
    lr = "train.lr: 0.1 there, 0.2 here"
    shown = two.finish(copied, str(changed), *two.settings, "--no-run")
    assert f"k-2-s1, where a run has other settings ({lr})" in shown
    assert two.finish(copied, str(changed), *two.settings, "--fresh").startswith("2 of 4 cells are finished")
    after = files(copied)
    assert {name: what for name, what in before.items() if name.startswith("fedavg")}.items() <= after.items()
    olds = sorted(path.name for path in copied.glob("*.old*"))
    assert olds == ["heurpfedla-k-2-s0.old1", "heurpfedla-k-2-s1.old1"]
    old, new = (copied / name / "checkpoint.h5" for name in (olds[0], "heurpfedla-k-2-s0"))
    assert old.read_bytes() == before["heurpfedla-k-2-s0/checkpoint.h5"][0] != new.read_bytes()
    assert table(copied, str(changed), *two.settings, "--fresh") == FINISHED
    assert files(copied) == after


def test_fresh_starts_over_what_cannot_resume_and_nothing_else(
    two: Two, copied: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "changed.yaml"
    changed.write_text(TABLE.replace("lr: 0.1}", "lr: 0.2}"))
    without, damaged = copied / "heurpfedla-k-2-s1", copied / "fedavg-s0"
    for name in ("checkpoint.h5", "checkpoint.prev.h5"):
        (without / name).unlink(missing_ok=True)
        (damaged / name).write_bytes(b"damaged")
    (damaged / "clients.csv").unlink()
    words = [str(changed), *two.settings, "--quiet", "--row"]
    error = two.refusal(copied, *words, "HeurpFedLA", "--seeds", "1")
    assert "holds a finished run without its checkpoint" in error
    assert "or --fresh" in error
    error = two.refusal(copied, *words, "FedAvg", "--seeds", "0")
    assert f"{damaged / 'checkpoint.h5'} is damaged" in error
    assert "add --fresh" in error
    (copied / "fedavg-s1" / "clients.csv").unlink()
    assert two.finish(copied, str(changed), *two.settings, "--fresh").startswith("0 of 4 cells are finished")
    olds = sorted(path.name for path in copied.glob("*.old*"))
    assert olds == ["fedavg-s0.old1", "heurpfedla-k-2-s0.old1", "heurpfedla-k-2-s1.old1"]


def test_metrics_are_added_to_finished_cells(two: Two, copied: Path) -> None:
    before = files(copied)
    assert two.finish(copied, *two.words, "run.metrics=true").startswith("0 of 4 cells are finished")
    assert len([*copied.glob("*/confusion.csv")]) == 4
    after = files(copied)
    assert all(after[name] == what for name, what in before.items() if name.endswith("checkpoint.h5"))
    assert two.finish(copied, *two.words, "run.metrics=true").startswith("4 of 4 cells are finished")


# Mistakes

FEW_CANDIDATES = "clients: {sampling: power_of_choice, candidates: 1}"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("lr: 0.1}", "lr: -1}", "row 2 (HeurpFedLA, k = 2): train.lr=-1 is invalid"),
        ("k: 2}", "k: 9}", "method.k=9 is more than the model's 6 layers"),
        ("tuned:", "tunde:", "row 2 (HeurpFedLA, k = 2): tunde is an unknown key"),
        ("seeds:", "run: {}\nseeds:", "compare, show, figure; write it under settings"),
        ("seeds: [0, 1]", "", "seeds is missing; a table has extends, title,"),
        ("HeurpFedLA, k = 2", "fedavg", "row 2 (fedavg): another row is called fedavg"),
        ("HeurpFedLA, k = 2", "FedAvg!", "row 2 (FedAvg!), seed 0: fedavg makes the same folder"),
        ("[0, 1]", "[]", "seeds=[] is invalid: List should have at least 1 item"),
        ("[0, 1]", "[1, 1]", "seeds=[1, 1] is invalid"),
        ("tuned:", "run: {seed: 3}\n    tuned:", "run.seed=3: the table's list of seeds sets it"),
        ("tuned: train.lr of 0.05, 0.1", FEW_CANDIDATES, "k = 2), seed 0: clients.candidates=1 are too few"),
    ],
)
def test_a_mistake_in_a_file_is_refused(two: Two, tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert TABLE.count(old) == 1
    path = tmp_path / "mistaken.yaml"
    path.write_text(TABLE.replace(old, new))
    for more in ([], ["--plan"]):
        message = two.refusal(tmp_path / "out", path, *two.settings, *more)
        assert str(path) in message
        assert expected in message
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--part", "0/2"], "--part 0/2 is invalid; give K/N with K from 1 to N"),
        (["--part", "3/2"], "--part 3/2 is invalid"),
        (["--part", "2"], "--part 2 is invalid"),
        (["--rounds", "0"], "train.rounds=0 is invalid"),
        (["--seeds", "0;1"], "--seeds: invalid seeds value: '0;1'"),
        (["--seeds", "0", "1"], "seeds are joined by commas; write --seeds 0,1"),
        (["run.seed=4"], "run.seed=4: the table's list of seeds sets it"),
        (["data.clients=99999"], "row 1 (fedavg), seed 0: "),
        (["--plan", "data.clients=99999"], "row 1 (fedavg), seed 0: "),
    ],
)
def test_a_mistake_in_a_command_is_refused(two: Two, tmp_path: Path, more: list[str], expected: str) -> None:
    assert expected in two.refusal(tmp_path / "out", *two.words, *more)
    assert list(tmp_path.iterdir()) == []


def test_a_table_file_is_needed(two: Two, tmp_path: Path) -> None:
    assert "give a table file, such as " in two.refusal(tmp_path / "out", "train.lr=1")
    assert "none.yaml: No such file" in two.refusal(tmp_path / "out", "none.yaml")


def test_a_cell_folder_of_something_else_is_refused(two: Two, tmp_path: Path) -> None:
    (tmp_path / "out" / "fedavg-s1").mkdir(parents=True)
    (tmp_path / "out" / "fedavg-s1" / "draft.txt").write_text("Dear")
    for fresh in ([], ["--fresh"]):
        message = two.refusal(tmp_path / "out", *two.words, *fresh)
        assert "exists but is not a run folder" in message
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["fedavg-s1"]


# Under mpirun


def test_ranks_stop_resume_and_make_the_same_table(
    words: list[str], whole: Path, tmp_path: Path, mpirun: Mpirun
) -> None:
    command = ["-m", "hpcfl.main", "table", *words, "--out", str(tmp_path / "out")]
    stopped = mpirun(3, *command, check=False, env=time_is_up())
    assert stopped.returncode == STOPPED
    assert stopped.stdout.splitlines()[-1].startswith("  mpirun -n 3 hpcfl table ")
    done = mpirun(3, *command)
    assert done.stderr == ""
    assert done.stdout.count(f"\n# Two methods on digits ({changed(words[1:])})\n") == 1
    for name in ALONE:
        assert not differing(whole / name, tmp_path / "out" / name)
    assert [row | SPEEDS for row in figures(tmp_path / "out")] == [row | SPEEDS for row in figures(whole)]


def test_three_ranks_print_a_plan_and_a_refusal_once(
    words: list[str], whole: Path, tmp_path: Path, mpirun: Mpirun
) -> None:
    chain = tmp_path / "chain.yaml"
    chain.write_text(TABLE.replace("heurpfedla, head_init: default, k: 2", "fedmn, order: chain"))
    before = files(whole)
    commands = [
        ["table", *words, "--out", str(whole), "--plan"],
        ["table", *words, "--out", str(whole), "train.weight_decay=0.1"],
        ["table", str(chain), *words[1:], "--out", str(tmp_path / "out")],
    ]
    (tmp_path / "codes").mkdir()
    program = REPOSITORY / "tests" / "helpers" / "world_commands.py"
    done = mpirun(3, program, json.dumps(commands), cwd=tmp_path / "codes")
    for rank in range(3):
        codes = json.loads((tmp_path / "codes" / f"codes{rank}.json").read_text())
        assert codes == [FINISHED, errors.BAD_INPUT, errors.BAD_INPUT]
    planned = [line.split()[:3] for line in done.stdout.splitlines()]
    assert [line for line in planned if line[:1] == ["fedavg"]] == [["fedavg", "2", "2"]]
    of_other, of_chain = done.stderr.splitlines()
    assert "train.weight_decay: 0.0 there, 0.1 here" in of_other
    assert "row 2 (HeurpFedLA, k = 2), seed 0: method.order=chain trains a round's clients one" in of_chain
    assert files(whole) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chain.yaml", "codes"]
