"""Pictures of a paper's column as PNG and PDF: the only module that knows matplotlib."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.style import context
from matplotlib.ticker import MaxNLocator

from hpcfl.tables.paper_figures import Bars, Curves, HeatMap, HeatMaps, PaperFigure, Point, Points

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

_TITLE_CHARACTERS_AN_INCH, _NOTE_CHARACTERS_AN_INCH = 14.5, 19.5
_TITLE_LINE_INCH, _NOTE_LINE_INCH = 0.14, 0.105
_MAX_NAMED_TICKS = 12


def draw(sheet: PaperFigure) -> dict[str, bytes]:
    """Return a picture as the bytes of files by their ending; the same sheet gives the same bytes."""
    made = {}
    # a user's own style would change the bytes
    with context(["default", STYLE]):
        picture = figure(sheet)
        for ending, metadata in WITHOUT_CLOCK_AND_VERSION.items():
            file = io.BytesIO()
            picture.savefig(file, format=ending, dpi=DOTS_PER_INCH, metadata=metadata)
            made[ending] = file.getvalue()
    return made


def figure(sheet: PaperFigure) -> Figure:
    """Return a picture with its title above and its notes below."""
    drawn = sheet.drawn
    width, height = _size(drawn)
    title = _wrapped(sheet.title, width * _TITLE_CHARACTERS_AN_INCH)
    notes = [line for note in sheet.notes for line in _wrapped(note, width * _NOTE_CHARACTERS_AN_INCH)]
    heights = [
        0.06 + _TITLE_LINE_INCH * len(title),
        height,
        0.04 + _NOTE_LINE_INCH * len(notes),
    ]
    whole = Figure(figsize=(width, sum(heights)), layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03))
    parts: Any = whole.subfigures(3, 1, height_ratios=heights)
    above, body, below = parts
    above.text(0.02, 0.5, "\n".join(title), va="center", weight="bold", fontsize=8)
    below.text(0.02, 0.95, "\n".join(notes), va="top", fontsize=6, color="#444444")
    if isinstance(drawn, HeatMaps):
        _draw_heat_maps(body, drawn)
    elif isinstance(drawn, Curves):
        _draw_curves(body, drawn)
    elif isinstance(drawn, Bars):
        _draw_bars(body, drawn)
    else:
        _draw_points(body, drawn)
    return whole


def _size(drawn: HeatMaps | Curves | Bars | Points) -> tuple[float, float]:
    """Return the width and the height of what stands between title and notes, in inches."""
    if isinstance(drawn, HeatMaps):
        lines = _lines(drawn)
        across = max(map(len, lines))
        width = COLUMN_INCH if across < 4 else PAGE_INCH
        of_panel = (width - 1.0) / across
        most_columns = max(panel.values.shape[1] for line in lines for _, panel in line)
        square = min(of_panel / most_columns, MAX_INCH_A_CELL)
        return width, square * sum(_line_heights(lines)) + 0.3 * len(lines) + 0.2
    if isinstance(drawn, Curves):
        across, down = _grid(len(drawn.panels))
        return (COLUMN_INCH if across == 1 else PAGE_INCH), 2.1 * down + 0.3
    if isinstance(drawn, Bars):
        bars = sum(map(len, drawn.series.values()))
        return (COLUMN_INCH if bars <= 12 else PAGE_INCH), 2.4
    return COLUMN_INCH, 2.6


def _wrapped(text: str, characters: float) -> list[str]:
    return textwrap.wrap(text, int(characters))


def _grid(count: int) -> tuple[int, int]:
    """Return how many panels stand side by side, and in how many lines."""
    across = min(count, 3 if count % 4 else 4)
    return across, math.ceil(count / across)


# Heat maps


def _lines(drawn: HeatMaps) -> list[list[tuple[str, HeatMap]]]:
    """Return panels with what stands beside their line; lines of one panel each become one line."""
    lines = [[(title, panel) for panel in panels] for title, panels in drawn.lines.items()]
    if all(len(line) == 1 for line in lines):
        across, _ = _grid(len(lines))
        panels = [line[0] for line in lines]
        return [panels[start : start + across] for start in range(0, len(panels), across)]
    return lines


def _line_heights(lines: list[list[tuple[str, HeatMap]]]) -> list[int]:
    """Return the largest number of matrix rows of each line."""
    return [max(len(panel.values) for _, panel in line) for line in lines]


def _draw_heat_maps(body: SubFigure, drawn: HeatMaps) -> None:
    lines = _lines(drawn)
    beside = max(map(len, drawn.lines.values())) > 1
    across = max(map(len, lines))
    grid = body.subplots(len(lines), across, squeeze=False, height_ratios=_line_heights(lines))
    low, high = _ends(drawn)
    colours = LogNorm(low, high) if drawn.is_log else Normalize(low, high)
    image = None
    for at, line in enumerate(lines):
        for number, axes in enumerate(grid[at]):
            if number >= len(line):
                axes.set_axis_off()
                continue
            title, panel = line[number]
            # zero has no logarithm: it is as pale as the smallest
            values = np.maximum(panel.values, low) if drawn.is_log else panel.values
            image = axes.imshow(values, norm=colours, cmap=LARGE_IS_DARK, interpolation="none", aspect="auto")
            axes.set_title(panel.title if beside else f"{title}\n{panel.title}".strip())
            is_named = number == 0 or panel.row_names != line[0][1].row_names
            _name_ticks(axes.yaxis, panel.row_names if is_named else [])
            if number == 0:
                side = f"{title}\n" if beside and title else ""
                axes.set_ylabel(f"{side}{drawn.axes[0]}")
            below = lines[at + 1][number : number + 1] if at + 1 < len(lines) else []
            is_last = not below or below[0][1].column_names != panel.column_names
            _name_ticks(axes.xaxis, panel.column_names if is_last else [])
            if is_last:
                axes.set_xlabel("for client" if drawn.axes[1] == "client" else drawn.axes[1])
    assert image is not None
    _, height = _size(drawn)
    bar = body.colorbar(image, ax=grid, fraction=0.05, pad=0.01, aspect=height / BAR_INCH)
    bar.set_label(drawn.of)


def _ends(drawn: HeatMaps) -> tuple[float, float]:
    """Return the values of the palest and of the darkest colour."""
    values = np.concatenate([panel.values.ravel() for line in drawn.lines.values() for panel in line])
    high = float(values.max())
    if drawn.is_log:
        low = drawn.low or float(min(values[values > 0], default=1.0))
        return low, max(high, 10 * low)
    low = min(0.0, float(values.min())) if drawn.low is None else drawn.low
    return low, high if high > low else low + 1


def _name_ticks(axis: Any, names: Sequence[str]) -> None:
    # all layers are named, of many clients some
    is_counted = bool(names) and names[0].isdigit()
    numbers = range(0, len(names), math.ceil(len(names) / _MAX_NAMED_TICKS) if is_counted else 1)
    axis.set_ticks(list(numbers), [names[number] for number in numbers])


# Accuracies


def _draw_curves(body: SubFigure, drawn: Curves) -> None:
    across, down = _grid(len(drawn.panels))
    grid = body.subplots(down, across, squeeze=False, sharey=True).ravel()
    labels = list(dict.fromkeys(curve.label for curves in drawn.panels.values() for curve in curves))
    looks = dict(zip(labels, zip(cycle(COLOURS), cycle(LINES), cycle(MARKS), strict=False), strict=False))
    for axes, (title, curves) in zip(grid, drawn.panels.items(), strict=False):
        for curve in curves:
            colour, line, mark = looks[curve.label]
            percent = 100 * curve.by_seed
            axes.plot(
                curve.rounds,
                percent.mean(axis=0),
                color=colour,
                linestyle=line,
                marker=mark,
                markevery=max(1, len(curve.rounds) // 6),
                label=curve.label,
            )
            if len(percent) > 1:
                low, high = percent.min(axis=0), percent.max(axis=0)
                axes.fill_between(curve.rounds, low, high, color=colour, alpha=0.2, linewidth=0)
            if curve.published is not None:
                axes.axhline(
                    100 * curve.published,
                    color=colour,
                    linestyle=(0, (1, 3)),
                    linewidth=0.8,
                    label=f"{curve.label}, published",
                )
        axes.set_title(title)
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(axis="y", linewidth=0.3, color="#cccccc")
    for axes in grid[len(drawn.panels) :]:
        axes.set_axis_off()
    for axes in grid[::across]:
        axes.set_ylabel(f"accuracy, %, {drawn.of}")
    _legend(body, grid)


def _draw_bars(body: SubFigure, drawn: Bars) -> None:
    axes = body.subplots()
    key, groups = _common_key(drawn.groups)
    if len(drawn.groups) == 1:
        # one bar a row needs no legend
        series = {"": [of_row[drawn.groups[0]] for of_row in drawn.series.values()]}
        places = {"": np.arange(len(drawn.series), dtype=float)}
        groups, key, width = list(drawn.series), "", 0.7
    else:
        width = 0.8 / len(drawn.series)
        series, places = {}, {}
        for number, (label, of_row) in enumerate(drawn.series.items()):
            series[label] = list(of_row.values())
            offset = (number - (len(drawn.series) - 1) / 2) * width
            places[label] = np.array([drawn.groups.index(column) + offset for column in of_row])
    for number, (label, bars) in enumerate(series.items()):
        means = [100 * bar.mean for bar in bars]
        deviations = [100 * (bar.deviation or 0) for bar in bars]
        axes.bar(
            places[label],
            means,
            width,
            label=label or None,
            color=COLOURS[number % len(COLOURS)],
            hatch=HATCHES[number % len(HATCHES)],
            edgecolor="white",
            linewidth=0.3,
        )
        spread = [(at, mean, by) for at, mean, by in zip(places[label], means, deviations, strict=True) if by]
        if spread:
            at, mean, by = zip(*spread, strict=True)
            axes.errorbar(at, mean, by, fmt="none", ecolor="black", elinewidth=0.8, capsize=1.5)
        known = [
            (at, 100 * bar.published) for at, bar in zip(places[label], bars, strict=True) if bar.published
        ]
        if known:
            at, published = zip(*known, strict=True)
            axes.plot(
                at,
                published,
                "D",
                color="white",
                markeredgecolor="black",
                markeredgewidth=0.8,
                label="published",
            )
    axes.set_xticks(range(len(groups)), groups)
    if max(map(len, groups)) * len(groups) > 45:
        axes.tick_params(axis="x", rotation=30)
        for text in axes.get_xticklabels():
            text.set(horizontalalignment="right", rotation_mode="anchor")
    axes.set_xlabel(key)
    axes.set_ylabel(f"accuracy, %, {drawn.of}")
    _legend(body, [axes])


def _common_key(labels: Sequence[str]) -> tuple[str, list[str]]:
    """Return the key of a sweep's labels, such as `k = 2`, and its values; "" and the labels without one."""
    keys = {label.rpartition(" = ")[0] for label in labels}
    if len(keys) != 1 or keys == {""}:
        return "", list(labels)
    return keys.pop(), [label.rpartition(" = ")[2] for label in labels]


def _draw_points(body: SubFigure, drawn: Points) -> None:
    axes = body.subplots()
    looks = zip(cycle(COLOURS), cycle(MARKS), strict=False)
    for (group, points), (colour, mark) in zip(drawn.groups.items(), looks, strict=False):
        axes.errorbar(
            [point.gigabytes for point in points],
            [100 * point.accuracy for point in points],
            [100 * (point.deviation or 0) for point in points],
            fmt=mark,
            color=colour,
            elinewidth=0.6,
            label=group,
        )
    axes.set_xlabel("GB down and up, all rounds and clients")
    axes.set_ylabel("accuracy, %")
    axes.margins(0.2, 0.12)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    _label_points(axes, [point for points in drawn.groups.values() for point in points])
    axes.grid(linewidth=0.3, color="#cccccc")
    _legend(body, [axes])


def _label_points(axes: Axes, points: Sequence[Point]) -> None:
    """Write each point's label beside it, where the fewest others are, in a fixed order."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    places = [
        np.array([(point.gigabytes - left) / (right - left), (100 * point.accuracy - low) / (high - low)])
        for point in points
    ]
    taken = [(place - 0.015, place + 0.015) for place in places]
    for point, place in zip(points, places, strict=True):
        # as shares of the axes: right of the point, above, below, and left of it
        size = np.array([0.0165 * len(point.label), 0.035])
        shifts = (
            (0.02, -size[1] / 2),
            (-size[0] / 2, 0.025),
            (-size[0] / 2, -0.025 - size[1]),
            (-0.02 - size[0], -size[1] / 2),
        )
        corners = [place + shift for shift in shifts]
        crossed = [
            sum(bool((corner < end).all() and (corner + size > start).all()) for start, end in taken)
            for corner in corners
        ]
        best = corners[crossed.index(min(crossed))]
        taken.append((best, best + size))
        axes.text(best[0], best[1], point.label, transform=axes.transAxes, fontsize=5, va="bottom")


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
