"""What the page shows, which runs it accepts, and what it refuses."""

from __future__ import annotations

import base64
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import refused
from made_runs import LAYERS, make_run, metrics_of_runs, rising
from processes import REPOSITORY

from hpcfl.errors import FINISHED
from hpcfl.main import main
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.report import content
from hpcfl.report.packing import UNKNOWN, Recorded, packed_pictures
from hpcfl.results.run import load_run

TINY = ["data.clients=3", "data.per_client=20", "train.local_epochs=1", "train.rounds=2", "--quiet"]


def data_of(page: Path) -> Any:
    """Return the block of data of a page."""
    block = r'<script type="application/json" id="data">(.*?)</script>'
    return json.loads(re.search(block, page.read_text(), re.DOTALL)[1])


def reported(out: Path, *folders: Path) -> Any:
    """Write the page of runs, and return its block of data."""
    assert main(["report", *map(str, folders), "--out", str(out)]) == FINISHED
    return data_of(out)


def headline(run: Any, field: str) -> dict[str, Any]:
    """Return one field of a run's figures, by their names."""
    return {entry["name"]: entry[field] for entry in run["headline"]}


def test_a_run_writes_its_page_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main([*TINY[:-1], "run.checkpoint_every=1", "--out", str(folder)]) == FINISHED
    assert f"open in a browser\n  {folder}/report.html\n" in capsys.readouterr().out
    written = (folder / "report.html").read_bytes()
    # the name of SVG is no address
    assert "://" not in written.decode().replace("http://www.w3.org/2000/svg", "")
    (run,) = data_of(folder / "report.html")["runs"]
    assert list(headline(run, "text"))[:3] == ["Mean accuracy", "Spread", "Worst tenth"]
    assert run["layerBytes"]["layers"] == ["conv1", "conv2", "fc1", "fc2"]
    # 3 clients of 14 samples: one mini-batch of each, in each of 2 rounds
    assert run["curves"]["steps"] == [3, 6]
    assert set(run["seconds"]) == {"training", "evaluation", "checkpoints", "the rest"}
    assert min(run["seconds"]["training"], run["seconds"]["evaluation"], run["seconds"]["checkpoints"]) > 0
    assert run["pictures"][0]["axes"] == ["client", "layer", "client"]
    # the same command again, and the command for it, write the same page
    assert main([*TINY, "run.checkpoint_every=1", "--out", str(folder)]) == FINISHED
    assert main(["report", str(folder)]) == FINISHED
    assert (folder / "report.html").read_bytes() == written


def test_a_run_without_a_page_writes_none(tmp_path: Path) -> None:
    assert main([*TINY, "run.report=false", "--out", str(tmp_path / "run")]) == FINISHED
    assert not (tmp_path / "run" / "report.html").exists()
    # it changes no result
    assert main([*TINY, "--out", str(tmp_path / "run")]) == FINISHED
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("unseen", [None, np.full((2, 2), 0.5)])
def test_before_the_first_checkpoint_no_client_is_worst(tmp_path: Path, unseen: np.ndarray | None) -> None:
    folder = make_run(tmp_path / "fedavg", rising(2, 5), ["method.name=fedavg"], unseen=unseen)
    for name in ("clients.csv", "checkpoint.h5"):
        (folder / name).unlink()
    (run,) = reported(tmp_path / "page.html", folder)["runs"]
    remarks = headline(run, "remark")
    assert remarks["Mean accuracy"] == f"mean over 5 clients{'' if unseen is None else ' in training'}"
    assert "Worst tenth" not in remarks
    # with a run that has it, the column is shown
    other = make_run(tmp_path / "local", rising(2, 5), ["method.name=local"], unseen=unseen)
    both = [headline(run, "text") for run in reported(tmp_path / "both.html", folder, other)["runs"]]
    assert [one["Worst tenth"] for one in both] == ["none", "54.00 %"]
    assert list(both[0]) == list(both[1])


def test_unseen_clients_are_apart_from_those_in_training(tmp_path: Path) -> None:
    seen, unseen = rising(3, 4), np.array([[0.1, 0.1], [0.2, 0.2], [0.25, 0.35]])
    folder = make_run(tmp_path / "fedavg", seen, ["method.name=fedavg"], unseen=unseen)
    (run,) = reported(tmp_path / "page.html", folder)["runs"]
    texts, remarks = headline(run, "text"), headline(run, "remark")
    # 0.9 times 0.6, 0.73, 0.87 and 1
    shown = [texts[name] for name in ("Mean accuracy", "Worst tenth", "Unseen clients")]
    assert shown == ["72.00 %", "54.00 %", "30.00 %"]
    assert remarks["Mean accuracy"] == "mean over 4 clients in training"
    assert remarks["Unseen clients"] == "mean over 2 clients with no part in training, spread 5.00 %"
    assert (run["numUnseen"], run["clients"]["accuracy"][4:]) == (2, [0.25, 0.35])
    assert run["classes"]["shape"] == [6, 6]
    assert run["curves"]["accuracy_unseen"] == [0.1, 0.2, 0.3]
    assert run["curves"]["loss_unseen"] == [0.9, 0.8, 0.7]
    # 10 steps a round
    assert run["curves"]["steps"] == [10, 20, 30]
    # a quantile over the four
    assert run["bands"]["accuracy"][1][-1] == pytest.approx(np.quantile(seen[-1], 0.25), abs=1e-4)

    # the same from the checkpoint of an unfinished run, and with a run without such clients
    (folder / "clients.csv").unlink()
    other = make_run(tmp_path / "local", rising(3, 6), ["method.name=local"])
    going, other_run = reported(tmp_path / "both.html", folder, other)["runs"]
    remarks["Worst tenth"] += " after round 3"
    assert (headline(going, "text"), headline(going, "remark")) == (texts, remarks)
    assert (going["isFinished"], going["done"]) == (False, 3)
    assert going["clients"]["train_samples"] == [40] * 6
    assert going["clients"]["accuracy"] == run["clients"]["accuracy"]
    assert going["clients"]["accuracy_after_training"][4:] == [None, None]
    assert list(headline(other_run, "text")) == list(texts)
    assert headline(other_run, "text")["Unseen clients"] == "none"
    assert "accuracy_unseen" not in other_run["curves"]


def test_metrics_are_means_over_clients_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unseen = np.full((2, 2), 0.5)
    whole = make_run(tmp_path / "pfedla", rising(2, 4), unseen=unseen, added=metrics_of_runs(6))
    plain = make_run(tmp_path / "fedavg", rising(2, 4), ["method.name=fedavg"])
    runs = reported(tmp_path / "both.html", whole, plain)["runs"]
    first, second = ({entry["name"]: entry for entry in run["headline"]} for run in runs)
    assert list(first) == list(second)
    assert (first["Macro F1"]["text"], first["Macro F1"]["remark"]) == ("50.00 %", "mean over 4 clients")
    assert (first["AUC"]["text"], first["AUC"]["remark"]) == ("75.00 %", "mean over 3 of 4 clients")
    assert (second["AUC"]["text"], second["AUC"]["value"], second["AUC"]["remark"]) == ("none", None, "")
    assert runs[0]["clients"]["auc"] == [None, *[0.75] * 5]
    assert (runs[0]["confusion"]["classes"], runs[1]["confusion"]) == (10, {})
    assert "Macro F1" not in str(reported(tmp_path / "one.html", plain))
    # of whole clients: 0 has one line, and the others two
    monkeypatch.setattr(content, "CONFUSION_LINES", 4)
    (run,) = reported(tmp_path / "one.html", whole)["runs"]
    lines = np.frombuffer(base64.b64decode(run["confusion"]["lines"]), "<u4").reshape(-1, 4).tolist()
    assert lines[-3:] == [[1, 0, 9, 10], [2, 1, 1, 1], [2, 1, 9, 9]]
    assert run["notes"] == ["confusion matrices: 2 of 6 clients"]
    monkeypatch.setattr(content, "MAX_CLASSES", 9)
    (run,) = reported(tmp_path / "one.html", whole)["runs"]
    assert (run["confusion"], run["notes"]) == ({}, ["no confusion matrix of 10 classes"])


def test_the_newest_weights_are_shown_if_there_are_too_many(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).random((3, len(LAYERS), 3), np.float32)
    more = {"of_method": {"self_weight": np.full((2, 3, len(LAYERS)), 0.5)}, "derived": {"alpha": weights}}
    folder = make_run(tmp_path / "pfedla", rising(2, 3), **more)
    alpha, self_weight = reported(tmp_path / "page.html", folder)["runs"][0]["pictures"]
    assert (alpha["quantity"], self_weight["quantity"]) == ("alpha", "self_weight")
    assert (alpha["rounds"], self_weight["rounds"]) == ([2], [1, 2])
    assert alpha["note"].startswith("only the last evaluation: earlier ones are not stored")
    # but for the steps in which a page has them
    assert np.allclose(np.array(codes(alpha)) / 254 * alpha["high"], weights.ravel(), atol=0.005)
    assert alpha["names"]["layer"] == LAYERS


def test_a_page_shows_runs_or_all_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table"
    for seed in (0, 1):
        for method in ("fedavg", "local"):
            settings = [f"method.name={method}", f"run.seed={seed}"]
            make_run(table / f"{method}-s{seed}", rising(3, 4), settings)
    (table / "local-s1" / "clients.csv").unlink()
    make_run(table / "local-s0.old1", rising(3, 4), ["method.name=local"])
    assert main(["report", str(table)]) == FINISHED
    assert f"the report of 3 runs is in {table}/report.html" in capsys.readouterr().out
    content = data_of(table / "report.html")
    assert [run["label"] for run in content["runs"]] == ["fedavg-s0", "fedavg-s1", "local-s0"]
    assert content["differing"]["keys"] == ["method.name", "run.seed"]
    assert content["notes"] == ["Clients of these runs hold different samples: data.seed differ."]
    both = tmp_path / "both.html"
    of_two = reported(both, table / "fedavg-s0", table / "local-s0", table / "fedavg-s0")
    assert ([run["label"] for run in of_two["runs"]], of_two["notes"]) == (["fedavg-s0", "local-s0"], [])
    # other numbers of the same samples
    raw = make_run(tmp_path / "raw", rising(3, 4), ["method.name=local", "data.normalise=none"])
    assert reported(both, table / "local-s0", raw)["notes"] == []


def test_folders_that_cannot_be_shown_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a run folder" in refused(capsys, "report", tmp_path / "nowhere")
    assert "is not a run folder" in refused(capsys, "report", tmp_path)
    too_long = tmp_path / ("a" * 300)
    for command in ("report", "compare", "watch"):
        assert "is not a run folder: File name too long" in refused(capsys, command, too_long)
    folder = make_run(tmp_path / "runs" / "one", rising(2, 3))
    text = (folder / "metrics.csv").read_text()
    (folder / "metrics.csv").write_text(text.splitlines()[0] + "\n")
    assert "has no evaluation yet" in refused(capsys, "report", folder)
    (folder / "metrics.csv").write_text(text)
    other = make_run(tmp_path / "other", rising(2, 3), ["run.eval_split=val", "data.val_fraction=0.2"])
    line = refused(capsys, "report", folder, other)
    assert "run.eval_split differs (test in pfedla (one), val in pfedla (other))" in line
    assert "cannot write" in refused(capsys, "report", folder, "--out", tmp_path / "no" / "page.html")
    assert "RUN" in refused(capsys, "report")
    # no file of a run is written over, and nothing is left behind
    clients = (folder / "clients.csv").read_bytes()
    for out, page in ((folder / "clients.csv", "clients.html"), (folder, "report.html")):
        line = refused(capsys, "report", folder, "--out", out)
        assert f"does not end in .html; name a page, such as {folder}/{page}" in line
    (tmp_path / "folder.html").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert "cannot write" in refused(capsys, "report", folder, "--out", tmp_path / "folder.html")
    assert sorted(tmp_path.rglob("*")) == before
    assert (folder / "clients.csv").read_bytes() == clients
    (folder / "clients.csv").unlink()
    assert "has no finished run" in refused(capsys, "report", tmp_path / "runs")


def test_axes_that_cannot_be_drawn_are_refused() -> None:
    for axes in (("client", "branch", "layer"), ("client", "layer", "layer", "client")):
        with pytest.raises(ValueError, match=r"diagnostic 'a': the second of its axes .* must be 'layer'"):
            Diagnostic("a", axes, "", "")


def codes(picture: Any) -> list[int]:
    return list(base64.b64decode(picture["codes"]))


def packed(values: np.ndarray, *axes: str, size: int = 100, **how: Any) -> Any:
    """Return a picture of values [evaluations, ...] in so many bytes."""
    diagnostic = Diagnostic("a", axes, "", "", **how)
    (picture,) = packed_pictures([Recorded(diagnostic, values, np.arange(len(values)))], size)
    return picture


def test_a_line_for_each_client_has_the_numbers_themselves() -> None:
    values = np.array([[0.5, 0.4981], [0.5006, np.nan], [0.5093, 0.5]])
    picture = packed(values, "client", low=0, high=1)
    assert picture["lines"] == [[0.5, 0.5006, 0.5093], [0.4981, None, 0.5]]
    assert (picture["note"], "codes" in picture) == ("", False)
    # too many for lines: a matrix in colours
    picture = packed(np.repeat(values, 20, axis=1), "client", size=1000, low=0, high=1)
    assert len(codes(picture)) == 3 * 40
    assert "lines" not in picture


def test_values_are_coded_as_bytes_between_the_bounds() -> None:
    values = np.array([[0.0, 0.5, 1.0, np.nan], [0.25, 2.0, 0.0, -np.inf]]).reshape(2, 2, 2)
    picture = packed(values, "client", "path", low=0)
    # 2 is the highest: 127 steps a unit; what is not finite is unknown
    assert codes(picture) == [0, 64, 127, UNKNOWN, 32, 254, 0, UNKNOWN]
    assert (picture["low"], picture["high"], picture["rounds"]) == (0, 2, [0, 1])
    # a declared bound holds unless values are beyond it
    wide = packed(values, "client", "path", low=-2, high=1)
    assert (wide["low"], wide["high"]) == (-2, 2)
    assert codes(packed(np.array([[0, 3, -1]]), "client", is_name=True)) == [0, 3, UNKNOWN]


def test_the_page_names_the_step_of_values_only_if_they_are_rounded() -> None:
    for exact in ([0, 1, 1, np.nan], [0.5, 0.5]):
        assert packed(np.array([exact]), "client")["note"] == ""
    assert packed(np.array([[0, 1, 0.3]]), "client")["note"] == "values in 254 steps of 0.0039"


def test_evaluations_are_thinned_before_clients_and_the_page_reports_it() -> None:
    large, axes, rounds = np.zeros((9, 4, 2, 4)), ("client", "layer", "client"), np.arange(9)
    pictures = [
        Recorded(Diagnostic("a", axes, "", ""), large, rounds),
        Recorded(Diagnostic("b", ("client",), "", ""), np.zeros((9, 4)), rounds),
    ]
    first, second = packed_pictures(pictures, 36 + 3 * 32)
    assert (first["rounds"], second["rounds"]) == ([0, 4, 8], list(range(9)))
    assert first["note"] == "3 of 9 evaluations"
    picture = packed(large, *axes, size=31)
    assert (picture["shape"], picture["rounds"]) == ((2, 2, 2), [0, 4, 8])
    assert picture["note"] == "clients 0 to 1 of 4; 3 of 9 evaluations"
    picture = packed(large, *axes, size=32)
    assert (picture["shape"], picture["rounds"]) == ((4, 2, 4), [8])


def test_the_wheel_has_all_files_of_the_page() -> None:
    tools = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]
    there = {path.name for path in (REPOSITORY / "hpcfl" / "report").iterdir() if path.suffix != ".py"}
    assert set(tools["setuptools"]["package-data"]["hpcfl.report"]) == there - {"__pycache__"}


def test_a_name_cannot_end_the_block_of_data(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "fedavg <b> & co", rising(2, 2), ["method.name=fedavg"])
    assert main(["report", str(folder)]) == FINISHED
    text = (folder / "report.html").read_text()
    assert "<b>" not in text
    assert "&lt;b&gt; &amp; co" in text
    assert data_of(folder / "report.html")["runs"][0]["label"] == "fedavg <b> & co"


def test_clients_that_diverge_are_named(tmp_path: Path) -> None:
    some = make_run(tmp_path / "pfedla", rising(3, 6), ["run.on_divergence=skip"], diverged=[1, 4])
    none = make_run(tmp_path / "fedavg", rising(3, 6), ["method.name=fedavg"])
    expected = "clients with nan or infinity, round by round (clients 1 and 4); the run left them out"
    for is_finished in (True, False):
        if not is_finished:
            (some / "clients.csv").unlink()
        assert load_run(some).diverged.tolist() == [0, 3, 0, 0, 3, 0]
        page = tmp_path / "page.html"
        runs = reported(page, some, none)["runs"]
        assert [headline(run, "value")["Diverged"] for run in runs] == [6, None]
        assert [headline(run, "remark")["Diverged"] for run in runs] == [expected, ""]
        assert expected in page.read_text()
    continued = make_run(tmp_path / "on", rising(3, 6), ["run.on_divergence=continue"], diverged=[4])
    (run,) = reported(tmp_path / "page.html", continued)["runs"]
    assert headline(run, "remark")["Diverged"].endswith(
        "round by round (client 4); the run continued with them"
    )
    # a page without such a run has no figure of it
    assert "Diverged" not in str(reported(tmp_path / "none.html", none))


def test_the_page_shows_lost_clients_and_the_simulated_clock(tmp_path: Path) -> None:
    keys = ["clients.drop_rate=0.5", "clients.step_s=1"]
    some = make_run(tmp_path / "pfedla", rising(3, 6), keys, lost=[1, 4])
    none = make_run(tmp_path / "fedavg", rising(3, 6), ["method.name=fedavg"])
    runs = reported(tmp_path / "page.html", some, none)["runs"]
    texts, values = ([headline(run, field) for run in runs] for field in ("text", "value"))
    assert [(text["Lost"], text["Simulated time"]) for text in texts] == [("6", "0:00:06"), ("none", "none")]
    assert [(value["Lost"], value["Simulated time"]) for value in values] == [(6, 6), (None, None)]
    assert runs[0]["curves"]["simulated"] == [2, 4, 6]
    assert "simulated" not in runs[1]["curves"]
    assert runs[0]["clients"]["lost"] == [0, 3, 0, 0, 3, 0]
    (alone,) = reported(tmp_path / "none.html", none)["runs"]
    assert not {"Simulated time", "Lost"} & headline(alone, "text").keys()
