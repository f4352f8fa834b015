"""A table as text, Markdown, LaTeX, CSV and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path

from hpcfl.config.keys import Chosen, Params
from hpcfl.formatting import as_latex, as_markdown, as_text
from hpcfl.results.statistics import Interval
from hpcfl.storage.atomic import csv_text, replace_file, writing
from hpcfl.storage.ledger import MOMENTS
from hpcfl.tables.accuracies import ACCURACIES, COSTS, Difference, Result, differences, read_results
from hpcfl.tables.cells import Table
from hpcfl.tables.diagnostics_csv import diagnostics, read_histories
from hpcfl.tables.display import document

MAX_CLIENT_LINES = 20_000
"""Largest number of lines (about 800 kB) for which `write_results` writes every client's accuracy."""


def write(table: Table) -> str:
    """Write table.md, table.tex, table.csv and differences.csv from the folders of the finished cells.

    differences.csv is written only if the table compares rows. Returns the table as text. Raises UserError if
    the files cannot be written.
    """
    results = read_results(table)
    compared = differences(table, results)
    made = document(table, results, compared)
    files: dict[str, str | bytes] = {
        "table.md": as_markdown(made),
        "table.tex": as_latex(made, table.result_name),
    }
    files["table.csv"] = _csv([_line(table, result) for result in results])
    if compared:
        files["differences.csv"] = _csv([_difference_line(table, one) for one in compared])
    _write_files(table.folder, files, old=["differences.csv"])
    return as_text(made)


def write_from_histories(table: Table) -> dict[str, list[str]]:
    """Write diagnostics.csv and the figure's pictures beside the table, where there is something to show.

    Returns the files of each picture by its name without ending, none where nothing of it is finished. Raises
    UserError if the figure names layers or clients that the cells do not have.
    """
    histories = read_histories(table)
    lines = diagnostics(table, histories)
    files: dict[str, str | bytes] = {"diagnostics.csv": _csv(lines)} if lines else {}
    drawn, names = {}, ["diagnostics.csv"]
    if table.drawings:
        # a run that draws nothing need not wait for matplotlib
        from hpcfl.tables.drawing import WITHOUT_CLOCK_AND_VERSION, as_files, draw

        for name, picture in draw(table, read_results(table), histories):
            made = {} if picture is None else as_files(name, picture)
            drawn[name] = list(made)
            files |= made
            names += [f"{name}.{ending}" for ending in WITHOUT_CLOCK_AND_VERSION]
    _write_files(table.folder, files, old=names)
    return drawn


def write_results(table: Table) -> list[Path]:
    """Copy what is written of a table into the folder results/ beside the table file; return the files.

    <name>.csv is table.csv, <name>_differences.csv and <name>_diagnostics.csv are what is called so and
    <name>_figure.png is the figure, each if it is there. <name>_clients.csv has the accuracy of every client,
    and its domain if the data have domains, if these are at most MAX_CLIENT_LINES lines. Earlier files that
    these do not replace are deleted.
    """
    stem = table.result_name
    copies = {"table.csv": f"{stem}.csv"}
    others = ["differences.csv", "diagnostics.csv", *(f"{name}.png" for name in table.figure_names)]
    copies |= {name: f"{stem}_{name}" for name in others}
    files: dict[str, str | bytes] = {
        copy: (table.folder / name).read_bytes()
        for name, copy in copies.items()
        if (table.folder / name).exists()
    }
    results = read_results(table)
    has_domains = any(run.domains for result in results for run in result.runs.values())
    lines = [
        {"label": result.row.label, "column": result.column, "seed": seed}
        | {"client": client, "accuracy": round(accuracy, 4)}
        | ({"domain": domains[client] if domains else ""} if has_domains else {})
        for result in results
        for seed, run in result.runs.items()
        for domains in [run.domains]
        for client, accuracy in enumerate(result.by_client(seed))
    ]
    if 0 < len(lines) <= MAX_CLIENT_LINES:
        files[f"{stem}_clients.csv"] = _csv(lines)
    folder = table.path.parent / "results"
    old = [*copies.values(), f"{stem}_clients.csv"]
    _write_files(folder, files, old, advice="make it writable, or copy the table file elsewhere")
    return [folder / name for name in files]


def _csv(lines: Sequence[Mapping[str, object]]) -> str:
    """Return lines of the same columns, at least one, as CSV."""
    return csv_text([lines[0], *(line.values() for line in lines)])


def _line(table: Table, result: Result) -> dict[str, object]:
    """Return a line of table.csv.

    Accuracies are fractions. `seeds_after_download` and `seeds_after_training` are how many of the seeds were
    scored at that moment, `clients_with_auc` how many clients of all seeds have samples of several classes.
    """
    config = result.config
    line: dict[str, object] = {
        "label": result.row.label,
        "column": result.column,
        "method": config.method.name,
        "settings": settings(config.method, config.train.lr),
        "accuracy_mean": result.mean("accuracy_mean"),
        "accuracy_std_over_seeds": result.deviation("accuracy_mean"),
        "published_accuracy": None if result.published is None else round(result.published / 100, 6),
        "published_bytes": result.published_bytes,
    }
    for name in ACCURACIES[1:]:
        line |= {name: result.mean(name), f"{name}_std_over_seeds": result.deviation(name)}
    line |= {"best_round": result.mean("best_round"), "scored": result.scored}
    line |= {"coverage": result.mean("coverage"), "seeds": len(result.runs), "missing_seeds": result.missing}
    line |= {f"seeds_{moment}": result.count(f"accuracy_{moment}") for moment in MOMENTS}
    line["clients_with_auc"] = result.known_clients("auc")[0] or None
    line |= {"rounds": config.train.rounds, "rounds_done": result.mean("rounds_done")}
    line["eval_split"] = config.run.eval_split
    for name in COSTS:
        mean = result.mean(name)
        line[name] = round(mean) if mean is not None and "bytes" in name else mean
    line |= {"finetune_epochs": config.train.finetune_epochs, "tuned": result.row.tuned}
    line |= {"title": table.title, "size": table.size}
    for seed in table.seeds:
        line[f"accuracy_seed_{seed}"] = result.figures[seed]["accuracy_mean"] if seed in result.runs else None
    return line


def settings(method: Chosen[Params], lr: float) -> str:
    """Return a run's learning rate, and the hyper-parameters that are not its method's defaults."""
    given = method.options.model_dump(mode="json", exclude_defaults=True)
    own = [f"method.{name}={json.dumps(value)}" for name, value in given.items()]
    return " ".join([f"train.lr={lr:g}", *own])


def _difference_line(table: Table, difference: Difference) -> dict[str, object]:
    """Return a line of differences.csv, of fractions; a bound is empty where there is no interval.

    `partitions` is how many the seeds have drawn.
    """
    paired = difference.paired
    over_seeds, over_clients = (paired.over_seeds, paired.over_clients) if paired else (None, None)
    return {
        "first": difference.pair.rows[0],
        "second": difference.pair.rows[1],
        "column": difference.column,
        "moment": difference.moment,
        "weighted": int(difference.pair.weighted),
        "difference": over_seeds and over_seeds.mean,
        **_bounds("over_seeds", over_seeds),
        "seeds": difference.seeds,
        "partitions": difference.partitions,
        **_bounds("over_clients", over_clients),
        "clients_and_seeds": over_clients and over_clients.count,
        "title": table.title,
        "size": table.size,
    }


def _bounds(name: str, found: Interval | None) -> dict[str, float | None]:
    if found is None or isnan(found.half_width):
        return {f"{name}_low": None, f"{name}_high": None}
    return {f"{name}_low": found.mean - found.half_width, f"{name}_high": found.mean + found.half_width}


def _write_files(
    folder: Path,
    files: Mapping[str, str | bytes],
    old: Sequence[str] = (),
    advice: str = "name another with --out DIR",
) -> None:
    """Write files by name, and delete those of the `old` names that these do not replace.

    UserError where they cannot be written, StorageError without room.
    """
    with writing(f"the table in {folder}", advice):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            replace_file(folder / name, content)
        for name in set(old) - files.keys():
            # a folder of this name is the user's
            if (folder / name).is_file():
                (folder / name).unlink(missing_ok=True)
