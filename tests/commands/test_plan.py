"""What `hpcfl plan` says before a run: clients by classes, the network, work, and the server's memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcfl.config import load_config
from hpcfl.main import BAD_INPUT, FINISHED, main
from hpcfl.methods import METHODS, Context
from hpcfl.models import ConvNetOptions
from hpcfl.simulation import refusals
from hpcfl.simulation.driver import Driver
from hpcfl.simulation.experiment import load_data, make_method
from hpcfl.simulation.work import step_seconds
from hpcfl.training.settings import TrainConfig

DIGITS_CNN = 160 + 4640 + 8256 + 650
"""Trainable numbers of digits_cnn: conv1, conv2, fc1, fc2."""


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["plan", "--no-timing", *words]) == FINISHED
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def numbers(line: str) -> list[int]:
    """Return the cells of a line of the table; a dot is 0."""
    return [0 if cell == "." else int(cell) for cell in line.split()[1:]]


@pytest.mark.parametrize(
    ("words", "per_client", "classes"),
    [
        (["data.per_client=40"], 40, {4}),
        (["data.clients=7", "data.per_client=40", "data.partition.classes_per_client=2"], 40, {2}),
        (["data.partition.name=dominant"], None, {10}),
        (["data.partition.name=neighbours", "data.clients=8"], 172, {4}),
        (["data.partition.name=target", "data.clients=8"], None, {4}),
        (["data.partition.name=random_classes"], None, {2}),
        (["data.partition.name=pairs", "data.per_client=60"], 60, {2}),
        (["data.partition.name=pathological"], None, {2}),
        (["data.partition.name=dirichlet_pfllib"], None, set(range(1, 11))),
        (["data.partition.name=mixture"], None, set(range(1, 11))),
        (["data.partition.name=pachinko", "data.partition.coarse_classes=5"], 179, set(range(1, 11))),
        (["data.partition.name=iid", "data.per_client=100", "data.val_fraction=0.2"], 100, {8, 9, 10}),
    ],
)
def test_the_table_of_clients_adds_up(
    words: list[str], per_client: int | None, classes: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = planned(capsys, *words)
    config = load_config(None, words)
    assert lines[0] == f"{config.partition} partition of digits: samples of each class"
    assert lines[1].split() == ["client", *map(str, range(10)), "train", "val", "test"]
    rows = np.array([numbers(line) for line in lines[2 : 2 + config.data.clients]])
    assert [line.split()[0] for line in lines[2 : 2 + config.data.clients]] == [
        str(client) for client in range(config.data.clients)
    ]
    by_class, splits = rows[:, :10], rows[:, 10:]
    assert np.array_equal(by_class.sum(axis=1), splits.sum(axis=1))
    assert {int(owned) for owned in (by_class > 0).sum(axis=1)} <= classes
    if per_client is not None:
        assert set(by_class.sum(axis=1)) == {per_client}
    assert (splits[:, 1] > 0).all() == (config.data.val_fraction > 0)
    total = lines[2 + config.data.clients]
    assert total.split()[0] == "all"
    assert numbers(total) == rows.sum(axis=0).tolist()
    assert len({len(line) for line in lines[1 : 3 + config.data.clients]}) == 1
    assert len(lines[1]) <= 80


def test_network_and_work(capsys: pytest.CaptureFixture[str]) -> None:
    lines = planned(
        capsys,
        "method.name=fedavg",
        "data.per_client=40",
        "data.clients=5",
        "train.participation=0.5",
        "train.rounds=10",
        "train.local_epochs=3",
        "train.batch_size=9",
    )
    # 28 training samples are four batches of 7
    assert lines[-2:] == [
        "model digits_cnn: 13,706 trainable numbers (conv1 160, conv2 4,640, fc1 8,256, fc2 650)",
        "10 rounds of 3 of 5 clients, 3 local epochs: about 360 gradients of mini-batches",
    ]


def test_unseen_clients_come_last_and_their_cost_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["method.name=ditto", "data.per_client=40", "data.clients=5", "train.batch_size=9"]
    everyone = planned(capsys, *words)
    lines = planned(capsys, *words, "data.unseen_clients=0.4", "run.eval_every=4", "train.unseen_epochs=2")
    # numbers of client, mini-batches of 28 training samples
    names = [" ".join(line.split()[:-13]) for line in lines[2:7]]
    assert names == ["0", "1", "2", "unseen 3", "unseen 4"]
    assert sorted(line.split()[-13:] for line in lines[2:7]) == sorted(
        line.split()[-13:] for line in everyone[2:7]
    )
    assert lines[7].split() == everyone[7].split()
    assert any(line.startswith("30 rounds of 3 of 3 clients, 5 local epochs: ") for line in lines)
    assert (
        "2 unseen clients adapt for 2 epochs at each of 8 evaluations: 128 mini-batches beside those" in lines
    )
    of_one = 4 * DIGITS_CNN
    assert lines[-1] == f"workers' memory, theta: {5 * of_one:,} bytes in all, {of_one:,} a client"


def hypernetwork_numbers(clients: int, layers: int) -> int:
    """Return the numbers of one hypernetwork at the defaults: embedding, trunk of three, heads."""
    return 100 + 3 * (100 * 100 + 100) + layers * clients * (100 + 1)


def test_the_memory_of_pfedla_by_parts(capsys: pytest.CaptureFixture[str]) -> None:
    lines = planned(capsys, "method.name=pfedla", "data.per_client=40", "method.optimiser=adam")
    hypernetworks = 4 * 10 * hypernetwork_numbers(10, 4)
    assert f"server memory, theta: {4 * 10 * DIGITS_CNN:,} bytes" in lines
    assert f"server memory, hypernetworks: {hypernetworks:,} bytes" in lines
    assert f"server memory, hypernetworks' optimiser: {2 * hypernetworks:,} bytes" in lines


def test_sharded_models_are_the_workers_memory(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("method.name=pfedla", "data.per_client=40", "method.server=sharded", "method.heads=low_rank")
    lines = planned(capsys, *keys)
    assert not any(line.startswith("server memory, theta") for line in lines)
    of_one = 4 * DIGITS_CNN
    assert lines[-1] == f"workers' memory, theta: {10 * of_one:,} bytes in all, {of_one:,} a client"
    numbers = 10 * (100 + 3 * 10_100 + 4 * (16 * 100 + 1)) + 4 * 10 * 16
    assert f"server memory, hypernetworks: {4 * numbers:,} bytes" in lines


def test_a_server_larger_than_the_machine_is_told_and_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(refusals, "machine_bytes", lambda: 1_900_000)
    # shorter codes than there are clients, so that they help
    keys = ["method.name=pfedla", "data.per_client=40", "method.rank=2"]
    reason = planned(capsys, *keys)[-1]
    assert reason.startswith("method.name=pfedla with data.clients=10 keeps 0.00193 GB on the server (theta")
    assert reason.endswith(
        "this machine has 0.0019 GB; set method.heads=low_rank (hypernetworks of 0.00125 GB) and "
        "method.server=sharded (models on the workers), or use fewer clients or a larger machine"
    )
    assert main(["--out", str(tmp_path / "run"), *keys]) == BAD_INPUT
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(refusals, "machine_bytes", lambda: 0)
    assert not planned(capsys, *keys)[-1].startswith("method.name")


def test_the_memory_that_is_planned_is_the_memory_that_is_held() -> None:
    context = Context(
        "digits_cnn",
        ConvNetOptions(),
        (1, 8, 8),
        10,
        torch.full((6,), 20),
        TrainConfig(),
        seed=0,
    )
    names, optimisers = ("pfedla", "heurpfedla"), ("scaled", "adam", "sgd")
    for method_name, optimiser, low_rank in itertools.product(names, optimisers, (False, True)):
        more = {"heads": "low_rank", "server": "sharded"} if low_rank else {}
        method = METHODS[method_name](context, METHODS[method_name].Params(optimiser=optimiser, **more))
        held = dict.fromkeys(method.server_bytes(), 0)
        for name, tensor in Driver(method).initial_server().items():
            optimiser_part = dict.fromkeys(("optimiser", "common_optimiser"), "hypernetworks' optimiser")
            kind = dict.fromkeys(("hypernetworks", "common"), "hypernetworks") | optimiser_part
            held[kind.get(name.partition("/")[0], name)] += tensor.nbytes
        if optimiser == "adam":
            held["hypernetworks' optimiser"] -= 8 * (6 + 6 * 4 + low_rank * (1 + 4))  # the counts of steps
        assert held == method.server_bytes()


def test_with_a_thousand_clients_the_hypernetworks_outweigh_the_models() -> None:
    context = Context(
        "digits_cnn",
        ConvNetOptions(),
        (1, 8, 8),
        10,
        torch.full((1000,), 20),
        TrainConfig(),
        seed=0,
    )
    memory = METHODS["pfedla"](context, METHODS["pfedla"].Params()).server_bytes()
    assert memory["theta"] == 4 * 1000 * DIGITS_CNN
    assert memory["hypernetworks"] == 4 * 1000 * hypernetwork_numbers(1000, 4)
    assert memory["hypernetworks"] > 30 * memory["theta"]


def test_fedmn_is_timed_with_its_own_network_in_all_its_shapes() -> None:
    sizes = ["method.name=fedmn", "data.clients=3", "data.per_client=40", "run.device=cpu", "train.rounds=4"]
    seconds = []
    for more in ([], ["method.pretrain_rounds=2"], ["method.routing=open", "run.engine=batched"]):
        config = load_config(None, [*sizes, "method.widths=[2048,1024]", *more])
        method = make_method(config, *load_data(config))
        seconds.append(step_seconds(config, method))
    plain = load_config(None, [*sizes, "method.name=fedavg"])
    # encoders, blocks and a router of 2,048 numbers in place of one network
    assert min(seconds) > 2 * step_seconds(plain, make_method(plain, *load_data(plain)))
