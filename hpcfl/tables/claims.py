"""What papers claim, and what this project's result files say of it, by rule.

A claims file names a paper and its sentences. Each is about a row of tables that is above other rows, or
above a number. The verdict on a column follows from the difference of accuracies and its 95 % interval over
seeds:

    shown      three seeds or more, and the interval lies above 0
    seen       above, but of fewer seeds, of equal differences, or of an interval with 0 in it
    not shown  not above, but of fewer seeds, of equal differences, or of an interval with 0 in it
    refuted    three seeds or more, and the interval lies below 0
    not run    no result
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpcfl.config.key_errors import FileKeys, validate_file
from hpcfl.config.load import read_yaml
from hpcfl.errors import UserError
from hpcfl.formatting import Document, Grid, percent
from hpcfl.results.statistics import interval
from hpcfl.tables.cells import Table
from hpcfl.tables.file import ONLY, Moment, Pair, Text, as_list, check_known

RULES = {"printed": "the paper's rule", "ours": "a rule of ours, which differs from a printed equation"}
VERDICTS = ("shown", "seen", "not shown", "refuted", "not run")
ENOUGH_SEEDS = 3
RESULTS = "results"
"""Folder of the result files, beside the table files."""
TABLES = "tables"
"""Folder of the table files, beside that of the claims files."""

Line = dict[str, str]
"""A line of a result file, by column."""


class Runs(FileKeys):
    """A table that tests a claim: which row is above which."""

    table: Text
    """Name of a table file, without .yaml."""
    row: Text
    above: Annotated[list[Text] | list[float], as_list] = Field(min_length=1)
    """Labels of other rows, or an accuracy in %."""
    columns: list[Text] = Field([])
    """Default: all in which the table compares these rows."""
    at: Moment | None = None
    """When models are scored; default: each row's own moment."""
    weighted: bool = False
    """Whether clients count with their samples."""
    printed_rounds: int | None = Field(None, ge=1)
    """Rounds of the paper, where the table has fewer."""


class Claim(FileKeys):
    sentence: Text
    where: Text
    """Table or figure of the paper."""
    rule: Literal["printed", "ours"]
    """Whether the rows follow the paper's equations, or differ from one, as the method's file says."""
    runs: list[Runs] = Field(min_length=1)
    reason: Text | None = None
    """Why the outcome is as it is, as far as it was found."""
    evidence: Text | None = None
    """Result file that the reason rests on; a reason has one."""

    @model_validator(mode="after")
    def _reason_has_evidence(self) -> Claim:
        if (self.reason is None) != (self.evidence is None):
            raise ValueError("reason and evidence, the result file that it rests on, go together")
        return self


class ClaimsFile(FileKeys):
    paper: Text
    tables: list[Text] = Field([])
    """Tables of the paper in full, of which each cell is listed beside ours."""
    smaller: list[Text] = Field([])
    """Smaller tables without a claim, whose cells stand in for those that are not run in full."""
    claims: list[Claim] = Field(min_length=1)


@dataclass(frozen=True)
class Verdict:
    """What one table says of a claim in one column; numbers are accuracies between 0 and 1."""

    claim: Claim
    table: str
    column: str
    pair: str
    rounds: str = ""
    """As `30 of 600`; the second is the paper's. Of both rows, as `296 and 150`, where they differ."""
    moment: str = ""
    """When the models were scored."""
    seeds: int = 0
    difference: float | None = None
    bounds: tuple[float, float] | None = None
    """Of the 95 % interval over seeds; None without one."""
    is_of_one_partition: bool = False
    """Whether all seeds deal the same samples to the same clients."""

    @property
    def word(self) -> str:
        if self.difference is None:
            return "not run"
        if self.seeds >= ENOUGH_SEEDS and self.bounds is not None:
            if self.bounds[0] > 0:
                return "shown"
            if self.bounds[1] < 0:
                return "refuted"
        return "seen" if self.difference > 0 else "not shown"

    @property
    def text(self) -> str:
        """The difference in points, with its interval."""
        if self.difference is None:
            return ""
        text = f"{100 * self.difference:+.1f}"
        if self.bounds is not None:
            text += f" [{100 * self.bounds[0]:+.1f}, {100 * self.bounds[1]:+.1f}]"
            text += " of one partition" * self.is_of_one_partition
        return text


class ResultFiles:
    """A table file and its result files."""

    def __init__(self, path: Path, place: str) -> None:
        """Read the table file; UserError, which begins with `place`, where it cannot be read."""
        if not os.path.isfile(path):
            raise UserError(f"{place}: there is no table file {path}; name one that is there")
        self.table = Table(path)
        folder = path.parent / RESULTS
        shortened = {
            int(rounds[1]): file.stem
            for file in folder.glob(f"{path.stem}-*rounds.csv")
            if (rounds := re.fullmatch(rf"{re.escape(path.stem)}-(\d+)rounds", file.stem))
        }
        # the table in full comes first, then what was shortened least
        stems = [path.stem, *(shortened[rounds] for rounds in sorted(shortened, reverse=True))]
        cells = {(cell.label, cell.column) for cell in self.table.cells}
        self._files = [
            [
                _read_csv(folder / f"{stem}.csv", ["label"], cells),
                _read_csv(folder / f"{stem}_differences.csv", ["first", "second"], cells),
            ]
            for stem in stems
        ]
        """Lines of the results, and of the differences, of each file."""

    def line(self, label: str, column: str) -> Line | None:
        """Return the result of a row in a column, of the longest run; None where no seed is finished."""
        found = (_finished(results, label, column) for results, _ in self._files)
        return next((line for line in found if line is not None), None)

    def difference(self, pair: Pair, column: str, rows: Sequence[str]) -> tuple[Line, list[Line]] | None:
        """Return a pair's difference in a column, and the results of `rows` in the same file, in their order.

        Returns None where no seed is finished.
        """
        found = [
            (line, [result for row in rows if (result := _finished(results, row, column))])
            for results, differences in self._files
            for line in differences
            if [line["first"], line["second"], line["column"]] == [*pair.rows, column]
            and line.get("weighted", "0") == str(int(pair.weighted))
            and line["difference"]
        ]
        if pair.at is None:
            # without a moment of its own, a pair has whatever moments its rows have
            same = [one for one in self.table.compare if set(one.rows) == set(pair.rows)]
            others = {one.at.replace("_", " ") for one in same if one.at is not None}
            found.sort(key=lambda lines: lines[0]["moment"] in others)
        else:
            found = [lines for lines in found if lines[0]["moment"] == pair.at.replace("_", " ")]
        return found[0] if found else None

    def rounds(self, line: Line, in_full: int | None = None) -> str:
        """Return the rounds of a result, and of how many where it was shortened; default: of the table's."""
        full = in_full or self.table.cells_of(line["label"], line["column"])[0].config.train.rounds
        return f"{line['rounds']} of {full}" if int(line["rounds"]) < full else line["rounds"]


@dataclass(frozen=True)
class Claims:
    """A claims file, checked."""

    path: Path
    paper: str
    by_claim: list[list[Verdict]]
    tables: list[ResultFiles]
    """Of the paper in full."""
    smaller: list[ResultFiles]
    """Tables that test its claims, then others; their cells stand in for those of the same labels not run."""

    @property
    def has_results(self) -> bool:
        return any(verdict.difference is not None for found in self.by_claim for verdict in found)


def read_claims(path: Path) -> Claims:
    """Read a claims file, and judge its claims by the result files of their tables.

    Raises UserError for the first row, column, moment, pair, table or key that is not there.
    """
    file = validate_file(path, read_yaml(path, "give a claims file (YAML)"), ClaimsFile)
    folder = path.parent.parent / TABLES
    known: dict[str, ResultFiles] = {}

    def results(name: str, place: str) -> ResultFiles:
        if name not in known:
            known[name] = ResultFiles(folder / f"{name}.yaml", place)
        return known[name]

    by_claim: list[list[Verdict]] = []
    for number, claim in enumerate(file.claims, 1):
        place = f"{path}, claim {number} ({claim.sentence})"
        if claim.evidence is not None and not (folder / RESULTS / claim.evidence).is_file():
            raise UserError(f"{place}: evidence={claim.evidence} is not a file in {folder / RESULTS}")
        by_claim.append([])
        for runs in claim.runs:
            of = (results(runs.table, place), f"{place}, {runs.table}")
            for other in runs.above:
                if isinstance(other, str):
                    by_claim[-1] += _over_row(claim, runs, other, *of)
                else:
                    by_claim[-1] += _over_number(claim, runs, other, *of)
    tables = [results(name, f"{path}, tables") for name in file.tables]
    for name in file.smaller:
        results(name, f"{path}, smaller")
    smaller = [found for name, found in known.items() if name not in file.tables]
    return Claims(path, file.paper, by_claim, tables, smaller)


def document(claims: Claims) -> Document:
    """Return the verdicts, and each cell of the paper's tables beside ours."""
    grids = [
        *map(_verdicts_on, claims.by_claim),
        *(_ours_and_published(full, claims.smaller) for full in claims.tables),
    ]
    notes = [
        "Shown: three seeds or more, and the 95 % interval over seeds lies above 0. Refuted: three seeds or "
        "more, and it lies below 0. Seen: the difference is above 0, but of fewer seeds, of equal "
        "differences, or of an interval with 0 in it. Not shown: it is not, and nothing is refuted. "
        "Differences are in points; intervals are not corrected for the number of comparisons."
    ]
    return Document(claims.paper, notes, [grid for grid in grids if grid.rows])


def overview(many: Sequence[Claims]) -> Grid:
    """Return one line a claim: how many of its comparisons have each verdict."""
    rows = []
    for claims in many:
        for verdicts in claims.by_claim:
            claim, words = verdicts[0].claim, [verdict.word for verdict in verdicts]
            counts = [str(words.count(word)) for word in VERDICTS]
            rows.append([claims.path.stem, claim.where, claim.sentence, claim.rule, *counts])
    return Grid("", ["paper", "where", "claim", "rule", *VERDICTS], rows)


def _over_row(claim: Claim, runs: Runs, other: str, results: ResultFiles, place: str) -> Iterator[Verdict]:
    """Yield the verdicts on a row's accuracy over another row's, in each column."""
    table = results.table
    for label in (runs.row, other):
        check_known(place, label, "row", table.labels)
    pairs = [pair for pair in table.compare if set(pair.rows) == {runs.row, other}]
    pair = next((one for one in pairs if (one.at, one.weighted) == (runs.at, runs.weighted)), None)
    if pair is None:
        at = ("" if runs.at is None else f", at: {runs.at}") + ", weighted: true" * runs.weighted
        # a label may have a comma
        rows = json.dumps([runs.row, other], ensure_ascii=False)
        raise UserError(f"{place}: {table.path} has no such pair; add {{rows: {rows}{at}}} to its compare")
    for column in runs.columns or pair.columns:
        check_known(f"{place}: {runs.row} compared with {other}", column, "column", pair.columns)
        name = f"{runs.row} - {other}" + ", weighted by samples" * runs.weighted
        of = (claim, table.path.stem, column, name)
        if (found := results.difference(pair, column, [runs.row, other])) is None:
            yield Verdict(*of, moment=(runs.at or "").replace("_", " "))
            continue
        line, of_rows = found
        rounds = dict.fromkeys(results.rounds(result, runs.printed_rounds) for result in of_rows)
        difference, low, high = (
            float(line[name]) if line[name] else math.nan
            for name in ("difference", "over_seeds_low", "over_seeds_high")
        )
        if pair.rows[0] != runs.row:
            difference, low, high = -difference, -high, -low
        yield Verdict(
            *of,
            rounds=" and ".join(rounds),
            moment=line["moment"],
            seeds=int(line["seeds"]),
            difference=difference,
            bounds=None if math.isnan(low) else (low, high),
            is_of_one_partition=line.get("partitions") == "1",
        )


def _over_number(
    claim: Claim, runs: Runs, number: float, results: ResultFiles, place: str
) -> Iterator[Verdict]:
    """Yield the verdicts on a row's accuracy over a number in %, in each column."""
    table = results.table
    if runs.at is not None or runs.weighted:
        raise UserError(f"{place}: at and weighted go with other rows; leave them out with a number")
    check_known(place, runs.row, "row", table.labels)
    columns = [column for column in table.columns if table.cells_of(runs.row, column)]
    for column in runs.columns or columns:
        check_known(place, column, "column", columns)
        of = (claim, table.path.stem, column, f"{runs.row} - {number:g} %")
        if (line := results.line(runs.row, column)) is None:
            yield Verdict(*of)
            continue
        seeds = [float(value) for key, value in line.items() if key.startswith("accuracy_seed_") and value]
        found = interval([accuracy - number / 100 for accuracy in seeds])
        bounds = (found.mean - found.half_width, found.mean + found.half_width)
        yield Verdict(
            *of,
            rounds=results.rounds(line, runs.printed_rounds),
            moment=line["scored"],
            seeds=len(seeds),
            difference=found.mean,
            bounds=None if math.isnan(found.half_width) else bounds,
        )


def _verdicts_on(verdicts: Sequence[Verdict]) -> Grid:
    """Return the verdicts on one claim; columns in which a pair was not run share a line."""
    claim = verdicts[0].claim
    caption = f"{claim.where}: {claim.sentence} ({RULES[claim.rule]})"
    note = "" if claim.reason is None else f"Why: {claim.reason} ({claim.evidence})."
    header = ["rows", "column", "verdict", "difference", "scored", "seeds", "rounds", "table"]
    rows, not_run = [], dict[tuple[str, str, str], list[str]]()
    for verdict in verdicts:
        if verdict.difference is None:
            not_run.setdefault((verdict.pair, verdict.moment, verdict.table), []).append(verdict.column)
            continue
        figures = [verdict.word, verdict.text, verdict.moment, str(verdict.seeds), verdict.rounds]
        rows.append([verdict.pair, verdict.column, *figures, verdict.table])
    for (pair, moment, table), columns in not_run.items():
        where = columns[0] if len(columns) == 1 else f"{len(columns)} columns"
        rows.append([pair, where, "not run", "", moment, "", "", table])
    return Grid(caption, header, rows, note)


def _ours_and_published(results: ResultFiles, smaller: Sequence[ResultFiles]) -> Grid:
    """Return the accuracy of each row and column beside the paper's, in %, with its seeds and rounds.

    It is weighted by samples where the table shows that first, as the paper's is.
    """
    table = results.table
    is_weighted = next((name for name in table.show if name in ("weighted", "accuracy")), "") == "weighted"
    mean = "accuracy_weighted" if is_weighted else "accuracy_mean"
    deviation = f"{mean.removesuffix('_mean')}_std_over_seeds"
    columns = [name for name in table.columns if any(name in row.published for row in table.rows)]
    same = [results, *(other for other in smaller if other.table.source == table.source)]
    rows = []
    for row in table.rows:
        cells = [row.label]
        for column in columns:
            if column in (row.without or ()):
                cells.append("-")
                continue
            line = next((line for other in same if (line := other.line(row.label, column))), None)
            ours = "not run"
            if line is not None:
                ours = percent(float(line[mean]), float(line[deviation]) if line[deviation] else None)
                seeds = f"{line['seeds']} seed{'s' if line['seeds'] != '1' else ''}"
                ours += f", {seeds}, {results.rounds(line)} rounds"
            published = row.published.get(column)
            cells.append(ours if published is None else f"{ours} ({published:.2f})")
        rows.append(cells)
    names = ["accuracy, %" if column == ONLY else column for column in columns]
    caption = f"{table.title}: ours{', weighted by samples' * is_weighted}, in brackets the paper's"
    return Grid(caption, ["method", *names], rows if columns else [])


def _finished(lines: Sequence[Line], label: str, column: str) -> Line | None:
    """Return the line of a row in a column, None where no seed is finished."""
    found = (line for line in lines if (line["label"], line["column"]) == (label, column))
    return next((line for line in found if line["seeds"] != "0"), None)


def _read_csv(path: Path, labels: Sequence[str], cells: Collection[tuple[str, str]]) -> list[Line]:
    """Return the lines whose `labels` have a cell in their column; none where the file is not there."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        lines = csv.DictReader(file)
        return [line for line in lines if all((line[label], line["column"]) in cells for label in labels)]
