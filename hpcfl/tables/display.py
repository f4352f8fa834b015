"""What is printed of a table: an overview, the quantities of each column, and the paired differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hpcfl.formatting import Document, Grid, half_width, percent
from hpcfl.tables.accuracies import Difference, Entry
from hpcfl.tables.cells import Table
from hpcfl.tables.file import ONLY
from hpcfl.tables.schema import DEFAULT_SHOW, QUANTITIES

MISSING = "missing"
NO_CELL = "-"
ONLY_WHERE_THEY_DIFFER = ("finetune_epochs", "rounds")
"""Quantities of the default that are left out of a table where all rows have the same."""


def document(table: Table, known: Sequence[Entry], compared: Sequence[Difference]) -> Document:
    grids = []
    if table.columns != [ONLY]:
        grids.append(_overview(table, known))
    for column in table.columns:
        of_column = [entry for entry in known if entry.column == column]
        if of_column:
            grids.append(_details(table, column, of_column))
    if compared:
        grids.append(_comparison(table, compared))
    not_run = [f"{label}: not run: {reason}" for label, reason in table.not_run.items()]
    notes = [*([table.size] if table.size else []), _setting(table), *not_run]
    return Document(table.title, notes, grids)


def _overview(table: Table, known: Sequence[Entry]) -> Grid:
    """Return rows by columns, the first shown quantity in each, the published number in brackets."""
    by_place = {(entry.row.label, entry.column): entry for entry in known}
    rows = []
    for label in table.labels:
        line = [label]
        for column in table.columns:
            entry = by_place.get((label, column))
            text = NO_CELL if entry is None else _shown(table.show[0], entry, MISSING)
            if entry is not None and entry.runs and entry.missing:
                text += f", {entry.missing} seed{'s' if entry.missing > 1 else ''} missing"
            if entry is not None and entry.published is not None:
                text += f" ({entry.published:.2f})"
            line.append(text)
        rows.append(line)
    published = f"; in brackets: published, {table.source}" if table.source else ""
    if not table.source and any(entry.published is not None for entry in known):
        published = "; in brackets: published"
    return Grid(f"{QUANTITIES[table.show[0]]}{published}", ["method", *table.columns], rows)


def _details(table: Table, column: str, known: Sequence[Entry]) -> Grid:
    """Return all shown quantities of the rows of a column."""
    lines = {
        name: [_shown(name, entry, "" if number else MISSING) for entry in known]
        for number, name in enumerate(table.show)
    }
    if table.show == list(DEFAULT_SHOW):
        for name, cells in list(lines.items()):
            same = name in ONLY_WHERE_THEY_DIFFER and len(set(cells)) == 1
            if same or not any(cells):
                del lines[name]
    header = ["method", *(QUANTITIES[name] for name in lines)]
    rows = [
        [entry.row.label, *(cells[number] for cells in lines.values())] for number, entry in enumerate(known)
    ]
    return Grid(column, header, rows)


def _comparison(table: Table, compared: Sequence[Difference]) -> Grid:
    """Return the paired differences with their intervals."""
    has_columns = table.columns != [ONLY]
    rows = []
    for difference in compared:
        line = [f"{difference.rows[0]} - {difference.rows[1]}", *([difference.column] if has_columns else [])]
        line.append(difference.moment + ", weighted by samples" * difference.is_weighted)
        over_seeds, over_clients = difference.over_seeds, difference.over_clients
        if over_seeds is None:
            rows.append([*line, MISSING, "", "0", "", ""])
            continue
        of_one = " of one partition" if difference.partitions < over_seeds.count else ""
        width = half_width(over_seeds.mean, over_seeds.half_width, digits=1)
        line += [f"{100 * over_seeds.mean:+.1f}", width + of_one, str(over_seeds.count)]
        of_clients = ["", ""]
        if over_clients is not None:
            of_clients = [half_width(over_clients.mean, over_clients.half_width, 1), str(over_clients.count)]
        rows.append([*line, *of_clients])
    header = ["rows", *(["column"] if has_columns else []), "scored", "difference, points", "95 % over seeds"]
    is_of_one = any(difference.partitions < len(difference.seeds) for difference in compared)
    of_one = ", and where it is over seeds of one partition, for this partition only" if is_of_one else ""
    shown = sum(difference.over_seeds is not None for difference in compared)
    return Grid(
        "paired differences client by client, * where the 95 % interval excludes 0; conclude from that over "
        f"seeds, whose unit is a whole run{of_one}; that over clients holds for these runs only",
        [*header, "seeds", "95 % over clients and seeds", "pairs"],
        rows,
        f"Differences shown: {shown}; their 95 % intervals are not corrected for this number.",
    )


def _shown(name: str, entry: Entry, missing: str) -> str:
    """Return an entry's quantity as text; `missing` where only a finished run would tell it."""
    if name in _OF_RUNS:
        return _OF_RUNS[name](entry) if entry.runs else missing
    return _OF_SETTINGS[name](entry)


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


def _values(values: Iterable[object]) -> str:
    return " or ".join(dict.fromkeys(map(str, values)))


def _accuracy(name: str) -> Callable[[Entry], str]:
    def show(entry: Entry) -> str:
        count, seeds = entry.count(name), len(entry.runs)
        some = f" ({count} of {seeds} seeds)" if 0 < count < seeds else ""
        return percent(entry.mean(name), entry.deviation(name)) + some

    return show


def _best(entry: Entry) -> str:
    rounds = sorted({int(value) for value in entry.values("best_round")})
    span = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    return f"{_accuracy('best_accuracy')(entry)} (round {span})"


def _bytes(way: str) -> Callable[[Entry], str]:
    def show(entry: Entry) -> str:
        numbers, others = (round(entry.mean(f"{kind}bytes_{way}") or 0) for kind in ("", "other_"))
        return f"{numbers:,}" + (f" + {others:,}" if others else "")

    return show


def _round_s(entry: Entry) -> str:
    """Return seconds of the whole run by its rounds, on as many processes as ran it."""
    return f"{(entry.mean('wall_s') or 0) / entry.config.train.rounds:.2f}"


def _published_bytes(entry: Entry) -> str:
    known = entry.row.published_bytes.get(entry.column)
    return "" if known is None else f"{known:,.0f}"


_OF_RUNS: dict[str, Callable[[Entry], str]] = {
    "accuracy": _accuracy("accuracy_mean"),
    "best": _best,
    "weighted": _accuracy("accuracy_weighted"),
    "after_download": _accuracy("accuracy_after_download"),
    "after_training": _accuracy("accuracy_after_training"),
    "spread": _accuracy("spread_over_clients"),
    "worst_tenth": _accuracy("worst_tenth_accuracy"),
    "unseen": _accuracy("accuracy_unseen"),
    "coverage": lambda entry: f"{100 * (entry.mean('coverage') or 0):.0f}",
    "bytes_down": _bytes("down"),
    "bytes_up": _bytes("up"),
    "steps_per_s": lambda entry: f"{entry.mean('client_steps_per_s') or 0:.0f}",
    "round_s": _round_s,
}
"""Of the quantities that are known after a run has finished: the text of an entry."""

_OF_SETTINGS: dict[str, Callable[[Entry], str]] = {
    "published": lambda entry: "" if entry.published is None else f"{entry.published:.2f}",
    "scored": lambda entry: entry.scored,
    "seeds": lambda entry: str(len(entry.runs)),
    "published_bytes": _published_bytes,
    "finetune_epochs": lambda entry: str(entry.config.train.finetune_epochs),
    "rounds": lambda entry: str(entry.config.train.rounds),
    "tuned": lambda entry: entry.row.tuned or "",
}
"""Of all others."""
