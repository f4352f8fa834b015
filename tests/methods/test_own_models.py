"""Methods whose clients keep a model of their own: Ditto, APFL, pFedMe and FedPHP.

Plain torch implementations run whole rounds in float64.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from by_hand import (
    assert_close,
    batches_of,
    gradient,
    loss,
    mean_by_samples,
    network_with,
    step_size,
    torchs_optimiser,
    work,
)
from harness import MLP, UNEQUAL_FEW, Run, random
from torch import Tensor
from torch.nn.functional import cross_entropy

from hpcfl.communication.channel import Channel
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort
from hpcfl.errors import UserError
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.losses import discrepancy

DITTO, APFL, PFEDME, FEDPHP = (f"method.name={name}" for name in ("ditto", "apfl", "pfedme", "fedphp"))
DIGITS_CNN = 13_706
SOME = (*UNEQUAL_FEW, "train.participation=0.5", "train.lr_decay=0.8")
"""Two of four clients in a round, all of them unequal, and smaller steps each round."""


# Ditto


@pytest.mark.usefixtures("double")
def test_rounds_of_ditto_equal_those_by_hand() -> None:
    run = Run(DITTO, *MLP, *SOME, "method.pull=2", "method.personal_epochs=2")
    w = run.method.context.initial_parameters()
    own = [w] * 4
    for number in range(3):
        cohort, lr = run.simulation.cohort(number), step_size(run, number)
        ends = []
        for client in cohort.clients:
            for x, y in batches_of(run, client, number, epochs=2):
                own[client] = own[client] - lr * (gradient(run, own[client], x, y) + 2 * (own[client] - w))
            theta = w
            for x, y in batches_of(run, client, number):
                theta = theta - lr * gradient(run, theta, x, y)
            ends.append(theta)
        w = mean_by_samples(run, cohort.clients, torch.stack(ends))
    assert_close(run.server["theta"], w)
    assert_close(run.evaluated()["theta"], torch.stack(own))


# APFL


@pytest.mark.parametrize("alpha_moves", ["round", "step"])
@pytest.mark.usefixtures("double")
def test_rounds_of_apfl_equal_those_by_hand_with_autograd_through_the_mixture(alpha_moves: str) -> None:
    keys = ("method.alpha=0.6", "method.alpha_lr=0.5", f"method.alpha_moves={alpha_moves}")
    run = Run(APFL, *MLP, *SOME, *keys, "train.local_epochs=2")
    w = run.method.context.initial_parameters()
    own, alpha = [w] * 4, [torch.tensor(0.6)] * 4
    evaluated = [w] * 4
    for number in range(3):
        cohort, lr = run.simulation.cohort(number), step_size(run, number)
        ends = []
        for client in cohort.clients:
            shared = w
            for step, (x, y) in enumerate(batches_of(run, client, number)):
                shared = shared - lr * gradient(run, shared, x, y)
                a, v = alpha[client].clone().requires_grad_(), own[client].clone().requires_grad_()
                of_a, of_v = torch.autograd.grad(loss(run, a * v + (1 - a) * shared, x, y), [a, v])
                own[client] = v.detach() - lr * of_v
                if step == 0 or alpha_moves == "step":
                    alpha[client] = (a.detach() - 0.5 * 0.8**number * of_a).clamp(0, 1)
            evaluated[client] = alpha[client] * own[client] + (1 - alpha[client]) * shared
            ends.append(shared)
        w = mean_by_samples(run, cohort.clients, torch.stack(ends))
    assert_close(run.server["theta"], w)
    assert_close(run.clients["own"], torch.stack(own))
    assert_close(run.clients["alpha"], torch.stack(alpha))
    assert_close(run.evaluated()["theta"], torch.stack(evaluated))
    assert (run.clients["alpha"] - 0.6).abs().max() > 0.01
    # v is kept, and not the mixture in its place
    assert (run.clients["own"] - run.clients["theta"]).abs().amax(dim=1).max() > 1e-3


@pytest.mark.parametrize("alpha_moves", ["round", "step"])
def test_alpha_stays_in_its_interval(alpha_moves: str) -> None:
    # one mini-batch a round, after which alpha moves no more
    keys = ("train.rounds=2", "train.batch_size=100")
    run = Run(APFL, "method.alpha_lr=1e5", f"method.alpha_moves={alpha_moves}", *keys)
    assert run.clients["alpha"].min() == 0
    run.worker.state["alpha"].fill_(0.5)
    # next to a ruined global model the client's own is worth everything
    run.server["theta"] += random(DIGITS_CNN)
    assert float(work(run, 0)[1]["alpha"]) == 1


# pFedMe


@pytest.mark.parametrize(("pull", "steps", "beta"), [(15, 3, 1.0), (5, 2, 0.5), (5, 1, 2.0)])
@pytest.mark.usefixtures("double")
def test_rounds_of_pfedme_equal_those_by_hand(pull: float, steps: int, beta: float) -> None:
    keys = (f"method.pull={pull}", f"method.steps={steps}", f"method.beta={beta}", "train.lr=0.02")
    run = Run(PFEDME, *MLP, *SOME, *keys, "method.personal_lr=0.03")
    w = run.method.context.initial_parameters()
    own = [w] * 4
    for number in range(3):
        cohort, lr, personal_lr = run.simulation.cohort(number), step_size(run, number), 0.03 * 0.8**number
        ends = []
        for client in cohort.clients:
            theta = w_i = w
            for x, y in batches_of(run, client, number):
                for _ in range(steps):
                    theta = theta - personal_lr * (gradient(run, theta, x, y) + pull * (theta - w_i))
                w_i = w_i - lr * pull * (w_i - theta)
            own[client] = theta
            ends.append(w_i)
        w = (1 - beta) * w + beta * mean_by_samples(run, cohort.clients, torch.stack(ends))
    assert_close(run.server["theta"], w)
    assert_close(run.evaluated()["theta"], torch.stack(own))


@pytest.mark.usefixtures("double")
def test_fine_tuning_of_pfedme_has_the_step_size_of_its_own_models() -> None:
    keys = (*MLP, *SOME, "method.personal_lr=0.03", "train.lr=0.06")
    run = Run(PFEDME, *keys, "train.finetune_epochs=1")
    for client, tuned in enumerate(run.evaluated()["theta"]):
        theta = run.clients["theta"][client]
        for x, y in batches_of(run, client, 3, "finetune", epochs=1):
            theta = theta - 0.03 * 0.8**3 * gradient(run, theta, x, y)
        torch.testing.assert_close(tuned, theta, rtol=0, atol=1e-12)


def test_pfedme_refuses_steps_that_diverge_and_warns_of_those_that_overshoot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = (PFEDME, *MLP, "train.rounds=1", "train.batch_size=100")
    with pytest.raises(UserError, match=r"is 2, .* diverges; set train.lr below 0.1, or method.pull below 5"):
        Run(*keys, "train.lr=0.2", "method.pull=10")
    expected = (
        "is 1.5, how far w_i follows theta_i in one mini-batch: from 1 on .*; set train.lr below 0.0667"
    )
    run = Run(*keys, "train.lr=0.1", "method.pull=15")
    start = run.method.context.initial_parameters()
    # of one mini-batch: half as far again as to theta_i
    w = start + 1.5 * (run.clients["theta"].mean(dim=0) - start)
    torch.testing.assert_close(run.server["theta"], w, rtol=0, atol=1e-6)
    Run(*keys, "train.lr=0.1", "method.pull=9.9")
    (warning,) = caplog.messages
    assert re.search(expected, warning)


# FedPHP


def test_the_discrepancy_equals_that_by_hand() -> None:
    one, other = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [1.0]])

    def by_hand(width: float) -> float:
        """Return the means of exp(-d^2 / 2 width) over pairs: d is 0 or 2, 0, and 1 between the two."""
        return (1 + math.exp(-4 / (2 * width))) / 2 + 1 - 2 * math.exp(-1 / (2 * width))

    assert by_hand(0.5) == pytest.approx(0.773398, abs=1e-6)
    for widths in ([0.5], [2.0], [0.5, 2.0, 10.0]):
        assert float(discrepancy(one, other, widths)) == pytest.approx(sum(map(by_hand, widths)), abs=1e-6)
    # lengths count in all dimensions: (3, 4) is 5 away
    found = discrepancy(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]]), [12.5])
    assert float(found) == pytest.approx(2 - 2 / math.e, abs=1e-6)


def test_the_discrepancy_stores_no_features_of_pairs() -> None:
    one, other, sizes = random(20, 50).requires_grad_(), random(20, 50, seed=1), []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        discrepancy(one, other, [10.0]).backward()
    assert max(sizes) <= 2 * 20 * 50


def apart(regulariser: str, ours: tuple[Tensor, Tensor], known: tuple[Tensor, Tensor]) -> Tensor:
    """Return R of (features, logits) pair by pair."""
    if regulariser == "mmd":

        def kernel(a: Tensor, b: Tensor) -> Tensor:
            squared = torch.cdist(a, b) ** 2
            return (-squared / 2).exp().mean() + (-squared / 8).exp().mean()

        return kernel(ours[0], ours[0]) + kernel(known[0], known[0]) - 2 * kernel(ours[0], known[0])
    target, log_share = (known[1] / 4).softmax(dim=1), (ours[1] / 4).log_softmax(dim=1)
    return 16 * (target * (target.log() - log_share)).sum(dim=1).mean()


@pytest.mark.parametrize("regulariser", ["mmd", "distillation"])
@pytest.mark.usefixtures("double")
def test_rounds_of_fedphp_equal_those_by_hand_with_a_teacher_in_evaluation_mode(regulariser: str) -> None:
    keys = (f"method.regulariser={regulariser}", "method.bandwidths=[1, 4]", "method.transfer=0.5")
    # two of four clients a round, though 0.4 of four is less
    run = Run(FEDPHP, *SOME, "model.batchnorm=true", *keys, "train.participation=0.4")
    w = run.method.context.initial_parameters()
    own, count = [(w, run.method.buffers.initial())] * 4, [0] * 4
    for number in range(3):
        cohort, ends = run.simulation.cohort(number), []
        for client in cohort.clients:
            private, statistics = own[client]
            student, teacher = (network_with(run, theta, statistics) for theta in (w, private))
            teacher.eval()
            optimiser = torchs_optimiser(run, list(student.parameters()), number)
            share = 0.5 if count[client] else 0.0
            for x, y in batches_of(run, client, number):
                features = student.body(x)
                logits = student.head(features)
                known = teacher.body(x).detach()
                term = apart(regulariser, (features, logits), (known, teacher.head(known).detach()))
                optimiser.zero_grad()
                ((1 - share) * cross_entropy(logits, y) + share * term).backward()
                optimiser.step()
            end = run.method.layout.flatten(student)
            # p T = 0.5 * 3
            kept = min(0.9, 0.9 * count[client] / 1.5)
            own[client] = (kept * private + (1 - kept) * end[0], kept * statistics + (1 - kept) * end[1])
            count[client] += 1
            ends.append(end[0])
        w = mean_by_samples(run, cohort.clients, torch.stack(ends))
    assert max(count) > 1
    assert_close(run.server["theta"], w)
    theta, buffers = (torch.stack(rows) for rows in zip(*own, strict=True))
    assert_close(run.evaluated(), {"theta": theta, "buffers": buffers})
    assert run.clients["count"].tolist() == count


# What a download brings


@pytest.mark.parametrize("method", ["ditto", "fedamp", "fedfomo", "fedafk"])
def test_a_download_contains_the_model_from_which_training_starts(method: str) -> None:
    keys = (*UNEQUAL_FEW, "model.batchnorm=true", "train.participation=0.5", "train.rounds=2")
    run = Run(*keys, f"method.name={method}")
    cohort = Cohort(2, tuple(range(4)), run.method.context.num_samples)
    channel = Channel(Communicator(), run.method.layers, 4)
    down = channel.down(run.adapter.eval_download(run.server, cohort), cohort)
    for client in range(4):
        clients = ClientGroup(run.worker, [client], 2)
        model = run.adapter.model_after_download(clients, down.select(slice(client, client + 1)))
        assert torch.equal(model["buffers"], run.clients["buffers"][[client]])
        own = run.clients["theta"][client]
        if method == "ditto":
            start = run.server["theta"]
        elif method == "fedamp":
            start = run.method.download(run.server, cohort)["theta"][client]
        elif method == "fedfomo":
            start = work(run, client, 2)[1]["previous"][0]
        else:
            start = run.method.layout.with_head(run.server["theta"], own[run.method.layout.head])
        assert torch.equal(model["theta"][0], start)
        assert method == "fedfomo" or not torch.equal(start, own)
