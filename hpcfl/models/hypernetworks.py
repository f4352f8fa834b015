"""Hypernetworks that weigh clients layer by layer: one for each client, all stacked as [N, ...] tensors.

A hypernetwork maps an embedding through a trunk of linear layers with ReLU to one linear head a layer, whose
N outputs weigh the N clients (pFedLA, figure 3). Shapes: N clients, S of a cohort, L layers, E embedding,
H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hpcfl.parameters import Tensors
from hpcfl.randomness import torch_stream

HeadInit = Literal["zero", "default", "uniform"]
Optimiser = Literal["adam", "sgd"]

ADAM_BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8


@dataclass(frozen=True)
class Hypernetworks:
    """The shape of N hypernetworks; their weights live in a state dictionary of [N, ...] tensors."""

    num_clients: int
    num_layers: int
    embedding: int
    hidden: int
    hidden_layers: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of one hypernetwork."""
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.embedding,)}
        inputs = self.embedding
        for number in range(1, self.hidden_layers + 1):
            shapes[f"trunk{number}.weight"] = (self.hidden, inputs)
            shapes[f"trunk{number}.bias"] = (self.hidden,)
            inputs = self.hidden
        shapes["heads.weight"] = (self.num_layers, self.num_clients, inputs)
        shapes["heads.bias"] = (self.num_layers, self.num_clients)
        return shapes

    @property
    def size(self) -> int:
        """Numbers in one hypernetwork."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def initial(self, seed: int, head_init: HeadInit) -> Tensors:
        """Draw all N hypernetworks; client i's depends on (seed, i) alone.

        Embeddings are N(0, 1), linear layers U(-1/sqrt(inputs), 1/sqrt(inputs)) as PyTorch's default. Heads
        are zero (every weight exactly 1/N at first), drawn like the trunk, or U(0, 1) with zero bias (as in
        public code).
        """
        state = {name: torch.zeros(self.num_clients, *shape) for name, shape in self.shapes().items()}
        for client in range(self.num_clients):
            stream = torch_stream(seed, "hypernetwork", 0, client)
            inputs = self.embedding
            for name, tensor in state.items():
                row = tensor[client]
                if name == "embedding":
                    row.normal_(generator=stream)
                    continue
                inputs = row.shape[-1] if name.endswith("weight") else inputs
                if name.startswith("trunk") or head_init == "default":
                    row.uniform_(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs), generator=stream)
                elif head_init == "uniform" and name == "heads.weight":
                    row.uniform_(generator=stream)
        return state

    def outputs(self, state: Tensors) -> Tensor:
        """Run the hypernetworks of S clients, tensors [S, ...]: raw outputs [S, L, N]."""
        hidden = state["embedding"].unsqueeze(-1)
        for number in range(1, self.hidden_layers + 1):
            bias = state[f"trunk{number}.bias"].unsqueeze(-1)
            hidden = torch.baddbmm(bias, state[f"trunk{number}.weight"], hidden).relu()
        weight = state["heads.weight"].flatten(1, 2)
        return torch.bmm(weight, hidden).view_as(state["heads.bias"]) + state["heads.bias"]


def descend(
    state: Tensors,
    moments: Tensors,
    gradients: Tensors,
    rows: Sequence[int],
    optimiser: Optimiser,
    lr: float,
    frozen: Tensor,
) -> None:
    """Take one step on the hypernetworks of some clients, in place.

    `state` and `moments` hold [N, ...]; `gradients` [S, ...] belong to `rows`. Heads of the layers in
    `frozen`, bool [S, L], do not move, and neither do their moments and step counts.
    """
    clients = torch.as_tensor(rows)
    num_layers = frozen.shape[1]
    if optimiser == "adam":
        moments["steps"][clients] += 1
        moments["heads.steps"][clients] += ~frozen
    for name, gradient in gradients.items():
        depth, index, counter = 1, clients, "steps"
        if name.startswith("heads."):
            depth, counter = 2, "heads.steps"
            position, layer = (~frozen).nonzero(as_tuple=True)
            index = clients[position] * num_layers + layer
            if frozen.any():
                gradient = gradient[~frozen]
        tensors = [state[name]]
        if optimiser == "adam":
            tensors += [moments[f"{name}.first"], moments[f"{name}.second"], moments[counter]]
        flat = [_flat(tensor, depth) for tensor in tensors]
        gradient = gradient.reshape(len(index), flat[0].shape[1])
        step = _adam_direction(gradient, index, *flat[1:]) if optimiser == "adam" else gradient
        flat[0].index_add_(0, index, step, alpha=-lr)


def _adam_direction(gradient: Tensor, index: Tensor, mean: Tensor, square: Tensor, steps: Tensor) -> Tensor:
    """Update Adam's moments, rows `index` of [., rest], in place; return the direction of the step."""
    first = mean.index_select(0, index).lerp_(gradient, 1 - ADAM_BETAS[0])
    second = square.index_select(0, index).mul_(ADAM_BETAS[1])
    second.addcmul_(gradient, gradient, value=1 - ADAM_BETAS[1])
    mean.index_copy_(0, index, first)
    square.index_copy_(0, index, second)
    count = steps[index].double()
    correction = (1 - ADAM_BETAS[1] ** count).sqrt()
    scale = second.sqrt_().div_(correction.to(gradient.dtype)).add_(ADAM_EPSILON)
    return first.div_(scale).div_((1 - ADAM_BETAS[0] ** count).to(gradient.dtype))


def _flat(tensor: Tensor, depth: int) -> Tensor:
    """View [N, ...] as [N, rest], or [N, L, ...] as [N L, rest] with depth 2."""
    return tensor.view(tensor.shape[:depth].numel(), -1)


def initial_moments(state: Tensors, optimiser: Optimiser) -> Tensors:
    """Return the optimiser's state for hypernetworks [N, ...]; empty for plain SGD."""
    if optimiser == "sgd":
        return {}
    moments = {
        f"{name}.{kind}": torch.zeros_like(t) for name, t in state.items() for kind in ("first", "second")
    }
    shapes = {"steps": state["heads.bias"].shape[:1], "heads.steps": state["heads.bias"].shape[:2]}
    return moments | {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
