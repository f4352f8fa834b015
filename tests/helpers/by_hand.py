"""What methods and networks are compared with: training, gradients and networks in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from harness import UNEQUAL_FEW, Run
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from hpcfl.communication.channel import Channel
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort, Message
from hpcfl.config.keys import TrainConfig
from hpcfl.methods import Context, Method
from hpcfl.methods.base import State
from hpcfl.models import MODELS, Network
from hpcfl.models.hypernetworks import Hypernetworks
from hpcfl.models.modular import ModularNetwork
from hpcfl.parameters import ParameterLayout
from hpcfl.randomness import torch_stream
from hpcfl.samples import SampleType
from hpcfl.training.batches import minibatches
from hpcfl.training.client_group import ClientGroup

SOME = (*UNEQUAL_FEW, "train.participation=0.75", "model.batchnorm=true")
"""Unequal clients, three of four in a round."""

SLIPPERY = ("train.momentum=0.9", "train.weight_decay=0.01", "train.lr_decay=0.9")
"""Settings under which numbers that should stay fixed drift if they are not left out of the optimiser."""

ADAM = (
    "train.optimiser=adam",
    "train.momentum=0",
    "train.weight_decay=0.01",
    "train.lr=0.01",
    "train.beta1=0.8",
    "train.beta2=0.9",
    "train.epsilon=0.001",
    "train.clip=0.5",
    "train.local_epochs=2",
)
"""Adam with constants under which each of them, and clipping, move weights by 0.03 in three rounds."""

ADAMW = (*ADAM, "train.optimiser=adamw", "train.weight_decay=0.3")


Loss = Callable[[Network, Tensor, Tensor], Tensor]
"""Function of a network and a mini-batch."""


def assert_close(found: Any, expected: Any, atol: float = 1e-9) -> None:
    """Compare tensors, or dictionaries and sequences of them, number by number."""
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def is_batchnorm(layout: ParameterLayout) -> Tensor:
    """Return bool [P]: which numbers are BatchNorm's weight or bias, by module type."""
    mask = torch.zeros(layout.size, dtype=torch.bool)
    for slot in layout.parameters:
        mask[slot.start : slot.stop] = slot.module in layout.batchnorm_modules
    return mask


def network_with(run: Run, theta: Tensor, buffers: Tensor) -> Network:
    """Return the run's network with weights [P] and running statistics [U] of its own, in training mode."""
    network: Network = copy.deepcopy(run.method.network).train()
    layout = run.method.layout
    network.load_state_dict(layout.views(theta) | layout.buffer_views(buffers), strict=False)
    return network


def models_of(run: Run, networks: Sequence[Network]) -> State:
    """Return the weights [N, P] and running statistics [N, U] of networks."""
    ends = zip(*map(run.method.layout.flatten, networks), strict=True)
    return dict(zip(("theta", "buffers"), map(torch.stack, ends), strict=True))


def predicted(run: Run, client: int, x: Tensor) -> Tensor:
    """Return the class probabilities [n, K] of samples by a client's evaluated model."""
    group = ClientGroup(run.worker, range(run.num_clients), run.config.train.rounds)
    found: Tensor = run.method.predict(group, run.evaluated(), client, x)
    return found


def class_counts(run: Run) -> Tensor:
    """Return how many training samples of each class each client has, [N, K]."""
    labels = [run.worker.shard.samples("train", client)[1] for client in range(run.num_clients)]
    return torch.stack([torch.tensor([int((y == c).sum()) for c in range(10)]) for y in labels])


def batches_of(
    run: Run, client: int, round: int, purpose: str = "batches", epochs: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one client's mini-batches (x, y) of a training pass; new clients follow the others."""
    new = client - run.num_clients
    shard, place = (run.unseen.shard, new) if new >= 0 else (run.worker.shard, client)
    x, y = shard.samples("train", place)
    stream = torch_stream(run.config.run.seed, purpose, round, client)
    for _ in range(run.config.train.local_epochs if epochs is None else epochs):
        order = torch.randperm(len(y), generator=stream)
        for start, stop in minibatches(len(y), run.config.train.batch_size):
            yield x[order[start:stop]], y[order[start:stop]]


def torchs_optimiser(
    run: Run, parameters: Sequence[nn.Parameter], round: int, lr: float | None = None
) -> torch.optim.Optimizer:
    """Return torch's optimiser with the settings of a round, or a step size of its own that decays alike.

    Its steps clip the gradients first.
    """
    train = run.config.train
    lr = (train.lr if lr is None else lr) * train.lr_decay**round
    optimiser: torch.optim.Optimizer
    if train.optimiser is not None:
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[train.optimiser]
        beta1, beta2, epsilon = train.adam_constants
        optimiser = kind(parameters, lr, (beta1, beta2), epsilon, train.weight_decay)
    else:
        optimiser = torch.optim.SGD(parameters, lr, train.momentum, weight_decay=train.weight_decay)
    clip = train.clip

    def shorten(*_: object) -> None:
        nn.utils.clip_grad_norm_(parameters, clip)

    if clip is not None:
        optimiser.register_step_pre_hook(shorten)
    return optimiser


def train_by_torch(
    run: Run,
    client: int,
    round: int,
    network: Network,
    *,
    part: str = "",
    purpose: str = "batches",
    epochs: int | None = None,
    loss: Loss | None = None,
    lr: float | None = None,
) -> None:
    """Train the parameters whose names begin with `part` on cross-entropy, or another loss."""

    def plain(network: Network, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(network(x), y, label_smoothing=run.config.train.label_smoothing or 0.0)

    chosen = [p for name, p in network.named_parameters() if name.startswith(part)]
    optimiser = torchs_optimiser(run, chosen, round, lr)
    for x, y in batches_of(run, client, round, purpose, epochs):
        network.zero_grad()
        (loss or plain)(network, x, y).backward()
        optimiser.step()


def train_cohort(
    run: Run, round: int, theta: Tensor, buffers: Tensor, loss_of: Callable[[int], Loss] | None = None
) -> tuple[list[int], Tensor, Tensor]:
    """Train the clients of a round from one model [P] with statistics [U], each on a loss of its own or not.

    Returns the clients, their models [S, P] and running statistics [S, U].
    """
    clients, ends = list(run.simulation.cohort(round).clients), []
    for client in clients:
        network = network_with(run, theta, buffers)
        train_by_torch(run, client, round, network, loss=loss_of(client) if loss_of else None)
        ends.append(run.method.layout.flatten(network))
    models, statistics = (torch.stack(rows) for rows in zip(*ends, strict=True))
    return clients, models, statistics


def give_one_class_each(run: Run) -> None:
    """Label all training samples of client i with class i // 2, so that nobody holds most classes."""
    for client in range(run.num_clients):
        run.worker.shard.samples("train", client)[1].fill_(client // 2)


def adapted_by_head_alone(run: Run, head: int) -> State:
    """Return the models of unseen clients; only the last `head` numbers differ from the server's."""
    models, theta = run.adapted(), run.server["theta"]
    count = len(models["theta"])
    assert torch.equal(models["theta"][:, :-head], theta[:-head].expand(count, -1))
    assert (models["theta"][:, -head:] != theta[-head:]).any(dim=1).all()
    if "buffers" in run.server:
        assert torch.equal(models["buffers"], run.server["buffers"].expand(count, -1))
    return models


def mean_by_samples(run: Run, clients: Sequence[int], rows: Tensor) -> Tensor:
    """Return the mean of rows [S, ...] of some clients, weighted by their training samples."""
    samples = run.method.context.num_samples[list(clients)]
    return torch.tensordot(samples / samples.sum(), rows, dims=1)


def method_of(kind: type[Method], clients: int = 4, **params: object) -> Any:
    """Return a method for so many clients and a small network, without data or a run."""
    network = MODELS["mlp"].options.model_validate({"hidden": [16]})
    sizes = torch.full((clients,), 20)
    context = Context("mlp", network, SampleType((1, 8, 8)), 10, sizes, train=TrainConfig(), seed=0)
    return kind(context, kind.Params.model_validate(params))


def cohort_of(method: Method, clients: Sequence[int], round: int = 0) -> Cohort:
    """Return some clients as the cohort of a round."""
    return Cohort(round, tuple(clients), method.context.num_samples[list(clients)])


def work(run: Run, client: int, round: int = 0) -> tuple[Message, ClientGroup]:
    """Train one client from its state and the server's as they are now; return its upload."""
    cohort = cohort_of(run.method, [client], round)
    clients = ClientGroup(run.worker, [client], round)
    channel = Channel(Communicator(), run.method.layers, run.num_clients)
    down = channel.down(run.adapter.download(run.server, cohort), cohort)
    if run.adapter.needs_request(round):
        asked = run.adapter.client_request(clients, down)
        answer = run.adapter.server_response(run.server, cohort, asked.per_client)
        down = down | asked | channel.down(answer, cohort)
    return run.adapter.train(clients, down), clients


def step_size(run: Run, round: int) -> float:
    """Return the learning rate of a round."""
    return float(run.config.train.lr * run.config.train.lr_decay**round)


def loss(run: Run, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of a model [P] without BatchNorm, which autograd can differentiate."""
    logits = functional_call(run.method.context.network, run.method.layout.views(theta), x)
    return cross_entropy(logits, y)


def gradient(run: Run, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient [P] of the cross-entropy of a model [P] without BatchNorm."""
    leaf = theta.clone().requires_grad_()
    return torch.autograd.grad(loss(run, leaf, x, y), leaf)[0]


def squares_by_hand(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the squared norm of the gradient of log p(y | x) [n], one backward pass a sample."""
    squares = []
    for number in range(len(y)):
        loss = cross_entropy(network(x[number : number + 1]), y[number : number + 1])
        slopes = torch.autograd.grad(loss, list(network.parameters()))
        squares.append(torch.stack([slope.square().sum() for slope in slopes]).sum())
    return torch.stack(squares)


def discriminant_head(mu: Tensor, sigma: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights and biases of linear discriminant analysis for a client with labels y [n]."""
    classes, size = mu.shape
    shares = torch.tensor([float((y == label).sum()) / len(y) + 1e-4 for label in range(classes)])
    inverse = torch.linalg.inv((1 - 1e-4) * sigma + 1e-4 * torch.trace(sigma) / size * torch.eye(size))
    weights = mu @ inverse
    biases = [-mu[c] @ inverse @ mu[c] / 2 + torch.log(shares[c] / shares.sum()) for c in range(classes)]
    return weights, torch.stack(biases)


def class_gaussians(features: Tensor, y: Tensor, mu: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Return class means [K, F] and covariance of features, with mu for classes of two samples or fewer."""
    means, scatter = mu.clone(), torch.zeros(mu.shape[1], mu.shape[1])
    for label in y.unique():
        rows = features[y == label]
        if len(rows) > 2:
            means[label] = rows.mean(dim=0)
        for row in rows:
            scatter += torch.outer(row - means[label], row - means[label])
    return means, scatter / max(1, len(y) - 1) + ridge * torch.eye(mu.shape[1])


def adapted_gaussians(
    run: Run, client: int, round: int, network: Network, mu: Tensor, sigma: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what pFedFDA makes of mu and Sigma for a client whose network is in evaluation mode."""
    x, y = run.worker.shard.samples("train", client)
    ridge = run.config.method.options.ridge
    with torch.no_grad():
        features = network.eval().body(x)
    order = torch.randperm(len(y), generator=torch_stream(run.config.run.seed, "folds", round, client))
    halves: tuple[list[int], list[int]] = ([], [])
    for label in y.unique():
        for number, place in enumerate(place for place in order.tolist() if y[place] == label):
            halves[number % 2].append(place)
    losses = []
    for tenths in range(11):
        share, total = tenths / 10, torch.zeros(())
        for held_out, rest in (halves, halves[::-1]):
            m, s = class_gaussians(features[rest], y[rest], mu, ridge)
            weights, biases = discriminant_head(
                share * m + (1 - share) * mu, share * s + (1 - share) * sigma, y
            )
            logits = features[held_out] @ weights.T + biases
            total -= logits.log_softmax(dim=1)[torch.arange(len(held_out)), y[held_out]].sum()
        losses.append(float(total))
    share = losses.index(min(losses)) / 10
    m, s = class_gaussians(features, y, mu, ridge)
    return share * m + (1 - share) * mu, share * s + (1 - share) * sigma


class OneClient(nn.Module):
    """The hypernetwork of one client in plain torch, with the weights of one row of a state."""

    def __init__(self, shape: Hypernetworks, state: State, client: int) -> None:
        super().__init__()
        self._depth = shape.hidden_layers
        for name in shape.shapes():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(state[name][client].clone()))

    def forward(self) -> Tensor:
        hidden = self.embedding
        for number in range(1, self._depth + 1):
            weight, bias = (getattr(self, f"trunk{number}_{kind}") for kind in ("weight", "bias"))
            hidden = (weight @ hidden + bias).relu()
        return self.heads_weight @ hidden + self.heads_bias

    def tensors(self, shape: Hypernetworks) -> State:
        """Return the weights under the names of the stacked state."""
        return {name: self.get_parameter(name.replace(".", "_")).detach() for name in shape.shapes()}


def paths_by_hand(network: ModularNetwork, x: Tensor, decision: Sequence[Any]) -> tuple[Tensor, list[str]]:
    """Follow equation 13 of FedMN block by block; return the logits and the names of the active blocks."""
    sizes = network.sizes
    entries = iter(decision)
    outputs = {k: network.get_submodule(f"encoder{k + 1}")(x) for k in range(sizes[0])}
    names: list[str] = []

    def mean(weights: dict[int, Any]) -> Tensor | None:
        """Average outputs over the open paths that lead from blocks with an input."""
        weights = {k: torch.as_tensor(w) for k, w in weights.items() if k in outputs}
        if not any(w > 0 for w in weights.values()):
            return None
        total = torch.stack(list(weights.values())).sum()
        # a closed path adds only its derivative, and only where the path is a probability
        return torch.stack([w * outputs[k] for k, w in weights.items()]).sum(dim=0) / total

    for layer in range(2, len(sizes) + 1):
        matrix = [[next(entries) for _ in range(sizes[layer - 1])] for _ in range(sizes[layer - 2])]
        following = {}
        for j in range(sizes[layer - 1]):
            block_input = mean({k: row[j] for k, row in enumerate(matrix)})
            if block_input is not None:
                names.append(f"block{layer}_{j + 1}")
                output = network.get_submodule(names[-1])(block_input)
                following[j] = output if layer == len(sizes) else output.relu()
        outputs = following
    logits = mean(dict(enumerate(entries)))
    if logits is None:
        blocks = [m for name, m in network.named_children() if name.startswith(f"block{len(sizes)}")]
        assert isinstance(blocks[0], nn.Linear)
        logits = x.new_zeros(len(x), blocks[0].out_features)
    return logits, names
