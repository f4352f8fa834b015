"""FedAFK: invariants, numbers worked out, and a plain implementation of its round."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from by_hand import (
    assert_close,
    batches_of,
    mean_by_samples,
    models_of,
    torchs_optimiser,
    train_by_torch,
    work,
)
from harness import MLP, UNEQUAL_FEW, Run
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from hpcfl.communication.channel import Channel
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort
from hpcfl.methods.fedafk import FIXED_HEAD, FedAFK
from hpcfl.parameters import Tensors

OURS = "method.name=fedafk"


def fixed_head(run: Run) -> Tensor:
    return run.method.context.initial_parameters([FIXED_HEAD], own=True)[0, run.method.layout.head]


# The fixed head


def test_all_clients_and_rounds_share_one_fixed_head_that_no_client_owns() -> None:
    run = Run(OURS, *MLP, "train.participation=0.5")
    head, h_0 = run.method.layout.head, fixed_head(run)
    assert torch.equal(run.adapter.initial_server()["theta"][head], h_0)
    assert torch.equal(run.server["theta"][head], h_0)
    start = run.adapter.initial_clients(range(4))["theta"][:, head]
    assert all((own - h_0).abs().mean() > 0.01 for own in (*start, *run.clients["theta"][:, head]))
    more = Run(OURS, *MLP, "train.rounds=1", "data.clients=6")
    assert torch.equal(more.server["theta"][head], h_0)
    other = Run(OURS, *MLP, "train.rounds=1", "run.seed=1")
    assert not torch.equal(other.server["theta"][head], h_0)


def test_the_fixed_head_is_never_sent() -> None:
    run = Run(OURS, *MLP, "train.rounds=1")
    channel = Channel(Communicator(), run.method.layers, 4)
    cohort = Cohort(0, tuple(range(4)), run.method.context.num_samples)
    arrived = channel.down(run.adapter.download(run.server, cohort), cohort)
    head, body = run.method.layout.head, run.method.layout.body
    assert not arrived["theta"][:, head].any()
    assert torch.equal(arrived["theta"][:, body], run.server["theta"][body].expand(4, -1))
    # clients attach the head themselves, so the server's copy has no influence
    run.server["theta"][head] = torch.nan
    up, clients = work(run, 1)
    assert up.per_client["theta"][:, body].isfinite().all()
    assert clients["theta"].isfinite().all()


# The coefficient


class ConstantSlope(FedAFK):
    """Cross-entropy falls towards the local extractors, as steeply in every step."""

    def coefficient_gradient(self, gradient: Tensor, local: Tensor, shared: Tensor) -> Tensor:
        return torch.full((len(gradient),), -0.3)


@pytest.mark.parametrize(("pull", "settled"), [("0", 1.0), ("2", 0.65)])
def test_the_coefficient_settles_where_the_pull_outweighs_the_slope(pull: str, settled: float) -> None:
    keys = (OURS, "method.coefficient_lr=0.3", f"method.coefficient_pull={pull}", "train.rounds=7")
    coefficient = Run(*keys, *MLP, kind=ConstantSlope).clients["coefficient"]
    torch.testing.assert_close(coefficient, torch.full((4,), settled), rtol=0, atol=1e-4)


# The round, one client at a time


def step(optimiser: torch.optim.Optimizer, objective: Tensor) -> None:
    optimiser.zero_grad()
    objective.backward()
    optimiser.step()


class Reference:
    """FedAFK with torch modules and torch's SGD; each module looks after its running statistics."""

    def __init__(self, run: Run) -> None:
        self.run, self.params = run, run.config.method.options
        context = run.method.context
        self.local = [copy.deepcopy(context.network).train() for _ in range(run.num_clients)]
        self.shared = copy.deepcopy(context.network).train()
        self.shared.head.load_state_dict(context.build_network(FIXED_HEAD).head.state_dict())
        start = self.params.coefficient if self.params.mixing else 1.0
        self.coefficient = [torch.tensor(start) for _ in range(run.num_clients)]

    def mixed(self, coefficient: Tensor, local: nn.Module, shared: nn.Module) -> Tensors:
        pairs = zip(local.body.named_parameters(), shared.body.parameters(), strict=True)
        return {
            f"body.{name}": coefficient * own.detach() + (1 - coefficient) * other.detach()
            for (name, own), other in pairs
        }

    def train_client(self, client: int, round: int) -> nn.Module:
        """Train one client and return its global extractor."""
        local, shared = self.local[client], copy.deepcopy(self.shared)
        of_shared, of_local = (
            torchs_optimiser(self.run, [*network.body.parameters()], round) for network in (shared, local)
        )

        def update_shared(x: Tensor, y: Tensor) -> None:
            step(of_shared, cross_entropy(shared(x), y))

        def update_local(x: Tensor, y: Tensor) -> None:
            features = local.body(x)
            heat = self.params.temperature
            known = (shared.body(x).detach() / heat).softmax(dim=1)
            log_ratio = known.log() - (features / heat).log_softmax(dim=1)
            transfer = heat**2 * (known * log_ratio).sum(dim=1).mean()
            step(of_local, cross_entropy(local.head(features), y) + self.params.transfer * transfer)

        def update_coefficient(x: Tensor, y: Tensor) -> None:
            leaf = self.coefficient[client].clone().requires_grad_()
            logits = functional_call(copy.deepcopy(local), self.mixed(leaf, local, shared), x)
            pull = self.params.coefficient_pull / 2 * (leaf - self.params.coefficient) ** 2
            lr = self.params.coefficient_lr * self.run.config.train.lr_decay**round
            step(torch.optim.SGD([leaf], lr), cross_entropy(logits, y) + pull)
            self.coefficient[client] = leaf.detach().clamp(0, 1)

        updates: list[Callable[[Tensor, Tensor], None]] = [update_shared, update_local]
        updates += [update_coefficient] if self.params.mixing else []
        interleaved = self.params.schedule == "interleaved"
        passes = [updates] if interleaved else [[update] for update in updates]
        for purpose, together in zip(("batches", "batches1", "batches2"), passes, strict=False):
            for x, y in batches_of(self.run, client, round, purpose):
                for update in together:
                    update(x, y)
        mixed = self.mixed(self.coefficient[client], local, shared)
        local.load_state_dict(mixed, strict=False)
        head = {"part": "head", "purpose": "head", "epochs": self.params.head_epochs}
        train_by_torch(self.run, client, round, local, **head)
        return shared

    def round(self, number: int) -> None:
        cohort = self.run.simulation.cohort(number)
        trained = [self.train_client(client, number).body for client in cohort.clients]
        bodies = torch.stack([parameters_to_vector(body.parameters()).detach() for body in trained])
        mean = mean_by_samples(self.run, cohort.clients, bodies)
        vector_to_parameters(mean, self.shared.body.parameters())


@pytest.mark.parametrize(
    "keys",
    [
        (*UNEQUAL_FEW, "train.momentum=0.9", "train.weight_decay=0.01", "method.coefficient_pull=1"),
        ("model.batchnorm=true", "method.temperature=2", "method.transfer=0.5"),
        ("method.schedule=sequential", "train.local_epochs=2", "method.head_epochs=2", "train.lr_decay=0.6"),
        ("method.mixing=false", "model.batchnorm=true", "train.participation=0.5", "method.head_epochs=0"),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_equal_a_plain_implementation(keys: tuple[str, ...]) -> None:
    run = Run(OURS, "train.rounds=2", "method.coefficient_lr=0.5", *keys)
    reference = Reference(run)
    for number in range(2):
        reference.round(number)
    shared = parameters_to_vector(reference.shared.parameters()).detach()
    assert_close(run.server["theta"], shared)
    assert_close(run.evaluated(), models_of(run, reference.local))
    assert_close(run.clients["coefficient"], torch.stack(reference.coefficient))
    if run.config.method.options.mixing:
        assert (run.clients["coefficient"] - 0.5).abs().min() > 1e-3


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ((), 2 * 3 + 3),
        (("method.schedule=sequential",), 3 * 2 * 3 + 3),
        (("method.schedule=sequential", "method.mixing=false", "method.head_epochs=0"), 2 * 2 * 3),
    ],
)
def test_each_schedule_runs_its_epochs_of_each_update(keys: tuple[str, ...], steps: int) -> None:
    """28 samples in batches of 10, two local epochs, and one epoch of the head."""
    run = Run(OURS, *MLP, "train.rounds=1", "train.local_epochs=2", *keys)
    assert int(work(run, 0)[1].steps) == steps
