"""Verdicts on claims, from table files and result files made for the purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bits import refused, write_csv

from hpcfl.errors import FINISHED, UserError
from hpcfl.formatting import as_text
from hpcfl.main import main
from hpcfl.tables.claims import document, overview, read_claims

FULL = """\
title: A table
seeds: [0, 1, 2]
settings: {train: {rounds: 40}}
columns:
  - {label: few}
  - {label: many, data: {clients: 12}}
rows:
  - {label: ours, method: {name: pfedla}, published: {few: 61.43, many: 70.0}}
  - {label: alone, method: {name: local}}
  - {label: mean, method: {name: fedavg}, without: [many]}
compare:
  - [ours, alone]
  - {rows: [ours, alone], at: after_training}
  - [mean, ours]
"""
SMALL = "extends: full.yaml\nsettings: {train: {rounds: 3}}\n"
CLAIMS = """\
paper: A paper
tables: [full]
claims:
  - sentence: it does better
    where: table 1
    rule: printed
    runs:
      - {table: full, row: ours, above: alone}
"""


def difference(
    mean: float, *bounds: float, pair: tuple[str, str] = ("ours", "alone"), at: str = "", seeds: int = 3
) -> dict[str, Any]:
    low, high = bounds or ("", "")
    moment = at or "after download, after training"
    line = {"first": pair[0], "second": pair[1], "column": "few", "moment": moment, "seeds": seeds}
    return line | {"difference": mean, "over_seeds_low": low, "over_seeds_high": high}


class Folder:
    """configs/ with two table files, result files and a claims file."""

    def __init__(self, path: Path) -> None:
        self.claims, self.tables = path / "claims", path / "tables"
        self.results = self.tables / "results"
        for folder in (self.claims, self.results):
            folder.mkdir(parents=True)
        (self.tables / "full.yaml").write_text(FULL)
        (self.tables / "small.yaml").write_text(SMALL)

    def write(self, name: str, *lines: dict[str, Any]) -> None:
        write_csv(self.results / name, lines)

    def result(self, name: str, label: str, *accuracies: float, rounds: int = 40) -> None:
        seeds = {f"accuracy_seed_{seed}": accuracy for seed, accuracy in enumerate(accuracies)}
        mean = sum(accuracies) / len(accuracies)
        line = {"label": label, "column": "few", "seeds": len(accuracies), "rounds": rounds}
        line |= {"scored": "after download", "accuracy_mean": mean, "accuracy_std_over_seeds": ""}
        self.write(name, line | seeds)

    def write_claims(self, text: str = CLAIMS) -> Path:
        path = self.claims / "paper.yaml"
        path.write_text(text)
        return path

    def words(self, text: str = CLAIMS) -> list[tuple[str, str, str]]:
        [verdicts] = read_claims(self.write_claims(text)).by_claim
        return [(verdict.column, verdict.word, verdict.text) for verdict in verdicts]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_the_verdict_follows_from_seeds_and_interval(folder: Folder) -> None:
    for mean, bounds, seeds, word, text in (
        (0.034, (0.022, 0.046), 3, "shown", "+3.4 [+2.2, +4.6]"),
        (0.034, (0.022, 0.046), 2, "seen", "+3.4 [+2.2, +4.6]"),
        (0.01, (-0.011, 0.031), 3, "seen", "+1.0 [-1.1, +3.1]"),
        (0.01, (), 1, "seen", "+1.0"),
        (-0.01, (-0.031, 0.011), 3, "not shown", "-1.0 [-3.1, +1.1]"),
        (-0.03, (-0.04, -0.02), 2, "not shown", "-3.0 [-4.0, -2.0]"),
        (-0.03, (-0.04, -0.02), 3, "refuted", "-3.0 [-4.0, -2.0]"),
    ):
        folder.result("full.csv", "ours", *[0.6] * seeds)
        folder.write("full_differences.csv", difference(mean, *bounds, seeds=seeds))
        assert folder.words() == [("few", word, text), ("many", "not run", "")]


def test_a_pair_that_the_table_compares_the_other_way_round_changes_its_sign(folder: Folder) -> None:
    folder.result("full.csv", "ours", 0.6)
    folder.write("full_differences.csv", difference(-0.2, -0.3, -0.1, pair=("mean", "ours")))
    words = folder.words(CLAIMS.replace("above: alone", "above: mean"))
    assert words == [("few", "shown", "+20.0 [+10.0, +30.0]")]


def test_claims_distinguish_moments(folder: Folder) -> None:
    own, trained = difference(0.03, 0.02, 0.04), difference(-0.01, at="after training", seeds=1)
    folder.result("full.csv", "ours", 0.6)
    for lines in ([own, trained], [trained, own]):
        folder.write("full_differences.csv", *lines)
        assert folder.words()[0] == ("few", "shown", "+3.0 [+2.0, +4.0]")
        at = CLAIMS.replace("above: alone", "above: alone, at: after_training, columns: [few]")
        assert folder.words(at) == [("few", "not shown", "-1.0")]


def test_columns_that_are_not_run_share_a_line_with_their_moment(folder: Folder) -> None:
    text = CLAIMS + "      - {table: full, row: ours, above: alone, at: after_training}\n"
    rows = document(read_claims(folder.write_claims(text))).grids[0].rows
    of_pair = ["ours - alone", "2 columns", "not run", ""]
    assert rows == [[*of_pair, moment, "", "", "full"] for moment in ("", "after training")]


def test_a_claim_may_compare_with_a_number(folder: Folder) -> None:
    """60, 62 and 64 % beside 60 %: 2 points, and t(2) = 4.303 times 2 / sqrt(3) on each side."""
    folder.result("full.csv", "ours", 0.60, 0.62, 0.64)
    words = folder.words(CLAIMS.replace("above: alone", "above: 60.0, columns: [few]"))
    assert words == [("few", "seen", "+2.0 [-3.0, +7.0]")]
    words = folder.words(CLAIMS.replace("above: alone", "above: 50, columns: [few]"))
    assert words == [("few", "shown", "+12.0 [+7.0, +17.0]")]


def test_a_claim_covers_the_cells_that_a_row_has(folder: Folder) -> None:
    """A line of a cell that the table no longer has, as in `without`, is no result."""
    of_mean = CLAIMS.replace("ours, above: alone", "mean, above: 50")
    assert folder.words(of_mean) == [("few", "not run", "")]
    folder.result("full.csv", "mean", 0.6)
    text = (folder.results / "full.csv").read_text()
    (folder.results / "full.csv").write_text(text + text.splitlines()[1].replace("few", "many") + "\n")
    assert folder.words(of_mean) == [("few", "seen", "+10.0")]
    with pytest.raises(UserError, match=r"unknown column many; allowed: few"):
        folder.words(of_mean.replace("above: 50", "above: 50, columns: [many]"))


def test_a_claim_may_be_about_samples_instead_of_clients(folder: Folder) -> None:
    weighted = "  - {rows: [ours, alone], weighted: true}\n"
    (folder.tables / "full.yaml").write_text(FULL + weighted)
    folder.result("full.csv", "ours", 0.6)
    lines = [difference(0.03, 0.02, 0.04) | {"weighted": 0}, difference(0.05, 0.04, 0.06) | {"weighted": 1}]
    folder.write("full_differences.csv", *lines)
    assert folder.words()[0] == ("few", "shown", "+3.0 [+2.0, +4.0]")
    by_samples = CLAIMS.replace("above: alone", "above: alone, weighted: true")
    assert folder.words(by_samples)[0] == ("few", "shown", "+5.0 [+4.0, +6.0]")


def test_of_shortened_results_the_longest_are_taken_with_the_papers_rounds(folder: Folder) -> None:
    for rounds, mean in ((2, 0.01), (30, 0.02), (4, 0.03)):
        folder.result(f"small-{rounds}rounds.csv", "ours", 0.6, rounds=rounds)
        folder.write(f"small-{rounds}rounds_differences.csv", difference(mean, seeds=1))
    text = CLAIMS.replace("{table: full, row: ours,", "{table: small, row: ours, printed_rounds: 40,")
    claims = read_claims(folder.write_claims(text))
    of_run = [(v.rounds, v.text, v.table) for v in claims.by_claim[0] if v.seeds]
    assert of_run == [("30 of 40", "+2.0", "small")]
    # a cell that is not run at full size has the smaller one
    row = ["ours", "60.0, 1 seed, 30 of 40 rounds (61.43)", "not run (70.00)"]
    assert document(claims).grids[1].rows[0] == row


def test_the_verdict_has_the_rounds_of_both_rows_where_they_differ(folder: Folder) -> None:
    line = {"column": "few", "seeds": 1, "scored": "after download", "accuracy_mean": 0.6}
    folder.write("full_differences.csv", difference(0.2, 0.1, 0.3, pair=("mean", "ours")))
    for of_mean, rounds in ((40, "40"), (30, "40 and 30 of 40")):
        lines = [line | {"label": label, "rounds": done} for label, done in (("mean", of_mean), ("ours", 40))]
        folder.write("full.csv", *lines)
        claims = read_claims(folder.write_claims(CLAIMS.replace("above: alone", "above: mean")))
        assert [verdict.rounds for verdict in claims.by_claim[0]] == [rounds]


def test_a_smaller_table_without_a_claim_stands_in_for_cells_that_are_not_run(folder: Folder) -> None:
    folder.result("small.csv", "ours", 0.6, rounds=3)
    text = CLAIMS.replace("claims:", "smaller: [small]\nclaims:")
    assert document(read_claims(folder.write_claims())).grids[1].rows[0][1] == "not run (61.43)"
    cell = document(read_claims(folder.write_claims(text))).grids[1].rows[0][1]
    assert cell == "60.0, 1 seed, 3 of 40 rounds (61.43)"


def test_a_cell_that_is_not_run_in_full_has_its_longest_shortened_run(folder: Folder) -> None:
    folder.result("full.csv", "alone", 0.5)
    folder.write("full_differences.csv", difference(0, seeds=0) | {"difference": ""})
    for rounds, mean in ((30, 0.02), (4, 0.03)):
        folder.result(f"full-{rounds}rounds.csv", "ours", 0.6, rounds=rounds)
        folder.write(f"full-{rounds}rounds_differences.csv", difference(mean, seeds=1))
    claims = read_claims(folder.write_claims())
    assert [(v.rounds, v.text) for v in claims.by_claim[0] if v.seeds] == [("30 of 40", "+2.0")]
    assert document(claims).grids[1].rows[:2] == [
        ["ours", "60.0, 1 seed, 30 of 40 rounds (61.43)", "not run (70.00)"],
        ["alone", "50.0, 1 seed, 40 rounds", "not run"],
    ]
    # the rounds are those of the file with the difference
    folder.result("full.csv", "ours", 0.6)
    verdicts = read_claims(folder.write_claims()).by_claim[0]
    assert [(v.rounds, v.text) for v in verdicts if v.seeds] == [("30 of 40", "+2.0")]


def test_the_verdict_names_seeds_of_one_partition(folder: Folder) -> None:
    folder.result("full.csv", "ours", 0.6)
    for partitions, ending in ((1, " of one partition"), (3, "")):
        folder.write("full_differences.csv", difference(0.03, 0.02, 0.04) | {"partitions": partitions})
        assert folder.words()[0] == ("few", "shown", f"+3.0 [+2.0, +4.0]{ending}")


def test_the_page_has_each_cell_and_the_reason(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.result("full.csv", "ours", 0.6, 0.62)
    folder.write("full_differences.csv", difference(0.01, seeds=2))
    reason = "    reason: too few rounds\n    evidence: full.csv\n"
    path = folder.write_claims(CLAIMS + reason)
    made = document(read_claims(path))
    assert made.grids[0].caption == "table 1: it does better (the paper's rule)"
    assert made.grids[0].note == "Why: too few rounds (full.csv)."
    assert made.grids[1].rows == [
        ["ours", "61.0, 2 seeds, 40 rounds (61.43)", "not run (70.00)"],
        ["alone", "not run", "not run"],
        ["mean", "not run", "-"],
    ]
    overall = ["paper", "table 1", "it does better", "printed", "0", "1", "0", "0", "1"]
    assert overview([read_claims(path)]).rows == [overall]
    assert main(["claims", str(path)]) == FINISHED
    assert capsys.readouterr().out == as_text(made) + "\n"
    assert main(["claims", str(path), str(path)]) == FINISHED
    out = capsys.readouterr().out.rstrip()
    assert out.endswith("it does better  printed      0     1          0        0        1")
    assert main(["claims", str(path), "--markdown"]) == FINISHED
    assert "| ours - alone | few | seen | +1.0 |" in capsys.readouterr().out


def test_cells_are_weighted_by_samples_where_the_table_shows_that_first(folder: Folder) -> None:
    figures = {"accuracy_weighted": 0.7, "accuracy_weighted_std_over_seeds": 0.02}
    line = {"label": "ours", "column": "few", "seeds": 2, "rounds": 40, "scored": "after download"}
    folder.write("full.csv", line | {"accuracy_mean": 0.6, "accuracy_std_over_seeds": 0.01} | figures)
    for show, cell, words in (
        ("accuracy, weighted", "60.0 ± 1.0, 2 seeds, 40 rounds (61.43)", "ours, in brackets"),
        (
            "weighted, accuracy",
            "70.0 ± 2.0, 2 seeds, 40 rounds (61.43)",
            "ours, weighted by samples, in brackets",
        ),
    ):
        (folder.tables / "full.yaml").write_text(FULL + f"show: [{show}]\n")
        grid = document(read_claims(folder.write_claims())).grids[1]
        assert grid.rows[0][1] == cell
        assert words in grid.caption


ABOVE = "above: alone"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("row: ours", "row: mean", 'has no such pair; add {rows: ["mean", "alone"]} to'),
        ("row: ours", "row: theirs", "unknown row theirs; allowed: ours | alone | mean"),
        (ABOVE, "above: theirs", "unknown row theirs; allowed: ours | alone | mean"),
        (ABOVE, f"{ABOVE}, columns: [none]", "compared with alone: unknown column none; allowed: few | many"),
        (ABOVE, f"{ABOVE}, at: at_last", "'after_download' or 'after_training'"),
        (ABOVE, "above: mean, at: after_training", 'add {rows: ["ours", "mean"], at: after_training}'),
        (ABOVE, "above: 60, at: after_training", "at and weighted go with other rows"),
        (ABOVE, "above: 60, columns: [none]", "unknown column none; allowed: few | many"),
        ("row: ours, above: alone", "row: theirs, above: 60", "unknown row theirs; allowed: ours"),
        ("{table: full", "{table: none", "there is no table file"),
        ("claims:", "smaller: [none]\nclaims:", "smaller: there is no table file"),
        ("    where: table 1\n", "", "claim 1: where is missing"),
        ("    runs:", "    reason: so\n    evidence: none.csv\n    runs:", "evidence=none.csv is not a file"),
        ("    runs:", "    reason: so\n    runs:", "reason and evidence, the result file that it rests on,"),
    ],
)
def test_a_claim_on_a_missing_cell_is_refused_with_one_line(
    folder: Folder, old: str, new: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in CLAIMS
    path = folder.write_claims(CLAIMS.replace(old, new))
    line = refused(capsys, "claims", path)
    assert str(path) in line
    assert expected in line


def test_a_file_whose_tables_have_no_results_is_refused_with_one_line(
    folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder.write_claims()
    assert "none of its tables has results; make them with hpcfl table" in refused(capsys, "claims", path)
    monkeypatch.chdir(folder.claims)
    assert "there is no claims file in configs/claims" in refused(capsys, "claims")
