"""A document of tables, and its three formats: text, Markdown and LaTeX."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

TEXT_WIDTH = 110
"""Of sentences on a terminal; tables are as wide as they are."""


@dataclass(frozen=True)
class Grid:
    """One table of a document."""

    caption: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    """A sentence below it."""


@dataclass(frozen=True)
class Document:
    """All that is printed of a table, in no format yet."""

    title: str
    notes: list[str]
    grids: list[Grid]


def as_text(document: Document) -> str:
    """Return a document as aligned columns for a terminal."""
    notes = [textwrap.fill(note, TEXT_WIDTH) for note in document.notes]
    parts = [f"# {document.title}\n", *(f"{note}\n" for note in notes)]
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
        caption = textwrap.fill(f"{grid.caption}:", TEXT_WIDTH) + "\n" if grid.caption else ""
        parts.append(caption + "\n".join(aligned) + "\n")
        if grid.note:
            parts.append(textwrap.fill(grid.note, TEXT_WIDTH) + "\n")
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
        if grid.note:
            parts.append(f"{grid.note}\n")
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
            *([rf"\noindent {_escaped(grid.note)}\par"] if grid.note else []),
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
