"""Format numbers, tables and hints for people: all layout of printed text is here."""

from __future__ import annotations

import difflib
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

TEXT_WIDTH = 110
"""Width of sentences on a terminal; tables may be wider."""
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = ".:-=+*#@"


def readable_bytes(count: float) -> str:
    """Return a number of bytes with three digits and its unit, such as "16.4 MB"."""
    size, unit = unit_of_bytes(count)
    return f"{count / size:.3g} {unit}"


def unit_of_bytes(count: float) -> tuple[float, str]:
    """Return the bytes of the unit for a number of bytes, and its name."""
    units = {1e0: "B", 1e3: "kB", 1e6: "MB", 1e9: "GB"}
    return next(((size, unit) for size, unit in units.items() if count < 999.5 * size), (1e12, "TB"))


def readable_seconds(seconds: float) -> str:
    """Return a time with three digits and its unit, such as "1.5 ms", and a long one as a clock's."""
    if seconds >= 999.5:
        return clock(seconds)
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def times(count: float) -> str:
    """Return "once", "2 times" and so on."""
    return "once" if count == 1 else f"{count:.0f} times"


def clock(seconds: float) -> str:
    """Return seconds as days, hours, minutes and seconds, such as "1:02:03"."""
    return str(timedelta(seconds=round(seconds)))


def percent(mean: float | None, deviation: float | None = None) -> str:
    """Return a fraction in %, such as "61.4 ± 0.5"; "" for None."""
    if mean is None:
        return ""
    return f"{100 * mean:.1f}{'' if deviation is None else f' ± {100 * deviation:.1f}'}"


def half_width(mean: float, width: float, digits: int, beside: float | None = None) -> str:
    """Return half the width of a confidence interval in points.

    "-" where there is none (nan). Where the number `beside` it is not its mean, its bounds: seeds may have
    different numbers of clients, and then the mean over clients is not the mean over seeds.
    """
    if math.isnan(width):
        return "-"
    if beside is not None and abs(mean - beside) > 0.5 * 10 ** -(digits + 2):
        return f"[{100 * (mean - width):+.{digits}f}, {100 * (mean + width):+.{digits}f}]"
    return f"± {100 * width:.{digits}f}"


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a hint that names the most similar known word, or those that begin with this one, in any case;
    `otherwise` if there is none."""
    small = word.lower()
    by_small = {name.lower(): name for name in known}
    # one letter is a large part of a short word; fedmtl is another method than fedmn
    near = difflib.get_close_matches(small, by_small, n=1, cutoff=0.6 if len(word) < 5 else 0.75)
    near = near or [name for name in by_small if name.startswith(small) and small]
    return f"; did you mean {' or '.join(by_small[name] for name in near)}?" if near else otherwise


def curve(values: Sequence[float], width: int, encoding: str) -> str:
    """Return fractions such as accuracies as `first ▁▃█▅ last` (see `sparkline`); "" without any."""
    if not len(values):
        return ""
    return f"{values[0]:.2%} {sparkline(values, width, encoding)} {values[-1]:.2%}"


def sparkline(values: Sequence[float], width: int, encoding: str) -> str:
    """Return numbers as at most `width` characters between the lowest and the highest.

    If there are more numbers, neighbours share a character of the height of their mean. Characters are ASCII
    where the encoding has no blocks.
    """
    if not len(values):
        return ""
    means = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
    lowest, highest = means.min(), means.max()
    heights = (means - lowest) / (highest - lowest) if highest > lowest else np.zeros(len(means))
    try:
        BLOCKS.encode(encoding)
        levels = BLOCKS
    except (UnicodeEncodeError, LookupError):
        levels = ASCII_LEVELS
    return "".join(levels[round(height * (len(levels) - 1))] for height in heights.tolist())


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown; the first row is its header."""
    lines = (rows[0], ["---"] * len(rows[0]), *rows[1:])
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)


@dataclass(frozen=True)
class Grid:
    """One table of a document."""

    caption: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    """A sentence below it."""
    highest_is_best: Sequence[int] = ()
    """Numbers of the columns whose entries begin with a number, the higher the better."""


@dataclass(frozen=True)
class Document:
    """The content of a printed table, before it is formatted."""

    title: str
    notes: list[str]
    grids: list[Grid]


def as_text(document: Document) -> str:
    """Return a document as aligned columns for a terminal."""
    notes = [textwrap.fill(note, TEXT_WIDTH) for note in document.notes]
    parts = [f"# {document.title}\n", *(f"{note}\n" for note in notes)]
    for grid in document.grids:
        caption = textwrap.fill(f"{grid.caption}:", TEXT_WIDTH) + "\n" if grid.caption else ""
        parts.append(caption + "\n".join(aligned([grid.header, *grid.rows])) + "\n")
        if grid.note:
            parts.append(textwrap.fill(grid.note, TEXT_WIDTH) + "\n")
    return "\n".join(parts)


def as_markdown(document: Document) -> str:
    """Return a document as Markdown."""
    parts = [f"# {document.title}\n", *(f"{note}\n" for note in document.notes)]
    for grid in document.grids:
        if grid.caption:
            parts.append(f"## {grid.caption}\n")
        parts.append(markdown([grid.header, *grid.rows]))
        if grid.note:
            parts.append(f"{grid.note}\n")
    return "\n".join(parts)


def as_latex(document: Document, name: str) -> str:
    r"""Return a document as LaTeX to be put into another with \input.

    Each grid is a table with the label tab:<name>-<number>; the first one's caption has the notes.
    """
    parts = [r"% needs \usepackage{booktabs}"]
    for number, grid in enumerate(document.grids, 1):
        title = f"{document.title}: {grid.caption}" if grid.caption else document.title
        texts = [title, *(document.notes if number == 1 else []), grid.note]
        caption = " ".join(f"{text.removesuffix('.')}." for text in texts if text)
        columns = [*zip(grid.header, *grid.rows, strict=True)]
        header, *rows = map(_latex_row, ([_escaped(text) for text in grid.header], *_bold_best(grid)))
        parts += [
            "",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_escaped(caption)}}}",
            rf"\label{{tab:{name}-{number}}}",
            rf"\begin{{tabular}}{{l{''.join(map(_alignment, columns[1:]))}}}",
            r"\toprule",
            header,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    return "\n".join(parts) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    r"""Join cells; LaTeX would take a first [ or * for an argument of the \\ before it."""
    return ("{}" if cells[0][:1] in ("[", "*") else "") + " & ".join(cells) + r" \\"


def _alignment(column: Sequence[str]) -> str:
    """Return how LaTeX aligns a column, given its header and entries: numbers on the right."""
    return "r" if any(re.match(r"[-+±]? ?\d", entry) for entry in column[1:]) else "l"


def _bold_best(grid: Grid) -> list[list[str]]:
    """Return the rows as LaTeX, with the highest of the columns `highest_is_best` in bold."""
    rows = [[_escaped(text) for text in row] for row in grid.rows]
    for column in grid.highest_is_best:
        found = [re.match(r"[\d.]+", row[column]) for row in rows]
        means = [float(mean[0]) for mean in found if mean]
        best = max(means) if len(means) > 1 else None
        for row, mean in zip(rows, found, strict=True):
            if mean and float(mean[0]) == best:
                row[column] = rf"\textbf{{{mean[0]}}}{row[column][mean.end() :]}"
    return rows


_LATEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "±": r"$\pm$",
    }
)


def _escaped(text: str) -> str:
    """Return text for LaTeX, with minus signs and dashes where a hyphen stands for one."""
    return re.sub(r"(?<![\w.])-(?=\d)", "$-$", text.translate(_LATEX)).replace(" - ", " -- ")
