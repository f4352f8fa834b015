"""`hpcfl bench`: what it measures, shows, writes and compares; not how fast this machine is."""

from __future__ import annotations

import itertools
import json
import re
import signal
from pathlib import Path

import pytest
import torch
from marked_device import DEVICE, marked_device
from processes import Mpirun

from hpcfl.benchmarks import engines, ratios, runs, scale, steps
from hpcfl.benchmarks.ratios import Earlier, Ratio, as_table, compare
from hpcfl.benchmarks.runs import methods
from hpcfl.communication.communicator import Communicator, open_world
from hpcfl.errors import BAD_INPUT, FINISHED, STOPPED
from hpcfl.main import main
from hpcfl.methods import METHODS
from hpcfl.terminal import Progress

RATIOS = [Ratio("small", 0.5, 0.6, "ms"), Ratio("large", 3.0, 4.0, is_floor=True), Ratio("plain", 2.0)]


def test_a_goal_is_a_ceiling_or_a_floor() -> None:
    assert [ratio.holds for ratio in RATIOS] == [True, False, None]


def test_two_functions_take_turns_after_a_first_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], []

    def taking(name: str, seconds: float) -> None:
        calls.append(name)
        clock[0] += seconds

    monkeypatch.setattr(ratios.time, "perf_counter", lambda: clock[0])
    assert compare(lambda: taking("a", 3.0), lambda: taking("b", 2.0), 2) == (1.5, 3.0, 2.0)
    assert calls == ["a", "b"] * 3


def test_a_table_stands_beside_an_earlier_one() -> None:
    lines = as_table(RATIOS, Earlier(1, {"small": 0.4, "plain": 4.0}), 1).splitlines()
    assert lines[2].split() == ["ratio", "value", "goal", "before", "change", "measured"]
    assert lines[3].split() == ["small", "0.5", "<=", "0.6", "holds", "0.4", "+25%", "ms"]
    assert lines[4].split() == ["large", "3", ">=", "4", "missed"]
    assert lines[5].split() == ["plain", "2", "4", "-50%"]
    assert "do not compare" in as_table(RATIOS, Earlier(3, {"plain": 4.0}), 1)


def test_ratios_with_parts_stand_in_a_table_of_their_own() -> None:
    made = Ratio("made", 1.5, parts={"training": 1.25, "server": 0.25})
    first, second = as_table([made, *RATIOS], None, 1).split("\n\n")[1:]
    assert [line.split() for line in first.splitlines()] == [
        ["ratio", "value", "goal", "training", "server", "measured"],
        ["made", "1.5", "1.25", "0.25"],
    ]
    assert [line.split()[0] for line in second.splitlines()] == ["ratio", "small", "large", "plain"]


def test_it_writes_a_file_and_reads_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    assert main(["bench", "--parts", "start", "--repeats", "1", "--json", str(path)]) == FINISHED
    found = json.loads(path.read_text())
    assert [ratio["name"].partition(":")[0] for ratio in found["ratios"]] == ["start"]
    assert all(ratio["value"] > 0 for ratio in found["ratios"])
    assert found["ranks"] == 1
    capsys.readouterr()
    assert main(["bench", "--parts", "start", "--against", str(path)]) == FINISHED
    assert "before" in capsys.readouterr().out


def test_training_steps_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "TRAIN_SAMPLES", 64)
    monkeypatch.setattr(steps, "SERVER_CLIENTS", 10)
    assert main(["bench", "--parts", "steps,server", "--repeats", "1"]) == FINISHED
    shown = capsys.readouterr().out
    for name in ("LeNet-16/32 with BatchNorm", "FedAvgCNN", "LeNet-6/16", "pFedMB: 5 branches / 1"):
        assert f"training step, {name}" in shown
    assert "server step, pFedLA: stacking all models for each client / ours" in shown


def test_engines_are_compared_on_a_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "SAMPLES", 32)
    assert main(["bench", "--parts", "engines", "--repeats", "1", "--device", "cpu"]) == FINISHED
    shown = capsys.readouterr().out
    for name in ("training step", "local round, pFedLA"):
        assert f"{name}, 4 clients on cpu: loop engine / batched engine" in shown
    assert "missed" not in shown


def test_a_gpu_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["bench", "--device", "cuda"]) == BAD_INPUT
    told = capsys.readouterr()
    assert (
        told.err
        == "hpcfl: error: --device cuda: there is no GPU; go to a node that has one, or drop --device\n"
    )
    assert "measuring" not in told.out


def test_engines_on_a_marked_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(engines, "SAMPLES", 32)
    monkeypatch.setattr(engines, "CLIENTS", {"cuda": 3})
    with marked_device() as marked:
        step, pfedla_round = engines.engines(DEVICE, 1)
    assert [ratio.goal for ratio in (step, pfedla_round)] == [20, 20]
    assert marked.operators.total() > 500


def test_every_method_stands_beside_fedavg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("fedavg", "ifca", "fedmn")
    monkeypatch.setattr(runs, "METHODS", {name: METHODS[name] for name in names})
    monkeypatch.setattr(runs, "METHOD_SAMPLES", 20)
    found = [*methods(open_world())]
    assert [method.name for method in found] == ["ifca: round / FedAvg's", "fedmn: round / FedAvg's"]
    for method in found:
        assert method.value == pytest.approx(method.parts["training"] + method.parts["server"])
        assert min(method.parts.values()) > 0
    assert list(tmp_path.iterdir()) == []


def test_rounds_use_the_ranks_there_are(mpirun: Mpirun, tmp_path: Path) -> None:
    measure = (
        "from hpcfl.benchmarks import runs; from hpcfl.main import main; "
        "runs.ROUND_SAMPLES = runs.METHOD_SAMPLES = 20; "
        "main(['bench', '--parts', 'start,rounds,scale', '--clients', '20', '--repeats', '1'])"
    )
    shown = mpirun(3, "-c", measure, cwd=tmp_path).stdout
    assert "slowest of 3 ranks" in shown
    assert "10 clients, 10 epochs, 2 worker(s)" in shown
    assert "checkpoints: share of a run" in shown
    assert "9.7 MB down and up among 3 ranks" in shown
    (moved,) = (line for line in shown.splitlines() if line.startswith("messages: bytes moved by MPI"))
    # less than a thousandth of it tells the ranks what comes
    assert moved.split("messages ")[1].split()[0] == "1"
    assert "10 of 20 clients on 2 workers, 0 is the least possible" in shown
    assert re.search(r"server [0-9.e-]+, workers [0-9.e-]+ sharded", shown)
    assert list(tmp_path.iterdir()) == []


def test_rounds_are_timed_by_workers_beside_a_plan(mpirun: Mpirun, tmp_path: Path) -> None:
    measure = (
        "from hpcfl.benchmarks import nodes; from hpcfl.main import main; "
        "nodes.HIDDEN = 4; nodes.MESSAGE_BYTES = (1000,); "
        "nodes.CLIENTS_A_WORKER = 2; "
        "main(['bench', '--parts', 'nodes', '--repeats', '1', '--json', 'nodes.json'])"
    )
    shown = mpirun(4, "-c", measure, cwd=tmp_path).stdout
    assert "network: MB/s of broadcast to all, 0.001 MB" in shown
    ratios = {ratio["name"]: ratio for ratio in json.loads((tmp_path / "nodes.json").read_text())["ratios"]}
    cases = [("strong", 1, 6), ("strong", 2, 6), ("strong", 3, 6)]
    cases += [("weak", 1, 2), ("weak", 2, 4), ("weak", 3, 6)]
    for method, (kind, workers, clients) in itertools.product(("fedavg", "pfedla"), cases):
        name = f"{kind}, {method}, clients {clients}, workers {workers}, nodes 1: planned / measured"
        parts = ratios[name]["parts"]
        whole = parts["training"] + parts["messages"] + parts["server"]
        assert whole == pytest.approx(parts["round s"], rel=1e-6)
        assert ratios[name]["value"] == pytest.approx(parts["planned s"] / parts["round s"])
        assert 0 <= parts["of it idle"] < parts["training"]
        assert min(parts["efficiency"], parts["planned s"], parts["server"]) > 0
        if workers == 1:
            assert (parts["efficiency"], parts["of it idle"]) == (1, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["nodes.json"]


def test_a_request_to_stop_ends_it_with_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "ROUND_SAMPLES", 20)
    monkeypatch.setattr(Progress, "start", lambda *_: signal.raise_signal(signal.SIGUSR1))
    assert main(["bench", "--parts", "start,rounds,methods"]) == STOPPED
    shown = capsys.readouterr().out
    assert "start: seconds to the first round" in shown
    assert "share that is not training" not in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--parts", "speed"],
            "--parts has 'speed'; allowed: start, steps, server, engines, scale, rounds, methods, nodes",
        ),
        (
            ["--parts", "nodes"],
            "--parts nodes needs several ranks; type mpirun -n 4 python -m hpcfl.main bench --parts nodes",
        ),
        (["--repeats", "0"], "--repeats 0 must be 1 or more"),
        (["--clients", "100,9"], "--clients 100,9 must be numbers from 10 on, such as --clients 100,1000"),
        (["--parts", "steps,start"], "behind others; put it first"),
        (["--against", "missing.json"], "cannot read missing.json: No such file or directory"),
        (["--against", __file__], "is no file of hpcfl bench --json FILE"),
        (["--parts", "start", "--json", "no/such/folder.json"], "cannot write no/such/folder.json"),
    ],
)
def test_mistakes_get_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == BAD_INPUT
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_the_servers_round_is_measured_on_one_rank() -> None:
    measured = scale.server_rounds(Communicator(), [20], 1)
    (alone,) = measured
    assert alone.name == "server round, pFedLA, N=20, full heads: sharded / whole"
    assert "workers" not in alone.detail
