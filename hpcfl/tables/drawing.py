"""The pictures of a table's figure as PNG and PDF: the only module that knows matplotlib."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.style import context
from matplotlib.ticker import MaxNLocator

from hpcfl.formatting import percent, unit_of_bytes
from hpcfl.tables.accuracies import Result
from hpcfl.tables.cells import Table, axes_by_diagnostic
from hpcfl.tables.diagnostics_csv import History, evaluations
from hpcfl.tables.file import Bars, Curves, Drawing, HeatMaps

WITHOUT_CLOCK_AND_VERSION: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""Metadata of a file by its ending."""

COLUMN_INCH, PAGE_INCH = 3.4, 7.0
"""Widths: one column of two, and the whole page."""
DOTS_PER_INCH = 200
MAX_INCH_A_CELL = 0.24
"""Largest height of a matrix' entry."""
BAR_INCH = 0.09
"""Width of a bar of colours."""
MAX_NAMED_TICKS = 12

STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws the same
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.titlepad": 3,
    "axes.labelsize": 7,
    "axes.labelpad": 2,
    "axes.linewidth": 0.6,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2,
    "ytick.major.size": 2,
    "legend.fontsize": 6,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.4,
    "pdf.fonttype": 42,  # TrueType, embedded: text stays text
}

LARGE_IS_DARK = "YlGnBu"
"""Its lightness falls from end to end: it reads in grey, and for the colour-blind."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's, for the colour-blind; lines, marks and hatches differ as well, for grey."""
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "oo", "++")
Look = tuple[str, Any, str, str]
"""Colour, line, mark and hatch."""


def _look(number: int) -> Look:
    """Return how row `number` is drawn: rows of one colour differ in the rest, up to 64."""
    form = (number + number // len(COLOURS)) % len(COLOURS)
    return COLOURS[number % len(COLOURS)], LINES[form], MARKS[form], HATCHES[form]


Histories = Mapping[Path, History]


def draw(
    table: Table, results: Sequence[Result], histories: Histories
) -> Iterator[tuple[str, Figure | None]]:
    """Yield the pictures of the table's figure by name; None where nothing of one is finished."""
    for name, drawing in zip(table.figure_names, table.drawings, strict=True):
        letter = name.removeprefix("figure").removeprefix("_")
        title = f"{table.title} ({letter})" if letter else table.title
        # a user's own style would change the bytes
        with context(["default", STYLE]):
            picture = _picture(table, drawing, title, results, histories)
        yield name, picture


def as_files(name: str, picture: Figure) -> dict[str, bytes]:
    """Return a picture as the bytes of files by name; the same cells give the same bytes."""
    made = {}
    with context(["default", STYLE]):
        for ending, metadata in WITHOUT_CLOCK_AND_VERSION.items():
            file = io.BytesIO()
            picture.savefig(file, format=ending, dpi=DOTS_PER_INCH, metadata=metadata)
            made[f"{name}.{ending}"] = file.getvalue()
    return made


def _picture(
    table: Table, drawing: Drawing, title: str, results: Sequence[Result], histories: Histories
) -> Figure | None:
    notes = [table.size] if table.size else []
    if isinstance(drawing, HeatMaps):
        return _heat_maps(table, drawing, title, notes, results, histories)
    done = [result for result in results if result.runs]
    if not done:
        return None
    notes += _scored(done)
    if any(len(result.runs) > 1 for result in done):
        band = "bands: from the lowest to the highest seed"
        notes.append(band if isinstance(drawing, Curves) else "whiskers: one standard deviation over seeds")
    notes += _missing(results)
    if isinstance(drawing, Curves):
        return _curves(drawing, title, notes, done, histories)
    if isinstance(drawing, Bars):
        return _bars(drawing, title, notes, done)
    return _points(title, notes, done)


def _page(title: str, notes: Sequence[str], width: float, height: float) -> tuple[Figure, SubFigure]:
    """Return a picture with its title above and its notes below, and what is between; sizes in inches."""
    heading = textwrap.wrap(title, int(14.5 * width))
    lines = [line for note in notes for line in textwrap.wrap(note, int(19.5 * width))]
    heights = [0.06 + 0.14 * len(heading), height, 0.04 + 0.105 * len(lines)]
    whole = Figure(figsize=(width, sum(heights)), layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03))
    parts: Any = whole.subfigures(3, 1, height_ratios=heights)
    above, body, below = parts
    above.text(0.02, 0.5, "\n".join(heading), va="center", weight="bold", fontsize=8)
    below.text(0.02, 0.95, "\n".join(lines), va="top", fontsize=6, color="#444444")
    return whole, body


def _grid(count: int) -> tuple[int, int]:
    """Return how many panels stand side by side, and in how many lines."""
    across = min(count, 3 if count % 4 else 4)
    return across, math.ceil(count / across)


# Heat maps


class _Matrix(NamedTuple):
    title: str
    values: np.ndarray
    """[rows, columns]."""
    row_names: Sequence[str]
    column_names: Sequence[str]


def _heat_maps(
    table: Table,
    drawing: HeatMaps,
    title: str,
    notes: list[str],
    results: Sequence[Result],
    histories: Histories,
) -> Figure | None:
    """Draw a line of matrices for each row and column of the table; all are on one scale."""
    name, axes = drawing.quantity, table.axes[drawing.quantity]
    results = [one for one in results if axes_by_diagnostic(one.config.method.name).get(name) == axes]
    lines: dict[str, list[_Matrix]] = {}
    for result, side in zip(results, _short_names(results), strict=True):
        read = ((seed, histories.get(run.path)) for seed, run in result.runs.items())
        known = [(seed, history) for seed, history in read if history and name in history.diagnostics]
        if known:
            seed, history = known[0]
            lines[side], said = _matrices(drawing, result.column, axes, history)
            said.append(f"seed {seed}" + f" of {', '.join(map(str, table.seeds))}" * (len(table.seeds) > 1))
            said.append(f"accuracy {percent(result.figures[seed]['accuracy_mean'])} %")
            said += [] if result.published is None else [f"published {result.published:.1f} %"]
            notes.append(f"{side}: {', '.join(said)}".removeprefix(": "))
        elif result.runs:
            notes.append(f"{side or result.row.label}: its checkpoint holds no {name}")
    if not lines:
        return None
    of = name if drawing.client is None or len(axes) < 3 else f"{name} of client {drawing.client}"
    drawn_axes = axes[1:] if of != name else (axes[0], axes[-1])
    return _draw_matrices(title, [*notes, *_missing(results)], drawing, of, drawn_axes, lines)


def _matrices(
    drawing: HeatMaps, column: str, axes: Sequence[str], history: History
) -> tuple[list[_Matrix], list[str]]:
    """Return the matrices of one run, by evaluation, and within it by layer; and what is said of them."""
    layers = (drawing.layers_in(column) or history.layers) if "layer" in axes else []
    numbers = [history.layers.index(layer) for layer in layers]
    known = history.diagnostics[drawing.quantity]
    wanted = evaluations(history.rounds, drawing.rounds)
    # of very many clients there is the last alone
    chosen = [at for at in wanted if at in known] or list(known)
    made = []
    for at in chosen:
        values, moment = known[at], f"round {history.rounds[at]}" * (len(chosen) > 1)
        if len(axes) == 2:
            made.append(_matrix(moment, values[:, numbers] if layers else values, columns=layers))
        elif drawing.client is not None:
            made.append(_matrix(moment, values[drawing.client, numbers], rows=layers))
        else:
            for layer, number in zip(layers, numbers, strict=True):
                made.append(_matrix(", ".join(filter(None, [layer, moment])), values[:, number]))
    said = [f"round {history.rounds[chosen[0]]}"] if len(chosen) == 1 else []
    if len(chosen) < len(wanted):
        said.append("only the last evaluation: earlier ones are not stored for so many clients")
    return made, said


def _matrix(title: str, values: np.ndarray, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> _Matrix:
    counted = [[str(number) for number in range(size)] for size in values.shape]
    return _Matrix(title, values, rows or counted[0], columns or counted[1])


def _draw_matrices(
    title: str,
    notes: Sequence[str],
    drawing: HeatMaps,
    of: str,
    axes: Sequence[str],
    by_side: Mapping[str, list[_Matrix]],
) -> Figure:
    sides, lines = list(by_side), list(by_side.values())
    if all(len(line) == 1 for line in lines):
        across, _ = _grid(len(lines))
        flat = [
            line[0]._replace(title=f"{side}\n{line[0].title}".strip())
            for side, line in zip(sides, lines, strict=True)
        ]
        lines = [flat[start : start + across] for start in range(0, len(flat), across)]
        sides = [""] * len(lines)
    across = max(map(len, lines))
    heights = [max(len(matrix.values) for matrix in line) for line in lines]
    width = COLUMN_INCH if across < 4 else PAGE_INCH
    max_columns = max(matrix.values.shape[1] for line in lines for matrix in line)
    square = min((width - 1.0) / across / max_columns, MAX_INCH_A_CELL)
    height = square * sum(heights) + 0.3 * len(lines) + 0.2
    whole, body = _page(title, notes, width, height)
    grid = body.subplots(len(lines), across, squeeze=False, height_ratios=heights)
    low, high = _ends(drawing, [matrix.values for line in lines for matrix in line])
    colours = LogNorm(low, high) if drawing.scale == "log" else Normalize(low, high)
    image: Any = None
    for at, line in enumerate(lines):
        below = lines[at + 1] if at + 1 < len(lines) else []
        for panel in grid[at, len(line) :]:
            panel.set_axis_off()
        for number, (panel, matrix) in enumerate(zip(grid[at], line, strict=False)):
            # zero has no logarithm: it is as pale as the smallest
            values = np.maximum(matrix.values, low) if drawing.scale == "log" else matrix.values
            image = panel.imshow(
                values, norm=colours, cmap=LARGE_IS_DARK, interpolation="none", aspect="auto"
            )
            panel.set_title(matrix.title)
            is_first = number == 0 or matrix.row_names != line[0].row_names
            _name_ticks(panel.yaxis, matrix.row_names if is_first else [])
            if number == 0:
                panel.set_ylabel(f"{sides[at]}\n{axes[0]}".strip())
            is_last = number >= len(below) or below[number].column_names != matrix.column_names
            _name_ticks(panel.xaxis, matrix.column_names if is_last else [])
            if is_last:
                panel.set_xlabel("for client" if axes[1] == "client" else axes[1])
    bar = body.colorbar(image, ax=grid, fraction=0.05, pad=0.01, aspect=height / BAR_INCH)
    bar.set_label(of)
    return whole


def _ends(drawing: HeatMaps, matrices: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the values of the palest and of the darkest colour."""
    values = np.concatenate([matrix[np.isfinite(matrix)] for matrix in matrices])
    high = float(max(values, default=0.0))
    if drawing.scale == "log":
        low = drawing.low or float(min(values[values > 0], default=1.0))
        return low, max(high, 10 * low)
    low = float(min(values, default=0.0))
    low = min(0.0, low) if drawing.low is None else drawing.low
    return low, high if high > low else low + 1


def _name_ticks(axis: Any, names: Sequence[str]) -> None:
    # all layers are named, of many clients some
    is_counted = bool(names) and names[0].isdigit()
    numbers = range(0, len(names), math.ceil(len(names) / MAX_NAMED_TICKS) if is_counted else 1)
    axis.set_ticks(list(numbers), [names[number] for number in numbers])


# Accuracies


def _curves(
    drawing: Curves, title: str, notes: list[str], results: Sequence[Result], histories: Histories
) -> Figure | None:
    """Draw a panel for each column, in it a line for each row."""
    if drawing.client is not None:
        counts = [sum(run.path not in histories for run in result.runs.values()) for result in results]
        notes += _seeds_of("without checkpoint", results, counts, [len(result.runs) for result in results])
    by_result = [(result, *_over_rounds(drawing, result, histories)) for result in results]
    by_result = [(result, rounds, by_seed) for result, rounds, by_seed in by_result if rounds]
    columns = list(dict.fromkeys(result.column for result, *_ in by_result))
    if not columns:
        return None
    across, down = _grid(len(columns))
    whole, body = _page(title, notes, COLUMN_INCH if across == 1 else PAGE_INCH, 2.1 * down + 0.3)
    grid = body.subplots(down, across, squeeze=False, sharey=True).ravel()
    labels = dict.fromkeys(result.row.label for result, *_ in by_result)
    looks = {label: _look(number) for number, label in enumerate(labels)}
    for result, rounds, by_seed in by_result:
        axes = grid[columns.index(result.column)]
        label = result.row.label
        colour, line, mark, _ = looks[label]
        every = max(1, len(rounds) // 6)
        mean = by_seed.mean(axis=0)
        axes.plot(rounds, mean, color=colour, linestyle=line, marker=mark, markevery=every, label=label)
        if len(by_seed) > 1:
            axes.fill_between(rounds, by_seed.min(0), by_seed.max(0), color=colour, alpha=0.2, linewidth=0)
        if result.published is not None and drawing.client is None:
            name = f"{label}, published"
            axes.axhline(result.published, color=colour, linestyle=(0, (1, 3)), linewidth=0.8, label=name)
    for column, axes in zip(columns, grid, strict=False):
        axes.set_title(column)
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(axis="y", linewidth=0.3, color="#cccccc")
    for axes in grid[len(columns) :]:
        axes.set_axis_off()
    of = "mean over clients" if drawing.client is None else f"client {drawing.client}"
    for axes in grid[::across]:
        axes.set_ylabel(f"accuracy, %, {of}")
    _legend(body, grid)
    return whole


def _over_rounds(drawing: Curves, result: Result, histories: Histories) -> tuple[list[int], np.ndarray]:
    """Return the rounds whose evaluation all seeds have, and the accuracies in % [seeds, rounds]."""
    by_seed: list[dict[int, float]] = []
    for run in result.runs.values():
        if drawing.client is None:
            rounds, accuracy = run.metrics["round"].astype(int).tolist(), run.metrics["accuracy_mean"]
            by_seed.append(dict(zip(rounds, accuracy, strict=True)))
        elif (history := histories.get(run.path)) is not None:
            by_seed.append(dict(zip(history.rounds, history.accuracy[:, drawing.client], strict=True)))
    # train.patience ends seeds after different rounds
    rounds = [number for number in next(iter(by_seed), {}) if all(number in one for one in by_seed)]
    return rounds, 100 * np.array([[one[number] for number in rounds] for one in by_seed])


def _bars(drawing: Bars, title: str, notes: Sequence[str], results: Sequence[Result]) -> Figure:
    """Draw a group of bars for each column, in it a bar for each row."""
    columns = list(dict.fromkeys(result.column for result in results))
    whole, body = _page(title, notes, COLUMN_INCH if len(results) <= 12 else PAGE_INCH, 2.4)
    axes = body.subplots()
    rows = list(dict.fromkeys(result.row.label for result in results))
    width = 0.8 / len(rows)
    name = "best_accuracy" if drawing.accuracy == "best" else "accuracy_mean"
    for number, row in enumerate(rows):
        of_row = [result for result in results if result.row.label == row]
        at = [columns.index(result.column) + (number - (len(rows) - 1) / 2) * width for result in of_row]
        means = [100 * (result.mean(name) or 0) for result in of_row]
        colour, _, _, hatch = _look(number)
        axes.bar(at, means, width, color=colour, hatch=hatch, label=row, edgecolor="white", linewidth=0.3)
        # nan is not drawn
        spreads = [100 * (result.deviation(name) or math.nan) for result in of_row]
        axes.errorbar(at, means, spreads, fmt="none", ecolor="black", elinewidth=0.8, capsize=1.5)
        published = [math.nan if result.published is None else result.published for result in of_row]
        if not np.isnan(published).all():
            axes.plot(at, published, "D", label="published", color="white", mec="black", mew=0.8)
    key, groups = _common_key(columns)
    axes.set_xticks(range(len(groups)), groups)
    if max(map(len, groups)) * len(groups) > 45:
        axes.tick_params(axis="x", rotation=30)
        for text in axes.get_xticklabels():
            text.set(horizontalalignment="right", rotation_mode="anchor")
    axes.set_xlabel(key)
    axes.set_ylabel(f"accuracy, %, {drawing.accuracy} round")
    _legend(body, [axes])
    return whole


def _common_key(labels: Sequence[str]) -> tuple[str, list[str]]:
    """Return the key of a sweep's labels, such as `k = 2`, and its values; "" and the labels without one."""
    keys = {label.rpartition(" = ")[0] for label in labels}
    if len(keys) != 1 or keys == {""}:
        return "", list(labels)
    return keys.pop(), [label.rpartition(" = ")[2] for label in labels]


def _points(title: str, notes: Sequence[str], results: Sequence[Result]) -> Figure:
    """Draw a point for each row and column; those whose names are the same before a comma look the same."""
    whole, body = _page(title, notes, COLUMN_INCH, 2.6)
    axes = body.subplots()
    names = _short_names(results)
    groups = list(dict.fromkeys(name.partition(", ")[0] for name in names))
    sent = [result.mean("bytes") or 0 for result in results]
    size, unit = unit_of_bytes(max(sent))
    sent = [count / size for count in sent]
    for number, (result, name, at) in enumerate(zip(results, names, sent, strict=True)):
        group, _, detail = name.partition(", ")
        colour, _, mark, _ = _look(groups.index(group))
        accuracy, spread = (
            100 * (value or 0) for value in (result.mean("accuracy_mean"), result.deviation("accuracy_mean"))
        )
        axes.errorbar(at, accuracy, spread, fmt=mark, color=colour, elinewidth=0.6, label=group)
        # towards the middle, and in turn above and below
        side = "right" if at > (min(sent) + max(sent)) / 2 else "left"
        shift = (-3 if side == "right" else 3, -6 if number % 2 else 2)
        axes.annotate(detail or name, (at, accuracy), shift, textcoords="offset points", fontsize=5, ha=side)
    axes.set_xlabel(f"{unit} down and up, all rounds and clients")
    axes.set_ylabel("accuracy, %")
    axes.margins(0.2, 0.12)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.grid(linewidth=0.3, color="#cccccc")
    _legend(body, [axes])
    return whole


def _legend(body: SubFigure, grid: Iterable[Axes]) -> None:
    """Name everything once above the panels."""
    named: dict[str, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    if named:
        longest = max(map(len, named))
        width = body.figure.get_figwidth()
        across = max(1, min(len(named), int(width * 16 / (longest + 6))))
        body.legend(named.values(), named.keys(), loc="outside upper center", ncols=across)


# Words


def _short_names(results: Sequence[Result]) -> list[str]:
    """Return names of results by what tells them apart: their rows, their columns, or both."""
    rows, columns = {result.row.label for result in results}, {result.column for result in results}
    return [
        ", ".join([result.row.label] * (len(rows) > 1) + [result.column] * (len(columns) > 1))
        for result in results
    ]


def _scored(results: Sequence[Result]) -> list[str]:
    """Say when models are scored, where rows differ in it."""
    rows: dict[str, dict[str, None]] = {}
    for result in results:
        rows.setdefault(result.scored, {})[result.row.label] = None
    said = [f"{moment}: {', '.join(labels)}" for moment, labels in sorted(rows.items())]
    return [f"scored {'; '.join(said)}"] if len(said) > 1 else []


def _missing(results: Sequence[Result]) -> list[str]:
    """Say which of the cells that would be drawn are not finished."""
    counts, totals = [result.missing for result in results], [len(result.cells) for result in results]
    return _seeds_of("missing", results, counts, totals)


def _seeds_of(
    what: str, results: Sequence[Result], counts: Sequence[int], totals: Sequence[int]
) -> list[str]:
    """Say of which results something holds; `counts` has for how many of the `totals` seeds of each."""
    named = [
        f"{name or result.row.label}" + f" ({count} of {total} seeds)" * (count < total)
        for result, name, count, total in zip(results, _short_names(results), counts, totals, strict=True)
        if count
    ]
    return [f"{what}: {'; '.join(named)}"] if named else []
