"""A table as text, Markdown, LaTeX, CSV and pictures."""

from __future__ import annotations

import csv
import io
import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcfl.config import Config
from hpcfl.errors import UserError
from hpcfl.formatting import as_latex, as_markdown, as_text
from hpcfl.results.statistics import Interval
from hpcfl.storage.atomic import replace_file
from hpcfl.storage.ledger import MOMENTS
from hpcfl.storage.lock import FolderLock
from hpcfl.tables.accuracies import ACCURACIES, COSTS, Difference, Entry, differences, entries
from hpcfl.tables.cells import Table
from hpcfl.tables.diagnostics import Line, diagnostics
from hpcfl.tables.display import document
from hpcfl.tables.histories import histories
from hpcfl.tables.paper_figures import sheets

MAX_CLIENT_LINES = 20_000
"""Largest number of lines (about 800 kB) for which `write_results` writes every client's accuracy."""


LONGEST_TURN_S = 120
"""How long a part of a table waits for another one that is writing."""

_LOOK_EVERY_S = 0.2


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Hold the lock of a table's folder, which other parts of the table wait for.

    What they have finished is seen by the one that writes last. Where a lock is not to be had, because the
    file system has none or its holder hangs, the files may lack a cell, but are whole.
    """
    with ExitStack() as at_exit, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*this file system has no locks")
        end_s = time.monotonic() + LONGEST_TURN_S
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                at_exit.enter_context(FolderLock(folder))
            except UserError:
                if time.monotonic() < end_s:
                    time.sleep(_LOOK_EVERY_S)
                    continue
            except OSError as error:
                raise _cannot_write(folder, error) from error
            break
        yield


def write(table: Table) -> tuple[str, int]:
    """Write table.md, table.tex, table.csv and differences.csv from the folders of the finished cells.

    differences.csv is written only if the table compares rows. Returns the table as text and the number of
    missing cells. Raises UserError if the files cannot be written.
    """
    known = entries(table)
    compared = differences(table, known)
    made = document(table, known, compared)
    files = {f"{name}.csv": text for name, text in _csv_files(table, known, compared).items()}
    files |= {"table.md": as_markdown(made), "table.tex": as_latex(made)}
    _write_files(table.folder, files)
    return as_text(made), sum(entry.missing for entry in known)


@dataclass(frozen=True)
class FromHistories:
    """What is made of the cells' checkpoints."""

    diagnostics: list[Line]
    """Lines of diagnostics.csv."""
    pictures: dict[str, bytes]
    """PNG and PDF files by name."""
    undrawn: list[str]
    """Names, without ending, of pictures of which nothing is finished."""


def write_from_histories(table: Table) -> FromHistories:
    """Write diagnostics.csv and the figure's pictures beside the table, where there is something to tell.

    If a column's data cannot be read any more, warns and writes no diagnostics of it. Raises UserError if the
    figure names layers or clients that the cells do not have.
    """
    found = histories(table)
    try:
        lines = diagnostics(table, found)
    except UserError as error:
        warnings.warn(f"no diagnostics.csv: {error}", stacklevel=1)
        lines = []
    pictures: dict[str, bytes] = {}
    undrawn = []
    if table.drawings:
        # a run that draws nothing need not wait for matplotlib
        from hpcfl.tables.drawing import draw

        for name, sheet in sheets(table, entries(table), found).items():
            if sheet is None:
                undrawn.append(name)
            else:
                pictures |= {f"{name}.{ending}": content for ending, content in draw(sheet).items()}
    stale = {path for name in undrawn for path in table.folder.glob(f"{name}.*")}
    for path in (*stale, table.folder / "diagnostics.csv"):
        path.unlink(missing_ok=True)
    files: dict[str, str | bytes] = {**pictures}
    if lines:
        files["diagnostics.csv"] = _csv(lines)
    _write_files(table.folder, files)
    return FromHistories(lines, pictures, undrawn)


def write_results(table: Table, told: FromHistories) -> list[Path]:
    """Write the table's results in the folder results/ beside the table file; return the files.

    <name>.csv holds the lines of table.csv, <name>_differences.csv the compared rows if there are any,
    <name>_diagnostics.csv the diagnostics if there are any, <name>_clients.csv the accuracy of every client
    if these are at most MAX_CLIENT_LINES lines, and <name>_figure.png the figure if it is drawn.
    """
    known = entries(table)
    texts = _csv_files(table, known, differences(table, known))
    lines = [
        {"label": entry.row.label, "column": entry.column, "seed": seed}
        | {"client": client, "accuracy": round(accuracy, 4)}
        for entry in known
        for seed in entry.runs
        for client, accuracy in enumerate(entry.of_clients(seed))
    ]
    if 0 < len(lines) <= MAX_CLIENT_LINES:
        texts["clients"] = _csv(lines)
    if told.diagnostics:
        texts["diagnostics"] = _csv(told.diagnostics)
    stem = table.result_name
    files: dict[str, str | bytes] = {
        f"{stem}.csv" if kind == "table" else f"{stem}_{kind}.csv": text for kind, text in texts.items()
    }
    files |= {f"{stem}_{name}": data for name, data in told.pictures.items() if name.endswith(".png")}
    folder = table.path.parent / "results"
    _write_files(folder, files)
    return [folder / name for name in files]


def _csv_files(table: Table, known: Sequence[Entry], compared: Sequence[Difference]) -> dict[str, str]:
    """Return table.csv, and where rows are compared differences.csv, by their names without `.csv`."""
    texts = {"table": _csv([_line(table, entry) for entry in known])}
    if compared:
        texts["differences"] = _csv([_difference_line(table, difference) for difference in compared])
    return texts


def _csv(lines: Sequence[Mapping[str, object]]) -> str:
    """Return lines of the same columns, at least one, as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _line(table: Table, entry: Entry) -> dict[str, object]:
    """Return a line of table.csv.

    Accuracies are fractions. `seeds_after_download` and `seeds_after_training` are how many of the seeds were
    scored at that moment.
    """
    config = entry.config
    line: dict[str, object] = {
        "label": entry.row.label,
        "column": entry.column,
        "method": config.method.name,
        "settings": settings(config),
        "accuracy_mean": entry.mean("accuracy_mean"),
        "accuracy_std_over_seeds": entry.deviation("accuracy_mean"),
        "published_accuracy": None if entry.published is None else round(entry.published / 100, 6),
        "published_bytes": entry.row.published_bytes.get(entry.column),
    }
    for name in ACCURACIES[1:]:
        line |= {name: entry.mean(name), f"{name}_std_over_seeds": entry.deviation(name)}
    line |= {"best_round": entry.mean("best_round"), "scored": entry.scored}
    line |= {"coverage": entry.mean("coverage"), "seeds": len(entry.runs), "missing_seeds": entry.missing}
    line |= {f"seeds_{moment}": entry.count(f"accuracy_{moment}") for moment in MOMENTS}
    line |= {"rounds": config.train.rounds, "eval_split": config.run.eval_split}
    for name in COSTS:
        mean = entry.mean(name)
        line[name] = round(mean) if mean is not None and "bytes" in name else mean
    line |= {"finetune_epochs": config.train.finetune_epochs, "tuned": entry.row.tuned}
    line |= {"title": table.title, "size": table.size}
    for seed in table.seeds:
        line[f"accuracy_seed_{seed}"] = entry.figures[seed]["accuracy_mean"] if seed in entry.runs else None
    return line


def settings(config: Config) -> str:
    """Return a run's step size, and the hyper-parameters that are not its method's defaults."""
    given = config.method.options.model_dump(mode="json", exclude_defaults=True)
    own = [
        f"method.{name}={json.dumps(given[name])}" for name in config.method.options.in_use() if name in given
    ]
    return " ".join([f"train.lr={config.train.lr:g}", *own])


def _difference_line(table: Table, difference: Difference) -> dict[str, object]:
    """Return a line of differences.csv, of fractions; a bound is empty where there is no interval.

    `weighted` is 1 where clients count with their samples, which leaves the columns of clients empty;
    `partitions` is how many the seeds have drawn.
    """
    over_seeds, over_clients = difference.over_seeds, difference.over_clients
    return {
        "first": difference.rows[0],
        "second": difference.rows[1],
        "column": difference.column,
        "moment": difference.moment,
        "weighted": int(difference.is_weighted),
        "difference": over_seeds and over_seeds.mean,
        **_bounds("over_seeds", over_seeds),
        "seeds": len(difference.seeds),
        "partitions": difference.partitions,
        **_bounds("over_clients", over_clients),
        "clients_and_seeds": over_clients and over_clients.count,
        "title": table.title,
        "size": table.size,
    }


def _bounds(name: str, found: Interval | None) -> dict[str, float | None]:
    if found is None or found.count < 2:
        return {f"{name}_low": None, f"{name}_high": None}
    return {f"{name}_low": found.mean - found.half_width, f"{name}_high": found.mean + found.half_width}


def _write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files by name; UserError where that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            replace_file(folder / name, content)
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: OSError) -> UserError:
    return UserError(f"cannot write the table in {folder}: {error.strerror}; name another with --out DIR")
