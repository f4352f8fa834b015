"""FedMN's modular network: encoders, layers of blocks, and the routing hypernetwork (II-A and II-D).

Shapes: B samples, n_l blocks of layer l, E paths, K classes. A path leads from a block of layer l - 1 to one
of layer l, or from a block of the last layer to the output; a decision [E] has a number for each: for every
layer from the second the matrix [n_{l-1}, n_l], row by row, then the [n_L] output paths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from hpcfl.models.networks import Network
from hpcfl.randomness import torch_stream

ROUTER, CLASSIFIER = "router", "classifier"
IMAGE_EMBEDDING, LABEL_EMBEDDING = 128, 64
"""Widths of the routing hypernetwork's two embeddings (the authors' code)."""

Norm = Literal["separate", "joint"]


class Encoder(nn.Module):
    """The body of a network and one fully connected layer with ReLU."""

    def __init__(self, network: Network, width: int) -> None:
        super().__init__()
        self.body = network.body
        self.project = _linear_for_relu(network.num_features, width)

    def forward(self, x: Tensor) -> Tensor:
        embedding: Tensor = self.project(self.body(x)).relu()
        return embedding


class Router(nn.Module):
    """The routing hypernetwork: a sample and its label to one logit a path, [B, E] (eq. 9).

    Each embedding is divided by its root mean square; or, where the `norm` is joint, both together by their
    length. At the start, logits depend on the label alone: they have a mean near 0 over all classes and, with
    separate norms, a standard deviation of about `spread`.
    """

    def __init__(
        self, network: Network, num_classes: int, num_paths: int, spread: float, norm: Norm = "separate"
    ) -> None:
        super().__init__()
        self.num_classes, self.norm = num_classes, norm
        self.images = Encoder(network, IMAGE_EMBEDDING)
        self.labels = nn.Linear(num_classes, LABEL_EMBEDDING)
        self.paths = nn.Linear(IMAGE_EMBEDDING + LABEL_EMBEDDING, num_paths)
        with torch.no_grad():
            of_images, of_labels = self.paths.weight.split([IMAGE_EMBEDDING, LABEL_EMBEDDING], dim=1)
            # with untrained weights, images add about the same to the logits of all clients
            of_images.zero_()
            of_labels.normal_(std=spread / math.sqrt(LABEL_EMBEDDING))
            self.labels.bias.zero_()
            self.paths.bias.zero_()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        images = self.images(x)
        classes = torch.arange(self.num_classes, device=y.device)
        one_hot = (y.unsqueeze(1) == classes).to(images.dtype)
        labels = self.labels(one_hot - 1 / self.num_classes)
        if self.norm == "joint":
            embedding = nn.functional.normalize(torch.cat([images, labels], dim=1))
        else:
            embedding = torch.cat([_scaled(images), _scaled(labels)], dim=1)
        logits: Tensor = self.paths(embedding)
        return logits


class ModularNetwork(nn.Module):
    """Encoders `encoder1`.., blocks `block2_1`.., the `router`, and on request a `classifier` on encoder1.

    `sizes` [n_1, ..., n_L] counts encoders and blocks a layer; `widths` [L - 1] are the encoders' outputs and
    those of all layers of blocks but the last, which gives logits. `networks` are n_1 + 1 networks whose
    bodies become the encoders' and the router's; `router_spread` and `router_norm` are its `spread` and
    `norm`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        widths: Sequence[int],
        num_classes: int,
        networks: Sequence[Network],
        with_classifier: bool,
        router_spread: float = 1.0,
        router_norm: Norm = "separate",
    ) -> None:
        super().__init__()
        self.sizes, self.widths = tuple(sizes), tuple(widths)
        for number, network in enumerate(networks[:-1], start=1):
            self.add_module(f"encoder{number}", Encoder(network, widths[0]))
        outputs = [*widths[1:], num_classes]
        for layer, (inputs, width) in enumerate(zip(widths, outputs, strict=True), start=2):
            for number in range(1, sizes[layer - 1] + 1):
                make = nn.Linear if layer == len(sizes) else _linear_for_relu
                self.add_module(f"block{layer}_{number}", make(inputs, width))
        router = Router(networks[-1], num_classes, num_paths(sizes), router_spread, router_norm)
        self.add_module(ROUTER, router)
        if with_classifier:
            self.add_module(CLASSIFIER, nn.Linear(widths[0], num_classes))

    def forward(
        self, x: Tensor, decision: Tensor | None = None, dropout_mask: Tensor | None = None
    ) -> Tensor:
        """Return logits [B, K] along a decision's open paths (eq. 13); without one, the classifier's.

        `dropout_mask` [B, num_hidden] multiplies the outputs of all blocks but the last layer's, block by
        block, with zeros for what is left out.
        """
        if decision is None:
            logits: Tensor = self.get_submodule(CLASSIFIER)(self.get_submodule("encoder1")(x))
            return logits
        return self.along(x, self.shares(decision), dropout_mask)

    @property
    def num_hidden(self) -> int:
        """Outputs of all blocks but those of the last layer."""
        return sum(size * width for size, width in zip(self.sizes[1:-1], self.widths[1:], strict=True))

    def shares(self, decision: Tensor) -> list[Tensor]:
        """Return of each layer's means the weights [n_{l-1}, n_l], and of the output's [n_L, 1] (eq. 13).

        Where no path is open, they are 0.
        """
        *layers, last = self.split(decision)
        active = decision.new_ones(self.sizes[0])
        found = []
        for paths in (*layers, last.unsqueeze(1)):
            weights = paths * active.unsqueeze(1)
            total = weights.sum(dim=0)
            found.append(weights / total.where(total > 0, 1.0))
            active = (total > 0).to(decision.dtype)
        return found

    def along(self, x: Tensor, shares: Sequence[Tensor], dropout_mask: Tensor | None = None) -> Tensor:
        """Return logits [B, K] of means with the weights of `shares`; `dropout_mask` as in `forward`."""
        outputs = [self.get_submodule(f"encoder{number}")(x) for number in range(1, self.sizes[0] + 1)]
        *layers, last = shares
        used = 0
        for layer, weights in enumerate(layers, start=2):
            inputs = _means(torch.stack(outputs), weights).unbind()
            outputs = []
            for number in range(1, self.sizes[layer - 1] + 1):
                output = self.get_submodule(f"block{layer}_{number}")(inputs[number - 1])
                if layer < len(self.sizes):
                    output = output.relu()
                    if dropout_mask is not None:
                        output = output * dropout_mask[:, used : used + output.shape[1]]
                        used += output.shape[1]
                outputs.append(output)
        return _means(torch.stack(outputs), last)[0]

    def split(self, decision: Tensor) -> list[Tensor]:
        """View a decision [..., E] as matrices [..., n_{l-1}, n_l] and the outputs [..., n_L]."""
        shapes = [*itertools.pairwise(self.sizes), (self.sizes[-1],)]
        parts = decision.split([torch.Size(shape).numel() for shape in shapes], dim=-1)
        return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]

    def opened(self, decision: Tensor, logits: Tensor) -> Tensor:
        """Return a hard decision [E] that reaches the output.

        If all paths from the active blocks of a layer are closed, the most likely of these paths is opened.
        """
        decision = decision.clone()
        active = torch.ones(self.sizes[0], dtype=torch.bool)
        for paths, scores in zip(self.split(decision), self.split(logits), strict=True):
            # a row for each block they lead from
            paths, scores = paths.reshape(len(active), -1), scores.reshape(len(active), -1)
            if not (paths[active] > 0).any():
                likeliest = scores.where(active.unsqueeze(1), -torch.inf).argmax()
                paths.view(-1)[likeliest] = 1
            active = (paths[active] > 0).any(dim=0)
        return decision

    def active(self, decision: Tensor) -> Tensor:
        """Return which encoders and blocks get an input under decisions [..., E], bool [..., sum of n_l].

        See section II-E.
        """
        active = [decision.new_ones(*decision.shape[:-1], self.sizes[0], dtype=torch.bool)]
        for paths in self.split(decision)[:-1]:
            active.append((paths * active[-1].unsqueeze(-1) > 0).any(dim=-2))
        return torch.cat(active, dim=-1)


class Routed(nn.Module):
    """A modular network along the paths of one decision [E]; the router is kept and not used."""

    parts = (
        "block k of layer l gets the sum over j of paths{l}[j, k] * output of block j of layer l - 1 (of "
        "layer 2: of encoder j); blocks end in ReLU, except for those of the last layer, whose outputs, "
        "weighed by paths_out, add up to the logits"
    )

    def __init__(self, network: ModularNetwork, decision: Tensor) -> None:
        super().__init__()
        self.network = network
        *layers, last = network.shares(decision)
        self._names = [*(f"paths{layer}" for layer in range(2, len(layers) + 2)), "paths_out"]
        for name, shares in zip(self._names, (*layers, last), strict=True):
            self.register_buffer(name, shares)

    def forward(self, x: Tensor) -> Tensor:
        return self.network.along(x, [self.get_buffer(name) for name in self._names])


def num_paths(sizes: Sequence[int]) -> int:
    """Return E = sum_l n_l n_{l+1} + n_L."""
    return sum(a * b for a, b in itertools.pairwise(sizes)) + sizes[-1]


def path_names(sizes: Sequence[int]) -> list[str]:
    """Name the paths in the order of a decision: "1.2-2.1" leads from encoder 2 to block 1 of layer 2."""
    layers = [[f"{number}.{k + 1}" for k in range(count)] for number, count in enumerate(sizes, start=1)]
    pairs = [pair for two in itertools.pairwise([*layers, ["out"]]) for pair in itertools.product(*two)]
    return [f"{start}-{stop}" for start, stop in pairs]


def _linear_for_relu(inputs: int, outputs: int) -> nn.Linear:
    """Return a layer with weights for ReLU (He et al.): means over blocks already shrink the signal."""
    linear = nn.Linear(inputs, outputs)
    nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu")
    return linear


def _scaled(embedding: Tensor) -> Tensor:
    """Divide embeddings [B, w] by their root mean squares."""
    return nn.functional.normalize(embedding) * math.sqrt(embedding.shape[1])


def _means(outputs: Tensor, weights: Tensor) -> Tensor:
    """Return the means [m, B, w] of outputs [n, B, w] with weights [n, m] whose sums are 1 or 0."""
    return torch.einsum("nbw,nm->mbw", outputs, weights)


Routing = Literal["straight", "soft", "open"]


@dataclass(frozen=True)
class Decisions:
    """Decisions [C, E] from C clients' mean logits z [C, E]: hard, soft, or all open (FedMN, eq. 5, 10)."""

    network: ModularNetwork
    routing: Routing
    temperatures: tuple[float, float]
    """tau of the first and of the last round."""
    rounds: range
    """The rounds that have decisions, counted from 0."""
    seed: int

    def temperature(self, round: int) -> float:
        """Return tau of a round; before the first of `rounds`, that of the first."""
        first, last = self.temperatures
        share = max(0, round - self.rounds.start) / max(1, len(self.rounds) - 1)
        return float(first * (last / first) ** share)

    def drawn(self, logits: Tensor, round: int, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the decisions that clients draw in a round, and the derivatives dv/dz (eq. 5)."""
        tau, rows = self.temperature(round), []
        # client by client, as the last bits of a sigmoid depend on a number's place in its tensor
        for z, client in zip(logits, clients, strict=True):
            stream = torch_stream(self.seed, "routing", round, client)
            uniform = torch.rand(z.shape, generator=stream, dtype=torch.float64)
            rows.append(((uniform.logit(eps=1e-12) + z) / tau).sigmoid().to(z.dtype))
        soft = torch.stack(rows)
        return self._as_applied(soft, logits), soft * (1 - soft) / tau

    def likely(self, logits: Tensor, round: int) -> Tensor:
        """Return the decisions without noise: hard ones open the paths with Pi > 0.5 (eq. 10)."""
        return self._as_applied((logits / self.temperature(round)).sigmoid(), logits)

    def _as_applied(self, soft: Tensor, logits: Tensor) -> Tensor:
        """Return the decisions that the network uses, from soft ones."""
        if self.routing == "soft":
            return soft
        if self.routing == "open":
            return torch.ones_like(soft)
        hard = (soft > 0.5).to(soft.dtype)
        return torch.stack([self.network.opened(row, z) for row, z in zip(hard, logits, strict=True)])
