"""What is printed of a table: an overview, the quantities of each column, and the paired differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isnan

from hpcfl.formatting import Document, Grid, half_width, percent
from hpcfl.storage.checkpoint import CheckpointStore
from hpcfl.tables.accuracies import Difference, Result
from hpcfl.tables.cells import Table
from hpcfl.tables.file import DEFAULT_SHOW, ONLY, QUANTITIES
from hpcfl.training.metrics import CLIENT_METRICS

MISSING = "missing"
NO_CELL = "-"
ONLY_WHERE_THEY_DIFFER = ("finetune_epochs", "rounds")
"""Quantities of the default that are left out of a table where all rows have the same."""

HIGHEST_IS_BEST = {
    *("accuracy", "best", "weighted", "after_download", "after_training", "unseen", "worst_tenth"),
    *("balanced_accuracy", "macro_f1", "auc"),
}
"""Quantities of which the table for LaTeX shows the best in bold."""


def document(table: Table, results: Sequence[Result], compared: Sequence[Difference]) -> Document:
    """Return all that is printed of a table."""
    grids = [] if table.columns == [ONLY] else [_overview(table, results)]
    for column in table.columns:
        of_column = [result for result in results if result.column == column]
        # a column without a finished cell is in the overview
        if column == ONLY or any(result.runs for result in of_column):
            grids.append(_details(table, column, of_column))
    if compared:
        grids.append(_comparison(table, compared))
    not_run = [f"{label}: not run: {reason}" for label, reason in table.not_run.items()]
    size = [table.size] if table.size else []
    return Document(table.title, [*size, _setting(table), *_without_metrics(table, results), *not_run], grids)


def _without_metrics(table: Table, results: Sequence[Result]) -> list[str]:
    """Say which shown metrics some finished runs do not have, and how to add them."""
    names = [name for name in table.show if name in (*CLIENT_METRICS, "by_class")]
    lacking = [run for result in results for run in result.runs.values() if names and not run.confusion]
    if not lacking:
        return []
    gone = sum(not CheckpointStore(run.path).exists for run in lacking)
    return [
        f"finished cells without {', '.join(names)}: {len(lacking)}; to add them, repeat the command with "
        "run.metrics=true" + (f" ({gone} of them cannot, without checkpoint.h5)" if gone else "")
    ]


def _overview(table: Table, results: Sequence[Result]) -> Grid:
    """Return rows by columns, the first shown quantity in each, the published number in brackets."""
    by_place = {(result.row.label, result.column): result for result in results}

    def text(label: str, column: str) -> str:
        result = by_place.get((label, column))
        if result is None:
            return NO_CELL
        published = "" if result.published is None else f" ({result.published:.1f})"
        seeds = f", {result.missing} seed{'s' if result.missing > 1 else ''} {_why_missing(result)}"
        has_some = bool(result.runs and result.missing)
        return _shown(table.show[0], result, _why_missing(result)) + seeds * has_some + published

    rows = [[label, *(text(label, column) for column in table.columns)] for label in table.labels]
    caption = QUANTITIES[table.show[0]]
    if table.source or any(result.published is not None for result in results):
        caption += "; in brackets: published" + (f", {table.source}" if table.source else "")
    compared = range(1, len(table.columns) + 1) if table.show[0] in HIGHEST_IS_BEST else ()
    return Grid(caption, ["method", *table.columns], rows, highest_is_best=compared)


def _details(table: Table, column: str, results: Sequence[Result]) -> Grid:
    """Return all shown quantities of the rows of a column."""
    shown = {}
    for number, name in enumerate(table.show):
        cells = [_shown(name, result, "" if number else _why_missing(result)) for result in results]
        same = name in ONLY_WHERE_THEY_DIFFER and len(set(cells)) == 1
        if table.show != DEFAULT_SHOW or (any(cells) and not same):
            shown[name] = cells
    labels = [result.row.label for result in results]
    rows = [list(line) for line in zip(labels, *shown.values(), strict=True)]
    compared = [number for number, name in enumerate(shown, 1) if name in HIGHEST_IS_BEST]
    return Grid(column, ["method", *(QUANTITIES[name] for name in shown)], rows, highest_is_best=compared)


def _comparison(table: Table, compared: Sequence[Difference]) -> Grid:
    """Return the paired differences with their intervals."""
    columns = ["column"] if table.columns != [ONLY] else []
    rows = []
    for difference in compared:
        line = [difference.pair.name, *([difference.column] if columns else []), difference.moment]
        if difference.paired is None:
            rows.append([*line, MISSING, "", "0", "", ""])
            continue
        over_seeds, over_clients = difference.paired.over_seeds, difference.paired.over_clients
        of_one = " of one partition" if difference.partitions < over_seeds.count else ""
        width = half_width(over_seeds.mean, over_seeds.half_width, digits=1) + over_seeds.star
        line += [f"{100 * over_seeds.mean:+.1f}", width + of_one, str(over_seeds.count)]
        beside = over_seeds.mean
        width = half_width(over_clients.mean, over_clients.half_width, digits=1, beside=beside)
        rows.append([*line, width, str(over_clients.count)])
    is_of_one = any(difference.partitions < difference.seeds for difference in compared)
    of_one = ", and where it is over seeds of one partition, for this partition only" if is_of_one else ""
    header = ["rows", *columns, "scored", "difference, points", "95 % over seeds"]
    shown = sum(difference.paired is not None for difference in compared)
    has_star = any(" *" in text for line in rows for text in line)
    star = ", * where the 95 % interval over seeds excludes 0" * has_star
    return Grid(
        f"paired differences client by client{star}; a seed is one data point{of_one}; the interval over "
        "clients and seeds describes only these runs",
        [*header, "seeds", "95 % over clients and seeds", "pairs"],
        rows,
        f"Differences shown: {shown}; their 95 % intervals are not corrected for this number.",
    )


def _why_missing(result: Result) -> str:
    missing = [cell for cell in result.cells if cell.seed not in result.runs]
    return "diverged" if all(cell.has_diverged for cell in missing) else MISSING


def _shown(name: str, result: Result, missing: str) -> str:
    """Return a quantity as text; `missing` where only a finished run would tell it."""
    if name in _OF_RUNS:
        return _OF_RUNS[name](result) if result.runs else missing
    return _OF_SETTINGS[name](result)


def _setting(table: Table) -> str:
    """Say in a line what all figures have in common."""
    configs = [cell.config for cell in table.cells]
    at_most = "at most " * any(config.train.patience is not None for config in configs)
    in_training = " in training" * any(config.data.unseen_clients for config in configs)
    lines = [
        f"Seeds {', '.join(map(str, table.seeds))}",
        f"rounds {at_most}{_values(config.train.rounds for config in configs)}",
        f"clients {_values(config.data.clients or 'as the data has them' for config in configs)}",
        f"accuracy on the {_values(config.run.eval_split for config in configs)} split after the last round, "
        f"mean over clients{in_training}, mean ± standard deviation over seeds",
    ]
    if table.source:
        lines.append(f"published: {table.source}")
    if {"bytes_down", "bytes_up"} & {*table.show}:
        lines.append(
            "bytes of a client in a round that it takes part in, of trainable numbers + of running "
            "statistics and indices"
        )
    if "steps_per_s" in table.show:
        lines.append("client steps are updates of weights by a mini-batch, whatever each costs")
    return "; ".join(lines) + "."


def _values(values: Iterable[object]) -> str:
    return " or ".join(dict.fromkeys(map(str, values)))


def _accuracy(name: str) -> Callable[[Result], str]:
    def show(result: Result) -> str:
        count, seeds = result.count(name), len(result.runs)
        some = f" ({count} of {seeds} seeds)" if 0 < count < seeds else ""
        return percent(result.mean(name), result.deviation(name)) + some

    return show


def _metric(name: str) -> Callable[[Result], str]:
    def show(result: Result) -> str:
        known, clients = result.known_clients(name)
        some = f" ({known} of {clients} clients)" if 0 < known < clients else ""
        return _accuracy(name)(result) + some

    return show


def _by_class(result: Result) -> str:
    return " ".join("-" if isnan(value) else f"{100 * value:.1f}" for value in result.accuracy_by_class)


def _best(result: Result) -> str:
    rounds = sorted({int(value) for value in result.values("best_round")})
    span = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    return f"{_accuracy('best_accuracy')(result)} (round {span})"


def _rounds(result: Result) -> str:
    done = sorted({int(value) for value in result.values("rounds_done")} or {result.config.train.rounds})
    return f"{done[0]} to {done[-1]}" if len(done) > 1 else str(done[0])


def _bytes(way: str) -> Callable[[Result], str]:
    def show(result: Result) -> str:
        numbers, others = (round(result.mean(f"{kind}bytes_{way}") or 0) for kind in ("", "other_"))
        return f"{numbers:,}" + (f" + {others:,}" if others else "")

    return show


_OF_RUNS: dict[str, Callable[[Result], str]] = {
    "accuracy": _accuracy("accuracy_mean"),
    "best": _best,
    "weighted": _accuracy("accuracy_weighted"),
    "after_download": _accuracy("accuracy_after_download"),
    "after_training": _accuracy("accuracy_after_training"),
    "spread": _accuracy("spread_over_clients"),
    "worst_tenth": _accuracy("worst_tenth_accuracy"),
    "unseen": _accuracy("accuracy_unseen"),
    **{name: _metric(name) for name in CLIENT_METRICS},
    "by_class": _by_class,
    "coverage": lambda result: f"{100 * (result.mean('coverage') or 0):.0f}",
    "bytes_down": _bytes("down"),
    "bytes_up": _bytes("up"),
    "steps_per_s": lambda result: f"{result.mean('client_steps_per_s') or 0:.0f}",
    # of the whole run, on as many processes as ran it
    "round_s": lambda result: f"{(result.mean('wall_s') or 0) / (result.mean('rounds_done') or 1):.2f}",
}
"""Of the quantities that are known after a run has finished: the text."""

_OF_SETTINGS: dict[str, Callable[[Result], str]] = {
    "published": lambda result: "" if result.published is None else f"{result.published:.1f}",
    "scored": lambda result: result.scored,
    "seeds": lambda result: str(len(result.runs)),
    "published_bytes": lambda result: (
        "" if result.published_bytes is None else f"{result.published_bytes:,.0f}"
    ),
    "finetune_epochs": lambda result: str(result.config.train.finetune_epochs),
    "rounds": _rounds,
    "tuned": lambda result: result.row.tuned or "",
}
"""Of all others."""
