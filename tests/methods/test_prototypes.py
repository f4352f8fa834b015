"""FedProto, FedTGP, FedPAC, FedAS and FedGH: methods whose clients compare their features by class.

Shapes: N clients, K classes, F features, P trainable numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from bits import refused
from by_hand import (
    SLIPPERY,
    SOME,
    Loss,
    assert_close,
    mean_by_samples,
    models_of,
    network_with,
    squares_by_hand,
    train_by_torch,
)
from harness import Run, random
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, mse_loss
from uploads import upload_of

from hpcfl.communication.messages import Cohort
from hpcfl.communication.upload import Upload
from hpcfl.methods import METHODS
from hpcfl.methods._prototypes import average_prototypes, distance
from hpcfl.methods.base import Method, State
from hpcfl.methods.fedpac import head_weights
from hpcfl.methods.fedtgp import contrastive_loss, margin_of
from hpcfl.models import Network
from hpcfl.parameters import under
from hpcfl.randomness import torch_stream

K, F = 10, 64
ONE_A_ROUND = "train.participation=0.25"
NEAREST = [("method.name=fedproto",), ("method.name=fedtgp", "method.server_epochs=1")]
"""Methods that predict the class of the nearest prototype."""


def assert_prototypes(run: Run, known: dict[int, Tensor]) -> None:
    assert run.server["is_known"].nonzero().flatten().tolist() == sorted(known)
    assert_close({label: run.server["prototypes"][label] for label in known}, known)


def batches_on_server(run: Run, round: int, count: int) -> Iterator[Tensor]:
    """Yield the places of mini-batches among `count` prototypes."""
    stream = torch_stream(run.config.run.seed, run.method.name, round)
    for _ in range(run.config.method.options.server_epochs):
        yield from torch.randperm(count, generator=stream).split(run.config.train.batch_size)


def sort_of(run: Run, client: int) -> dict[int, Tensor]:
    """Return a client's training images by class, for the classes that it has."""
    x, y = run.worker.shard.samples("train", client)
    return {int(label): x[y == label] for label in y.unique()}


def class_means(run: Run, client: int, network: Network) -> dict[int, Tensor]:
    """Return the mean features [F] of each class that a client has, in evaluation mode."""
    network.eval()
    with torch.no_grad():
        means = {label: network.body(x).mean(dim=0) for label, x in sort_of(run, client).items()}
    network.train()
    return means


def towards(run: Run, targets: dict[int, Tensor]) -> Loss:
    """Return cross-entropy plus the squared distance to the targets, sample by sample."""
    strength = run.config.method.options.alignment

    def loss(network: Network, x: Tensor, y: Tensor) -> Tensor:
        features = network.body(x)
        total = torch.zeros(())
        for sample, label in zip(features, y.tolist(), strict=True):
            if label in targets:
                total = total + (sample - targets[label]).square().sum() / (F * len(y))
        return cross_entropy(network.head(features), y) + strength * total

    return loss


def under_heads(run: Run, theta: Tensor, buffers: Tensor, heads: Tensor) -> State:
    """Return the models and statistics to evaluate: of one body [P] or one a client, with such heads."""
    count = run.num_clients
    bodies = theta[..., run.method.layout.body].expand(count, -1)
    models = torch.cat([bodies, heads.expand(count, -1)], dim=1)
    return {"theta": models, "buffers": buffers.expand(count, -1)}


def mean_by_counts(run: Run, clients: Sequence[int], found: list[dict[int, Tensor]]) -> dict[int, Tensor]:
    """Return the mean of each class over the clients that hold it, weighted by how many samples they have."""
    means = {}
    for label in {label for of_client in found for label in of_client}:
        rows = [
            (len(sort_of(run, client)[label]), of_client[label])
            for client, of_client in zip(clients, found, strict=True)
            if label in of_client
        ]
        means[label] = torch.stack([n * row for n, row in rows]).sum(dim=0) / sum(n for n, _ in rows)
    return means


# What they share


def test_distances_to_prototypes_equal_those_by_hand() -> None:
    """Class 1 is not known: ((1 - 3)^2 + (0 - 2)^2) / 2 = 4 and 0, whose mean is 2."""
    features, targets = torch.tensor([[1.0, 0.0], [5.0, 5.0]]), torch.tensor([[3.0, 2.0], [0.0, 0.0]])
    assert distance(features, torch.tensor([0, 1]), targets, torch.tensor([1.0, 0.0])) == 2
    assert distance(features, torch.tensor([0, 1]), targets, torch.tensor([1.0, 1.0])) == 2 + 12.5


def test_a_class_that_no_client_has_keeps_its_prototype() -> None:
    """Clients with 1 and 3 samples hold the first class, one client the second, and no client the third."""
    server = {
        "prototypes": torch.tensor([[9.0, 9.0], [9.0, 9.0], [7.0, 8.0]]),
        "is_known": torch.tensor([1, 0, 0], dtype=torch.uint8),
    }
    means = torch.tensor([[[4.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[0.0, 8.0], [1.0, 2.0], [0.0, 0.0]]])
    counts = torch.tensor([[1, 0, 0], [3, 5, 0]], dtype=torch.int32)
    average_prototypes(server, upload_of({"prototypes": means}), counts)
    assert server["prototypes"].tolist() == [[1.0, 6.0], [1.0, 2.0], [7.0, 8.0]]
    assert server["is_known"].tolist() == [1, 1, 0]


PLAIN = """
from collections import OrderedDict
from torch import nn
from hpcfl.models.networks import Model, Network, NetworkOptions

class Plain(Model):
    options = NetworkOptions

    def build(self, sample, num_classes, options):
        body = OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(64, 16))
        return Network(body, OrderedDict(HEAD))

PLAIN = Plain("another head")
"""
WITHOUT_BIAS = "out=nn.Linear(16, num_classes, bias=False)"
TWO_LAYERS = "inner=nn.Linear(16, 16), out=nn.Linear(16, num_classes)"


@pytest.mark.parametrize("head", [WITHOUT_BIAS, TWO_LAYERS])
@pytest.mark.parametrize("method", [name for name, kind in METHODS.items() if kind.traits.linear_head])
def test_a_head_that_is_not_one_layer_with_a_bias_is_refused(
    method: str, head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain.py").write_text(PLAIN.replace("HEAD", head))
    words = [f"model.path={tmp_path / 'plain.py'}", f"method.name={method}", "--out", str(tmp_path / "run")]
    assert refused(capsys, *words) == (
        f"hpcfl: error: method.name={method} needs a network whose head is one linear layer with a bias, and "
        "that of model.name=plain is another; use one that has, such as any of `hpcfl list`"
    )


# FedProto


def own_models_after(
    run: Run, round: int, theta: Tensor, buffers: Tensor, loss: Loss | None = None
) -> list[dict[int, Tensor]]:
    """Train the models [N, P] of a round's clients, in place; return the class means of each client."""
    found = []
    for client in run.simulation.cohort(round).clients:
        network = network_with(run, theta[client], buffers[client])
        train_by_torch(run, client, round, network, loss=loss)
        theta[client], buffers[client] = run.method.layout.flatten(network)
        found.append(class_means(run, client, network))
    return found


def fedproto_by_hand(run: Run) -> tuple[dict[int, Tensor], Tensor, Tensor]:
    """Return the prototypes, and each client's model [N, P] and running statistics."""
    everyone = range(run.num_clients)
    theta, buffers = run.method.context.initial_parameters(everyone), run.method.buffers.initial(everyone)
    known: dict[int, Tensor] = {}
    for number in range(run.config.train.rounds):
        found = own_models_after(run, number, theta, buffers, towards(run, known))
        known |= mean_by_counts(run, run.simulation.cohort(number).clients, found)
    return known, theta, buffers


@pytest.mark.parametrize("keys", [(), ("data.partition.beta=0.2", ONE_A_ROUND, "method.alignment=3")])
@pytest.mark.usefixtures("double")
def test_rounds_of_fedproto_equal_a_plain_implementation(keys: tuple[str, ...]) -> None:
    run = Run(*SOME, *SLIPPERY, "method.name=fedproto", *keys)
    known, theta, buffers = fedproto_by_hand(run)
    assert_prototypes(run, known)
    assert_close(run.clients, {"theta": theta, "buffers": buffers})


@pytest.mark.parametrize("method", ["fedproto", "fedtgp", "fedpac"])
def test_prototypes_of_classes_that_a_client_lacks_go_up_as_they_came(method: str) -> None:
    """So that they do not set the scale of int8."""
    kind, num_lacking = METHODS[method], 0

    def aggregate(self: Method, server: State, cohort: Cohort, up: Upload) -> None:
        nonlocal num_lacking
        rows = up.collect()
        lacks = (rows["held"] if method == "fedtgp" else rows["counts"]) == 0
        num_lacking += int(lacks.sum())
        assert up.sent is not None
        received = up.sent.shared["prototypes"].expand_as(rows["prototypes"])
        assert torch.equal(rows["prototypes"][lacks], received[lacks])
        assert not torch.equal(rows["prototypes"][~lacks], received[~lacks])
        kind.aggregate(self, server, cohort, upload_of(rows, up.sent))

    Run(f"method.name={method}", "train.rounds=3", kind=type("Watched", (kind,), {"aggregate": aggregate}))
    assert num_lacking


@pytest.mark.parametrize("keys", NEAREST)
@pytest.mark.usefixtures("double")
def test_the_nearest_known_prototype_predicts_and_without_any_the_own_head_does(
    keys: tuple[str, ...],
) -> None:
    run = Run(*SOME, *keys, "train.lr=0.2", "train.rounds=1")
    run.server["is_known"][3] = 0
    run.server["prototypes"][3] = 0
    evaluated, labels = run.evaluated(), run.server["is_known"].nonzero().flatten()
    for client in range(run.num_clients):
        network = network_with(run, evaluated["theta"][client], evaluated["buffers"][client]).eval()
        x, _ = run.worker.shard.samples("test", client)
        with torch.no_grad():
            features, found = network.body(x), network(x).softmax(dim=1)
        squared = (features.unsqueeze(1) - run.server["prototypes"][labels]).square().sum(dim=2)
        torch.testing.assert_close(found[:, labels], (-squared).softmax(dim=1), rtol=1e-9, atol=1e-12)
        assert found[:, 3].count_nonzero() == 0
    run.server["is_known"].zero_()
    assert torch.equal(run.evaluated()["theta"], run.clients["theta"])


@pytest.mark.parametrize("keys", NEAREST)
@pytest.mark.usefixtures("double")
def test_a_new_client_is_trained_towards_the_prototypes(keys: tuple[str, ...]) -> None:
    run = Run(*SOME, *keys, "data.unseen_clients=0.3", "train.unseen_epochs=2", "train.rounds=1")
    known = {int(label): run.server["prototypes"][label] for label in run.server["is_known"].nonzero()}
    network = network_with(run, run.method.context.initial_parameters(), run.method.buffers.initial())
    train_by_torch(run, 3, 1, network, purpose="finetune", epochs=2, loss=towards(run, known))
    theta, buffers = run.method.layout.flatten(network)
    found, body = run.adapted(), run.method.layout.body
    assert_close((found["theta"][0, body], found["buffers"][0]), (theta[body], buffers))


# FedTGP


def generated(leaves: State) -> Tensor:
    """Return the prototypes that the server's network makes."""
    hidden = linear(leaves["embeddings"], leaves["hidden.weight"], leaves["hidden.bias"]).relu()
    return linear(hidden, leaves["output.weight"], leaves["output.bias"])


def largest_distance(pairs: Sequence[tuple[int, Tensor]]) -> float:
    """Return the largest distance between the means of two classes."""
    means = []
    for label in {label for label, _ in pairs}:
        means.append(torch.stack([row for of, row in pairs if of == label]).mean(dim=0))
    return max(float((one - other).norm()) for one in means for other in means)


def fedtgp_by_hand(run: Run) -> tuple[dict[int, Tensor], State, Tensor, Tensor]:
    """Return the prototypes, the network that makes them, and each client's model and running statistics."""
    everyone, options = range(run.num_clients), run.config.method.options
    theta, buffers = run.method.context.initial_parameters(everyone), run.method.buffers.initial(everyone)
    weights = under(run.method.server_state(), "generator/")
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    known: dict[int, Tensor] = {}
    for number in range(run.config.train.rounds):
        of_clients = own_models_after(run, number, theta, buffers, towards(run, known))
        pairs = [pair for means in of_clients for pair in means.items()]
        margin = min(options.margin, largest_distance(pairs))
        optimiser = torch.optim.SGD(leaves.values(), options.server_lr)
        for part in batches_on_server(run, number, len(pairs)):
            optimiser.zero_grad()
            made, losses = generated(leaves), []
            for label, mean in (pairs[place] for place in part):
                near = (-((mean - made[label]).norm() + margin)).exp()
                far = [(-(mean - made[other]).norm()).exp() for other in range(K) if other != label]
                losses.append(-(near / (near + torch.stack(far).sum())).log())
            torch.stack(losses).mean().backward()
            optimiser.step()
        labels = {label for label, _ in pairs} | set(known)
        known = {label: generated(leaves).detach()[label] for label in labels}
    return known, {name: leaf.detach() for name, leaf in leaves.items()}, theta, buffers


@pytest.mark.parametrize(
    "keys",
    [
        ("data.partition.beta=0.2", ONE_A_ROUND, "method.alignment=3", "method.margin=0.1"),
        ("model.batchnorm=false", "method.server_lr=0.3", "method.server_epochs=3"),
        ("train.rounds=1", "method.server_epochs=0"),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_of_fedtgp_equal_a_plain_implementation(keys: tuple[str, ...]) -> None:
    run = Run(*SOME, *SLIPPERY, "method.name=fedtgp", "method.server_epochs=2", "train.lr=0.05", *keys)
    known, weights, theta, buffers = fedtgp_by_hand(run)
    assert_prototypes(run, known)
    assert_close(under(run.server, "generator/"), weights)
    assert_close((run.clients["theta"], run.clients.get("buffers", buffers)), (theta, buffers))


@pytest.mark.quick
def test_the_loss_and_margin_of_fedtgp_equal_those_by_hand() -> None:
    """Class means (0, 0), (3, 4) and (0, 1) are at most 5 apart.

    One prototype is 2 and 3 away from those of both classes, with a margin of 1: both have logit -3.
    """
    found = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    y = torch.tensor([0, 0, 7, 2])
    assert margin_of(found, y) == 5
    assert margin_of(found[:2], y[:2]) == 0
    made = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    loss = contrastive_loss(torch.zeros(1, 2), torch.tensor([0]), made, torch.tensor(1.0))
    assert float(loss) == pytest.approx(math.log(2))


def test_the_loss_of_fedtgp_has_a_gradient_if_features_equal_a_prototype() -> None:
    made = torch.zeros(2, 3, requires_grad=True)
    contrastive_loss(torch.zeros(1, 3), torch.tensor([0]), made, torch.tensor(1.0)).backward()
    assert made.grad is not None
    assert torch.equal(made.grad, torch.zeros(2, 3))


def test_fedtgp_keeps_the_prototype_of_a_class_that_no_client_of_the_cohort_has() -> None:
    """Later, one client sends one class, the only one of its cohort."""
    run = Run("method.name=fedtgp", "train.rounds=1", "method.server_epochs=1")
    run.server["is_known"] = torch.tensor([1] + [0] * 9, dtype=torch.uint8)
    rows = {"prototypes": random(1, K, F), "held": torch.eye(K, dtype=torch.uint8)[[4]]}
    run.method.aggregate(run.server, Cohort(1, (0,), torch.tensor([5])), upload_of(rows))
    assert run.server["is_known"].nonzero().flatten().tolist() == [0, 4]
    assert run.server["prototypes"].isfinite().all()


# FedPAC


def bound(alpha: Tensor, client: int, h: Tensor, variance: Tensor) -> Tensor:
    """Return what the weights [S] of a client minimise, as the paper has it: h [S, K, F], V [S]."""
    apart = h[client] - h
    pairs = torch.einsum("jkf,lkf->jl", apart, apart)
    return (alpha.square() * variance).sum() + alpha @ pairs @ alpha


def best_weights(client: int, h: Tensor, variance: Tensor) -> Tensor:
    """Find the least bound among the stationary points of all faces of the simplex."""
    apart = h[client] - h
    matrix = torch.einsum("jkf,lkf->jl", apart, apart) + variance.diag()
    found, size = [], len(h)
    for count in range(1, size + 1):
        for face in itertools.combinations(range(size), count):
            border = torch.ones(count + 1, count + 1)
            border[:count, :count] = 2 * matrix[list(face)][:, list(face)]
            border[count, count] = 0
            alpha = torch.zeros(size)
            alpha[list(face)] = torch.linalg.solve(border, torch.eye(count + 1)[count])[:count]
            if (alpha >= 0).all():
                found.append(alpha)
    return min(found, key=lambda alpha: float(bound(alpha, client, h, variance)))


def test_weights_of_two_clients_equal_those_by_hand() -> None:
    """The second's a minimises 3 (1 - a)^2 + a^2 + 4 (1 - a)^2, so that 7 (1 - a) = a: a = 7 / 8.

    The first's a minimises 3 a^2 + (1 - a)^2 + 4 (1 - a)^2, so that 3 a = 5 (1 - a): a = 5 / 8.
    """
    h, variance = torch.tensor([[[0.0]], [[2.0]]]), torch.tensor([3.0, 1.0])
    expected = torch.tensor([[5 / 8, 3 / 8], [1 / 8, 7 / 8]]).double()
    assert_close(head_weights(h, variance), expected)


@pytest.mark.parametrize("noise", [0.001, 1.0, 1000.0])
@pytest.mark.usefixtures("double")
def test_weights_are_the_minimum_over_all_faces_of_the_simplex(noise: float) -> None:
    stream = torch.Generator().manual_seed(5)
    h = torch.rand(6, 3, 4, generator=stream)
    variance = noise * torch.rand(6, generator=stream)
    expected = torch.stack([best_weights(client, h, variance) for client in range(6)])
    torch.testing.assert_close(head_weights(h, variance), expected, rtol=0, atol=1e-8)


@pytest.mark.usefixtures("double")
def test_weights_without_noise_for_equal_clients_and_for_one_client() -> None:
    """Without noise, different clients have weight 1 on themselves; equal ones weights by 1 / V."""
    h = torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(head_weights(h, torch.zeros(4)), torch.eye(4), rtol=0, atol=1e-7)
    noise = torch.tensor([1.0, 2.0, 4.0, 4.0])
    shares = torch.tensor([4.0, 2.0, 1.0, 1.0]) / 8
    assert_close(head_weights(h[:1].expand(4, -1, -1), noise), shares.expand(4, -1))
    assert head_weights(h[:1], noise[:1]).item() == 1
    assert head_weights(torch.zeros(3, 2, 2), torch.zeros(3)).isfinite().all()


def test_weights_of_a_hundred_clients_meet_the_conditions_of_the_minimum() -> None:
    """Where a weight is positive the slope is the row's least, up to what the solver leaves."""
    stream = torch.Generator().manual_seed(7)
    h = torch.randn(60, 10, 16, generator=stream).abs() * torch.rand(60, 10, 1, generator=stream)
    variance = 0.1 * torch.rand(60, generator=stream)
    alpha, rows = head_weights(h, variance), h.flatten(1).double()
    slope = alpha @ (rows @ rows.T + variance.double().diag()) - rows @ rows.T
    above = slope - slope.amin(dim=1, keepdim=True)
    assert (above * (alpha > 1e-6)).max() < 1e-6
    assert (alpha == 0).double().mean() > 0.3


def statistics_by_hand(run: Run, client: int, network: Network) -> tuple[Tensor, Tensor]:
    """Return h [K, F] and V of the paper, class by class, from second moments [F, F]."""
    network.eval()
    samples, h, variance = sort_of(run, client), torch.zeros(K, F), torch.zeros(())
    size = sum(map(len, samples.values()))
    with torch.no_grad():
        for label, x in samples.items():
            features, share = network.body(x), len(x) / size
            h[label] = share * features.mean(dim=0)
            variance += share * torch.trace(features.T @ features / len(x))
            variance -= share**2 * features.mean(dim=0).square().sum()
    network.train()
    return h, variance / size


def fedpac_by_hand(run: Run) -> tuple[Tensor, Tensor, Tensor, dict[int, Tensor]]:
    """Return phi under the initial head [P], running statistics, heads [N, P_head] and prototypes."""
    layout, options = run.method.layout, run.config.method.options
    theta, buffers = run.method.context.initial_parameters(), run.method.buffers.initial()
    heads = theta[layout.head].repeat(run.num_clients, 1)
    known: dict[int, Tensor] = {}
    for number in range(run.config.train.rounds):
        clients = list(run.simulation.cohort(number).clients)
        networks, found, moments = [], [], []
        for client in clients:
            start = torch.cat([theta[layout.body], heads[client]])
            network = network_with(run, start, buffers)
            moments.append(statistics_by_hand(run, client, network))
            epochs, lr = options.head_epochs, options.head_lr
            train_by_torch(run, client, number, network, part="head.", purpose="head", epochs=epochs, lr=lr)
            train_by_torch(run, client, number, network, part="body.", loss=towards(run, known))
            networks.append(network)
            found.append(class_means(run, client, network))
        trained, statistics = models_of(run, networks).values()
        mean = mean_by_samples(run, clients, trained)
        theta = torch.cat([mean[layout.body], theta[layout.head]])
        buffers = mean_by_samples(run, clients, statistics)
        h, variance = (torch.stack(moment) for moment in zip(*moments, strict=True))
        alpha = torch.stack([best_weights(place, h, variance) for place in range(len(clients))])
        heads[clients] = alpha @ trained[:, layout.head]
        known = known | mean_by_counts(run, clients, found)
    return theta, buffers, heads, known


@pytest.mark.parametrize(
    "keys",
    [
        ("data.partition.beta=0.2", "method.alignment=3", "method.head_epochs=2", "method.head_lr=0.02"),
        (ONE_A_ROUND, "model.batchnorm=false"),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_of_fedpac_equal_a_plain_implementation(keys: tuple[str, ...]) -> None:
    run = Run(*SOME, *SLIPPERY, "method.name=fedpac", *keys)
    theta, buffers, heads, known = fedpac_by_hand(run)
    assert_close(run.evaluated(), under_heads(run, theta, buffers, heads))
    assert_prototypes(run, known)


# FedAS


def information_by_hand(network: Network, x: Tensor, y: Tensor) -> Tensor:
    """Return the sum over samples of the squared gradient of log p(y | x)."""
    network.eval()
    total = squares_by_hand(network, x, y).sum()
    network.train()
    return total


def align(run: Run, client: int, round: int, network: Network, targets: dict[int, Tensor]) -> None:
    """Train the body towards the targets, which all classes of the client have."""

    def loss(network: Network, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(network.body(x), torch.stack([targets[label] for label in y.tolist()]))

    epochs, lr = run.config.method.options.alignment_epochs, run.config.method.options.alignment_lr
    train_by_torch(
        run, client, round, network, part="body.", purpose="alignment", epochs=epochs, lr=lr, loss=loss
    )


def fedas_by_hand(run: Run) -> tuple[Tensor, Tensor, Tensor, dict[int, dict[int, Tensor]]]:
    """Return phi under the initial head [P], running statistics, own heads and each client's prototypes."""
    layout = run.method.layout
    theta, buffers = run.method.context.initial_parameters(), run.method.buffers.initial()
    heads = theta[layout.head].repeat(run.num_clients, 1)
    own: dict[int, dict[int, Tensor]] = {}
    for number in range(run.config.train.rounds):
        clients = list(run.simulation.cohort(number).clients)
        networks, traces = [], []
        for client in clients:
            network = network_with(run, torch.cat([theta[layout.body], heads[client]]), buffers)
            if client in own:
                align(run, client, number, network, own[client])
            train_by_torch(run, client, number, network)
            own[client] = class_means(run, client, network)
            traces.append(information_by_hand(network, *run.worker.shard.samples("train", client)))
            networks.append(network)
        models, statistics = models_of(run, networks).values()
        heads[clients] = models[:, layout.head]
        mean = torch.tensordot(torch.stack(traces) / torch.stack(traces).sum(), models, dims=1)
        theta = torch.cat([mean[layout.body], theta[layout.head]])
        buffers = mean_by_samples(run, clients, statistics)
    return theta, buffers, heads, own


@pytest.mark.parametrize(
    "keys",
    [
        ("data.partition.beta=0.2", "method.alignment_lr=0.3", "method.alignment_epochs=2"),
        (ONE_A_ROUND, "model.batchnorm=false"),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_of_fedas_equal_a_plain_implementation(keys: tuple[str, ...]) -> None:
    run = Run(*SOME, *SLIPPERY, "method.name=fedas", *keys)
    theta, buffers, heads, own = fedas_by_hand(run)
    starts = under_heads(run, theta, buffers, heads)["theta"]
    networks = [network_with(run, start, buffers) for start in starts]
    for client, prototypes in own.items():
        align(run, client, 3, networks[client], prototypes)
    assert_close(run.evaluated(), models_of(run, networks))
    assert_close(run.clients["head"], heads)
    for client, is_known in enumerate(run.clients["is_known"]):
        known = is_known.nonzero().flatten().tolist()
        assert_close({c: run.clients["prototypes"][client, c] for c in known}, own.get(client, {}))


def test_clients_of_fedas_without_information_are_weighted_by_their_samples() -> None:
    run = Run(*SOME, "method.name=fedas", "train.rounds=1")
    rows = random(2, run.method.layout.size)
    cohort = Cohort(0, (0, 1), torch.tensor([1, 3]))
    for information, weights in (([0.0, 0.0], [0.25, 0.75]), ([6.0, 1.0], [2 / 3, 1 / 3])):
        upload = upload_of({"theta": rows, "information": torch.tensor(information)})
        run.method.aggregate(run.server, cohort, upload)
        body = run.method.layout.body
        torch.testing.assert_close(run.server["theta"][body], torch.tensor(weights) @ rows[:, body])


# FedGH


def fedgh_by_hand(run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Return the server's head, and each client's model [N, P] and running statistics."""
    everyone, layout, options = range(run.num_clients), run.method.layout, run.config.method.options
    theta, buffers = run.method.context.initial_parameters(everyone), run.method.buffers.initial(everyone)
    head = theta[0, layout.head].clone()
    for number in range(run.config.train.rounds):
        theta[list(run.simulation.cohort(number).clients), layout.head] = head
        pairs = [pair for means in own_models_after(run, number, theta, buffers) for pair in means.items()]
        leaf = head.requires_grad_()
        optimiser = torch.optim.SGD([leaf], options.server_lr)
        for part in batches_on_server(run, number, len(pairs)):
            optimiser.zero_grad()
            labels, means = zip(*[pairs[place] for place in part], strict=True)
            logits = linear(torch.stack(means), leaf[: K * F].view(K, F), leaf[K * F :])
            cross_entropy(logits, torch.tensor(labels)).backward()
            optimiser.step()
        head = leaf.detach()
    return head, theta, buffers


@pytest.mark.parametrize(
    "keys",
    [
        ("data.partition.beta=0.2", "method.server_lr=0.3", "method.server_epochs=3"),
        (ONE_A_ROUND, "model.batchnorm=false", "method.server_lr=1"),
        ("train.rounds=1", "method.server_epochs=0"),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_of_fedgh_equal_a_plain_implementation(keys: tuple[str, ...]) -> None:
    run = Run(*SOME, *SLIPPERY, "method.name=fedgh", *keys)
    head, theta, buffers = fedgh_by_hand(run)
    assert_close(run.clients["theta"], theta)
    assert_close(run.evaluated(), under_heads(run, theta, buffers, head))
