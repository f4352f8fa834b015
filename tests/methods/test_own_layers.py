"""FedAvg, local training, FedPer, FedRep, LG-FedAvg, FedBN, FedBABU and FedRoD.

Who keeps which layers, and how they are trained.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from bits import method_settings, refused
from by_hand import (
    ADAM,
    ADAMW,
    SLIPPERY,
    SOME,
    assert_close,
    batches_of,
    class_counts,
    mean_by_samples,
    models_of,
    network_with,
    predicted,
    torchs_optimiser,
    train_by_torch,
)
from harness import Run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from hpcfl.errors import UserError
from hpcfl.methods import METHODS

HEAD = 650

NOWHERE, EVERYWHERE, IN_HEAD = "^$", "", r"^head\."
"""Which parameters stay with a client, as a pattern of their names."""


def numbers(run: Run, pattern: str) -> Tensor:
    """Return which numbers of the network are in parameters with such names, bool [P]."""
    parameters = run.method.context.network.named_parameters()
    return torch.cat([torch.full((p.numel(),), bool(re.search(pattern, name))) for name, p in parameters])


# All of them


Phases = list[tuple[str, int | None, str]]
"""Passes of a client over its samples: the purpose of their order, epochs, and what is trained."""


def rounds_by_hand(run: Run, stays: Tensor, phases: Phases) -> tuple[Tensor, Tensor]:
    """Return the models [N, P] and statistics [N, U] to evaluate, if the numbers `stays` never travel."""
    layout, everyone = run.method.layout, range(run.num_clients)
    theta, own = run.method.context.initial_parameters(), run.method.context.initial_parameters(everyone)
    statistics, own_statistics = run.method.buffers.initial(), run.method.buffers.initial(everyone)
    for number in range(run.config.train.rounds):
        clients = list(run.simulation.cohort(number).clients)
        for client in clients:
            is_local = run.method.buffers.policy == "local"
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
    if run.method.buffers.policy == "average":
        own_statistics = statistics.expand(run.num_clients, -1)
    return torch.where(stays, own, theta), own_statistics


TOGETHER: Phases = [("batches", None, "")]
THREE_EPOCHS_LOCAL = ("train.local_epochs=3", "train.buffers=local")


@pytest.mark.parametrize(
    ("keys", "stays", "phases"),
    [
        (("method.name=fedavg",), NOWHERE, TOGETHER),
        (("method.name=fedavg", "train.buffers=local"), NOWHERE, TOGETHER),
        (("method.name=local",), EVERYWHERE, TOGETHER),
        (("method.name=fedper", "train.buffers=local", "train.local_epochs=2"), IN_HEAD, TOGETHER),
        (("method.name=fedper", *ADAM, "train.label_smoothing=0.3"), IN_HEAD, TOGETHER),
        (
            ("method.name=fedrep", "method.body_epochs=1", *ADAMW),
            IN_HEAD,
            [("head", None, "head."), ("batches", 1, "body.")],
        ),
        (
            ("method.name=fedrep", "method.body_epochs=null", "method.head_epochs=1", *THREE_EPOCHS_LOCAL),
            IN_HEAD,
            [("head", 1, "head."), ("batches", 2, "body.")],
        ),
        (("method.name=lg_fedavg", "method.global_layers=3"), r"\.(conv1|bn1|conv2)\.", TOGETHER),
        (("method.name=fedbn",), r"\.bn", TOGETHER),
        (("method.name=fedbabu", "train.finetune_epochs=0"), IN_HEAD, [("batches", None, "body.")]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.usefixtures("double")
def test_rounds_equal_a_plain_implementation(keys: tuple[str, ...], stays: str, phases: Phases) -> None:
    run = Run(*SOME, *SLIPPERY, *keys)
    assert len(set(run.method.context.num_samples.tolist())) > 1
    theta, buffers = rounds_by_hand(run, numbers(run, stays), phases)
    assert_close(run.evaluated(), {"theta": theta, "buffers": buffers})


NEED_A_BODY = [name for name, kind in METHODS.items() if kind.traits.needs_body or kind.traits.linear_head]


@pytest.mark.parametrize("case", [*NEED_A_BODY, "pfedhn-private"])
def test_a_model_that_is_only_a_head_is_refused(
    case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*method_settings(case), "model.name=mlp", "model.hidden=[]", "--out", str(tmp_path)]
    expected = "needs a feature extractor and a head, and model"
    assert refused(capsys, *words).startswith(f"hpcfl: error: {words[0]} {expected}")


TIED = """
from collections import OrderedDict

from torch import nn

from hpcfl.config.keys import NetworkOptions
from hpcfl.models.networks import Model, Network


class Tied(Model):
    options = NetworkOptions

    def build(self, sample, num_classes, options):
        first, last = nn.Linear(64, 64), nn.Linear(64, 64)
        last.weight = first.weight
        head = OrderedDict(last=last, out=nn.Linear(64, num_classes))
        return Network(OrderedDict(flat=nn.Flatten(), first=first), head)


TIED = Tied("one weight in body and head")
"""


def test_a_parameter_of_body_and_head_goes_with_methods_that_do_not_divide_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "tied.py"
    file.write_text(TIED)
    words = [f"model.path={file}", "train.rounds=1", "data.clients=3", "data.per_client=20"]
    loop, batched = (
        Run("method.name=fedavg", *words, f"run.engine={engine}").server["theta"]
        for engine in ("loop", "batched")
    )
    torch.testing.assert_close(loop, batched, rtol=0, atol=1e-6)
    assert loop.numel() == 64 * 64 + 64 + 64 + 65 * 10
    error = refused(capsys, "method.name=moon", *words, "--out", tmp_path / "moon")
    assert (
        "method.name=moon divides the model into body and head, and body.first.weight and head.last" in error
    )


# FedAvg


@pytest.mark.parametrize(("method", "policy"), [("fedavg", "mixed"), ("pfedhn", "average")])
def test_another_place_for_running_statistics_is_refused(method: str, policy: str) -> None:
    expected = rf"train\.buffers={policy} does not go with method\.name={method}; allowed"
    with pytest.raises(UserError, match=expected):
        Run(f"method.name={method}", f"train.buffers={policy}")


# FedRep


def test_fedrep_whose_head_has_all_epochs_is_refused() -> None:
    keys = ("method.name=fedrep", "method.head_epochs=1", "method.body_epochs=null")
    with pytest.raises(
        UserError, match=r"local_epochs=1 leaves the body 0 epochs; raise train.local_epochs or set"
    ):
        Run(*keys, "train.local_epochs=1")


# FedBABU


@pytest.mark.parametrize(("finetune", "part"), [("all", ""), ("head", "head."), ("body", "body.")])
@pytest.mark.usefixtures("double")
def test_fedbabu_fine_tunes_the_chosen_layers(finetune: str, part: str) -> None:
    keys = (f"method.finetune={finetune}", "train.finetune_epochs=2", "train.rounds=1")
    run = Run(*SOME, *SLIPPERY, "method.name=fedbabu", *keys)
    networks = [network_with(run, run.server["theta"], run.server["buffers"]) for _ in range(4)]
    for client, network in enumerate(networks):
        train_by_torch(run, client, 1, network, part=part, purpose="finetune", epochs=2)
    assert_close(run.evaluated(), models_of(run, networks))


# FedRoD


def loaded(module: nn.Module, flat: Tensor) -> nn.Module:
    """Fill a module from a vector of its parameters, in their order."""
    nn.utils.vector_to_parameters(flat.clone(), module.parameters())
    return module


class FedRoDReference:
    """FedRoD with torch's SGD and modules of their own for g, p_i and H."""

    def __init__(self, run: Run) -> None:
        self.run, self.is_hyper = run, run.config.method.options.hyper_head
        start = run.adapter.initial_server()
        self.theta, self.buffers, self.psi = start["theta"], start["buffers"], start.get("hypernetwork")
        head = run.method.context.initial_parameters()[run.method.layout.head]
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
        counts = class_counts(self.run)[client]
        head = module(counts / counts.sum())
        return linear(features, head[:640].view(10, 64), head[640:])

    def round(self, number: int) -> None:
        clients = self.run.simulation.cohort(number).clients
        ends = []
        for client in clients:
            network = network_with(self.run, self.theta, self.buffers)
            personal, counts = self.personal(client), class_counts(self.run)[client]
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


@pytest.mark.parametrize("keys", [SLIPPERY, ADAM, ("method.hyper_head=true", "method.hidden=3", *SLIPPERY)])
@pytest.mark.usefixtures("double")
def test_rounds_of_fedrod_equal_a_plain_implementation(keys: tuple[str, ...]) -> None:
    run = Run(*SOME, "method.name=fedrod", *keys)
    # whose generic weights do not move
    assert (class_counts(run) == 0).any(dim=1).all()
    reference = FedRoDReference(run)
    for number in range(run.config.train.rounds):
        reference.round(number)
    server = {"theta": reference.theta, "buffers": reference.buffers}
    clients = {"head": torch.stack(reference.heads)} if reference.psi is None else {}
    server |= {} if reference.psi is None else {"hypernetwork": reference.psi}
    assert_close((run.server, run.clients), (server, clients))
    for client in range(4):
        x, _ = run.worker.shard.samples("test", client)
        assert_close(predicted(run, client, x), reference.probabilities(client, x))
