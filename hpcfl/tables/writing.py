"""A table as text, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfl.errors import UserError
from hpcfl.tables.cells import Table
from hpcfl.tables.figures import ACCURACIES, COSTS, Entry, entries
from hpcfl.tables.file import ONLY
from hpcfl.tables.quantities import DEFAULT_SHOW, ONLY_WHERE_THEY_DIFFER, QUANTITIES

MISSING = "missing"
NO_CELL = "-"

COLUMNS = (
    "label",
    "column",
    "method",
    "accuracy_mean",
    "accuracy_std_over_seeds",
    "published_accuracy",
    *(
        name
        for accuracy in ACCURACIES
        if accuracy != "accuracy_mean"
        for name in (accuracy, f"{accuracy}_std_over_seeds")
    ),
    "best_round",
    "scored",
    "coverage",
    "seeds",
    "missing_seeds",
    "rounds",
    "eval_split",
    *COSTS,
    "gradients_a_batch",
    "finetune_epochs",
    "tuned",
)
"""Columns of table.csv before those of each seed's accuracy; accuracies lie between 0 and 1."""


@dataclass(frozen=True)
class Grid:
    """One table of a document."""

    caption: str
    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Document:
    """All that is printed of a table, in no format yet."""

    title: str
    notes: list[str]
    grids: list[Grid]


def write(table: Table) -> tuple[str, int]:
    """Write table.md, table.tex and table.csv from the folders of the finished cells.

    Returns the table as text, and how many cells are missing. Raises UserError where it cannot write.
    """
    known = entries(table)
    document = _document(table, known)
    files = {
        "table.csv": _csv(table, known),
        "table.md": as_markdown(document),
        "table.tex": as_latex(document),
    }
    try:
        table.folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            replace_file(table.folder / name, text)
    except OSError as error:
        raise UserError(
            f"cannot write the table in {table.folder}: {error.strerror}; name another with --out DIR"
        ) from error
    return as_text(document), sum(entry.missing for entry in known)


def _csv(table: Table, known: Sequence[Entry]) -> str:
    lines = io.StringIO()
    of_seeds = [f"accuracy_seed_{seed}" for seed in table.seeds]
    writer = csv.DictWriter(lines, [*COLUMNS, *of_seeds], lineterminator="\n")
    writer.writeheader()
    writer.writerows(_line(entry) for entry in known)
    return lines.getvalue()


def _line(entry: Entry) -> dict[str, Any]:
    """Return a line of table.csv."""
    line: dict[str, Any] = {
        "label": entry.row.label,
        "column": entry.column,
        "method": entry.config.method,
        "accuracy_std_over_seeds": entry.deviation("accuracy_mean"),
        "published_accuracy": None if entry.published is None else round(entry.published / 100, 6),
        "scored": entry.scored,
        "seeds": len(entry.figures),
        "missing_seeds": entry.missing,
        "rounds": entry.config.train.rounds,
        "eval_split": entry.config.run.eval_split,
        "gradients_a_batch": entry.gradients_a_batch,
        "finetune_epochs": entry.config.train.finetune_epochs,
        "tuned": entry.row.tuned,
    }
    for name in (*ACCURACIES, "best_round", "coverage", *COSTS):
        mean = entry.mean(name)
        line[name] = round(mean) if mean is not None and "bytes" in name else mean
    for name in ACCURACIES[1:]:
        line[f"{name}_std_over_seeds"] = entry.deviation(name)
    for seed, figures in entry.figures.items():
        line[f"accuracy_seed_{seed}"] = figures["accuracy_mean"]
    return line


def _document(table: Table, known: Sequence[Entry]) -> Document:
    grids = []
    if table.columns != [ONLY]:
        grids.append(_overview(table, known))
    for column in table.columns:
        of_column = [entry for entry in known if entry.column == column]
        if of_column:
            grids.append(_details(table, column, of_column))
    notes = [*([table.size] if table.size else []), _setting(table)]
    return Document(table.title, notes, grids)


def _overview(table: Table, known: Sequence[Entry]) -> Grid:
    """Return rows by columns, the first shown quantity in each, the published number in brackets."""
    first = QUANTITIES[table.show[0]]
    by_place = {(entry.row.label, entry.column): entry for entry in known}
    rows = []
    for label in table.labels:
        line = [label]
        for column in table.columns:
            entry = by_place.get((label, column))
            text = NO_CELL if entry is None else _shown(first.show, entry, first.of_runs)
            if entry is not None and entry.published is not None:
                text += f" ({entry.published:.2f})"
            line.append(text)
        rows.append(line)
    published = f"; in brackets: published, {table.source}" if table.source else ""
    if not table.source and any(entry.published is not None for entry in known):
        published = "; in brackets: published"
    return Grid(f"{first.header}{published}", ["method", *table.columns], rows)


def _details(table: Table, column: str, known: Sequence[Entry]) -> Grid:
    """Return all shown quantities of the rows of a column."""
    shown = {name: QUANTITIES[name] for name in table.show}
    lines = {
        name: [_shown(quantity.show, entry, quantity.of_runs, name == table.show[0]) for entry in known]
        for name, quantity in shown.items()
    }
    if table.show == list(DEFAULT_SHOW):
        for name, cells in list(lines.items()):
            same = name in ONLY_WHERE_THEY_DIFFER and len(set(cells)) == 1
            if same or not any(cells):
                del lines[name]
    header = ["method", *(shown[name].header for name in lines)]
    rows = [
        [entry.row.label, *(cells[number] for cells in lines.values())] for number, entry in enumerate(known)
    ]
    return Grid(column, header, rows)


def _shown(show: Callable[[Entry], str], entry: Entry, of_runs: bool, first: bool = True) -> str:
    """Return a quantity of an entry; that it is missing, once a line, where no seed is finished."""
    if of_runs and not entry.figures:
        return MISSING if first else ""
    return show(entry)


def _setting(table: Table) -> str:
    """Say in a line what all figures have in common."""
    configs = [cell.config for cell in table.cells]
    published = f"published: {table.source}; " if table.source else ""
    return (
        f"Seeds {', '.join(map(str, table.seeds))}; "
        f"rounds {_values(config.train.rounds for config in configs)}; "
        f"clients {_values(config.data.clients or 'as the data has them' for config in configs)}; "
        f"accuracy on the {_values(config.run.eval_split for config in configs)} split after the last "
        f"round, mean over clients, mean ± standard deviation over seeds; {published}"
        "bytes a client and round, of trainable numbers + of running statistics and indices; "
        "client steps are updates of weights by a mini-batch, whatever each costs."
    )


def as_text(document: Document) -> str:
    """Return a document as aligned columns for a terminal."""
    parts = [f"# {document.title}\n", *(f"{note}\n" for note in document.notes)]
    for grid in document.grids:
        lines = [grid.header, *grid.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = (
            "  ".join(
                cell.ljust(width) if number == 0 else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )
        caption = f"{grid.caption}:\n" if grid.caption else ""
        parts.append(caption + "\n".join(aligned) + "\n")
    return "\n".join(parts)


def as_markdown(document: Document) -> str:
    """Return a document as Markdown."""
    parts = [f"# {document.title}\n", *(f"{note}\n" for note in document.notes)]
    for grid in document.grids:
        if grid.caption:
            parts.append(f"## {grid.caption}\n")
        lines = (grid.header, ["---"] * len(grid.header), *grid.rows)
        parts.append(
            "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)
        )
    return "\n".join(parts)


def as_latex(document: Document) -> str:
    r"""Return a document as LaTeX to be put into another with \input; it needs no package."""
    parts = [f"% {document.title}", *(f"% {note}" for note in document.notes), ""]
    notes = " ".join(map(_escaped, document.notes))
    parts += [rf"\noindent\textbf{{{_escaped(document.title)}}}\par", rf"\noindent {notes}\par"]
    for grid in document.grids:
        if grid.caption:
            parts.append(rf"\medskip\noindent\textbf{{{_escaped(grid.caption)}}}\par")
        header, *rows = (" & ".join(map(_escaped, line)) + r" \\" for line in (grid.header, *grid.rows))
        parts += [
            rf"\medskip\noindent\begin{{tabular}}{{l{'r' * (len(grid.header) - 1)}}}",
            r"\hline",
            header,
            r"\hline",
            *rows,
            r"\hline",
            r"\end{tabular}\par",
        ]
    return "\n".join(parts) + "\n"


_LATEX = {character: rf"\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
}


def _escaped(text: str) -> str:
    return re.sub(r"[&%$#_{}\\~^<>|±]", lambda found: _LATEX[found[0]], text)


def replace_file(path: Path, text: str) -> None:
    """Write a file so that no reader ever sees half of it."""
    unfinished = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def _values(values: Iterable[object]) -> str:
    return " or ".join(dict.fromkeys(map(str, values)))
