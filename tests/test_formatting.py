"""Numbers and tables as people read them."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from hpcfl import formatting
from hpcfl.formatting import Document, Grid


def test_numbers_have_three_digits_and_a_unit() -> None:
    counts = [0, 999, 1000, 16_440_000, 999_600_000, 2e12, 3e16]
    expected = ["0 B", "999 B", "1 kB", "16.4 MB", "1 GB", "2 TB", "3e+04 TB"]
    assert [formatting.readable_bytes(count) for count in counts] == expected
    assert [*map(formatting.readable_seconds, (0.00154, 0.25, 12.345))] == ["1.54 ms", "250 ms", "12.3 s"]
    assert [formatting.times(count) for count in (1, 2.0)] == ["once", "2 times"]
    assert [*map(formatting.clock, (61.4, 7200, 90_000))] == ["0:01:01", "2:00:00", "1 day, 1:00:00"]


def test_shares_and_intervals_are_in_points() -> None:
    assert [formatting.percent(0.614), formatting.percent(None)] == ["61.4", ""]
    assert formatting.percent(0.614, 0.005) == "61.4 ± 0.5"
    assert formatting.half_width(0.02, 0.01, 1) == "± 1.0"
    assert formatting.half_width(-0.01, 0.02, 2) == "± 2.00"
    assert formatting.half_width(0.02, math.nan, 1) == "-"
    # of another centre, as after training, where seeds may have different numbers of clients
    assert formatting.half_width(0.1, 0.05, 1, beside=0.1) == "± 5.0"
    assert formatting.half_width(0.08, 0.05, 1, beside=0.1) == "[+3.0, +13.0]"


def test_a_hint_names_the_most_similar_word() -> None:
    assert formatting.did_you_mean("roudns", ["round", "rounds", "lr"]) == "; did you mean rounds?"
    partitions = ["dirichlet", "iid", "dirichlet_pfllib"]
    assert formatting.did_you_mean("Dir", partitions) == "; did you mean dirichlet or dirichlet_pfllib?"
    for word, known in (("x", "rounds"), ("fedmtl", "fedmn"), ("", "rounds")):
        assert formatting.did_you_mean(word, [known]) == ""
    assert formatting.did_you_mean("x", ["rounds"], "; see --help") == "; see --help"


def test_only_the_first_column_is_left_aligned() -> None:
    assert formatting.aligned([["a", "bc", ""], ["def", "g", "hi"]]) == ["a    bc", "def   g  hi"]


def test_each_value_is_drawn_as_a_character_of_its_height() -> None:
    values = np.linspace(0.2, 0.9, 8).tolist()
    assert formatting.curve(values, 40, "utf-8") == f"20.00% {formatting.BLOCKS} 90.00%"
    assert formatting.sparkline(values[::-1], 40, "utf-8") == formatting.BLOCKS[::-1]
    assert formatting.curve([0.1654, 0.1], 40, "utf-8") == "16.54% █▁ 10.00%"
    assert formatting.curve([0.5], 40, "utf-8") == "50.00% ▁ 50.00%"
    assert formatting.curve([], 40, "utf-8") == formatting.sparkline([], 40, "utf-8") == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "no such encoding"])
def test_encodings_without_blocks_use_ascii(encoding: str) -> None:
    assert formatting.sparkline(list(range(8)), 8, encoding) == formatting.ASCII_LEVELS
    assert len(formatting.ASCII_LEVELS) == len(formatting.BLOCKS)
    assert formatting.ASCII_LEVELS.isascii()


def test_several_values_share_a_character_of_their_mean() -> None:
    # the means of the pairs are 0.5, 2.5 and 4.5
    assert formatting.sparkline([0, 1, 2, 3, 4, 5], 3, "utf-8") == "▁▅█"
    assert formatting.curve([0.0, 0.1, 0.2, 0.3], 2, "utf-8") == "0.00% ▁█ 30.00%"
    assert len(formatting.sparkline(list(range(2500)), 40, "utf-8")) == 40


DOCUMENT = Document(
    "50 % & more_{x}",
    ["a note ~ with \\ and ^, <1> | #2 $"],
    [
        Grid("", ["method", "a & b"], [["x_1", "1 ± 2"], ["a|b", ""]]),
        Grid("second", ["m"], [["1"]], "50 % below"),
    ],
)


def test_text_is_aligned() -> None:
    lines = formatting.as_text(DOCUMENT).splitlines()
    assert lines[4:7] == ["method  a & b", "x_1     1 ± 2", "a|b"]
    assert lines[8:] == ["second:", "m", "1", "", "50 % below"]


def test_markdown_escapes_the_separators_of_columns() -> None:
    lines = formatting.as_markdown(DOCUMENT).splitlines()
    assert lines[4:8] == ["| method | a & b |", "| --- | --- |", "| x_1 | 1 ± 2 |", "| a&#124;b |  |"]
    assert lines[9] == "## second"
    assert lines[-2:] == ["", "50 % below"]


def test_latex_escapes_special_characters() -> None:
    latex = formatting.as_latex(DOCUMENT, "mine")
    assert r"\caption{50 \% \& more\_\{x\}. a note \textasciitilde{} with \textbackslash{} and " in latex
    assert r"\textasciicircum{}, \textless{}1\textgreater{} \textbar{} \#2 \$.}" in latex
    assert latex.endswith("\\end{tabular}\n\\end{table}\n")
    assert r"\caption{50 \% \& more\_\{x\}: second. 50 \% below.}" in latex
    assert re.findall(r"\\label{(.*)}", latex) == ["tab:mine-1", "tab:mine-2"]
    body = [line for line in latex.splitlines() if not line.startswith("%")]
    plain = re.sub(r"\\[&%$#_{}]", "", "\n".join(body))
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") % 2 == 0
    assert not re.search("[_#^~%]", plain)
    for name in ("table", "tabular"):
        assert plain.count(rf"\begin{{{name}}}") == plain.count(rf"\end{{{name}}}") == 2
    first = body[body.index(r"\begin{tabular}{lr}") :]
    rule, header, middle, *rows, end, _ = first[1 : first.index(r"\end{table}")]
    assert (rule, middle, end) == (r"\toprule", r"\midrule", r"\bottomrule")
    assert header == r"method & a \& b \\"
    assert rows == [r"x\_1 & 1 $\pm$ 2 \\", r"a\textbar{}b &  \\"]


def test_a_row_of_latex_is_no_argument_of_the_line_break_before_it() -> None:
    grid = Grid("", ["[m]", "a"], [["[2] ours", "[1]"], ["*", "*"], ["theirs", "2"]])
    lines = formatting.as_latex(Document("", [], [grid]), "mine").splitlines()
    rows = [line for line in lines if " & " in line]
    assert rows == [r"{}[m] & a \\", r"{}[2] ours & [1] \\", r"{}* & * \\", r"theirs & 2 \\"]


def test_latex_shows_the_highest_of_a_column_in_bold() -> None:
    texts = ["61.4 ± 0.5 (60.0)", "missing (70.0)", "9.8", "61.4", "-"]
    grid = Grid("", ["method", "a", "b"], [["m", text, text] for text in texts], highest_is_best=[1])
    lines = formatting.as_latex(Document("", [], [grid]), "mine").splitlines()
    rows = [line.split(" & ")[1] for line in lines if line.startswith("m &")]
    assert rows == [r"\textbf{61.4} $\pm$ 0.5 (60.0)", "missing (70.0)", "9.8", r"\textbf{61.4}", "-"]
    assert sum("textbf" in line for line in lines) == 2
    alone = Grid("", ["method", "a"], [["m", "61.4"], ["n", "missing"]], highest_is_best=[1])
    assert "textbf" not in formatting.as_latex(Document("", [], [alone]), "mine")


def test_latex_has_minus_signs_and_text_on_the_left() -> None:
    grid = Grid("", ["rows", "scored", "points", "width"], [["A-1 - B", "late", "-0.2", "± 1"]])
    text = formatting.as_latex(Document("", [], [grid]), "mine")
    assert "\nA-1 -- B & late & $-$0.2 & $\\pm$ 1 \\\\\n" in text
    assert r"\begin{tabular}{llrr}" in text
