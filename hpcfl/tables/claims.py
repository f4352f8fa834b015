"""What papers claim, and what this project's result files say of it, by rule.

A claims file names a paper and its sentences. Each is about a row of tables that is above other rows, or
above a number. The verdict on a row and a column follows from the difference of accuracies and its 95 %
interval over seeds:

    shown      three seeds or more, and the interval lies above 0
    seen       above, but of fewer seeds, or of an interval with 0 in it
    not shown  not above, but of fewer seeds, or of an interval with 0 in it
    refuted    three seeds or more, and the interval lies below 0
    not run    no result
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from hpcfl.config import read_yaml
from hpcfl.errors import UserError
from hpcfl.formatting import Document, Grid
from hpcfl.results.statistics import interval
from hpcfl.tables.cells import Table
from hpcfl.tables.file import ONLY
from hpcfl.tables.schema import Line, Moment

VERDICTS = ("shown", "seen", "not shown", "refuted", "not run")
RULES = {"printed": "the paper's rule", "ours": "a rule of ours, which differs from a printed equation"}
ENOUGH_SEEDS = 3
RESULTS = "results"
"""Folder of the result files, beside the table files."""
TABLES = "tables"
"""Folder of the table files, beside that of the claims files."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class RunsEntry(_Entry):
    """A table that tells of a claim: which row is above which."""

    table: Line
    """Name of a table file, without .yaml."""
    row: Line
    above: Annotated[list[Line] | list[float], BeforeValidator(_as_list)] = Field(min_length=1)
    """Labels of other rows, or an accuracy in %."""
    columns: list[Line] | None = None
    """Default: all in which the table compares these rows."""
    at: Moment | None = None
    """When models are scored; default: each row's own moment."""
    printed_rounds: int | None = Field(None, ge=1)
    """Rounds of the paper, where the table has fewer."""


class ClaimEntry(_Entry):
    sentence: Line
    where: Line
    """Table or figure of the paper."""
    rule: Literal["printed", "ours"]
    """Whether the rows follow the paper's equations, or differ from one, as the method's file says."""
    runs: list[RunsEntry] = Field(min_length=1)
    reason: Line | None = None
    """Why the outcome is as it is, as far as it was found."""
    evidence: Line | None = None
    """Result file that the reason rests on; a reason has one."""

    @model_validator(mode="after")
    def _reason_has_evidence(self) -> ClaimEntry:
        if (self.reason is None) != (self.evidence is None):
            raise ValueError("reason and evidence, the result file that it rests on, go together")
        return self


class ClaimsEntry(_Entry):
    paper: Line
    tables: list[Line] = []
    """Tables of the paper in full, of which each cell is listed beside ours."""
    claims: list[ClaimEntry] = Field(min_length=1)


@dataclass(frozen=True)
class Verdict:
    """What one table says of a claim in one column; numbers are accuracies between 0 and 1."""

    claim: ClaimEntry
    table: str
    column: str
    pair: str
    rounds: str
    """As `30 of 600`; the second is the paper's."""
    moment: str = ""
    """When the models were scored."""
    seeds: int = 0
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    """Bounds of the 95 % interval over seeds; None without one."""
    is_of_one_partition: bool = False
    """Whether all seeds deal the same samples to the same clients."""

    @property
    def word(self) -> str:
        if self.difference is None:
            return "not run"
        if self.seeds >= ENOUGH_SEEDS and self.low is not None and self.high is not None:
            if self.low > 0:
                return "shown"
            if self.high < 0:
                return "refuted"
        return "seen" if self.difference > 0 else "not shown"

    @property
    def text(self) -> str:
        """The difference in points, with its interval."""
        if self.difference is None:
            return ""
        bounds = "" if self.low is None else f" [{100 * self.low:+.1f}, {100 * (self.high or 0):+.1f}]"
        of_one = " of one partition" if bounds and self.is_of_one_partition else ""
        return f"{100 * self.difference:+.1f}{bounds}{of_one}"


class Results:
    """A table file and its result files."""

    def __init__(self, path: Path, place: str) -> None:
        """Read the table file; UserError, which begins with `place`, where that is not possible."""
        if not path.is_file():
            raise UserError(f"{place}: there is no table file {path}; name one that is there")
        self.table = Table(path, [], None)
        folder = path.parent / RESULTS
        # the table in full, or else the one that was shortened least
        found = {
            int(rounds[1]): file
            for file in folder.glob(f"{path.stem}-*rounds.csv")
            if (rounds := re.fullmatch(rf"{re.escape(path.stem)}-(\d+)rounds", file.stem))
        }
        full = folder / f"{path.stem}.csv"
        self.path = full if full.is_file() else found.get(max(found, default=0))
        self.title = self.table.title

    @cached_property
    def lines(self) -> list[dict[str, str]]:
        return [] if self.path is None else _lines(self.path)

    @cached_property
    def differences(self) -> list[dict[str, str]]:
        file = None if self.path is None else self.path.with_name(f"{self.path.stem}_differences.csv")
        return _lines(file) if file is not None and file.is_file() else []

    def line(self, label: str, column: str) -> dict[str, str] | None:
        """Return the result of a row in a column, None where no seed is finished."""
        found = (line for line in self.lines if (line["label"], line["column"]) == (label, column))
        return next((line for line in found if line["seeds"] != "0"), None)


@dataclass(frozen=True)
class Claims:
    """A claims file, checked."""

    path: Path
    paper: str
    verdicts: list[Verdict]
    tables: list[Results]
    """Of the paper in full."""
    smaller: list[Results]
    """Other tables that tell of its claims; a cell of the same labels stands in for one that is not run."""

    @property
    def by_claim(self) -> list[list[Verdict]]:
        found: dict[int, list[Verdict]] = {}
        for verdict in self.verdicts:
            found.setdefault(id(verdict.claim), []).append(verdict)
        return list(found.values())

    @property
    def has_results(self) -> bool:
        return any(verdict.difference is not None for verdict in self.verdicts)


def read_claims(path: Path) -> Claims:
    """Read a claims file, and judge its claims by the result files of their tables.

    Raises UserError for the first row, column, moment, pair, table or key that is not there.
    """
    try:
        entry = ClaimsEntry.model_validate(read_yaml(path))
    except ValidationError as error:
        raise UserError(f"{path}: {_mistake(error)}") from error
    folder = path.parent.parent / TABLES
    known: dict[str, Results] = {}

    def results(name: str, place: str) -> Results:
        if name not in known:
            known[name] = Results(folder / f"{name}.yaml", place)
        return known[name]

    verdicts: list[Verdict] = []
    for number, claim in enumerate(entry.claims, 1):
        place = f"{path}, claim {number} ({claim.sentence})"
        if claim.evidence is not None and not (folder / RESULTS / claim.evidence).is_file():
            raise UserError(f"{place}: evidence={claim.evidence} is no file in {folder / RESULTS}")
        for runs in claim.runs:
            verdicts += _verdicts(claim, runs, results(runs.table, place), f"{place}, {runs.table}")
    tables = [results(name, f"{path}, tables") for name in entry.tables]
    smaller = [found for name, found in known.items() if name not in entry.tables]
    return Claims(path, entry.paper, verdicts, tables, smaller)


def _mistake(error: ValidationError) -> str:
    first = error.errors()[0]
    *above, key = map(str, first["loc"])
    place = ".".join([*above, key])
    if first["type"] == "missing":
        return f"{place} is missing"
    if first["type"] == "extra_forbidden":
        kinds: dict[int, type[BaseModel]] = {0: ClaimsEntry, 2: ClaimEntry}
        kind = kinds.get(len(above), RunsEntry)
        return f"{place} is an unknown key; allowed: {', '.join(kind.model_fields)}"
    return f"{place}={first['input']!r} is invalid: {first['msg'].removeprefix('Value error, ')}"


def document(claims: Claims) -> Document:
    """Return the verdicts, and each cell of the paper's tables beside ours."""
    grids = [*map(_verdicts_on, claims.by_claim), *(_beside(full, claims.smaller) for full in claims.tables)]
    notes = [
        "Shown: three seeds or more, and the 95 % interval over seeds lies above 0. Seen: above, but of "
        "fewer seeds, or of an interval with 0 in it. Not shown: not above, likewise. Refuted: the interval "
        "lies below 0. Differences are in points; intervals are not corrected for their number."
    ]
    return Document(claims.paper, notes, [grid for grid in grids if grid.rows])


def overview(many: Sequence[Claims]) -> Grid:
    """Return one line a claim: how many of its comparisons have each verdict."""
    rows = []
    for claims in many:
        for verdicts in claims.by_claim:
            claim, words = verdicts[0].claim, [verdict.word for verdict in verdicts]
            told = ", ".join(f"{words.count(word)} {word}" for word in VERDICTS if word in words)
            rows.append([claims.path.stem, claim.where, claim.sentence, claim.rule, told])
    return Grid("", ["paper", "where", "claim", "rule", "comparisons"], rows)


def _verdicts(claim: ClaimEntry, runs: RunsEntry, results: Results, place: str) -> Iterator[Verdict]:
    table = results.table
    labels = [runs.row, *(label for label in runs.above if isinstance(label, str))]
    for kind, names, there in (("row", labels, table.labels), ("column", runs.columns or [], table.columns)):
        for name in names:
            if name not in there:
                raise UserError(f"{place}: {kind} {name} is not there; there are: {' | '.join(there)}")
    for other in runs.above:
        if isinstance(other, str):
            yield from _above_row(claim, runs, other, results, place)
        else:
            yield from _above_number(claim, runs, other, results, place)


def _above_row(
    claim: ClaimEntry, runs: RunsEntry, other: str, results: Results, place: str
) -> Iterator[Verdict]:
    both = ((runs.row, other), (other, runs.row))
    pairs = [p for p in results.table.compare if p.rows in both and not p.weighted]
    pair = next((p for p in pairs if p.at == runs.at), None)
    moment = "" if runs.at is None else f", at: {runs.at}"
    if pair is None:
        raise UserError(
            f"{place}: {results.table.path} does not compare these rows{' then' if moment else ''}; add "
            f"{{rows: [{runs.row}, {other}]{moment}}} to its compare"
        )
    sign = 1 if pair.rows[0] == runs.row else -1
    others = {p.at.replace("_", " ") for p in pairs if p.at is not None and p is not pair}
    wanted = None if pair.at is None else pair.at.replace("_", " ")
    for column in runs.columns or pair.columns:
        if column not in pair.columns:
            raise UserError(f"{place}: {runs.row} and {other} are not both in column {column}; drop it")
        found = [
            line
            for line in results.differences
            if (line["first"], line["second"], line["column"]) == (*pair.rows, column)
            and line["difference"]
            and line.get("weighted") != "1"
        ]
        own = [
            line for line in found if (line["moment"] == wanted if wanted else line["moment"] not in others)
        ]
        line = next(iter(own if wanted else own or found), None)
        verdict = _not_run(claim, results, runs, column, f"{runs.row} - {other}")
        if line is not None:
            bounds = [
                sign * float(line[name]) for name in ("over_seeds_low", "over_seeds_high") if line[name]
            ]
            low, high = sorted(bounds) if bounds else (None, None)
            verdict = replace(
                verdict,
                moment=line["moment"],
                seeds=int(line["seeds"]),
                difference=sign * float(line["difference"]),
                low=low,
                high=high,
                # older files say so in words
                is_of_one_partition=line.get("partitions") == "1" or "one partition" in line.get("size", ""),
            )
        yield verdict


def _above_number(
    claim: ClaimEntry, runs: RunsEntry, percent: float, results: Results, place: str
) -> Iterator[Verdict]:
    if runs.at is not None:
        raise UserError(f"{place}: at={runs.at} goes with other rows; drop it beside a number")
    for column in runs.columns or results.table.columns:
        line = results.line(runs.row, column)
        verdict = _not_run(claim, results, runs, column, f"{runs.row} - {percent:g} %")
        if line is not None:
            seeds = [float(v) for name, v in line.items() if name.startswith("accuracy_seed_") and v]
            found = interval([accuracy - percent / 100 for accuracy in seeds])
            bounds = (found.mean - found.half_width, found.mean + found.half_width)
            low, high = bounds if len(seeds) > 1 else (None, None)
            verdict = replace(
                verdict, moment=line["scored"], seeds=len(seeds), difference=found.mean, low=low, high=high
            )
        yield verdict


def _not_run(claim: ClaimEntry, results: Results, runs: RunsEntry, column: str, pair: str) -> Verdict:
    return Verdict(claim, results.table.path.stem, column, pair, _rounds(results, runs, column))


def _rounds(results: Results, runs: RunsEntry, column: str) -> str:
    line = results.line(runs.row, column)
    if line is None:
        return ""
    return line["rounds"] if runs.printed_rounds is None else f"{line['rounds']} of {runs.printed_rounds}"


def _verdicts_on(verdicts: Sequence[Verdict]) -> Grid:
    """Return the verdicts on one claim; columns in which a pair was not run share a line."""
    claim = verdicts[0].claim
    caption = f"{claim.where}: {claim.sentence} ({RULES[claim.rule]})"
    note = ""
    if claim.reason is not None:
        note = f"Why: {claim.reason}" + (f" ({claim.evidence})." if claim.evidence else ".")
    header = ["rows", "column", "verdict", "difference", "scored", "seeds", "rounds", "table"]
    rows, not_run = [], dict[tuple[str, str], list[str]]()
    for verdict in verdicts:
        if verdict.difference is None:
            not_run.setdefault((verdict.pair, verdict.table), []).append(verdict.column)
            continue
        figures = [verdict.word, verdict.text, verdict.moment, str(verdict.seeds), verdict.rounds]
        rows.append([verdict.pair, verdict.column, *figures, verdict.table])
    for (pair, table), columns in not_run.items():
        told = columns[0] if len(columns) == 1 else f"{len(columns)} columns"
        rows.append([pair, told, "not run", "", "", "", "", table])
    return Grid(caption, header, rows, note)


def _beside(results: Results, smaller: Sequence[Results]) -> Grid:
    """Return the accuracy of each row and column beside the paper's, in %, with its seeds and rounds."""
    table = results.table
    columns = [column for column in table.columns if any(column in row.published for row in table.rows)]
    rows = []
    for row in table.rows:
        cells = [row.label]
        for column in columns:
            published = row.published.get(column)
            same = [results, *(other for other in smaller if other.table.source == table.source)]
            line = next((line for other in same if (line := other.line(row.label, column))), None)
            if column in row.without:
                cells.append("-")
                continue
            paper = "" if published is None else f" ({published:.2f})"
            ours = "not run"
            if line is not None:
                spread = line["accuracy_std_over_seeds"]
                ours = f"{100 * float(line['accuracy_mean']):.1f}"
                ours += f" ± {100 * float(spread):.1f}" if spread else ""
                seeds = f"{line['seeds']} seed{'s' if line['seeds'] != '1' else ''}"
                ours += f", {seeds}, {line['rounds']} rounds"
            cells.append(ours + paper)
        rows.append(cells)
    names = ["accuracy, %" if column == ONLY else column for column in columns]
    caption = f"{results.title}: ours, in brackets the paper's"
    return Grid(caption, ["method", *names], rows if columns else [])


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
