"""What every method scores, and that both engines train it alike.

A method is under test by being in METHODS; what is expected of it is in the table SCORED below, and in
those of test_three_rounds.py.

Shapes: N clients, P trainable numbers, U running statistics, L layers, K classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from bits import (
    BODY,
    DIFFERENT,
    HEAD,
    LAYERS,
    MEETS_ALL_SOON,
    VARIANTS,
    N,
    P,
    U,
    expected,
    method_settings,
    run_here,
    tiny_settings,
)
from by_hand import give_one_class_each, network_with, work
from harness import SMALL, Run
from torch.nn.functional import linear

from hpcfl.communication.channel import Channel
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort, Message
from hpcfl.methods import METHODS, Method
from hpcfl.methods.base import State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.results.run import load_run
from hpcfl.training.client_group import ClientGroup

ROUNDS = 3
CASES = [*DIFFERENT, *VARIANTS]
ADAPTATION_STEPS = {"per_fedavg": 3}
"""More than one pass over the data of the smallest clients."""


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    tiny = [*tiny_settings(digits), *MEETS_ALL_SOON, "data.subset_per_class=13"]
    return [*tiny, f"train.rounds={ROUNDS}", "train.participation=0.6"]


@pytest.fixture(scope="module")
def finished(settings: list[str]) -> Callable[[str, str], Run]:
    """Return a function from a case and an engine to its run; in float64, under the fixture `double`."""

    @cache
    def of(case: str, engine: str) -> Run:
        keys = ["data.per_client=null", *settings, *method_settings(case)]
        keys += [f"method.adaptation_steps={ADAPTATION_STEPS[case]}"] if case in ADAPTATION_STEPS else []
        return Run(*keys, f"run.engine={engine}", "run.clients_at_once=3")

    return of


@pytest.mark.usefixtures("double")
def test_sizes_match_the_network(finished: Callable[[str, str], Run]) -> None:
    run = finished("fedavg", "loop")
    layout = run.method.layout
    assert {layer.name: slice(layer.start, layer.stop) for layer in layout.layers()} == LAYERS
    assert (layout.size, layout.buffer_size, layout.body, layout.head) == (P, U, BODY, HEAD)
    cohorts = [run.simulation.cohort(number).clients for number in range(ROUNDS)]
    assert cohorts == [(1, 3, 4, 5), (0, 1, 2, 6), (1, 2, 4, 5)]


# What is scored


def the_same_for_all(run: Run) -> State:
    return {name: run.server[name].expand(N, -1) for name in ("theta", "buffers")}


def own(run: Run) -> State:
    return {name: run.clients[name] for name in ("theta", "buffers")}


def of_cluster(run: Run) -> State:
    assert len(run.server["cluster"].unique()) == 2
    return {name: run.server[name][run.server["cluster"]] for name in ("theta", "buffers")}


def mixture(run: Run) -> State:
    components = {name: run.server[name].expand(N, -1, -1) for name in ("theta", "buffers")}
    return components | {"weights": run.clients["weights"]}


def generated(run: Run) -> State:
    """Follow each client's embedding through pFedHN's hypernetwork."""
    outputs = run.server["hypernetwork/embedding"]
    for name in ("trunk1", "trunk2", "head"):
        outputs = outputs.relu() if name == "trunk2" else outputs
        weight, bias = (run.server[f"hypernetwork/{name}.{kind}"] for kind in ("weight", "bias"))
        outputs = linear(outputs, weight, bias)
    return {"theta": outputs, "buffers": run.clients["buffers"]}


def generated_under_own_head(run: Run) -> State:
    return generated(run) | {"theta": torch.cat([generated(run)["theta"], run.clients["head"]], dim=1)}


def with_decision(run: Run) -> State:
    """Decide by the mean logits of the training set, here for the newest routing hypernetwork."""
    network, decisions = network_with(run, run.server["theta"], run.server["buffers"]).eval(), []
    for client in range(N):
        with torch.no_grad():
            logits = network.router(*run.worker.shard.samples("train", client)).mean(dim=0)
        decisions.append(network.opened((logits > 0).to(logits.dtype), logits))
    return the_same_for_all(run) | {"decision": torch.stack(decisions)}


SCORE_THE_SHARED = (
    *("fedavg", "fedyogi", "fedprox", "scaffold", "fednova"),
    *("feddyn", "elastic", "fedntd", "fedlc", "moon"),
)
SCORE_THEIR_OWN = (
    *("local", "pfedme", "fedfomo", "fedamp", "pfedgraph"),
    *("fedcac", "ditto", "apfl", "fedphp", "fedafk"),
)
SCORED_ELSEWHERE = (
    *("per_fedavg", "fedala", "fedbabu", "fedbn", "fedper", "fedrep", "fedrod", "lg_fedavg", "pfedsim"),
    *("ifca", "pfedla", "heurpfedla", "pfedmb", "feddbe", "fedcp", "gpfl", "fedproto", "fedtgp", "fedpac"),
    *("fedas", "fedgh", "knn_per", "pfedfda"),
)
"""Methods whose plain implementation, in their own test file, also computes what is scored."""
SCORED: dict[str, Callable[[Run], State]] = {
    **dict.fromkeys(SCORE_THE_SHARED, the_same_for_all),
    **dict.fromkeys(SCORE_THEIR_OWN, own),
    "pfedhn": generated,
    "pfedhn-private": generated_under_own_head,
    "clustered_fl": of_cluster,
    "fedem": mixture,
    "fedmn": with_decision,
}


@pytest.mark.parametrize("case", [case for case in CASES if case.partition("-")[0] not in SCORED_ELSEWHERE])
@pytest.mark.usefixtures("double")
def test_the_scored_model_is_the_expected_one(finished: Callable[[str, str], Run], case: str) -> None:
    model = expected("SCORED", SCORED, case)
    run = finished(case, "loop")
    torch.testing.assert_close(run.evaluated(), model(run), rtol=1e-9, atol=1e-12)


# Engines


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("double")
def test_both_engines_agree(
    finished: Callable[[str, str], Run], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, batched = finished(case, "loop"), finished(case, "batched")
    assert batched.worker.engine.clients_at_once == 3
    torch.testing.assert_close(batched.server, loop.server, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(batched.clients, loop.clients, rtol=1e-7, atol=1e-9)
    kept = copy.deepcopy([(run.server, run.clients) for run in (loop, batched)])
    finetunes = type(loop.method).finetune != Method.finetune
    for epochs in (0, 1) if finetunes or case == "fedavg" else (0,):
        for run in (loop, batched):
            train = run.method.context.train.model_copy(update={"finetune_epochs": epochs})
            monkeypatch.setattr(run.method.context, "train", train)
        # clients that were in three cohorts, in two and in one
        apart = {name: rows[1:4] for name, rows in loop.evaluated().items()}
        torch.testing.assert_close(batched.evaluated(range(1, 4)), apart, rtol=1e-7, atol=1e-9)
    # neither an evaluation nor its fine-tuning changes a state
    for run, state in zip((loop, batched), kept, strict=True):
        torch.testing.assert_close((run.server, run.clients), state, rtol=0, atol=0)


# Moments


def loss_on_training_data(run: Run, clients: ClientGroup, model: Message) -> float:
    """Return the loss of one client's model on what it trains on."""
    x, y = clients.samples("train", 0)
    return float(-run.method.predict(clients, model, 0, x).gather(1, y.unsqueeze(1)).log().mean())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("double")
def test_models_are_scored_at_the_expected_moments(finished: Callable[[str, str], Run], case: str) -> None:
    """Models of both moments are there, the scored ones where that is their moment, and change nothing."""
    run = finished(case, "loop")
    adapter, traits, state = run.adapter, run.method.traits, run.worker.state
    cohort = Cohort(ROUNDS, tuple(range(N)), run.method.context.num_samples)
    channel = Channel(Communicator(), run.method.layers, N)
    kept = copy.deepcopy((run.server, state))
    to_evaluate = channel.down(adapter.eval_download(run.server, cohort), cohort)
    to_train = channel.down(adapter.download(run.server, cohort), cohort)
    before, after = [], []
    for client in range(N):
        part = slice(client, client + 1)
        to_score, down = to_evaluate.select(part), to_train.select(part)
        clients = ClientGroup(run.worker, [client], ROUNDS)
        received = adapter.model_after_download(clients, to_score)
        assert bool(received) == (case != "local")
        if received:
            before.append(loss_on_training_data(run, clients, received))
        if traits.eval_after == "download" and not run.config.train.finetune_epochs:
            scored = adapter.eval_model(ClientGroup(run.worker, [client], ROUNDS), to_score)
            assert_same_model(received, scored)
        torch.testing.assert_close((run.server, state), kept, rtol=0, atol=0)

        clients = ClientGroup(run.worker, [client], ROUNDS)
        if adapter.needs_request(ROUNDS):
            asked = adapter.client_request(clients, down)
            alone = Cohort(ROUNDS, (client,), torch.ones(1))
            down = down | asked | adapter.server_response(run.server, alone, asked.per_client)
        up = adapter.train(clients, down)
        end = copy.deepcopy((up.per_client, clients.buffers, {name: clients[name] for name in state}))
        trained = adapter.model_after_training(clients, down, up)
        after.append(loss_on_training_data(run, clients, trained))
        now = (up.per_client, clients.buffers, {name: clients[name] for name in state})
        torch.testing.assert_close(now, end, rtol=0, atol=0)
        if traits.eval_after == "training":
            clients.commit()
            scored = adapter.eval_model(ClientGroup(run.worker, [client], ROUNDS), to_score)
            assert_same_model(trained, scored)
            for name, rows in kept[1].items():
                state[name].copy_(rows)
    assert len(after) == N
    if before:
        assert sum(after) < sum(before)


def assert_same_model(one: Message, other: Message) -> None:
    assert set(one.names) == set(other.names)
    assert all(torch.equal(one[name], other[name]) for name in other.names)


@pytest.mark.parametrize("method", ["gpfl", "fedcp", "feddbe"])
def test_numbers_stay_finite_with_one_class_and_with_classes_that_no_client_has(method: str) -> None:
    run = Run(f"method.name={method}", "train.rounds=2")
    give_one_class_each(run)
    up, clients = work(run, 0, 2)
    assert up["theta"].isfinite().all()
    assert all(clients[name].isfinite().all() for name in run.clients)


# Methods of others, written without care


class Careless(FedAvg):
    """Evaluates each client's own model, and declares nothing else."""

    name = "careless"

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        own = torch.tensor(clients.ids, dtype=down["theta"].dtype).view(-1, 1)
        return Message(per_client={"theta": down["theta"] + own})


@pytest.mark.parametrize(
    ("name", "rows"), [("fedavg", 1), ("fedbabu", 1), ("fedem", 1), ("fedper", 4), ("careless", 4)]
)
def test_shared_tensors_are_saved_once_and_own_tensors_for_each_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows: int
) -> None:
    monkeypatch.setitem(METHODS, "careless", Careless)
    keys = ["model.name=mlp", "train.finetune_epochs=0", "train.rounds=1", "run.report=false"]
    assert run_here(tmp_path / name, [*SMALL, f"method.name={name}", *keys]) == 0
    with h5py.File(tmp_path / name / "checkpoint.h5", "r") as file:
        saved = file["personalised/theta"][:]
        assert len(saved) == rows
        if name in ("fedavg", "careless"):
            added = np.arange(rows, dtype=np.float32)[:, None]
            np.testing.assert_array_equal(saved, file["server/theta"][:] + added)


def test_the_declared_model_after_the_download_is_the_actual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undeclared = {"name": "without", "model_after_download": lambda *_: Message()}
    monkeypatch.setitem(METHODS, "without", type("Without", (FedAvg,), undeclared))
    last = {}
    for name in ("fedavg", "without"):
        keys = [f"method.name={name}", "model.name=mlp", "run.report=false"]
        assert run_here(tmp_path / name, [*SMALL, *keys]) == 0
        last[name] = load_run(tmp_path / name).last
    plain, own = last["fedavg"], last["without"]
    assert plain["accuracy_after_download"] == plain["accuracy_mean"] == own["accuracy_mean"]
    assert np.isnan(own["accuracy_after_download"])
    assert own["accuracy_after_training"] == plain["accuracy_after_training"]
