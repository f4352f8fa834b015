"""What every method scores, and that both engines train it alike.

A method is under test by being in METHODS; what is expected of it is in the table SCORED below, and in
those of test_three_rounds.py.

Shapes: N clients, P trainable numbers, U running statistics, L layers, K classes.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

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
    differing,
    expected,
    method_settings,
    run_here,
    run_until_time_is_up,
    tiny_settings,
)
from by_hand import (
    give_one_class_each,
    network_with,
    work,
)
from harness import SMALL, Run
from torch import nn
from torch.nn.functional import linear

from hpcfl.communication.channel import Channel
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.errors import FINISHED, STOPPED
from hpcfl.methods import METHODS, Method
from hpcfl.methods.base import Context, Params, State
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.methods.fedavg import FedAvg
from hpcfl.methods.fedem import FedEM
from hpcfl.methods.local import Local
from hpcfl.methods.pfedla import PFedLA
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


def with_neighbours(run: Run) -> State:
    """Store the features of the newest model, and choose the weight of three neighbours on stored samples."""
    network = network_with(run, run.server["theta"], run.server["buffers"]).eval()
    most = int(run.method.context.num_samples.max())
    store = torch.full((N, most, network.num_features), torch.inf)
    labels, weight = torch.zeros(N, most, dtype=torch.int64), torch.zeros(N)
    for client in range(N):
        x, y = run.worker.shard.samples("train", client)
        with torch.no_grad():
            features, by_model = network.body(x), network(x).softmax(dim=1)
        store[client, : len(y)], labels[client, : len(y)] = features, y
        losses = torch.zeros(11)
        for sample, label in enumerate(y):
            distances = (features - features[sample]).square().mean(dim=1)
            distances[sample] = torch.inf
            nearest = distances.argsort()[:3]
            votes = (-distances[nearest]).exp()
            share = votes[y[nearest] == label].sum() / votes.sum()
            mixed = torch.linspace(0, 1, 11) * (share - by_model[sample, label]) + by_model[sample, label]
            losses -= mixed.clamp(min=1e-38).log()
        weight[client] = losses.argmin() / 10
    return the_same_for_all(run) | {"store": store, "labels": labels, "weight": weight}


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
    *("fedas", "fedgh", "pfedfda"),
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
    "knn_per": with_neighbours,
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


ALPHA = Diagnostic("alpha", ("client",), "", "")


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


class Restless(FedAvg):
    """Draws from the own generators of torch, NumPy and Python wherever it may."""

    def __init__(self, context: Context, params: Params) -> None:
        super().__init__(context, params)
        self.start = torch.rand(())

    def server_state(self) -> State:
        return {"theta": super().server_state()["theta"] * self.start + torch.rand(())}

    def download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={"theta": server["theta"] + torch.rand(())})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": down["theta"] + np.random.rand() + torch.rand(())})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        super().aggregate(server, cohort, up)
        server["theta"] += torch.rand(())

    def end_round(self, server: State, cohort: Cohort) -> None:
        server["theta"] += torch.rand(()) * np.random.rand() * random.random()


def test_hooks_that_draw_have_the_same_numbers_in_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "restless", Restless)
    keys = [*SMALL, "method.name=restless", "model.name=mlp", "train.rounds=2", "run.report=false"]
    assert run_here(tmp_path / "whole", keys) == FINISHED
    # the generators of another process are elsewhere
    torch.rand(()), np.random.rand(), random.random()
    assert run_until_time_is_up(tmp_path / "resumed", keys) == STOPPED
    assert run_here(tmp_path / "resumed", keys) == FINISHED
    assert not differing(tmp_path / "whole", tmp_path / "resumed")
    assert run_here(tmp_path / "other", [*keys, "run.seed=2"]) == FINISHED
    assert "/server/theta" in differing(tmp_path / "whole", tmp_path / "other")


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand, lambda count: [random.random()] * count])
def test_numbers_of_clients_that_depend_on_ranks_are_refused(draw: Callable[[int], Any]) -> None:
    def drawn(_: FedAvg, clients: Sequence[int]) -> State:
        return {"start": torch.as_tensor(draw(len(clients)))}

    with pytest.raises(TypeError, match=r"Drawing\.client_state drew from torch's, NumPy's or Python's own"):
        Run("method.name=fedavg", kind=type("Drawing", (FedAvg,), {"client_state": drawn}))


@pytest.mark.parametrize("hook", ["train", "aggregate"])
def test_an_attribute_that_a_round_sets_is_refused(hook: str) -> None:
    def remember(self: FedAvg, *arguments: object) -> object:
        self.last = arguments
        return getattr(FedAvg, hook)(self, *arguments)

    with pytest.raises(TypeError, match=r"Mindful\.last cannot be set in a round: a resumed run and othe"):
        Run("method.name=fedavg", kind=type("Mindful", (FedAvg,), {hook: remember}))


class Moody(FedAvg):
    """Sends its own tensor."""

    def train(self, clients: ClientGroup, down: Message) -> Message:
        mood = Message(per_client={"mood": torch.zeros(len(clients), 2)}, num_clients=len(clients))
        return super().train(clients, down) | mood


def test_the_traffic_of_an_own_tensor_is_counted_by_its_name() -> None:
    keys = ("method.name=fedavg", "train.rounds=1")
    more = Run(*keys, kind=Moody).bytes_by_client - Run(*keys).bytes_by_client
    assert more.tolist() == [[0, 8]] * len(more)


class Returning(FedAvg):
    """Scores what it sends, by returning the upload itself."""

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        return up


def test_scoring_an_upload_does_not_change_it() -> None:
    keys = ("method.name=fedavg", "model.batchnorm=true", "train.buffers=local", "run.eval_every=1")
    assert torch.equal(Run(*keys, kind=Returning).bytes_by_client, Run(*keys).bytes_by_client)


class Without(FedAvg):
    """Declares no model after the download, although it scores that one."""

    name = "without"

    def model_after_download(self, clients: ClientGroup, down: Message) -> Message:
        return Message()


def test_the_declared_model_after_the_download_is_the_actual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "without", Without)
    last = {}
    for name in ("fedavg", "without"):
        keys = [f"method.name={name}", "model.name=mlp", "run.report=false"]
        assert run_here(tmp_path / name, [*SMALL, *keys]) == 0
        last[name] = load_run(tmp_path / name).last
    plain, own = last["fedavg"], last["without"]
    assert plain["accuracy_after_download"] == plain["accuracy_mean"] == own["accuracy_mean"]
    assert np.isnan(own["accuracy_after_download"])
    assert own["accuracy_after_training"] == plain["accuracy_after_training"]


def test_a_network_that_does_not_match_its_layout_is_reported() -> None:
    def careless(self: FedAvg, context: Context, params: Params) -> None:
        super(FedAvg, self).__init__(context, params)
        self.network = torch.nn.Linear(3, 2)

    kind = type("Late", (FedAvg,), {"__init__": careless})
    with pytest.raises(TypeError, match=r"Late set network after .* return it from make_network"):
        Run("method.name=fedavg", kind=kind)


@pytest.mark.parametrize(
    ("base", "member", "value", "expected"),
    [
        (FedAvg, "as_module", nn.Linear, "predicts_by=network needs neither predict nor as_module of its"),
        (FedEM, "predict", FedAvg.predict, "predicts_by=module needs both predict and as_module, from the"),
        (FedAvg, "traits", FedAvg.traits.replace(predicts_by="rule"), "predicts_by=rule needs predict of"),
        (FedAvg, "trian", FedAvg.train, r"Mistaken\.trian is not a hook; did you mean train\? If not, name"),
        (FedAvg, "diagnostic", (), r"Mistaken\.diagnostic is not a hook; did you mean diagnostics\?"),
        (FedAvg, "local_gradient", None, r"Mistaken\.local_gradient is not a hook; did you mean finetune"),
        (FedAvg, "client_request", FedAvg.train, "client_request is never called; derive the class from Two"),
        (FedAvg, "traits", FedAvg.traits.replace(eval_after="trainig"), r"traits\.eval_after cannot be 'tra"),
        (FedAvg, "traits", FedAvg.traits.replace(averages="theta"), r"traits\.averages cannot be 'theta': "),
        (
            FedAvg,
            "needs_body",
            True,
            r"Mistaken\.needs_body is not a hook; did you mean traits\.needs_body\?",
        ),
        (FedAvg, "name", "a/b", "name cannot be 'a/b'; allowed: letters, digits and _"),
        (FedAvg, "privacy_units", ("clients",), "privacy_units has 'clients'; allowed: client, sample"),
        (
            FedAvg,
            "traits",
            FedAvg.traits.replace(refuses={"lrr": "which"}),
            r"traits\.refuses has 'lrr', which",
        ),
        (FedAvg, "traits", FedAvg.traits.replace(train_defaults={"x": 1}), r"traits\.train_defaults has 'x'"),
        (FedAvg, "diagnostics", (ALPHA, ALPHA), "two diagnostics of one name: alpha, alpha"),
        (FedAvg, "diagnostics", ALPHA, r"Mistaken\.diagnostics is no tuple; write \(Diagnostic"),
        (FedAvg, "traits", {"eval_after": "training"}, r"Mistaken\.traits is no Traits; write traits = "),
    ],
)
def test_a_class_with_contradictory_hooks_is_refused(
    base: type[Method], member: str, value: object, expected: str
) -> None:
    with pytest.raises(TypeError, match=expected):
        type("Mistaken", (base,), {member: value})


def test_the_first_axis_of_a_diagnostic_is_clients() -> None:
    with pytest.raises(ValueError, match="must be 'client'"):
        Diagnostic("alpha", ("layer", "client"), "", "")
    with pytest.raises(ValueError, match="'alpha' has the axis 'rank'; allowed: client, layer, branch, "):
        Diagnostic("alpha", ("client", "rank"), "", "")


def test_a_diagnostic_with_other_axes_than_its_values_is_refused_at_once() -> None:
    def gates(_: FedAvg, clients: Sequence[int]) -> State:
        return {"alpha": torch.zeros(len(clients), 3)}

    def start(*axes: str) -> None:
        diagnostic = replace(ALPHA, axes=axes)
        gated = type("Gated", (FedAvg,), {"diagnostics": (diagnostic,), "client_state": gates})
        Run("method.name=fedavg", kind=gated)

    with pytest.raises(
        TypeError, match=r"'alpha' as \[1, 3\]; expected: a tensor \[1\], by its axes \('client',"
    ):
        start("client")
    with pytest.raises(TypeError, match=r"'alpha' as \[1, 3\]; expected: a tensor \[1, 4\]"):
        start("client", "layer")
    start("client", "component")


def test_an_exit_in_a_hook_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*_: object) -> None:
        raise SystemExit(0)

    monkeypatch.setitem(METHODS, "leaving", type("Leaving", (FedAvg,), {"name": "leaving", "train": leave}))
    with pytest.raises(RuntimeError, match=r"own code ends the process by sys\.exit\(0\); raise an error"):
        run_here(tmp_path / "run", [*SMALL, "method.name=leaving", "model.name=mlp"])


@pytest.mark.parametrize(
    ("hook", "key", "expected"),
    [
        ("eval_model", "train.finetune_epochs=0", "cannot be written here"),
        ("finetune", "train.finetune_epochs=1", "cannot be written here"),
        ("new_client_model", "data.unseen_clients=0.5", r"inside `clients\.temporary_state\(\)`"),
    ],
)
def test_an_evaluation_cannot_write_the_state_of_clients(hook: str, key: str, expected: str) -> None:
    def write(self: Local, clients: ClientGroup, *_: object) -> None:
        clients["theta"] = clients["theta"] + 1

    with pytest.raises(TypeError, match=expected):
        Run("method.name=local", "train.rounds=1", key, kind=type("Writes", (Local,), {hook: write}))


def test_an_evaluation_cannot_write_the_state_of_clients_in_place() -> None:
    def write(self: Local, clients: ClientGroup, *_: object) -> Message:
        clients["theta"].add_(1)
        return Message(per_client={"theta": clients["theta"]})

    with pytest.raises(TypeError, match="cannot be written here"):
        Run("method.name=local", "train.rounds=1", kind=type("Writes", (Local,), {"eval_model": write}))


def test_averages_are_in_the_state_of_the_server() -> None:
    kind = type("Other", (FedAvg,), {"traits": FedAvg.traits.replace(averages=("mean",))})
    with pytest.raises(TypeError, match=r"Other\.traits\.averages names mean, which server_state does not"):
        Run("method.name=fedavg", "train.rounds=1", kind=kind)


def test_an_upload_without_a_model_is_refused_with_what_is_missing() -> None:
    class Updates(FedAvg):
        def train(self, clients: ClientGroup, down: Message) -> Message:
            assert clients.round == 0
            return Message(per_client={"update": clients.sgd(down["theta"]).theta - down["theta"]})

    with pytest.raises(TypeError, match=r"Updates\.train uploads no theta: override model_after_training"):
        Run("method.name=fedavg", kind=Updates)


@pytest.mark.warns
def test_a_codec_sends_differences_only_of_tensors_that_the_method_names() -> None:
    class Whole(FedAvg):
        traits = FedAvg.traits.replace(differences=())

    keys = ("method.name=fedavg", "train.rounds=1", "comm.codec=topk", "comm.topk_ratio=0.01")
    plain, whole = Run(*keys), Run(*keys, kind=Whole)
    up = [run.simulation.ledger.client_bytes.sum(axis=0)[1] for run in (plain, whole)]
    assert up[1] > 10 * up[0]


def test_the_sharded_state_waits_for_the_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(self: PFedLA, server: State, cohort: Cohort, up: Upload) -> None:
        self.sharded.products(torch.zeros(len(cohort), self.layout.size))

    monkeypatch.setattr(PFedLA, "aggregate", early)
    with pytest.raises(RuntimeError, match="read all of the upload, or drain it"):
        Run("method.name=pfedla", "method.server=sharded", "train.rounds=1")
