"""FedPer, FedRep, LG-FedAvg, FedBN, FedBABU and FedRoD: who keeps which layers, and how they are trained."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from by_hand import (
    ADAM,
    ADAMW,
    SLIPPERY,
    SOME,
    batches_of,
    mean_by_samples,
    network_with,
    torchs_optimiser,
    train_by_torch,
)
from harness import UNEQUAL, Run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from hpcfl.communication.channel import Channel
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort, Message
from hpcfl.errors import BAD_INPUT, UserError
from hpcfl.main import main
from hpcfl.methods import METHODS
from hpcfl.registries import load_config
from hpcfl.training.client_group import ClientGroup

ROUNDS = 3
DIGITS_CNN, HEAD, BATCHNORM = 13_706, 650, 96

Names = Callable[[str], bool]


def in_head(name: str) -> bool:
    return name.startswith("head.")


def in_batchnorm(name: str) -> bool:
    return ".bn" in name


def before_the_last(count: int) -> Names:
    """Return which parameters stay if the last `count` of conv1, bn1, conv2, bn2, fc1, fc2 travel."""
    stay = ("conv1", "bn1", "conv2", "bn2", "fc1", "fc2")[: 6 - count]
    return lambda name: name.split(".")[1] in stay


OWN_LAYERS: dict[str, Names] = {
    "fedper": in_head,
    "fedrep": in_head,
    "lg_fedavg": before_the_last(2),
    "fedbn": in_batchnorm,
}
"""Methods whose clients train layers of their own, and the names of these."""


def numbers(run: Run, is_wanted: Names) -> Tensor:
    """Return which numbers of the network have wanted names, bool [P]."""
    parameters = run.method.context.network.named_parameters()
    return torch.cat([torch.full((p.numel(),), is_wanted(name)) for name, p in parameters])


def rounds_of(run: Run) -> Tensor:
    """Return in how many rounds each client took part, int64 [N]."""
    rounds = torch.zeros(run.num_clients, dtype=torch.int64)
    for number in range(run.config.train.rounds):
        rounds[list(run.simulation.cohort(number).clients)] += 1
    return rounds


def work(run: Run, client: int) -> tuple[Message, Message]:
    """Train one client once more, as in round 0; return what it gets and what it sends."""
    cohort = Cohort(0, (client,), run.method.context.num_samples[[client]])
    channel = Channel(Communicator(), run.method.layers, run.num_clients)
    down = channel.down(run.driver.download(run.server, cohort), cohort)
    return down, run.driver.train(ClientGroup(run.workplace, [client], 0), down)


# All of them


Phases = list[tuple[str, int | None, str]]
"""Passes of a client over its samples: the purpose of their order, epochs, and what is trained."""


def rounds_by_hand(run: Run, stays: Tensor, phases: Phases) -> tuple[Tensor, Tensor]:
    """Return the models [N, P] and statistics [N, U] to evaluate, if the numbers `stays` never travel."""
    layout, everyone = run.method.layout, range(run.num_clients)
    theta, own = run.method.context.initial_parameters(), run.method.context.initial_parameters(everyone)
    statistics, own_statistics = run.method.initial_buffers(), run.method.initial_buffers(everyone)
    for number in range(run.config.train.rounds):
        clients = list(run.simulation.cohort(number).clients)
        for client in clients:
            is_local = run.method.buffers == "local"
            network = network_with(
                run,
                torch.where(stays, own[client], theta),
                own_statistics[client] if is_local else statistics,
            )
            for purpose, epochs, part in phases:
                train_by_torch(run, client, number, network, part=part, purpose=purpose, epochs=epochs)
            own[client], own_statistics[client] = layout.flatten(network)
        theta = torch.where(stays, theta, mean_by_samples(run, clients, own[clients]))
        statistics = mean_by_samples(run, clients, own_statistics[clients])
    if run.method.buffers == "average":
        own_statistics = statistics.expand(run.num_clients, -1)
    return torch.where(stays, own, theta), own_statistics


TOGETHER: Phases = [("batches", None, "")]


@pytest.mark.parametrize(
    ("keys", "stays", "phases"),
    [
        (("method.name=fedper",), in_head, TOGETHER),
        (("method.name=fedper", "train.buffers=local", "train.local_epochs=2"), in_head, TOGETHER),
        (
            ("method.name=fedrep", "method.head_epochs=2"),
            in_head,
            [("head", 2, "head."), ("batches", 1, "body.")],
        ),
        (
            ("method.name=fedrep", "method.body_epochs=2", "train.buffers=local"),
            in_head,
            [("head", None, "head."), ("batches", 2, "body.")],
        ),
        (
            ("method.name=fedrep", "method.head_epochs=2", *ADAMW),
            in_head,
            [("head", 2, "head."), ("batches", 1, "body.")],
        ),
        (("method.name=fedper", *ADAM), in_head, TOGETHER),
        (("method.name=fedper", "train.label_smoothing=0.3"), in_head, TOGETHER),
        (("method.name=lg_fedavg",), before_the_last(2), TOGETHER),
        (("method.name=lg_fedavg", "method.global_layers=3"), before_the_last(3), TOGETHER),
        (("method.name=fedbn",), in_batchnorm, TOGETHER),
        (("method.name=fedbabu", "train.finetune_epochs=0"), in_head, [("batches", None, "body.")]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.usefixtures("double")
def test_rounds_equal_a_slow_twin(keys: tuple[str, ...], stays: Names, phases: Phases) -> None:
    run = Run(*SOME, *SLIPPERY, *keys)
    assert len(set(run.method.context.num_samples.tolist())) > 1
    theta, buffers = rounds_by_hand(run, numbers(run, stays), phases)
    evaluated = run.evaluated()
    torch.testing.assert_close(evaluated["theta"], theta, rtol=0, atol=1e-9)
    torch.testing.assert_close(evaluated["buffers"], buffers, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "stays"), [*OWN_LAYERS.items(), ("fedbabu", in_head)])
def test_what_stays_is_neither_counted_nor_read_from_the_server(name: str, stays: Names) -> None:
    run = Run(*SOME, f"method.name={name}", "train.finetune_epochs=0")
    mask = numbers(run, stays)
    moved = 4 * int((~mask).sum())
    assert torch.equal(run.bytes_by_client, moved * rounds_of(run).unsqueeze(1).expand(-1, 2))
    assert torch.equal(run.server["theta"][mask], run.method.context.initial_parameters()[mask])
    evaluated = run.evaluated()["theta"]
    run.server["theta"][mask] = torch.nan
    assert torch.equal(run.evaluated()["theta"], evaluated)
    assert torch.equal(evaluated[:, ~mask], run.server["theta"][~mask].expand(4, -1))


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.traits.needs_body])
def test_a_model_that_is_nothing_but_a_head_is_refused(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [f"method.name={name}", "model.name=mlp", "model.hidden=[]", "train.rounds=1"]
    assert main([*words, "--out", str(tmp_path)]) == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        f"hpcfl: error: method.name={name} tells a feature extractor from a head, and model"
    )
    assert err.count("\n") == 1


# FedBN


def test_fedbn_without_batchnorm_is_fedavg_to_the_bit_and_says_so() -> None:
    with pytest.warns(UserWarning, match=re.escape("so fedbn is fedavg here; model.batchnorm=true adds it")):
        ours = Run(*UNEQUAL, "method.name=fedbn", "train.participation=0.75")
    fedavg = Run(*UNEQUAL, "method.name=fedavg", "train.participation=0.75")
    assert set(ours.server) == set(fedavg.server)
    assert torch.equal(ours.server["theta"], fedavg.server["theta"])
    assert torch.equal(ours.evaluated()["theta"], fedavg.evaluated()["theta"])
    assert torch.equal(ours.bytes_by_client, fedavg.bytes_by_client)


# LG-FedAvg


def test_lg_fedavg_that_shares_all_layers_is_fedavg_to_the_bit() -> None:
    ours = Run(*SOME, *SLIPPERY, "method.name=lg_fedavg", "method.global_layers=6", "train.buffers=average")
    fedavg = Run(*SOME, *SLIPPERY, "method.name=fedavg")
    assert set(ours.server) == set(fedavg.server)
    assert all(torch.equal(ours.server[name], tensor) for name, tensor in fedavg.server.items())
    expected = fedavg.evaluated()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.evaluated().items())
    assert torch.equal(ours.bytes_by_client, fedavg.bytes_by_client)
    assert ours.clients["lower_layers"].shape == (4, 0)


def test_lg_fedavg_with_more_layers_than_there_are_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["method.name=lg_fedavg", "method.global_layers=5", "--out", str(tmp_path)]
    assert main(words) == BAD_INPUT
    assert capsys.readouterr() == (
        "",
        "hpcfl: error: method.global_layers=5 is more than the model's 4 layers (conv1, conv2, fc1, fc2); "
        "allowed: up to 4\n",
    )


# FedRep


def test_fedreps_body_gets_the_epochs_that_its_head_leaves() -> None:
    keys = (*SOME, "method.name=fedrep", "method.head_epochs=1", "train.local_epochs=3", "train.rounds=1")
    rest, two = (Run(*keys, f"method.body_epochs={epochs}") for epochs in ("null", 2))
    assert torch.equal(rest.server["theta"], two.server["theta"])
    with pytest.raises(
        UserError, match=r"local_epochs=1 leaves the body 0 epochs; raise train.local_epochs or set"
    ):
        Run(*keys, "method.body_epochs=null", "train.local_epochs=1")


# FedBABU


def test_fedbabu_tunes_five_epochs_by_default() -> None:
    assert load_config(None, ["method.name=fedbabu"]).train.finetune_epochs == 5


@pytest.mark.parametrize(("finetune", "part"), [("all", ""), ("head", "head."), ("body", "body.")])
@pytest.mark.usefixtures("double")
def test_fedbabu_tunes_what_it_is_told_to_on_a_copy(finetune: str, part: str) -> None:
    keys = (f"method.finetune={finetune}", "train.finetune_epochs=2")
    run = Run(*SOME, *SLIPPERY, "method.name=fedbabu", *keys)
    before = {name: tensor.clone() for name, tensor in run.server.items()}
    tuned = run.evaluated()
    assert all(torch.equal(run.server[name], tensor) for name, tensor in before.items())
    for client in range(4):
        network = network_with(run, run.server["theta"], run.server["buffers"])
        train_by_torch(run, client, ROUNDS, network, part=part, purpose="finetune", epochs=2)
        theta, buffers = run.method.layout.flatten(network)
        torch.testing.assert_close(tuned["theta"][client], theta, rtol=0, atol=1e-9)
        torch.testing.assert_close(tuned["buffers"][client], buffers, rtol=0, atol=1e-9)
    moves = numbers(run, lambda name: name.startswith(part))
    assert (tuned["theta"] != run.server["theta"])[:, moves].float().mean() > 0.5
    assert torch.equal(tuned["theta"][:, ~moves], run.server["theta"][~moves].expand(4, -1))


# FedRoD


def counts_of(run: Run, client: int) -> Tensor:
    """Return a client's training samples by class, [K]."""
    labels = run.workplace.shard.samples("train", client)[1].tolist()
    return torch.tensor([float(labels.count(number)) for number in range(10)])


def loaded(module: nn.Module, flat: Tensor) -> nn.Module:
    """Fill a module from a vector of its parameters, in their order."""
    nn.utils.vector_to_parameters(flat.clone(), module.parameters())
    return module


class FedRoDTwin:
    """FedRoD with torch's SGD and modules of their own for g, p_i and H."""

    def __init__(self, run: Run) -> None:
        self.run, self.is_hyper = run, run.config.method.options.hyper_head
        start = run.driver.initial_server()
        self.theta, self.buffers, self.psi = start["theta"], start["buffers"], start.get("hypernetwork")
        head = run.method.context.initial_parameters()[numbers(run, in_head)]
        self.heads = [head] * run.num_clients

    def personal(self, client: int) -> nn.Module:
        """Return what makes a client's personal head: the head itself, or H."""
        if self.psi is None:
            return loaded(nn.Linear(64, 10), self.heads[client])
        hidden = self.run.config.method.options.hidden
        return loaded(nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, HEAD)), self.psi)

    def personal_logits(self, client: int, module: nn.Module, features: Tensor) -> Tensor:
        if self.psi is None:
            logits: Tensor = module(features)
            return logits
        counts = counts_of(self.run, client)
        head = module(counts / counts.sum())
        return linear(features, head[:640].view(10, 64), head[640:])

    def round(self, number: int) -> None:
        clients = self.run.simulation.cohort(number).clients
        ends = []
        for client in clients:
            network = network_with(self.run, self.theta, self.buffers)
            personal, counts = self.personal(client), counts_of(self.run, client)
            generic_sgd = torchs_optimiser(self.run, list(network.parameters()), number)
            personal_sgd = torchs_optimiser(self.run, list(personal.parameters()), number)
            for x, y in batches_of(self.run, client, number):
                z = network.body(x)
                generic = network.head(z)
                shares = counts * generic.exp()
                balanced = shares.gather(1, y.unsqueeze(1)).squeeze(1) / shares.sum(dim=1)
                z, constant = z.detach(), generic.detach()
                together = constant + self.personal_logits(client, personal, z)
                network.zero_grad()
                personal.zero_grad()
                (-balanced.log()).mean().backward()
                cross_entropy(together, y).backward()
                generic_sgd.step()
                personal_sgd.step()
            own = nn.utils.parameters_to_vector(personal.parameters()).detach()
            if self.psi is None:
                self.heads[client] = own
            ends.append((*self.run.method.layout.flatten(network), own))
        theta, buffers, own_rows = (
            mean_by_samples(self.run, clients, torch.stack(rows)) for rows in zip(*ends, strict=True)
        )
        self.theta, self.buffers = theta, buffers
        self.psi = None if self.psi is None else own_rows

    def probabilities(self, client: int, x: Tensor) -> Tensor:
        network = network_with(self.run, self.theta, self.buffers).eval()
        with torch.no_grad():
            z = network.body(x)
            logits = network.head(z) + self.personal_logits(client, self.personal(client), z)
        return logits.exp() / logits.exp().sum(dim=1, keepdim=True)


@pytest.mark.parametrize(
    "keys",
    [
        ("train.rounds=1", "train.batch_size=64"),
        SLIPPERY,
        ADAM,
        ("method.hyper_head=true", "method.hidden=5"),
        ("method.hyper_head=true", "method.hidden=3", *SLIPPERY),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_of_fedrod_equal_a_slow_twin(keys: tuple[str, ...]) -> None:
    run = Run(*SOME, "method.name=fedrod", *keys)
    twin = FedRoDTwin(run)
    for number in range(run.config.train.rounds):
        twin.round(number)
    torch.testing.assert_close(run.server["theta"], twin.theta, rtol=0, atol=1e-9)
    torch.testing.assert_close(run.server["buffers"], twin.buffers, rtol=0, atol=1e-9)
    if twin.psi is None:
        torch.testing.assert_close(run.clients["head"], torch.stack(twin.heads), rtol=0, atol=1e-9)
    else:
        torch.testing.assert_close(run.server["hypernetwork"], twin.psi, rtol=0, atol=1e-9)
        assert run.clients == {}
    evaluated = run.evaluated()
    for client in range(4):
        x, _ = run.workplace.shard.samples("test", client)
        ours = run.method.predict(ClientGroup(run.workplace, list(range(4)), ROUNDS), evaluated, client, x)
        torch.testing.assert_close(ours, twin.probabilities(client, x), rtol=0, atol=1e-9)


def test_a_class_without_samples_leaves_its_generic_weights_and_all_else_finite() -> None:
    run = Run("method.name=fedrod")
    assert all(tensor.isfinite().all() for tensor in (*run.server.values(), *run.clients.values()))
    for client in range(4):
        absent = (counts_of(run, client) == 0).nonzero().flatten().tolist()
        assert 0 < len(absent) < 10
        down, up = work(run, client)
        before, after = (network_with(run, m["theta"][0], torch.empty(0)).head for m in (down, up))
        for old, new in zip(before.parameters(), after.parameters(), strict=True):
            moved = (old != new).view(10, -1).any(dim=1)
            assert moved.logical_not().nonzero().flatten().tolist() == absent
