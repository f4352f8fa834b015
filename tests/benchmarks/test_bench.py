"""`hpcfl bench`: what it measures, shows, writes and compares; not how fast this machine is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bits import refused
from marked_device import DEVICE, marked_device
from processes import Mpirun

from hpcfl.benchmarks import ratios, runs, steps
from hpcfl.benchmarks.ratios import Ratio, as_tables, compare
from hpcfl.communication.communicator import open_world
from hpcfl.errors import FINISHED
from hpcfl.main import main
from hpcfl.methods import METHODS

RATIOS = [Ratio("small", 0.5, 0.6, "ms"), Ratio("large", 3.0, 2.0), Ratio("plain", 2.0)]


def test_two_functions_are_timed_alternately_after_one_warm_up_each(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], []

    def taking(name: str, seconds: float) -> None:
        calls.append(name)
        clock[0] += seconds

    monkeypatch.setattr(ratios.time, "perf_counter", lambda: clock[0])
    assert compare(lambda: taking("a", 3.0), lambda: taking("b", 2.0), 2) == (1.5, 3.0, 2.0)
    assert calls == ["a", "b"] * 3


def test_each_ratio_has_a_line_and_ratios_with_parts_have_a_table() -> None:
    made = Ratio("made", 1.5, parts={"training": 1.25, "server": 0.25})
    first, second = as_tables([made, *RATIOS]).split("\n\n")
    assert [line.split() for line in first.splitlines()] == [
        ["ratio", "value", "goal", "training", "server", "measured"],
        ["made", "1.5", "1.25", "0.25"],
    ]
    assert [line.split() for line in second.splitlines()] == [
        ["ratio", "value", "goal", "measured"],
        ["small", "0.5", "<=", "0.6", "holds", "ms"],
        ["large", "3", "<=", "2", "missed"],
        ["plain", "2"],
    ]


def test_the_benchmark_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    assert main(["bench", "--parts", "start", "--repeats", "1", "--json", str(path)]) == FINISHED
    found = json.loads(path.read_text())
    assert [ratio["name"].partition(":")[0] for ratio in found["ratios"]] == ["start"]
    assert all(ratio["value"] > 0 for ratio in found["ratios"])
    assert found["ranks"] == 1


def test_training_steps_are_measured_and_engines_compared_on_a_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "TRAIN_SAMPLES", 4)
    assert main(["bench", "--parts", "steps,engines", "--repeats", "1", "--device", "cpu"]) == FINISHED
    shown = capsys.readouterr().out
    for name in ("LeNet-16/32 with BatchNorm", "FedAvgCNN", "LeNet-6/16", "LSTM on 80", "transformer on 80"):
        assert f"training step, {name}" in shown
    ratio = "training step, 4 clients on cpu: batched engine / loop engine"
    of_engines = [line for line in shown.splitlines() if ratio in line]
    assert of_engines
    assert "missed" not in str(of_engines)


def test_a_missing_gpu_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    expected = "hpcfl: error: --device cuda: there is no GPU; go to a node that has one, or drop --device"
    assert refused(capsys, "bench", "--device", "cuda") == expected


def test_engines_are_compared_on_a_marked_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(steps, "TRAIN_SAMPLES", 4)
    monkeypatch.setattr(steps, "CLIENTS_AT_ONCE", {"cuda": {3: 0.05}})
    with marked_device() as marked:
        (step,) = steps.engines(DEVICE, 1)
    assert step.goal == 0.05
    assert marked.operators.total() > 500


def test_every_method_is_compared_with_fedavg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("fedavg", "ifca", "local")
    monkeypatch.setattr(runs, "METHODS", {name: METHODS[name] for name in names})
    monkeypatch.setattr(runs, "NUM_IMAGES", 600)
    monkeypatch.setattr(runs, "METHOD_SAMPLES", 20)
    found = [*runs.methods(open_world(), "cpu")]
    assert [method.name for method in found] == ["ifca: round / FedAvg's", "local: round / FedAvg's"]
    for method in found:
        assert method.value == pytest.approx(method.parts["training"] + method.parts["server"])
        assert min(method.parts.values()) > 0
    assert list(tmp_path.iterdir()) == []


MEASURE = (
    "from hpcfl.benchmarks import runs; from hpcfl.main import main; "
    "runs.NUM_IMAGES = 600; runs.ROUND_SAMPLES = 20; "
    "main(['bench', '--repeats', '1', '--parts', 'start,rounds', '--json', 'rounds.json'])"
)


def test_a_start_and_rounds_are_timed_on_all_ranks(mpirun: Mpirun, tmp_path: Path) -> None:
    shown = mpirun(3, "-c", MEASURE, cwd=tmp_path).stdout
    assert "slowest of 3 ranks" in shown
    assert "10 clients, 10 epochs, 2 worker(s)" in shown
    assert "checkpoints: share of a run" in shown
    ratios = json.loads((tmp_path / "rounds.json").read_text())["ratios"]
    assert [ratio["name"].partition(":")[0] for ratio in ratios] == ["start", "round", "checkpoints"]
    assert all(ratio["value"] > 0 for ratio in ratios)
    assert [path.name for path in tmp_path.iterdir()] == ["rounds.json"]
