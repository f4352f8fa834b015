"""FedProx, FedNTD, FedLC, SCAFFOLD and MOON: FedAvg with less drift of its clients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from by_hand import (
    SLIPPERY,
    SOME,
    Loss,
    assert_close,
    batches_of,
    class_counts,
    mean_by_samples,
    method_of,
    network_with,
    train_by_torch,
    train_cohort,
    work,
)
from harness import MLP, Run
from torch import Tensor
from torch.nn.functional import cross_entropy
from uploads import upload_of

from hpcfl.communication.messages import Cohort, Message
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.fedlc import FedLC
from hpcfl.methods.fedntd import not_true
from hpcfl.methods.moon import Moon
from hpcfl.methods.scaffold import Scaffold
from hpcfl.models import Network
from hpcfl.training.losses import distillation_loss

# FedAvg's rounds with another loss: FedProx, FedNTD and FedLC


def with_penalty(run: Run, client: int, received: Network) -> Loss:
    def loss(network: Network, x: Tensor, y: Tensor) -> Tensor:
        pairs = zip(network.parameters(), received.parameters(), strict=True)
        distance = torch.stack([(p - w.detach()).square().sum() for p, w in pairs]).sum()
        return cross_entropy(network(x), y) + 0.5 / 2 * distance

    return loss


def with_distillation(run: Run, client: int, received: Network) -> Loss:
    params = run.config.method.options
    received.eval()

    def loss(network: Network, x: Tensor, y: Tensor) -> Tensor:
        logits = network(x)
        others = torch.arange(10) != y.unsqueeze(1)
        with torch.no_grad():
            of_w = (received(x)[others].view(len(y), 9) / params.temperature).softmax(dim=1)
        ours = (logits[others].view(len(y), 9) / params.temperature).softmax(dim=1)
        divergence = (of_w * (of_w / ours).log()).sum(dim=1).mean()
        return cross_entropy(logits, y) + params.beta * params.temperature**2 * divergence

    return loss


def with_margins(run: Run, client: int, received: Network) -> Loss:
    counts, tau = class_counts(run)[client].tolist(), run.config.method.options.tau
    held = [c for c in range(10) if counts[c]]

    def loss(network: Network, x: Tensor, y: Tensor) -> Tensor:
        scores = {c: z - tau * counts[c] ** -0.25 for c, z in enumerate(network(x).unbind(1)) if c in held}
        normaliser = torch.stack(list(scores.values())).exp().sum(dim=0).log()
        own = torch.stack([scores[int(c)][number] for number, c in enumerate(y)])
        return (normaliser - own).mean()

    return loss


FEDNTD = ("method.name=fedntd", "train.local_epochs=2")
FEDLC = ("method.name=fedlc", "data.partition.beta=0.5")


@pytest.mark.parametrize(
    ("loss_of", "keys"),
    [
        (with_penalty, ("method.name=fedprox", "method.mu=0.5", *SLIPPERY)),
        (with_distillation, (*FEDNTD, *SLIPPERY)),
        (with_distillation, (*FEDNTD, "method.beta=0.3", "method.temperature=3")),
        (with_margins, (*FEDLC, *SLIPPERY)),
        (with_margins, (*FEDLC, "method.tau=0")),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_equal_a_plain_implementation_with_the_loss(
    loss_of: Callable[[Run, int, Network], Loss], keys: tuple[str, ...]
) -> None:
    run = Run(*SOME, *keys)
    # FedLC knows clients without samples of a class
    assert (class_counts(run) == 0).any() or loss_of is not with_margins
    theta, buffers = run.method.context.initial_parameters(), run.method.buffers.initial()
    for number in range(3):
        received = network_with(run, theta, buffers)
        losses = {client: loss_of(run, client, copy.deepcopy(received)) for client in range(4)}
        clients, models, statistics = train_cohort(run, number, theta, buffers, losses.__getitem__)
        theta, buffers = (mean_by_samples(run, clients, rows) for rows in (models, statistics))
    assert_close(run.server["theta"], theta)
    assert_close(run.server["buffers"], buffers)


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_not_true_distillation_equals_that_by_hand(temperature: float) -> None:
    y = torch.tensor([0, 2])
    z_w = temperature * torch.tensor([[5.0, 0.0, math.log(3)], [0.0, 0.0, -7.0]])
    z = temperature * torch.tensor([[9.0, 1.0, 1.0], [2.0, 2.0, 30.0]])
    assert torch.equal(not_true(z, y), temperature * torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    # of the first sample, 1/4 and 3/4 against 1/2 and 1/2; both models agree on the second one
    expected = temperature**2 * (0.25 * math.log(0.5) + 0.75 * math.log(1.5)) / 2
    found = distillation_loss(not_true(z_w, y), not_true(z, y), temperature)
    assert found.item() == pytest.approx(expected, rel=1e-6)
    # with two classes, one is left, of which there is nothing to know
    assert distillation_loss(not_true(z_w[:, 1:], y // 2), not_true(z[:, 1:], y // 2), temperature) == 0


@pytest.mark.quick
def test_margins_equal_those_by_hand() -> None:
    counts = torch.tensor([[16.0, 81.0, 0.0, 1.0]])
    torch.testing.assert_close(
        method_of(FedLC, tau=3).margins(counts), torch.tensor([[1.5, 1.0, torch.inf, 3.0]])
    )
    assert method_of(FedLC, tau=0).margins(counts).tolist() == [[0.0, 0.0, torch.inf, 0.0]]


def test_a_client_of_fedlc_with_one_class_returns_the_model_unchanged() -> None:
    run = Run(*MLP, "method.name=fedlc", "train.rounds=1")
    run.worker.shard.samples("train", 2)[1].fill_(3)
    down, (up, clients) = run.method.download(run.server, run.simulation.cohort(0)), work(run, 2)
    assert torch.equal(up["theta"], down["theta"])
    assert clients.loss_sum.item() == 0


# SCAFFOLD


def mean_of_scaffold(run: Run, clients: Sequence[int], rows: Tensor) -> Tensor:
    """Return the mean of rows [S, ...] of some clients, by samples or uniform."""
    by_samples = run.config.method.options.weights == "samples"
    return mean_by_samples(run, clients, rows) if by_samples else rows.mean(dim=0)


def scaffold_by_hand(run: Run) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return w, running statistics, c and c_i; a client's new c_i is the mean of its plain gradients."""
    theta, buffers = run.method.context.initial_parameters(), run.method.buffers.initial()
    c, own = torch.zeros_like(theta), torch.zeros(run.num_clients, len(theta))
    train = run.config.train
    for number in range(train.rounds):
        clients = list(run.simulation.cohort(number).clients)
        lr, models, statistics, new = train.lr * train.lr_decay**number, [], [], own.clone()
        for client in clients:
            y_i, kept, gradients = theta, buffers, []
            for x, y in batches_of(run, client, number):
                network = network_with(run, y_i, kept)
                cross_entropy(network(x), y).backward()
                slope = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
                gradients.append(slope + train.weight_decay * y_i)
                kept = run.method.layout.flatten(network)[1]
                y_i = y_i - lr * (gradients[-1] - own[client] + c)
            new[client] = torch.stack(gradients).mean(dim=0)
            models.append(y_i)
            statistics.append(kept)
        global_lr = run.config.method.options.global_lr
        theta = theta + global_lr * mean_of_scaffold(run, clients, torch.stack(models) - theta)
        buffers = mean_by_samples(run, clients, torch.stack(statistics))
        own, c = new, mean_of_scaffold(run, range(run.num_clients), new)
    return theta, buffers, c, own


@pytest.mark.parametrize(
    "keys", [(), ("method.weights=uniform", "method.global_lr=0.5", "train.weight_decay=0.01")]
)
@pytest.mark.usefixtures("double")
def test_rounds_of_scaffold_equal_a_plain_implementation_with_means_of_gradients(
    keys: tuple[str, ...],
) -> None:
    run = Run(*SOME, "method.name=scaffold", "train.batch_size=8", "train.lr_decay=0.8", *keys)
    theta, buffers, c, own = scaffold_by_hand(run)
    assert_close(run.server["theta"], theta)
    assert_close(run.server["buffers"], buffers)
    assert_close(run.server["variate"], c)
    assert_close(run.clients["variate"], own)


@pytest.mark.parametrize(("weights", "rest"), [("samples", 0.75), ("uniform", 0.5)])
def test_scaffold_converges_to_the_minimum_of_the_objective(weights: str, rest: float) -> None:
    """Two clients want 0 and 1; the second has three times the samples."""
    method = method_of(Scaffold, 2, weights=weights)
    method.context.num_samples = torch.tensor([10, 30])
    server = MethodAdapter(method).initial_server()
    cohort = Cohort(0, (0, 1), method.context.num_samples)
    wanted = torch.tensor([[0.0], [1.0]]).expand(-1, method.layout.size)
    own, lr, steps = torch.zeros_like(wanted), 0.1, 5
    for _ in range(100):
        y = server["theta"].expand_as(wanted)
        for _ in range(steps):
            y = y - lr * (y - wanted - own + server["variate"])
        change = (server["theta"] - y) / (steps * lr) - server["variate"]
        own = own + change
        sent = Message(shared={"theta": server["theta"]})
        method.aggregate(server, cohort, upload_of({"theta": y, "change": change}, sent))
    torch.testing.assert_close(server["theta"], torch.full_like(server["theta"], rest), rtol=0, atol=1e-5)


# MOON


def contrast_by_hand(z: Tensor, z_w: Tensor, z_p: Tensor, temperature: float) -> Tensor:
    """Return the mean of equation 3 over a batch."""
    near, far = ((z * other).sum(dim=1) / (z.norm(dim=1) * other.norm(dim=1)) for other in (z_w, z_p))
    near, far = ((cosine / temperature).exp() for cosine in (near, far))
    return -(near / (near + far)).log().mean()


def with_contrast(run: Run, of_global: Network, of_previous: Network) -> Loss:
    params = run.config.method.options

    def loss(network: Network, x: Tensor, y: Tensor) -> Tensor:
        z = network.body(x)
        with torch.no_grad():
            z_w, z_p = of_global.body(x), of_previous.body(x)
        contrast = contrast_by_hand(z, z_w, z_p, params.temperature)
        return cross_entropy(network.head(z), y) + params.mu * contrast

    return loss


def test_the_contrast_of_moon_equals_that_by_hand() -> None:
    moon = method_of(Moon)
    assert moon.params.temperature == 0.5
    z, z_w, z_p = torch.tensor(
        [[[3.0, 4.0], [1.0, 0.0]], [[4.0, 3.0], [2.0, 0.0]], [[-4.0, 3.0], [-1.0, 0.0]]]
    )
    # cosines 0.96 and 0, then 1 and -1
    expected = (math.log(1 + math.exp((0 - 0.96) / 0.5)) + math.log(1 + math.exp((-1 - 1) / 0.5))) / 2
    assert moon.contrast(z, z_w, z_p).item() == pytest.approx(expected, rel=1e-6)
    assert contrast_by_hand(z, z_w, z_p, 0.5).item() == pytest.approx(expected, rel=1e-6)
    assert moon.contrast(z, z_p, z_w).item() == pytest.approx(expected + (0.96 + 2) / 0.5 / 2, rel=1e-6)


@pytest.mark.parametrize(
    "keys",
    [SLIPPERY, ("train.buffers=local", "method.mu=5", "method.temperature=1", "train.local_epochs=2")],
    ids=["average", "local"],
)
@pytest.mark.usefixtures("double")
def test_rounds_of_moon_equal_a_plain_implementation(keys: tuple[str, ...]) -> None:
    run = Run(*SOME, "method.name=moon", *keys)
    theta, buffers = run.method.context.initial_parameters(), run.method.buffers.initial(range(4))
    previous: dict[int, tuple[Tensor, Tensor]] = {}
    for number in range(3):
        clients = list(run.simulation.cohort(number).clients)
        for client in clients:
            received = theta, buffers[client]
            network = network_with(run, *received)
            of_global, of_previous = (
                network_with(run, *model).eval() for model in (received, previous.get(client, received))
            )
            train_by_torch(run, client, number, network, loss=with_contrast(run, of_global, of_previous))
            previous[client] = run.method.layout.flatten(network)
        theta = mean_by_samples(run, clients, torch.stack([previous[client][0] for client in clients]))
        statistics = torch.stack([previous[client][1] for client in clients])
        if run.method.buffers.policy == "average":
            buffers = mean_by_samples(run, clients, statistics).expand(4, -1)
        else:
            buffers[clients] = statistics
    # someone came back after a round without them
    cohorts = [set(run.simulation.cohort(number).clients) for number in range(3)]
    assert (cohorts[0] - cohorts[1]) & cohorts[2]
    evaluated = run.evaluated()
    assert_close(evaluated["theta"], theta.expand(4, -1))
    assert_close(evaluated["buffers"], buffers)
    assert run.clients["count"].tolist() == [sum(c in cohort for cohort in cohorts) for c in range(4)]
    for client, (model, kept) in previous.items():
        assert_close(run.clients["previous"][client], model)
        assert_close(run.clients["previous_buffers"][client], kept)


@pytest.mark.usefixtures("double")
def test_the_contrast_of_moon_has_no_gradient_if_both_models_agree_and_is_finite_for_zero_features() -> None:
    moon = method_of(Moon)
    stream = torch.Generator().manual_seed(0)
    z, other = torch.randn(2, 6, 5, generator=stream)
    z.requires_grad_()
    value = moon.contrast(z, other, other)
    (slope,) = torch.autograd.grad(value, z)
    assert value.item() == pytest.approx(math.log(2), rel=1e-12)
    assert slope.abs().max() < 1e-16
    dead = torch.zeros(6, 5, requires_grad=True)
    (slope,) = torch.autograd.grad(moon.contrast(dead, other, torch.zeros(6, 5)), dead)
    assert slope.isfinite().all()
