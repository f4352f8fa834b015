"""pFedLA and HeurpFedLA: invariants, and a plain implementation of Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from by_hand import OneClient, assert_close, cohort_of, network_with, train_by_torch
from harness import UNEQUAL, Run, random
from torch import Tensor
from uploads import upload_of

from hpcfl.communication.traffic import count_bytes
from hpcfl.errors import UserError
from hpcfl.methods import Method, diagnostics, pfedla
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.base import State
from hpcfl.methods.heurpfedla import HeurpFedLA
from hpcfl.methods.pfedla import PFedLA

HEADS_BIAS = "hypernetworks/heads.bias"
DIVERSE = ("method.initial_models=own", "method.head_init=default", "method.hypernetwork_lr=0.01")
"""From the first round on, models and weights differ."""


def aggregate(method: Method, server: State, clients: Sequence[int], trained: Tensor) -> None:
    """Answer what the server sends these clients with trained models [S, P]."""
    cohort = cohort_of(method, clients)
    sent = MethodAdapter(method).download(server, cohort)
    method.aggregate(server, cohort, upload_of({"theta": trained}, sent))


# Weights that make pFedLA another method


class SampleWeights(PFedLA):
    """alpha_i^{l,j} = n_j / n for all i and l, for ever (with hypernetwork_lr=0)."""

    def server_state(self) -> State:
        state = super().server_state()
        state[HEADS_BIAS][:] = (self.context.num_samples / self.context.num_samples.sum()).log()
        return state


class OwnModelOnly(PFedLA):
    """alpha_i^{l,j} = 1 for j = i, else exactly 0, for ever (with hypernetwork_lr=0)."""

    def server_state(self) -> State:
        state = super().server_state()
        state[HEADS_BIAS][:] = 1000 * torch.eye(self.context.num_clients).unsqueeze(1)
        return state


def test_weights_by_samples_make_pfedla_fedavg() -> None:
    fedavg = Run(*UNEQUAL, "method.name=fedavg")
    ours = Run(*UNEQUAL, "method.hypernetwork_lr=0", kind=SampleWeights)
    assert len(set(ours.method.context.num_samples.tolist())) > 1
    expected = fedavg.server["theta"].expand(4, -1)
    torch.testing.assert_close(ours.evaluated()["theta"], expected, rtol=0, atol=2e-6)
    assert (expected[0] - ours.method.context.initial_parameters()).abs().max() > 0.01


def test_one_hot_weights_make_pfedla_local_training_to_the_bit() -> None:
    keys = ("train.participation=0.5", "model.batchnorm=true")
    local = Run(*keys, "method.name=local")
    ours = Run(*keys, "method.hypernetwork_lr=0", kind=OwnModelOnly)
    assert torch.equal(ours.server["theta"], local.clients["theta"])
    torch.testing.assert_close(ours.evaluated(), local.evaluated(), rtol=0, atol=0)
    assert not torch.equal(local.clients["theta"][0], local.clients["theta"][1])


# Weights


def test_first_weights_are_uniform() -> None:
    run = Run("train.rounds=1")
    first = run.method.alpha(run.adapter.initial_server(), range(4))
    assert torch.equal(first, torch.full((4, 4, 4), 0.25))


def test_relu_without_a_gradient_is_refused_and_its_default_has_one() -> None:
    with pytest.raises(UserError, match=r"^method\.head_init=zero with method\.weights=relu .*uniform"):
        Run("method.weights=relu", "method.head_init=zero")
    default = Run("method.weights=relu", "train.rounds=1")
    public = Run("method.weights=relu", "train.rounds=1", "method.head_init=uniform")
    torch.testing.assert_close(default.server, public.server, rtol=0, atol=0)


def test_relu_falls_back_to_the_own_model_where_all_outputs_are_zero_and_stays_finite() -> None:
    run = Run("method.weights=relu", "method.initial_models=own", "train.rounds=1")
    run.server["hypernetworks/heads.bias"][1, 2] = -1e6
    alpha = run.method.alpha(run.server, range(4))
    assert alpha[1, 2].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert (alpha[1, [0, 1, 3]] > 0.1).all()
    aggregate(run.method, run.server, range(4), run.server["theta"] + 0.1)
    assert all(tensor.isfinite().all() for tensor in run.server.values())


LOW_RANK = ("method.heads=low_rank", "method.rank=3")


# The step knows the number of clients


def of_clients_that_are_there_twice(once: Run, keys: Sequence[str]) -> Run:
    """Return a federation whose clients c and c + N have what client c has in `once`."""
    twice = Run("data.clients=8", "train.rounds=1", *keys)
    for name, rows in once.adapter.initial_server().items():
        start = rows.repeat(2, *[1] * (rows.dim() - 1))
        if name == "common/codes":
            start = rows.repeat(1, 1, 2, 1)
        elif name in ("hypernetworks/heads.weight", HEADS_BIAS) and not keys:
            # an output a client
            start = start.repeat(1, 1, 2, *[1] * (rows.dim() - 3))
        twice.server[name] = start
    return twice


@pytest.mark.usefixtures("double")
def test_a_pair_of_clients_gets_the_weight_that_one_had() -> None:
    once = Run("train.rounds=1")
    twice = of_clients_that_are_there_twice(once, ())
    towards = 0.1 * random(4, once.method.layout.size)
    server, doubled = once.adapter.initial_server(), twice.server
    for _ in range(6):
        sent = once.adapter.download(server, cohort_of(once.method, range(4)))
        trained = sent.per_client["theta"] + towards
        aggregate(once.method, server, range(4), trained)
        aggregate(twice.method, doubled, range(8), trained.repeat(2, 1))
    alpha = once.method.alpha(server, range(4))
    pairs = twice.method.alpha(doubled, range(8)).unflatten(2, (2, 4)).sum(dim=2)
    torch.testing.assert_close(pairs, alpha.repeat(2, 1, 1), rtol=1e-6, atol=1e-9)
    assert alpha.max() > 0.3


@pytest.mark.usefixtures("double")
def test_outputs_of_low_rank_move_as_far_with_clients_that_are_there_twice() -> None:
    """A client's own output has no twin, so only the others are compared, after one step."""
    once = Run("train.rounds=1", *LOW_RANK)
    twice = of_clients_that_are_there_twice(once, LOW_RANK)
    moved = []
    for run, server in ((once, once.adapter.initial_server()), (twice, twice.server)):
        times = run.num_clients // 4
        server["theta"] = random(4, server["theta"].shape[1]).repeat(times, 1)
        for seed in (1, 2):
            apart = 0.1 * random(4, server["theta"].shape[1], seed=seed)
            trained = server["theta"][:4].mean(dim=0) + apart
            aggregate(run.method, server, range(4 * times), trained.repeat(times, 1))
        rows = hypernetworks(server) | {"codes": server["common/codes"]}
        moved.append(run.method.hypernetworks.outputs(rows, range(4 * times))[:4, :, :4])
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-6, atol=1e-9)
    assert moved[0].abs().median() > 1e-5


# Heads of low rank


@pytest.mark.parametrize("weights", ["softmax", "relu"])
@pytest.mark.usefixtures("double")
def test_low_rank_steps_descend_through_the_mixed_models_of_the_whole_cohort(weights: str) -> None:
    keys = (*DIVERSE, *LOW_RANK, "train.rounds=1", f"method.weights={weights}", "method.head_init=uniform")
    run = Run(*keys, "method.optimiser=sgd", "method.hypernetwork_lr=1")
    method, server, members = run.method, run.server, [0, 2]
    before = {name: tensor.clone() for name, tensor in server.items()}
    trained = server["theta"][members] + 0.1 * random(2, method.layout.size)
    leaves = {name: t.clone().requires_grad_() for name, t in hypernetworks(before).items()}
    codes = before["common/codes"].clone().requires_grad_()
    hidden = leaves["embedding"][members]
    for number in (1, 2, 3):
        weight, bias = (leaves[f"trunk{number}.{part}"][members] for part in ("weight", "bias"))
        hidden = (torch.einsum("chi,ci->ch", weight, hidden) + bias).relu()
    outputs = torch.einsum("clrh,ch,lnr->cln", leaves["heads.weight"][members], hidden, codes[0])
    for row, client in enumerate(members):
        outputs[row, :, client] += leaves["heads.bias"][client, :, 0]
    alpha = normalised(outputs, weights)
    torch.testing.assert_close(method.alpha(server, members), alpha.detach())
    for number, layer in enumerate(method.layers):
        part = slice(layer.start, layer.stop)
        mixed = alpha[:, number] @ before["theta"][:, part]
        mixed.backward(mixed.detach() - trained[:, part], retain_graph=True)
    aggregate(method, server, members, trained)
    slopes = {f"hypernetworks/{name}": leaf.grad for name, leaf in leaves.items()}
    for name, gradient in (slopes | {"common/codes": codes.grad}).items():
        assert gradient.abs().max() > 1e-6
        torch.testing.assert_close(before[name] - server[name], gradient, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("optimiser", ["scaled", "adam"])
def test_codes_of_a_layer_that_the_whole_cohort_retains_do_not_change(optimiser: str) -> None:
    keys = (*DIVERSE, *LOW_RANK, "train.rounds=2", "method.name=heurpfedla", "method.k=1")
    run = Run(*keys, f"method.optimiser={optimiser}", kind=retaining("fc1"))
    fc1 = [layer.name for layer in run.method.layers].index("fc1")
    moved = run.server["common/codes"] != run.adapter.initial_server()["common/codes"]
    assert moved[0].flatten(1).any(dim=1).tolist() == [number != fc1 for number in range(4)]
    if optimiser == "adam":
        steps = run.server["common_optimiser/heads.steps"][0].tolist()
        assert steps == [0 if number == fc1 else 2 for number in range(4)]


def test_only_weights_of_own_models_are_recorded_if_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(*DIVERSE, *LOW_RANK, "train.rounds=1")
    alpha = run.method.alpha(run.server, range(4))
    assert torch.equal(MethodAdapter(run.method).checkpoint_diagnostics(run.server)["alpha"], alpha)
    own = torch.stack([alpha[client, :, client] for client in range(4)])
    # room for the weights of two clients at once
    monkeypatch.setattr(pfedla, "WEIGHTS_AT_ONCE", 2 * 4 * 4)
    monkeypatch.setattr(diagnostics, "CHECKPOINT_LIMIT", 4 * 4 * 4 - 1)
    monkeypatch.setattr(diagnostics, "HISTORY_LIMIT", 4 * 4 * 4 - 1)
    adapter = MethodAdapter(run.method)
    for recorded in (adapter.checkpoint_diagnostics(run.server), adapter.server_diagnostics(run.server)):
        assert list(recorded) == ["self_weight"]
        torch.testing.assert_close(recorded["self_weight"], own)


# Algorithm 1, one client at a time


def hypernetworks(server: State) -> State:
    prefix = "hypernetworks/"
    return {name.removeprefix(prefix): t for name, t in server.items() if name.startswith(prefix)}


def normalised(outputs: Tensor, weights: str) -> Tensor:
    if weights == "softmax":
        return outputs.exp() / outputs.exp().sum(dim=-1, keepdim=True)
    return outputs.relu() / outputs.relu().sum(dim=-1, keepdim=True)


class Reference:
    """pFedLA with a torch module a client and autograd through the mixed models; running statistics local.

    All clients retain the layers `kept`.
    """

    def __init__(self, run: Run, kept: Sequence[str]) -> None:
        self.kept = kept
        self.run, self.params, clients = run, run.config.method.options, range(run.num_clients)
        start = run.adapter.initial_server()
        self.theta, self.buffers = start["theta"], run.method.buffers.initial(clients)
        shape = run.method.hypernetworks
        self.hypernetworks = [OneClient(shape, hypernetworks(start), client) for client in clients]
        kind = torch.optim.Adam if self.params.optimiser == "adam" else torch.optim.SGD
        lr = self.params.hypernetwork_lr
        # a scaled step is N times as long for the heads
        times = run.num_clients if self.params.optimiser == "scaled" else 1
        self.optimisers = [
            kind([{"params": [p], "lr": lr * times if "head" in n else lr} for n, p in h.named_parameters()])
            for h in self.hypernetworks
        ]
        self.largest, self.took_part = [0.0] * run.num_clients, [False] * run.num_clients

    def mixture(self, client: int) -> Tensor:
        alpha = normalised(self.hypernetworks[client](), self.params.weights)
        mixed = []
        for weights, layer in zip(alpha, self.run.method.layers, strict=True):
            of_clients = self.theta[:, layer.start : layer.stop]
            mixed.append(of_clients[client] if layer.name in self.kept else weights @ of_clients)
        return torch.cat(mixed)

    def round(self, number: int) -> None:
        theta = self.theta.clone()
        for client in self.run.simulation.cohort(number).clients:
            mixed = self.mixture(client)
            network = network_with(self.run, mixed.detach(), self.buffers[client])
            train_by_torch(self.run, client, number, network)
            theta[client], self.buffers[client] = self.run.method.layout.flatten(network)
            old_minus_new = mixed.detach() - theta[client]
            if self.params.optimiser == "scaled":
                self.largest[client] = max(self.largest[client], float(old_minus_new.square().sum()))
                old_minus_new /= self.largest[client]
            weights = list(self.hypernetworks[client].parameters())
            gradients = torch.autograd.grad(mixed, weights, old_minus_new)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient * self.took_part[client]
            self.took_part[client] = True
            self.optimisers[client].step()
        self.theta = theta


HALF = ("train.participation=0.5", "train.rounds=5")
KEEPS_FC1 = ("method.name=heurpfedla", "method.k=1", "method.optimiser=sgd", "method.hypernetwork_lr=10")


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        (("method.optimiser=sgd", "method.hypernetwork_lr=10", *UNEQUAL), ()),
        (("method.optimiser=adam", *HALF), ()),
        (("method.optimiser=scaled", "method.hypernetwork_lr=1", *HALF), ()),
        (
            (
                "method.weights=relu",
                "method.head_init=uniform",
                "model.batchnorm=true",
                "method.layer=tensor",
            ),
            (),
        ),
        (("method.head_init=zero", "method.initial_models=common", "train.local_epochs=2"), ()),
        (KEEPS_FC1, ("fc1",)),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_equal_a_plain_implementation_with_one_module_for_each_client(
    keys: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    run = Run(*DIVERSE, *keys, kind=retaining(*kept) if kept else None)
    reference = Reference(run, kept)
    for number in range(run.config.train.rounds):
        reference.round(number)
    assert_close(run.server["theta"], reference.theta)
    for name, tensor in hypernetworks(run.server).items():
        rows = [h.tensors(run.method.hypernetworks)[name] for h in reference.hypernetworks]
        assert_close(tensor, torch.stack(rows))
    mixed = torch.stack([reference.mixture(client).detach() for client in range(run.num_clients)])
    expected = {"theta": mixed, "buffers": reference.buffers}
    assert_close(run.evaluated(), expected)
    start = run.adapter.initial_server()
    assert (hypernetworks(run.server)["heads.bias"] - hypernetworks(start)["heads.bias"]).abs().max() > 1e-3


# Layers and running statistics


@pytest.mark.parametrize(("layer", "num_layers"), [("module", 6), ("block", 4), ("tensor", 12)])
def test_each_layer_of_the_chosen_granularity_has_its_own_weights(layer: str, num_layers: int) -> None:
    run = Run(
        *DIVERSE, "train.rounds=1", "model.batchnorm=true", f"method.layer={layer}", "train.buffers=mixed"
    )
    alpha = run.method.alpha(run.server, range(4))
    assert alpha.shape == (4, num_layers, 4)
    sent = run.adapter.download(run.server, cohort_of(run.method, range(4)))
    mixed, statistics = sent["theta"], sent["buffers"]
    names = [part.name for part in run.method.layers]
    number_of = {
        "module": {"conv1": 0, "bn1": 1, "conv2": 2, "bn2": 3, "fc1": 4, "fc2": 5},
        "block": {"conv1": 0, "bn1": 0, "conv2": 1, "bn2": 1, "fc1": 2, "fc2": 3},
    }
    for slot in [*run.method.layout.parameters, *run.method.layout.buffers]:
        is_statistic = "running" in slot.name
        if layer == "tensor":
            number = names.index(f"{slot.module}.weight" if is_statistic else slot.name.split(".", 1)[1])
        else:
            number = number_of[layer][slot.module]
        rows, source = (statistics, run.server["buffers"]) if is_statistic else (mixed, run.server["theta"])
        part = slice(slot.start, slot.stop)
        torch.testing.assert_close(rows[:, part], alpha[:, number] @ source[:, part], rtol=1e-5, atol=1e-6)


def test_mixed_statistics_are_kept_and_sent_by_the_server() -> None:
    run = Run(*DIVERSE, "model.batchnorm=true", "train.buffers=mixed", "train.participation=0.5")
    assert "buffers" not in run.clients
    seen = {client for number in range(3) for client in run.simulation.cohort(number).clients}
    initial = run.method.buffers.initial()
    for client, row in enumerate(run.server["buffers"]):
        assert torch.equal(row, initial) != (client in seen)
    message = run.adapter.download(run.server, cohort_of(run.method, range(4)))
    counted = count_bytes(message, run.method.layers)
    assert counted.buffers.tolist() == [4 * 96] * 4
    assert counted.of_numbers.tolist() == [4 * 13_802] * 4


# HeurpFedLA


class Retains(HeurpFedLA):
    """Retain layers by name instead of by weight, as table 3 of the paper does."""

    kept: tuple[str, ...] = ()

    def retained(self, alpha: Tensor, clients: Sequence[int]) -> Tensor:
        return torch.tensor([layer.name in self.kept for layer in self.layers]).expand(len(alpha), -1)


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [(["method.optimiser=scaled"], 0.7, 1.0), (["method.optimiser=adam"], 0.0, 0.5)],
)
def test_heurpfedla_retains_the_fully_connected_layers_unless_adam_removes_the_scale(
    settings: list[str], least: float, most: float
) -> None:
    run = Run(
        "method.name=heurpfedla",
        "data.clients=8",
        "data.per_client=24",
        "data.partition.classes_per_client=4",
        "model.batchnorm=true",
        "train.rounds=8",
        *settings,
    )
    by_layer = run.server["retained_rounds"].sum(dim=0)
    assert [layer.name for layer in run.method.layers] == ["conv1", "bn1", "conv2", "bn2", "fc1", "fc2"]
    # in the first two rounds no weight distinguishes layers; with Adam it may later
    assert 8 * 5 < by_layer.sum() <= 8 * 6
    # a uniform choice would give these two of six layers a third
    assert least <= float(by_layer[-2:].sum() / by_layer.sum()) <= most


def retaining(*names: str) -> type[HeurpFedLA]:
    return type("RetainsSome", (Retains,), {"kept": names})


@pytest.mark.parametrize("buffers", ["local", "mixed"])
def test_with_k_zero_heurpfedla_is_pfedla_to_the_bit(buffers: str) -> None:
    keys = (*DIVERSE, "model.batchnorm=true", f"train.buffers={buffers}", "train.participation=0.75")
    pfedla = Run(*keys)
    ours = Run(*keys, "method.name=heurpfedla", "method.k=0")
    torch.testing.assert_close((ours.server, ours.clients), (pfedla.server, pfedla.clients), rtol=0, atol=0)
    assert torch.equal(ours.bytes_by_client, pfedla.bytes_by_client)


def test_more_retained_layers_than_the_model_has_are_refused() -> None:
    with pytest.raises(UserError, match=r"method\.k=5 is more than the model's 4 layers .*allowed: up to 4"):
        Run("method.name=heurpfedla", "method.k=5")


SELF_WEIGHTS = [
    (2, [0.2, 0.5, 0.5, 0.1], [0.8, 0.5, 0.5, 0.9], [1, 2]),
    (2, [0.3, 0.1, 0.2, 0.4], [0.7, 0.9, 0.8, 0.6], [0, 3]),
    # ties: of three for two places, and of sums that differ in their last bits
    (2, [0.5, 0.5, 0.5, 0.1], [0.5, 0.5, 0.5, 0.9], []),
    (1, [0.0, 0.0, 0.0, 0.0], [1.0, 1.0 - 2**-24, 1.0, 1.0 - 2**-23], []),
    (1, [0.0, 0.0, 0.1, 0.0], [1.0, 1.0 - 2**-24, 0.9, 1.0 - 2**-23], [2]),
    # what rounds to one is ordered by its distance to one
    (1, [1.0, 1.0, 1.0, 1.0], [1e-13, 2e-15, 3e-17, 2e-15], [2]),
]
"""k, a client's weights of its own model and of all others by layer, and the layers that it retains."""


def test_the_layers_of_largest_self_weight_are_retained_unless_others_tie_with_them() -> None:
    keys = ("method.name=heurpfedla", "train.rounds=1")
    methods = {k: Run(*keys, f"method.k={k}").method for k in (1, 2)}
    for k, own, others, retained in SELF_WEIGHTS:
        # of clients 3 and 1, of which the first has uniform weights
        alpha = torch.full((2, 4, 4), 0.25)
        alpha[1] = 0
        alpha[1, :, 1], alpha[1, :, 2] = torch.tensor(own), torch.tensor(others)
        found = methods[k].retained(alpha, [3, 1])
        assert found.nonzero().tolist() == [[1, layer] for layer in retained]


def test_heads_of_retained_layers_do_not_change() -> None:
    adam = "method.optimiser=adam"
    run = Run(*DIVERSE, "train.rounds=1", "method.name=heurpfedla", "method.k=2", adam)
    start = {name: rows.clone() for name, rows in run.server.items()}
    chosen = run.method.retained(run.method.alpha(start, range(4)), range(4))
    aggregate(run.method, run.server, range(4), start["theta"] + 0.1 * random(*start["theta"].shape))
    for name in ("heads.weight", "heads.bias"):
        for tensor, moment in (("hypernetworks/", ""), ("optimiser/", ".first"), ("optimiser/", ".second")):
            key = f"{tensor}{name}{moment}"
            moved = (run.server[key] != start[key]).flatten(2).any(dim=-1)
            assert torch.equal(moved, ~chosen), key
    for name in ("embedding", "trunk1.weight", "trunk3.bias"):
        key = f"hypernetworks/{name}"
        assert (run.server[key] != start[key]).flatten(1).any(dim=1).all()


# Table 3 of the paper


EMNIST, CIFAR = (28, 28, 1), (32, 32, 3)


@pytest.mark.parametrize(
    ("shape", "kept", "bytes_down", "cost_mib"),
    [
        (EMNIST, (), 343_288, 491.077),
        (EMNIST, ("fc3", "fc1"), 93_648, 312.521),
        (CIFAR, (), 485_112, 693.958),
        (CIFAR, ("fc1", "conv2", "fc3"), 45_904, 379.812),
    ],
)
def test_bytes_saved_are_those_of_table_3(
    tmp_path: Path, shape: tuple[int, ...], kept: tuple[str, ...], bytes_down: int, cost_mib: float
) -> None:
    """Cost of 10 clients over 75 rounds, which is 3000 bytes a number."""
    images = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (60, *shape), np.uint8)
    np.savez(tmp_path / "images.npz", x=images, y=np.arange(60) % 10)
    run = Run(
        "data.source=npz",
        f"data.path={tmp_path / 'images.npz'}",
        "data.layout=NHWC",
        "data.clients=10",
        "data.per_client=6",
        "data.partition.classes_per_client=1",
        "data.normalise=half",
        "model.name=lenet",
        f"model.batchnorm={str(shape == CIFAR).lower()}",
        "train.rounds=1",
        "method.name=heurpfedla",
        f"method.k={len(kept)}",
        kind=retaining(*kept),
    )
    whole = 485_112 if shape == CIFAR else 343_288
    assert run.bytes_by_client.tolist() == [[bytes_down, whole]] * 10
    assert float(run.bytes_by_client.sum()) * 75 / 2**20 == pytest.approx(cost_mib, abs=5e-4)
