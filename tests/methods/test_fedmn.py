"""FedMN against plain PyTorch, its bytes and decisions worked out by hand, and what it refuses."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from bits import logits_by_network, raw_tests, run_here
from by_hand import (
    assert_close,
    batches_of,
    mean_by_samples,
    network_with,
    paths_by_hand,
    train_by_torch,
    work,
)
from harness import SMALL, UNEQUAL, Run, random
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from uploads import upload_of

from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.errors import BAD_INPUT, FINISHED
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.base import State
from hpcfl.methods.fedmn import FedMN
from hpcfl.models.modular import ModularNetwork
from hpcfl.randomness import stream_seed, torch_stream, uniform_by_key
from hpcfl.registries import load_config
from hpcfl.results.run import load_run
from hpcfl.setup.experiment import build
from hpcfl.training.client_group import ClientGroup

FLAT = ("method.name=fedmn", "model.name=mlp", "model.hidden=[8]")
"""FedMN on small encoders."""
NARROW = (*FLAT, "method.widths=[6,5]")
WITH_BATCHNORM = ("method.name=fedmn", "model.name=digits_cnn", "model.batchnorm=true")


class Watched(FedMN):
    """FedMN that remembers what clients asked for and what the server had after each round."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: list[tuple[tuple[int, ...], Tensor]] = []
        self.after: list[State] = []

    def server_response(self, server: State, cohort: Cohort, requests: State) -> Message:
        self.asked.append((cohort.clients, requests["paths"].clone()))
        return super().server_response(server, cohort, requests)

    def end_round(self, server: State, cohort: Cohort) -> None:
        super().end_round(server, cohort)
        self.after.append({name: tensor.clone() for name, tensor in server.items()})


def make_method(*overrides: str) -> FedMN:
    method = build(load_config(None, [*SMALL, *overrides]), Communicator()).method
    assert isinstance(method, FedMN)
    return method


def piece(method: FedMN, theta: Tensor, name: str) -> Tensor:
    """Return one child's numbers of theta [..., P]."""
    (layer,) = (layer for layer in method.layers if layer.name == name)
    return theta[..., layer.start : layer.stop]


def network_of(run: Run, theta: Tensor) -> ModularNetwork:
    """Return the network without BatchNorm with weights theta [P], apart from the method's."""
    network: Any = network_with(run, theta, torch.empty(0))
    return network


def flat_gradient(network: ModularNetwork, loss: Tensor) -> Tensor:
    """Return the gradient [P] of a loss by plain autograd."""
    gradients = torch.autograd.grad(loss, list(network.parameters()), materialize_grads=True)
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def open_paths(bits: Tensor, count: int) -> list[int]:
    """Read one client's request, the first path in the highest bit of the first byte."""
    return [int(bits[number // 8]) >> (7 - number % 8) & 1 for number in range(count)]


def active_names(method: FedMN, decision: Sequence[int]) -> list[str]:
    """Return the encoders and the blocks that get an input under a decision."""
    names = [f"encoder{k + 1}" for k in range(method.params.architecture[0])]
    return names + paths_by_hand(method.network, torch.zeros(2, 1, 8, 8), decision)[1]


# One path everywhere


def fedavg_by_hand(run: Run, model: Any, rounds: int) -> nn.Module:
    """Train a plain network by FedAvg with torch's SGD on the run's mini-batches."""
    for round in range(rounds):
        clients, ends = run.simulation.cohort(round).clients, []
        for client in clients:
            local = copy.deepcopy(model).train()
            train_by_torch(run, client, round, local)
            ends.append(local.state_dict())
        stacked = {name: torch.stack([end[name].double() for end in ends]) for name in ends[0]}
        model.load_state_dict({name: mean_by_samples(run, clients, rows) for name, rows in stacked.items()})
    return model


def assert_same_weights(run: Run, server: State, model: nn.Module, names: Sequence[tuple[str, str]]) -> None:
    """Compare a sequence of modules with the children of these names, running statistics included."""
    network = network_with(run, server["theta"], server.get(BUFFERS, torch.empty(0)))
    for place, name in names:
        found, expected = network.get_submodule(name).state_dict(), model.get_submodule(place).state_dict()
        # FedMN does not count batches
        assert_close(found, expected | {n: found[n] for n in found if n.endswith("tracked")}, atol=1e-12)


@pytest.mark.parametrize(
    ("architecture", "widths", "model"), [("[1,1]", "[6]", FLAT), ("[1,1,1]", "[6,5]", WITH_BATCHNORM)]
)
def test_with_one_path_fedmn_is_fedavg(
    double: None, architecture: str, widths: str, model: tuple[str, ...]
) -> None:
    keys = ("train.participation=0.75", "train.momentum=0.5", "train.weight_decay=0.01")
    run = Run(*model, *UNEQUAL, *keys, f"method.architecture={architecture}", f"method.widths={widths}")
    names = [("0", "encoder1"), ("1", "block2_1")]
    modules = [run.method.network.get_submodule(name) for _, name in names]
    if architecture == "[1,1,1]":
        names.append(("3", "block3_1"))
        modules += [nn.ReLU(), run.method.network.get_submodule("block3_1")]
    expected = fedavg_by_hand(run, copy.deepcopy(nn.Sequential(*modules)), rounds=3)
    assert_same_weights(run, run.server, expected, names)
    moved = run.server["theta"] - run.method.server_state()["theta"]
    assert piece(run.method, moved, "block2_1").abs().max() > 0.001


# Aggregation


@pytest.mark.parametrize(
    ("rule", "of_one", "of_two"), [("normalised", 1.0, [1 / 6, 0, 5 / 6]), ("sum", 0.25, [1 / 8, 0, 5 / 8])]
)
def test_a_block_is_averaged_over_the_clients_that_used_it_or_shrinks_by_the_paper_s_sum(
    rule: str, of_one: float, of_two: list[float]
) -> None:
    """block2_1 is active at client 1 alone, block2_2 at all, block3_1 at two clients, block3_2 nowhere."""
    method = make_method(*NARROW, f"method.aggregation={rule}")
    cohort = Cohort(0, (0, 1, 3), torch.tensor([1, 2, 5]))
    server = method.server_state()
    before = server["theta"].clone()
    # encoders to blocks, blocks to blocks, outputs: block3_1 is fed by block2_2 of clients 0 and 2
    paths = ["0101001010", "1101000000", "0001001010"]
    bits = torch.tensor([[int(p[:8], 2), int(p[8:].ljust(8, "0"), 2)] for p in paths], dtype=torch.uint8)
    adapter = MethodAdapter(method)
    sent = adapter.download(server, cohort) | adapter.server_response(server, cohort, {"paths": bits})
    rows = random(3, len(before), seed=3)
    method.aggregate(server, cohort, upload_of({"theta": rows, "parts": rows}, sent))
    after, of_all = server["theta"], [1 / 8, 2 / 8, 5 / 8]
    for name, weights in {
        **dict.fromkeys(("encoder1", "router", "block2_2"), of_all),
        "block3_1": of_two,
    }.items():
        expected = torch.tensor(weights, dtype=torch.float64) @ piece(method, rows, name).double()
        torch.testing.assert_close(piece(method, after, name).double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(piece(method, after, "block2_1"), piece(method, rows[1], "block2_1") * of_one)
    kept = piece(method, before, "block3_2")
    assert torch.equal(piece(method, after, "block3_2"), kept if rule == "normalised" else 0 * kept)


@pytest.mark.parametrize(("codec", "largest"), [("int8", 0.1), ("topk", 1.0)])
def test_codecs_send_differences_of_all_blocks(codec: str, largest: float) -> None:
    """Of whole weights, int8 would lose more than an update has, and topk would send nearly none."""
    keys = (*NARROW, "train.rounds=1", "train.local_epochs=3")
    plain, coded = (Run(*keys, *more) for more in ((), (f"comm.codec={codec}", "comm.directions=up")))
    start = plain.method.server_state()["theta"]
    for name in ("encoder1", "router", "block3_1"):
        update, lost = (
            piece(plain.method, rows, name) for rows in (plain.server["theta"] - start, coded.server["theta"])
        )
        lost = lost - piece(plain.method, plain.server["theta"], name)
        assert 0 < lost.norm() < largest * update.norm(), name
    if codec == "topk":
        assert coded.bytes_by_client[:, 1].sum() < 0.3 * plain.bytes_by_client[:, 1].sum()


# The router's gradient


@pytest.mark.parametrize("routing", ["straight", "soft"])
def test_a_step_equals_plain_autograd(double: None, routing: str) -> None:
    keys = ("method.router_lr=0.7", "method.router_spread=0.3", "train.batch_size=64", "train.rounds=2")
    run = Run(*NARROW, f"method.routing={routing}", *keys)
    run.server = run.method.server_state()
    client, round = 2, 1
    trained = work(run, client, round)[0].per_client["theta"][0]

    network = network_of(run, run.server["theta"])
    (batch,) = ClientGroup(run.worker, [client], round).batches()
    x, y = batch.x[0], batch.y[0]
    logits = network.get_submodule("router")(x, y).mean(dim=0)
    uniform = torch.rand(10, generator=torch_stream(0, "routing", round, client))
    # the last round's temperature
    soft = ((uniform.log() - (1 - uniform).log() + logits) / 0.1).sigmoid()
    chosen = soft
    if routing == "straight":
        hard = network.opened((soft > 0.5).double(), logits).detach()
        assert torch.equal(network(x, hard + soft - soft.detach()), network(x, hard))
        chosen = hard + soft - soft.detach()
    outputs, _ = paths_by_hand(network, x, list(chosen))
    flat = flat_gradient(network, cross_entropy(outputs, y))
    steps = torch.full_like(flat, run.config.train.lr)
    piece(run.method, steps, "router")[:] = 0.7
    expected = run.server["theta"] - steps * flat
    names = active_names(run.method, (chosen > 0).int().tolist())
    for layer in run.method.layers:
        ours = piece(run.method, trained, layer.name)
        if layer.name in [*names, "router"]:
            torch.testing.assert_close(ours, piece(run.method, expected, layer.name), rtol=0, atol=1e-12)
        else:
            assert torch.count_nonzero(ours) == 0
            assert torch.count_nonzero(piece(run.method, flat, layer.name)) == 0
    assert piece(run.method, flat, "router").abs().max() > 1e-6


def test_a_step_with_dropout_equals_plain_autograd(double: None) -> None:
    keys = ("method.routing=open", "method.dropout=0.4", "train.batch_size=64", "train.rounds=1")
    run = Run(*NARROW, *keys)
    start = run.server = run.method.server_state()
    client = 2
    trained = work(run, client)[0].per_client["theta"][0]

    (batch,) = ClientGroup(run.worker, [client], 0).batches()
    x, y, network = batch.x[0], batch.y[0], network_of(run, start["theta"])
    drawn, _ = uniform_by_key(torch.tensor([stream_seed(0, "dropout", 0, client)]), (len(x), 10))
    kept = (drawn[0] >= 0.4) / 0.6
    assert 0.3 < (kept == 0).double().mean() < 0.5
    encoded = sum(network.get_submodule(f"encoder{k}")(x) for k in (1, 2)) / 2
    hidden = sum(
        network.get_submodule(f"block2_{k}")(encoded).relu() * kept[:, 5 * k - 5 : 5 * k] for k in (1, 2)
    )
    loss = cross_entropy(sum(network.get_submodule(f"block3_{k}")(hidden / 2) for k in (1, 2)) / 2, y)
    expected = start["theta"] - run.config.train.lr * flat_gradient(network, loss)
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-12)
    # all paths are open, independent of the router
    assert torch.equal(piece(run.method, trained, "router"), piece(run.method, start["theta"], "router"))


def test_dropout_draws_the_same_for_a_client_in_any_group(double: None) -> None:
    keys = (*NARROW, *UNEQUAL, "method.dropout=0.4", "train.rounds=1")
    one, three = (Run(*keys, "run.engine=batched", f"run.clients_at_once={n}") for n in (1, 3))
    assert_close(one.server["theta"], three.server["theta"])


# Everybody starts from the server, unless they are a chain


def chain_by_hand(run: Run, theta: Tensor, decisions: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Train all clients of the first round one after the other from theta [P], with plain autograd.

    Returns the mean of what they uploaded, and the network after each client.
    """
    method, lr = run.method, run.config.train.lr
    rows, masks = [], []
    for client, decision in enumerate(decisions):
        for x, y in batches_of(run, client, 0):
            network = network_of(run, theta)
            outputs, _ = paths_by_hand(network, x, list(decision))
            theta = theta - lr * flat_gradient(network, cross_entropy(outputs, y))
        rows.append(theta)
        names = [*active_names(method, decision.int().tolist()), "router"]
        masks.append(torch.cat([torch.full((n.size,), float(n.name in names)) for n in method.layers]))
    weights = torch.stack(masks) * method.context.num_samples.view(-1, 1)
    return (torch.stack(rows) * weights).sum(dim=0) / weights.sum(dim=0), rows


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_in_a_chain_each_client_starts_from_the_model_of_the_one_before(double: None, engine: str) -> None:
    keys = (*NARROW, *UNEQUAL, "method.order=chain", "train.rounds=1", "method.router_lr=1e-12")
    run = Run(*keys, f"run.engine={engine}", "run.clients_at_once=3")
    expected, rows = chain_by_hand(run, run.method.server_state()["theta"], run.clients["decision"])
    used = expected.isfinite()
    torch.testing.assert_close(run.server["theta"][used], expected[used], rtol=0, atol=1e-8)
    assert used.double().mean() > 0.9
    assert all((after - before).abs().max() > 1e-4 for before, after in itertools.pairwise(rows))


def test_a_chain_starts_from_the_server_s_model_in_every_round(double: None) -> None:
    keys = (*NARROW, "method.architecture=[1,1,1]", "train.participation=0.25")
    # a chain of one client is none
    chain, parallel = (Run(*keys, f"method.order={order}") for order in ("chain", "parallel"))
    assert torch.equal(chain.server["theta"], parallel.server["theta"])


@pytest.mark.mpi(min_size=3)
def test_a_chain_is_refused_on_three_ranks_and_more(
    world: Communicator, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On two, tests/simulation/test_bits.py runs it."""
    keys = (*SMALL, *WITH_BATCHNORM, "method.architecture=[1,2,2]", "method.order=chain", "train.rounds=2")
    assert run_here(tmp_path / "refused", keys) == BAD_INPUT
    printed = capfd.readouterr().err
    assert printed.count("hpcfl: error: ") == world.is_server
    if world.is_server:
        assert "method.order=chain trains a round's clients one after the other and needs" in printed
        assert f"not {world.num_workers}: start one or two ranks, or remove this key" in printed


# Decisions


def test_a_decision_is_a_function_of_seed_round_and_client() -> None:
    run = Run(*NARROW, "train.participation=0.75", kind=Watched)
    starts = [run.method.server_state(), *run.method.after]
    assert len(run.method.asked) == 3
    probabilities: dict[int, Tensor] = {}
    for round, (clients, bits) in enumerate(run.method.asked):
        network = network_of(run, starts[round]["theta"])
        for client, row in zip(clients, bits, strict=True):
            with torch.no_grad():
                samples = run.worker.shard.samples("train", client)
                logits = network.get_submodule("router")(*samples).mean(dim=0)
            probabilities[client] = logits.sigmoid()
            stream = torch_stream(0, "routing", round, client)
            uniform = torch.rand(10, generator=stream, dtype=torch.float64)
            drawn = (uniform.log() - (1 - uniform).log() + logits > 0).float()
            expected = network.opened(drawn, logits)
            assert open_paths(row, 10) == expected.int().tolist()
    # of the training data alone
    for client, row in probabilities.items():
        torch.testing.assert_close(run.clients["probability"][client], row)
    assert len({tuple(row.tolist()) for _, bits in run.method.asked for row in bits}) > 3


def test_the_authors_program_scores_the_newest_weights_with_the_sampled_decisions() -> None:
    keys = (*NARROW, "train.rounds=1", "train.participation=0.5")
    sampled, likely = (Run(*keys, f"method.scored_paths={paths}") for paths in ("sampled", "likely"))
    assert torch.equal(sampled.server["theta"], likely.server["theta"])
    found, others = sampled.evaluated(), likely.evaluated()
    assert torch.equal(found["theta"], others["theta"])
    last = sampled.clients["decision"]
    met = sampled.simulation.cohort(0).clients
    assert len(met) == 2
    for client in range(4):
        expected = last[client] if client in met else others["decision"][client]
        assert torch.equal(found["decision"][client], expected)
    assert not torch.equal(found["decision"], others["decision"])


def test_the_temperature_falls_geometrically_but_not_in_the_pretraining() -> None:
    def temperatures(rounds: int, *keys: str) -> list[float]:
        decisions = make_method(*FLAT, f"train.rounds={rounds}", *keys).decisions
        return [decisions.temperature(number) for number in range(rounds)]

    assert temperatures(3) == pytest.approx([1, 0.1**0.5, 0.1], rel=1e-12)
    keys = ("method.pretrain_rounds=2", "method.temperature=4", "method.final_temperature=1")
    assert temperatures(5, *keys) == pytest.approx([4, 4, 4, 2, 1], rel=1e-12)
    assert temperatures(3, "method.pretrain_rounds=2")[2] == 1.0


# Bytes


def bytes_by_round(run: Run) -> list[dict[str, int]]:
    """Return the ledger's bytes of each round by direction and layer."""
    table = run.simulation.ledger.tables()["bytes"]
    return [dict(zip(table.columns, row, strict=True)) for row in table.values.tolist()]


@pytest.mark.parametrize(
    ("architecture", "widths", "routing"),
    [("[1,3,2,2]", "[6,5,4]", "straight"), ("[2,2,2]", "[6,5]", "soft"), ("[2,2,2]", "[6,5]", "open")],
)
def test_bytes_follow_from_the_decisions(architecture: str, widths: str, routing: str) -> None:
    shape = (f"method.architecture={architecture}", f"method.widths={widths}", f"method.routing={routing}")
    run = Run(*FLAT, *shape, "train.participation=0.5", kind=Watched)
    blocks = run.config.method.options.architecture
    num_paths = sum(a * b for a, b in itertools.pairwise(blocks)) + blocks[-1]
    sizes = {layer.name: layer.size for layer in run.method.layers}
    expected = torch.zeros(4, 2, dtype=torch.int64)
    used = set()
    for clients, bits in run.method.asked:
        assert bits.shape[1] == -(-num_paths // 8)
        for client, row in zip(clients, bits, strict=True):
            names = [*active_names(run.method, open_paths(row, num_paths)), "router"]
            used.add(len(names))
            expected[client] += 4 * sum(sizes[name] for name in names)
    assert torch.equal(run.bytes_by_client, expected)
    assert (used == {len(sizes)}) == (routing != "straight")
    for row in bytes_by_round(run):
        # two clients a round
        assert row["up/(indices)"] == 2 * -(-num_paths // 8)
        assert row["down/(indices)"] == 0


# Pretraining


@pytest.fixture(scope="module")
def pretrained() -> Run:
    """Return a run whose first two rounds of three train an encoder and a classifier."""
    keys = ("method.widths=[6,5]", "method.pretrain_rounds=2", "train.rounds=3")
    torch.set_default_dtype(torch.float64)
    try:
        return Run(*WITH_BATCHNORM, *UNEQUAL, *keys, kind=Watched)
    finally:
        torch.set_default_dtype(torch.float32)


def test_pretraining_is_fedavg_on_the_first_encoder(double: None, pretrained: Run) -> None:
    method, start = pretrained.method, pretrained.method.network
    plain = nn.Sequential(start.get_submodule("encoder1"), start.get_submodule("classifier"))
    names = [("0", "encoder1"), ("1", "classifier")]
    for rounds in (1, 2):
        model = fedavg_by_hand(pretrained, copy.deepcopy(plain), rounds)
        assert_same_weights(pretrained, method.after[rounds - 1], model, names)


def test_evaluations_score_the_classifier_while_it_is_trained(tmp_path: Path) -> None:
    keys = (*NARROW, "method.pretrain_rounds=1", "train.rounds=2", "run.eval_every=1")
    assert run_here(tmp_path / "run", [*SMALL, *keys, "run.report=false"]) == FINISHED
    with h5py.File(tmp_path / "run" / "checkpoint.h5", "r", locking=False) as file:
        losses = file["history/loss"][()]
    run = Run(*keys, kind=Watched)
    networks = [network_of(run, state["theta"]) for state in run.method.after]
    decisions = run.evaluated()["decision"]
    for client in range(4):
        x, y = run.worker.shard.samples("test", client)
        with torch.no_grad():
            of_classifier = cross_entropy(networks[0](x), y).item()
            of_blocks = cross_entropy(networks[1](x, decisions[client]), y).item()
        assert losses[:, client] == pytest.approx([of_classifier, of_blocks], rel=1e-5)


def test_a_run_that_ends_in_the_pretraining_has_the_classifier_as_its_network(tmp_path: Path) -> None:
    keys = (*NARROW, "method.pretrain_rounds=8", "train.rounds=9", "run.eval_every=1", "train.lr=1e-6")
    words = [*SMALL, *keys, "train.patience=1", "data.val_fraction=0.2", "run.report=false"]
    assert run_here(tmp_path / "run", words) == FINISHED
    run = load_run(tmp_path / "run")
    assert run.done < 8
    x, _ = raw_tests(run)[0]
    probabilities = logits_by_network(run, 0, x).softmax(dim=1)
    torch.testing.assert_close(probabilities, torch.from_numpy(run.predict(0, x)))


def test_all_encoders_start_from_the_pretrained_body(pretrained: Run) -> None:
    method, layout = pretrained.method, pretrained.method.layout
    start = method.server_state()["theta"]
    for name in ("encoder2", "router", "block2_1", "block3_2"):
        assert torch.equal(piece(method, method.after[0]["theta"], name), piece(method, start, name))
    after = method.after[1]
    initial = layout.views(start)
    found = layout.views(after["theta"]) | layout.buffer_views(after[BUFFERS])
    copied = set()
    for name, tensor in found.items():
        child, _, rest = name.partition(".")
        if rest.removeprefix("images.").startswith("body."):
            assert torch.equal(tensor, found[f"encoder1.{rest.removeprefix('images.')}"])
            copied.add(child)
        elif child not in ("encoder1", "classifier"):
            assert torch.equal(tensor, initial[name])
    assert copied == {"encoder1", "encoder2", "router"}
    assert piece(method, after["theta"] - start, "encoder1").abs().max() > 0.001


def test_bytes_of_pretraining_are_those_of_encoder_and_classifier(pretrained: Run) -> None:
    rows = bytes_by_round(pretrained)
    layers = {layer.name: layer.size for layer in pretrained.method.layers}
    # four clients, 8 bytes a number in float64
    sent = {name: 4 * 8 * layers[name] if name in ("encoder1", "classifier") else 0 for name in layers}
    expected = {f"{way}/{name}": size for way in ("down", "up") for name, size in sent.items()}
    for row in rows[:2]:
        assert expected.items() <= row.items()
        assert row["up/(indices)"] == row["down/(indices)"] == 0
    for row in rows[2:]:
        assert row["up/classifier"] == row["down/classifier"] == 0
        assert row["up/encoder2"] == row["down/encoder2"] == 4 * 8 * layers["encoder2"]
        assert row["up/(indices)"] == 4 * 2
