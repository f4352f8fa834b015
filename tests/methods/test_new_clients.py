"""What a client that took no part in training learns, and what does not change.

Shapes: U such clients, N others, P trainable numbers, L layers.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from by_hand import SLIPPERY, SOME, batches_of, method_of, network_with, train_by_torch
from harness import Run, random
from torch import Tensor
from torch.nn.functional import cross_entropy

from hpcfl.communication.messages import Cohort
from hpcfl.methods import Method
from hpcfl.methods.fedamp import FedAMP
from hpcfl.methods.fedfomo import FedFomo
from hpcfl.models import Network

N, U, ROUNDS, EPOCHS = 3, 1, 2, 2
EPOCHS_OF_NEW = f"train.unseen_epochs={EPOCHS}"
KEYS = (*SOME, *SLIPPERY, "data.unseen_clients=0.3", f"train.rounds={ROUNDS}", EPOCHS_OF_NEW)
"""Three clients in training, of which two take part in a round, and one that is new."""

pytestmark = pytest.mark.usefixtures("double")


@cache
def finished(*keys: str) -> Run:
    run = Run(*KEYS, *keys)
    assert (run.num_clients, len(run.unseen.clients)) == (N, U)
    return run


def trained(
    run: Run, theta: Tensor, buffers: Tensor, purpose: str, part: str = "", epochs: int = EPOCHS
) -> tuple[Tensor, Tensor]:
    """Train the parameters whose names begin with `part`, with torch's own modules and optimiser."""
    network = network_with(run, theta, buffers)
    train_by_torch(run, N, ROUNDS, network, part=part, purpose=purpose, epochs=epochs)
    weights, statistics = run.method.layout.flatten(network)
    return weights, statistics


def losses(run: Run, theta: Tensor, buffers: Tensor) -> Tensor:
    """Return the loss of each training sample of the new client, in evaluation mode."""
    network: Network = network_with(run, theta, buffers).eval()
    x, y = run.unseen.shard.samples("train", 0)
    with torch.no_grad():
        return cross_entropy(network(x), y, reduction="none")


def assert_adapted(run: Run, theta: Tensor, buffers: Tensor) -> None:
    expected = {"theta": theta.unsqueeze(0), "buffers": buffers.unsqueeze(0)}
    torch.testing.assert_close(run.adapted(), expected)


@pytest.mark.parametrize(
    ("keys", "epochs"),
    [
        (["method.name=fedavg"], EPOCHS),
        (["method.name=fedavg", "train.unseen_epochs=null"], 1),
        (["method.name=moon"], EPOCHS),
        (["method.name=fedala"], EPOCHS),
    ],
)
def test_a_new_client_fine_tunes_the_global_model_for_unseen_or_local_epochs(
    keys: list[str], epochs: int
) -> None:
    run = finished(*keys)
    theta, buffers = trained(run, run.server["theta"], run.server["buffers"], "finetune", epochs=epochs)
    assert_adapted(run, theta, buffers)


@pytest.mark.parametrize(
    ("keys", "start"),
    [
        (["method.name=local"], "initial"),
        (["method.name=ditto", "method.pull=0"], "global"),
        (["method.name=fedphp"], "global"),
    ],
)
def test_a_new_client_runs_a_first_round_alone(keys: list[str], start: str) -> None:
    run = finished(*keys)
    first = run.method.context.initial_parameters() if start == "initial" else run.server["theta"]
    theta, buffers = trained(run, first, run.method.buffers.initial(), "batches")
    assert_adapted(run, theta, buffers)


@pytest.mark.parametrize("method", ["fedper", "fedrod", "fedpac"])
def test_a_new_client_trains_a_head_on_the_body_of_the_server(method: str) -> None:
    run = finished(f"method.name={method}")
    head = run.method.layout.head
    start = run.server["theta"].clone()
    initial = run.method.context.initial_parameters()[head]
    start[head] = start[head] + initial if method == "fedrod" else initial
    theta, _ = trained(run, start, run.server["buffers"], "finetune", part="head.")
    assert_adapted(run, theta, run.server["buffers"])


@pytest.mark.parametrize("method", ["fedbn", "lg_fedavg"])
def test_a_new_client_trains_only_its_own_layers(method: str) -> None:
    run = finished(f"method.name={method}")
    theta, is_own = run.adapted()["theta"][0], run.method.is_own
    assert torch.equal(theta[~is_own], run.server["theta"][~is_own])
    start = run.method.context.initial_parameters()
    assert (theta[is_own] != start[is_own]).double().mean() > 0.9


def test_a_new_client_of_fedem_learns_the_mixture_by_em() -> None:
    run = finished("method.name=fedem", "method.components=2")
    models = zip(run.server["theta"], run.server["buffers"], strict=True)
    likelihood = torch.stack([(-losses(run, *model)).exp() for model in models], dim=1)
    weights = torch.full((2,), 0.5)
    for _ in range(EPOCHS):
        shares = weights * likelihood
        weights = (shares / shares.sum(dim=1, keepdim=True)).mean(dim=0)
    found = run.adapted()
    torch.testing.assert_close(found["weights"][0], weights)
    assert torch.equal(found["theta"][0], run.server["theta"])
    assert torch.equal(found["buffers"][0], run.server["buffers"])


@pytest.mark.parametrize("method", ["pfedla", "heurpfedla"])
def test_a_new_client_of_pfedla_mixes_the_models_of_the_others(method: str) -> None:
    """The reference trains the mixture for an epoch, and computes eq. 10 of Delta by autograd."""
    run = finished(f"method.name={method}")
    models, layers = run.server["theta"], run.method.layers
    outputs, buffers, largest = torch.zeros(len(layers), N), run.method.buffers.initial(), 0.0
    for epoch in range(EPOCHS):
        outputs.requires_grad_()
        alpha = outputs.softmax(dim=1)
        rows = [alpha[n] @ models[:, layer.start : layer.stop] for n, layer in enumerate(layers)]
        mixed = torch.cat(rows)
        theta, buffers = trained(run, mixed.detach(), buffers, f"finetune/{epoch}", epochs=1)
        delta = theta - mixed.detach()
        largest = max(largest, float(delta.square().sum()))
        (slope,) = torch.autograd.grad(mixed, outputs, -delta / largest)
        # 0.1 is the default step; the factor undoes weights of 1/N
        outputs = (outputs - 0.1 * N * slope).detach()
    alpha = outputs.softmax(dim=1)
    theta = torch.cat([alpha[n] @ models[:, layer.start : layer.stop] for n, layer in enumerate(layers)])
    assert_adapted(run, theta, buffers)
    assert losses(run, theta, buffers).mean() < losses(run, models.mean(dim=0), buffers).mean()


def test_a_new_client_of_pfedmb_mixes_the_branches_of_the_server() -> None:
    run = finished("method.name=pfedmb", "method.branches=3")
    found, branches = run.adapted(), run.server["branches"]
    weights = []
    for layer, is_branched in zip(run.method.layers, run.method.branched.tolist(), strict=True):
        part, parts = found["theta"][0, layer.start : layer.stop], branches[:, layer.start : layer.stop]
        if not is_branched:
            assert torch.equal(part, parts[0])
            continue
        solved = torch.linalg.lstsq(parts.T, part.unsqueeze(1)).solution.squeeze(1)
        torch.testing.assert_close(parts.T @ solved, part)
        weights.append(solved)
    torch.testing.assert_close(torch.stack(weights).sum(dim=1), torch.ones(len(weights)))
    assert all((of_layer > 1e-6).all() and (of_layer - 1 / 3).abs().max() > 1e-4 for of_layer in weights)
    assert torch.equal(found["buffers"][0], run.server["buffers"])


@pytest.mark.parametrize("keys", [[], ["method.private_head=true"]])
def test_a_new_client_of_pfedhn_learns_an_embedding(keys: list[str]) -> None:
    run = finished("method.name=pfedhn", "method.hidden=10", "method.start=drawn", *keys)
    params, generator, layout = run.method.params, run.method.generator, run.method.layout
    weights = {n.removeprefix("hypernetwork/"): t for n, t in run.server.items() if n.startswith("hyper")}
    embedding = weights["embedding"].mean(dim=0, keepdim=True).requires_grad_()
    optimiser = torch.optim.SGD(
        [embedding],
        params.hypernetwork_lr,
        momentum=params.hypernetwork_momentum,
        weight_decay=params.hypernetwork_weight_decay,
    )
    head, buffers = run.method.context.initial_parameters()[generator.outputs :], run.method.buffers.initial()
    for epoch in range(EPOCHS):
        made = generator.generate(weights | {"embedding": embedding}, [0])[0]
        start = torch.cat([made.detach(), head])
        theta, buffers = trained(run, start, buffers, f"finetune/{epoch}", epochs=1)
        optimiser.zero_grad()
        (made @ (start - theta)[: generator.outputs]).backward()
        assert embedding.grad is not None
        assert embedding.grad.norm() < params.clip
        optimiser.step()
        head = theta[generator.outputs :]
    made = generator.generate(weights | {"embedding": embedding.detach()}, [0])[0]
    assert_adapted(run, torch.cat([made, head]), buffers)
    assert (layout.size > generator.outputs) == bool(keys)


def test_a_new_client_of_ifca_trains_the_model_of_lowest_loss() -> None:
    run = finished("method.name=ifca")
    models = zip(run.server["theta"], run.server["buffers"], strict=True)
    best = min(models, key=lambda model: float(losses(run, *model).mean()))
    theta, buffers = trained(run, *best, "finetune")
    assert_adapted(run, theta, buffers)


def test_a_new_client_of_per_fedavg_takes_an_adaptation_step() -> None:
    run = finished("method.name=per_fedavg", "train.momentum=0", "train.weight_decay=0")
    network = network_with(run, run.server["theta"], run.server["buffers"])
    x, y = next(batches_of(run, N, ROUNDS, "evaluation", 1))
    cross_entropy(network(x), y).backward()
    slope = torch.cat([p.grad.reshape(-1) for p in network.parameters() if p.grad is not None])
    torch.testing.assert_close(run.adapted()["theta"][0], run.server["theta"] - 0.01 * slope)


@pytest.mark.parametrize("kind", [FedAMP, FedFomo])
def test_a_new_client_starts_at_the_mean_of_the_models_that_were_sent(kind: type[Method]) -> None:
    method = method_of(kind)
    models = random(4, method.layout.size)
    server = method.server_state() | {"models": models, "is_known": torch.tensor([1, 0, 1, 1])}
    torch.testing.assert_close(method.mean_of_models(server), models[[0, 2, 3]].mean(dim=0))
    if kind is FedFomo:
        message = method.new_client_download(server, Cohort(0, (4,), torch.ones(1)))
        sent = {tuple(model) for model in message.per_client["models"][0].tolist()}
        assert sent == {tuple(model) for model in models[[0, 2, 3]].tolist()}
    # models that diverged are left out
    models[2] = torch.nan
    torch.testing.assert_close(method.mean_of_models(server), models[[0, 3]].mean(dim=0))
    models[:] = torch.nan
    assert torch.equal(method.mean_of_models(server), method.context.initial_parameters())
