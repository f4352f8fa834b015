"""Numbers of a table: which file and column has which number, for folders whose numbers are known."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from bits import read_csv, write_csv

from hpcfl.config.keys import ENVIRONMENT
from hpcfl.errors import FINISHED
from hpcfl.main import main
from hpcfl.results.statistics import interval, mean_and_deviation, paired_difference, worst_tenth
from hpcfl.storage.ledger import METRICS
from hpcfl.tables.accuracies import read_results
from hpcfl.tables.cells import Cell, Table
from hpcfl.tables.diagnostics_csv import History
from hpcfl.tables.file import QUANTITIES, Curves
from hpcfl.tables.write_results import MAX_CLIENT_LINES, write, write_results
from hpcfl.training.metrics import CLIENT_METRICS

TABLE = """
title: Two & two
source: table 9
size: "tiny: 4 clients"
seeds: [0, 1, 2]
settings: {data: {clients: 4}, train: {rounds: 8, local_epochs: 2}, run: {eval_every: 4}}
columns:
  - {label: easy, data: {partition: {classes_per_client: 10}}}
  - {label: hard, data: {partition: {classes_per_client: 2}}}
rows:
  - label: ours_1
    method: {name: ditto, personal_epochs: 1}
    published: {easy: 61.43, hard: 7}
    published_bytes: {easy: 1200}
  - {label: theirs, method: {name: pfedme}, train: {finetune_epochs: 5}, without: [hard]}
  - {label: alone, method: {name: local}, published: {hard: 50}}
compare: [[ours_1, theirs], [ours_1, alone]]
"""
ACCURACIES = {
    "ours_1": {0: [0.5, 0.7, 0.6, 0.8], 1: [0.4, 0.9, 0.7, 0.8], 2: [0.6, 0.8, 0.7, 0.9]},
    "theirs": {0: [0.4, 0.5, 0.6, 0.7], 1: [0.4, 0.8, 0.6, 0.7], 2: [0.3, 0.8, 0.6, 0.9]},
}
"""Of the four clients in column `easy` by seed; nothing else is finished."""


def finish(cell: Cell, accuracies: list[float], *, rounds: int = 8, **last: object) -> None:
    """Write the folder of a run to its last round, with two evaluations, of which the first is the better."""
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.yaml").write_text(
        cell.config.yaml() + "environment: {ranks: [here cpu loop], samples: bundled}\n"
    )
    mean = float(np.mean(accuracies))
    line = dict.fromkeys(METRICS, 0.0) | {"coverage": 0.75, "diverged": 0, "client_steps_per_s": 60}
    line |= {"accuracy_mean": mean, "accuracy_std": float(np.std(accuracies))}
    line |= {"accuracy_weighted": mean - 0.1, "accuracy_after_training": mean}
    line |= {"bytes_down": 8 * 4 * 1000, "bytes_up": 8 * 4 * 10, "index_bytes_up": 8 * 4 * 2}
    line |= {"accuracy_after_download": math.nan, "wall_s": 7}
    first = line | last | {"round": rounds // 2, "accuracy_mean": mean + 0.01, "client_steps_per_s": 30}
    write_csv(cell.folder / "metrics.csv", [first, line | {"round": rounds} | last])
    same = {"loss": 0.5, "train_samples": 28, "evaluated_samples": 12, "bytes_down": 1000, "bytes_up": 10}
    clients = [
        {"client": n, "accuracy": value, "accuracy_after_training": value / 2 if n else math.nan}
        | {"accuracy_after_download": math.nan, **same}
        for n, value in enumerate(accuracies)
    ]
    write_csv(cell.folder / "clients.csv", clients)


def finished(folder: Path, text: str) -> Table:
    """Return a table with the cells of ACCURACIES finished."""
    path = folder / "two.yaml"
    path.write_text(text)
    made = Table(path, [], folder / "out")
    for label, of in ACCURACIES.items():
        for cell in made.cells_of(label, "easy"):
            finish(cell, of[cell.seed])
    return made


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return finished(tmp_path, TABLE)


def rows_below(title: str, text: str, count: int) -> list[list[str]]:
    """Return the cells of so many lines below a title of a printed table."""
    lines = text.splitlines()
    first = lines.index(title) + 1
    return [re.split(" {2,}", line) for line in lines[first : first + count]]


# Statistics


def test_the_worst_tenth_is_at_least_one_client() -> None:
    assert worst_tenth([0.5, 0.1, 0.9]) == 0.1
    assert worst_tenth([n / 100 for n in range(29, -1, -1)]) == pytest.approx(0.01)
    assert worst_tenth([0.3] * 9 + [0.0] * 10) == 0.0


def test_mean_and_deviation_ignore_missing_values() -> None:
    assert mean_and_deviation([0.5, 0.7]) == pytest.approx((0.6, 0.1 * 2**0.5))
    assert mean_and_deviation([0.5, math.nan]) == (0.5, None)
    assert mean_and_deviation([math.nan]) == (None, None)


def test_an_interval_is_that_of_student_s_t() -> None:
    # t(2) = 4.3027, deviation 2, 4.3027 * 2 / sqrt 3
    found = interval([1.0, 3.0, 5.0])
    assert (found.mean, found.count) == (3.0, 3)
    assert found.half_width == pytest.approx(4.9683, abs=1e-4)
    assert math.isnan(interval([1.0]).half_width)
    # 0.1 + 0.2 is not quite 0.3
    assert math.isnan(interval([0.1 + 0.2, 0.3]).half_width)
    assert (interval([2.0, 3.0, 4.0]).star, found.star, interval([1.0]).star) == (" *", "", "")


def test_paired_differences_are_over_seeds_and_over_clients() -> None:
    first, second = [[0.5, 0.7], [0.4, 0.9], [0.6, 0.8]], [[0.4, 0.7], [0.2, 0.8], [0.6, 0.5]]
    # differences 0.1 0, 0.2 0.1, 0 0.3; of the seeds 0.05, 0.15, 0.15
    found = paired_difference(first, second)
    assert found.over_seeds.mean == pytest.approx(0.35 / 3)
    assert (found.over_seeds.count, found.over_clients.count) == (3, 6)
    # deviation of the seeds 0.057735
    assert found.over_seeds.half_width == pytest.approx(4.302653 * 0.0577350 / 3**0.5, rel=1e-5)
    # sum of squares 0.15 - 0.7^2 / 6, over 5; t(5) = 2.570582
    deviation = ((0.15 - 0.49 / 6) / 5) ** 0.5
    assert found.over_clients.half_width == pytest.approx(2.570582 * deviation / 6**0.5, rel=1e-5)


def test_clients_may_be_weighted_by_their_samples() -> None:
    first, second = [[0.5, 0.7], [0.4, 0.9]], [[0.4, 0.7], [0.2, 0.8]]
    # differences 0.1 0, 0.2 0.1: with 30 and 10 samples 0.075, with 10 and 10 samples 0.15
    found = paired_difference(first, second, [[30, 10], [10, 10]])
    assert found.over_seeds.mean == pytest.approx(0.1125)
    # t(1) = 12.7062, deviation 0.075 / sqrt 2
    assert found.over_seeds.half_width == pytest.approx(12.7062 * 0.075 / 2, rel=1e-4)
    assert math.isnan(found.over_clients.half_width)


# Files


def test_every_figure_is_in_the_csv_and_those_of_clients_are_beside_the_table_file(table: Table) -> None:
    write(table)
    results = table.path.with_name("results")
    written = [results / f"two{ending}.csv" for ending in ("", "_differences", "_clients")]
    assert write_results(table) == written
    for path, original in zip(written, ("table.csv", "differences.csv"), strict=False):
        assert path.read_text() == (table.folder / original).read_text()
    lines = read_csv(written[2])
    assert len(lines) == 2 * 3 * 4 < MAX_CLIENT_LINES
    known = [float(line["accuracy"]) for line in lines if (line["label"], line["seed"]) == ("theirs", "1")]
    assert known == ACCURACIES["theirs"][1]
    ours, theirs, alone, *hard = read_csv(table.folder / "table.csv")
    assert [(row["label"], row["column"]) for row in hard] == [("ours_1", "hard"), ("alone", "hard")]
    spreads = [np.std(ACCURACIES["ours_1"][seed]) for seed in (0, 1, 2)]
    expected = {"accuracy_mean": 0.7, "accuracy_std_over_seeds": 0.05, "accuracy_after_training": 0.7}
    expected |= {"accuracy_seed_0": 0.65, "accuracy_seed_1": 0.7, "accuracy_seed_2": 0.75}
    expected |= {"best_accuracy": 0.71, "best_round": 4, "accuracy_weighted": 0.6, "coverage": 0.75}
    expected |= {"worst_tenth_accuracy": 0.5, "worst_tenth_accuracy_std_over_seeds": 0.1}
    expected |= {"spread_over_clients": float(np.mean(spreads)), "client_steps_per_s": 40, "wall_s": 7}
    assert {name: float(ours[name]) for name in expected} == pytest.approx(expected)
    texts = {"accuracy_after_download": "", "scored": "after training", "seeds": "3", "missing_seeds": "0"}
    texts |= {"bytes_down": "1000", "bytes_up": "10", "other_bytes_up": "2", "finetune_epochs": "0"}
    texts |= {"published_accuracy": "0.6143", "published_bytes": "1200.0", "rounds": "8"}
    texts |= {"eval_split": "test", "tuned": ""}
    assert texts.items() <= ours.items()
    of_theirs = {"scored": "after fine-tuning", "finetune_epochs": "5", "published_accuracy": ""}
    assert (of_theirs | {"published_bytes": ""}).items() <= theirs.items()
    nothing = dict.fromkeys(("accuracy_mean", "accuracy_seed_0", "published_accuracy"), "")
    assert (nothing | {"seeds": "0", "missing_seeds": "3"}).items() <= alone.items()
    assert {(row["title"], row["size"]) for row in (ours, *hard)} == {("Two & two", "tiny: 4 clients")}


def test_differences_have_a_line_for_each_pair_and_column(table: Table) -> None:
    write(table)
    against_theirs, against_alone, hard = read_csv(table.folder / "differences.csv")
    assert [against_theirs[name] for name in ("first", "second", "column")] == ["ours_1", "theirs", "easy"]
    expected = paired_difference(*([list(of.values()) for of in ACCURACIES.values()]))
    assert float(against_theirs["difference"]) == pytest.approx(expected.over_seeds.mean)
    for name, found in (("seeds", expected.over_seeds), ("clients", expected.over_clients)):
        bounds = [float(against_theirs[f"over_{name}_{end}"]) for end in ("low", "high")]
        assert bounds == pytest.approx([found.mean - found.half_width, found.mean + found.half_width])
    assert (against_theirs["seeds"], against_theirs["clients_and_seeds"]) == ("3", "12")
    # ditto's models come to be by training, and the other row's are fine-tuned
    assert against_theirs["moment"] == "after training, after fine-tuning"
    assert against_theirs["partitions"] == "3"
    for row in (against_alone, hard):
        names = ("difference", "over_seeds_low", "seeds", "partitions")
        assert [row[name] for name in names] == ["", "", "0", "0"]


def test_seeds_of_one_partition_are_marked(tmp_path: Path) -> None:
    table = finished(tmp_path, TABLE.replace("{data: {clients: 4}", "{data: {clients: 4, seed: 7}"))
    text = write(table)
    line = read_csv(table.folder / "differences.csv")[0]
    assert (line["seeds"], line["partitions"]) == ("3", "1")
    assert "where it is over seeds of one partition, for this partition only" in " ".join(text.split())
    assert re.search(r"ours_1 - theirs .* ± \d+\.\d( \*)? of one partition +3 ", text)


def test_seeds_are_counted_by_moment(table: Table) -> None:
    for cell in table.cells_of("ours_1", "easy")[1:]:
        shutil.rmtree(cell.folder)
        finish(cell, ACCURACIES["ours_1"][cell.seed], accuracy_after_training=math.nan)
    text = write(table)
    ours, theirs, alone, *_ = read_csv(table.folder / "table.csv")
    names = ("seeds", "seeds_after_download", "seeds_after_training")
    assert [[row[name] for name in names] for row in (ours, theirs)] == [["3", "0", "1"], ["3", "0", "3"]]
    assert alone["seeds_after_training"] == "0"
    assert float(ours["accuracy_after_training"]) == pytest.approx(0.65)
    assert " 65.0 (1 of 3 seeds) " in text
    assert text.count("of 3 seeds") == 1


def test_runs_without_a_score_at_a_moment_are_missing_there(table: Table) -> None:
    for cell in table.cells_of("theirs", "easy"):
        for name in ("metrics.csv", "clients.csv"):
            lines = read_csv(cell.folder / name)
            for line in lines:
                del line["accuracy_after_training"], line["accuracy_after_download"]
            write_csv(cell.folder / name, lines)
    table.compare = [table.compare[0].model_copy(update={"at": "after_training"})]
    text = write(table)
    assert read_csv(table.folder / "table.csv")[1]["seeds_after_training"] == "0"
    line = read_csv(table.folder / "differences.csv")[0]
    assert (line["difference"], line["seeds"], line["clients_and_seeds"]) == ("", "0", "")
    assert re.search(r"ours_1 - theirs +easy +after training +missing", text)
    assert "Differences shown: 0;" in text


def test_a_pair_is_compared_at_the_moment_that_it_names(table: Table) -> None:
    moments = ("after_training", "after_download")
    table.compare = [table.compare[0].model_copy(update={"at": at}) for at in moments]
    text = write(table)
    trained, downloaded = read_csv(table.folder / "differences.csv")
    # client 0 has no model after training
    halved = [[[value / 2 for value in row[1:]] for row in of.values()] for of in ACCURACIES.values()]
    expected = paired_difference(*halved).over_clients
    assert (trained["moment"], trained["seeds"], trained["clients_and_seeds"]) == ("after training", "3", "9")
    assert float(trained["over_clients_low"]) == pytest.approx(expected.mean - expected.half_width)
    assert (downloaded["moment"], downloaded["seeds"]) == ("after download", "0")
    assert re.search(r"ours_1 - theirs +easy +after training +\+3\.\d", text)
    assert re.search(r"ours_1 - theirs +easy +after download +missing", text)


def test_runs_of_other_data_files_are_shown_but_not_compared(table: Table) -> None:
    path = table.cells_of("theirs", "easy")[1].folder / "config.yaml"
    record = yaml.safe_load(path.read_text())
    record["data"] |= {"source": "npz", "path": "mine.npz"}
    record[ENVIRONMENT]["samples"] = "of mine.npz"
    path.write_text(yaml.safe_dump(record))
    write(table)
    assert read_csv(table.folder / "table.csv")[1]["seeds"] == "3"
    assert read_csv(table.folder / "differences.csv")[0]["seeds"] == "2"


def test_a_pair_is_weighted_by_samples(table: Table) -> None:
    for cell in table.cells_of("ours_1", "easy"):
        lines = read_csv(cell.folder / "clients.csv")
        for line in lines:
            line["evaluated_samples"] = "36" if line["client"] == "3" else "12"
        write_csv(cell.folder / "clients.csv", lines)
    table.compare = [table.compare[0].model_copy(update={"weighted": True})]
    text = write(table)
    line = read_csv(table.folder / "differences.csv")[0]
    ours, theirs = (np.array(list(ACCURACIES[row].values())) for row in ("ours_1", "theirs"))
    expected = ((ours - theirs) @ [12, 12, 12, 36] / 72).mean()
    assert float(line["difference"]) == pytest.approx(expected)
    assert (line["weighted"], line["seeds"], line["over_clients_low"]) == ("1", "3", "")
    assert re.search(r"ours_1 - theirs, weighted by samples +easy +after training", text)
    assert f"{100 * expected:+.1f}" in text


def test_only_seeds_that_both_rows_have_are_compared(table: Table) -> None:
    (table.cells_of("theirs", "easy")[1].folder / "clients.csv").unlink()
    text = write(table)
    line = read_csv(table.folder / "differences.csv")[0]
    assert (line["seeds"], line["clients_and_seeds"]) == ("2", "8")
    of_first = [np.mean(ACCURACIES["ours_1"][seed]) - np.mean(ACCURACIES["theirs"][seed]) for seed in (0, 2)]
    assert float(line["difference"]) == pytest.approx(np.mean(of_first))
    assert re.search(r"ours_1 - theirs +easy +after training, after \S+ +\+10\.0 +- +2 ", text)
    assert re.search(r"^theirs +60\.0 ± 7\.1, 1 seed missing +-$", text, re.MULTILINE)
    (table.cells_of("theirs", "easy")[2].folder / "clients.csv").unlink()
    text = write(table)
    line = read_csv(table.folder / "differences.csv")[0]
    assert (line["seeds"], line["over_seeds_low"], line["clients_and_seeds"]) == ("1", "", "4")
    assert re.search(r"ours_1 - theirs +easy +after training, after \S+ +\+10\.0 +- +1 ", text)


def test_the_printed_table_is_as_expected(table: Table) -> None:
    text = write(table)
    lines = text.splitlines()
    assert lines[0] == "# Two & two"
    assert lines[2] == "tiny: 4 clients"
    printed, latex = ((table.folder / f"table.{ending}").read_text() for ending in ("md", "tex"))
    assert printed.startswith("# Two & two\n\ntiny: 4 clients\n")
    note = "Differences shown: 1; their 95 % intervals are not corrected for this number."
    assert text.partition("ours_1 - alone     hard")[2].splitlines()[1:] == ["", note]
    assert "one partition" not in text
    assert printed.endswith(f"\n\n{note}\n")
    escaped = note.replace("%", r"\%")
    assert f". {escaped}}}\n\\label{{tab:two-3}}\n" in latex
    assert r"\caption{Two \& two: accuracy, \%; in brackets: published, table 9. tiny: 4 clients. S" in latex
    assert "ours\\_1 & \\textbf{70.0} $\\pm$ 5.0 (61.4) & missing (7.0)" in latex
    assert rows_below("accuracy, %; in brackets: published, table 9:", text, 4) == [
        ["method", "easy", "hard"],
        ["ours_1", "70.0 ± 5.0 (61.4)", "missing (7.0)"],
        ["theirs", "60.8 ± 5.2", "-"],
        ["alone", "missing", "missing (50.0)"],
    ]
    header, ours, theirs, alone = rows_below("easy:", text, 4)
    assert "fine-tuning epochs" in header
    assert "rounds" not in header
    assert "tuned on validation samples" not in header
    of_ours = dict(zip(header, ours, strict=False))
    assert of_ours["accuracy, %"] == "70.0 ± 5.0"
    assert of_ours["published, %"] == "61.4"
    assert {"after training", "1,000", "10 + 2"} <= set(ours)
    assert "5" in theirs
    assert alone[:2] == ["alone", "missing"]


def test_members_that_were_left_out_have_sent_nothing(table: Table) -> None:
    for cell in table.cells_of("ours_1", "easy"):
        shutil.rmtree(cell.folder)
        # 16 of 32 turns
        finish(cell, ACCURACIES["ours_1"][cell.seed], diverged=16)
        record = cell.folder / "config.yaml"
        record.write_text(record.read_text().replace("on_divergence: stop", "on_divergence: skip"))
    found = read_results(table)[0]
    assert (found.mean("bytes_down"), found.mean("bytes_up"), found.mean("other_bytes_up")) == (1000, 20, 4)


def test_a_file_chooses_what_is_shown(table: Table) -> None:
    table.show = ["best", "coverage", "spread", "weighted", "published_bytes"]
    text = write(table)
    assert re.search(r"^ours_1 .* 1,200$", text, re.MULTILINE)
    assert "best, %; in brackets" in text
    assert "71.0 ± 5.0 (round 4)" in text
    assert rows_below("easy:", text, 1) == [["method", *(QUANTITIES[name] for name in table.show)]]


def test_unseen_clients_are_shown_on_demand_and_left_out_of_all_else(table: Table) -> None:
    accuracies = ACCURACIES["ours_1"][0]
    cell, without = table.cells_of("ours_1", "easy")[0], read_results(table)[0]
    assert without.mean("accuracy_unseen") is None
    shutil.rmtree(cell.folder)
    finish(cell, accuracies, accuracy_unseen=0.25)
    rows = [row | {"unseen": 0} for row in read_csv(cell.folder / "clients.csv")]
    counts = dict.fromkeys(("train_samples", "evaluated_samples", "bytes_down", "bytes_up"), 0)
    new: dict[str, Any] = counts | {"client": 4, "accuracy": 0.25, "unseen": 1}
    write_csv(cell.folder / "clients.csv", [*rows, dict.fromkeys(rows[0], math.nan) | new])
    result = read_results(table)[0]
    assert result.by_client(0) == without.by_client(0) == accuracies
    expected = without.figures[0] | {"accuracy_unseen": 0.25}
    assert result.figures[0] == pytest.approx(expected, rel=0, nan_ok=True)
    table.show = ["unseen"]
    assert re.search(r"^ours_1 +25\.0 \(1 of 3 seeds\)$", write(table), re.MULTILINE)
    line = read_csv(table.folder / "table.csv")[0]
    assert (line["label"], float(line["accuracy_unseen"])) == ("ours_1", 0.25)


def test_metrics_are_shown_of_runs_that_have_them(table: Table) -> None:
    table.show = ["macro_f1", "auc", "calibration_error", "by_class"]
    hint = " ".join(write(table).split())
    assert "finished cells without macro_f1, auc, calibration_error, by_class: 6; to add them, repeat" in hint
    assert "run.metrics=true (6 of them cannot, without checkpoint.h5)" in hint
    header = ["client", "class", "predicted", "evaluated_samples"]
    for cell in table.cells_of("ours_1", "easy"):
        rows: list[dict[str, Any]] = [
            row | dict.fromkeys(CLIENT_METRICS, 0.25) | {"macro_f1": 0.1 * cell.seed + 0.1 * n}
            for n, row in enumerate(read_csv(cell.folder / "clients.csv"))
        ]
        rows[0]["auc"] = 0.25 if cell.seed else math.nan
        # as of clients whose models are not finite
        rows[1]["calibration_error"] = rows[2]["calibration_error"] = 0.25 if cell.seed else math.nan
        write_csv(cell.folder / "clients.csv", rows)
        counts = [(0, 0, 0, 3), (1, 0, 2, 1), (1, 2, 2, cell.seed), (2, 2, 0, 2 - cell.seed)]
        # a class that the first seed does not have
        counts += [(2, 3, 3, cell.seed)]
        cells = [dict(zip(header, line, strict=True)) for line in counts if line[-1]]
        write_csv(cell.folder / "confusion.csv", cells)
    text = write(table)
    of_some = ["25.0 ± 0.0 (11 of 12 clients)", "25.0 ± 0.0 (10 of 12 clients)"]
    # by seed 15, 25 and 35 %; class 1 is of no client, class 2 is right for seed 1 half, for 2 wholly
    assert rows_below("easy:", text, 3) == [
        ["method", "macro F1, %", "AUC, %", "calibration error, %", "accuracy by class, %"],
        ["ours_1", "25.0 ± 10.0", *of_some, "75.0 - 50.0 100.0"],
        ["theirs"],
    ]
    assert "finished cells without macro_f1, auc, calibration_error, by_class: 3;" in text
    ours, theirs, *_ = read_csv(table.folder / "table.csv")
    assert float(ours["macro_f1"]) == pytest.approx(0.25)
    assert float(ours["macro_f1_std_over_seeds"]) == pytest.approx(0.1)
    assert (float(ours["calibration_error"]), theirs["calibration_error"]) == (0.25, "")
    assert (ours["clients_with_auc"], theirs["clients_with_auc"]) == ("11", "")
    table.show = ["accuracy"]
    assert "finished cells" not in write(table)


@pytest.mark.parametrize("client", [None, 1])
def test_curves_show_the_rounds_that_all_seeds_have(table: Table, client: int | None) -> None:
    """As with train.patience, seeds 1 and 2 end after round 4, of 70 %, and seed 0 after round 8."""
    from hpcfl.tables.drawing import draw

    table.drawings = [Curves(draw="curves", client=client)]
    results = read_results(table)[:1]
    histories = {}
    for cell in table.cells_of("ours_1", "easy"):
        rounds = [4] if cell.seed else [4, 8]
        run = results[0].runs[cell.seed]
        run.metrics = {"round": np.array(rounds), "accuracy_mean": np.array([0.7, 0.9][: len(rounds)])}
        accuracy = np.repeat(run.metrics["accuracy_mean"][:, None], 4, axis=1)
        histories[cell.folder] = History(rounds, accuracy, {}, [], None, [])
    [(_, picture)] = draw(table, results, histories)
    assert picture is not None
    [line] = [line for line in picture.subfigs[1].axes[0].lines if line.get_label() == "ours_1"]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([4], [pytest.approx(70)])


# The command


def test_plan_lists_cells_and_their_time_and_writes_nothing(
    table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    words = ["table", str(table.path), "--out", str(table.folder), "data.per_client=40", "--plan"]
    # enough rounds for minutes
    assert main([*words, "--quiet", "train.rounds=100000"]) == FINISHED
    text = capsys.readouterr().out
    rows = rows_below("easy:", text, 4)
    assert rows[0] == ["method", "cells", "finished", "rounds", "time left"]
    of_rows = [[name, "3", "0", "100000"] for name in ("ours_1", "theirs", "alone")]
    assert [row[:4] for row in rows[1:]] == of_rows
    of_clock = re.findall(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d)", " ".join(text.split()))
    whole_s, *of_rows_s = (np.dot([int(n or 0) for n in part], [86400, 3600, 60, 1]) for part in of_clock)
    assert len(of_rows_s) == 5
    assert whole_s == pytest.approx(sum(of_rows_s), abs=3)
    assert re.search(r"15 cells, .*:\d\d of one process", " ".join(text.split()))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_plan_leaves_out_finished_cells_and_needs_neither_a_gpu_nor_memory(
    table: Table, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    words = ["table", str(table.path), "--out", str(table.folder), "--column", "easy", "--plan"]
    assert main(words) == FINISHED
    rows = rows_below("easy:", capsys.readouterr().out, 4)[1:]
    assert [row[1:3] for row in rows] == [["3", "3"], ["3", "3"], ["3", "0"]]
    assert [row[4] == "0 ms" for row in rows] == [True, True, False]
    assert main([*words, "--row", "alone", "data.per_client=40", "run.device=cuda"]) == FINISHED
    no_gpu = "which has no GPU although run.device=cuda expects one, for what is not finished"
    assert no_gpu in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr("hpcfl.planning.dry_run.free_bytes", lambda: -1)
    assert main(words) == FINISHED
    out, err = capsys.readouterr()
    assert [row[4] for row in rows_below("easy:", out, 4)[1:]] == ["0 ms", "0 ms", "-"]
    assert re.search(r"warning: .*, without a time: the dry run needs about .* free\n", err)
