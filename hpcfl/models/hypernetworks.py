"""Hypernetworks that weigh clients layer by layer: one for each client, all stacked as [N, ...] tensors.

A hypernetwork maps an embedding through a trunk of linear layers with ReLU to one linear head a layer, whose
N outputs weigh the N clients (pFedLA, figure 3). Shapes: N clients, S of a cohort, L layers, E embedding,
H hidden, R rank.

Heads of N outputs are N^2 L H numbers in all. With a rank, the output of client i for layer l and client j is

    <U_{i,l} h_i, v_{l,j}> + s_{i,l} [i = j]

where h_i is the trunk's output, U_{i,l} [R, H] and s_{i,l} are the client's head, and the codes v [L, N, R]
are common to all hypernetworks. Codes learn from the sum of the cohort's gradients, with an optimiser's state
of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adam import adam

from hpcfl.parameters import Tensors, under
from hpcfl.randomness import torch_stream

HeadInit = Literal["zero", "default", "uniform"]
HypernetworkOptimiser = Literal["adam", "sgd", "scaled"]

ADAM_BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8
MOMENT_ORDERS = ("first", "second")
CODES = "codes"
HEADS = ("heads.weight", "heads.bias", CODES)


@dataclass(frozen=True)
class Hypernetworks:
    """The shape of N hypernetworks; their weights live in a state dictionary of [N, ...] tensors."""

    num_clients: int
    num_layers: int
    embedding: int
    hidden: int
    hidden_layers: int
    rank: int | None = None
    """R, or None: heads with an output a client."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of one hypernetwork."""
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.embedding,)}
        inputs = self.embedding
        for number in range(1, self.hidden_layers + 1):
            shapes[f"trunk{number}.weight"] = (self.hidden, inputs)
            shapes[f"trunk{number}.bias"] = (self.hidden,)
            inputs = self.hidden
        outputs, biases = (self.num_clients, self.num_clients) if self.rank is None else (self.rank, 1)
        shapes["heads.weight"] = (self.num_layers, outputs, inputs)
        shapes["heads.bias"] = (self.num_layers, biases)
        return shapes

    @property
    def head_steps(self) -> dict[str, int]:
        """Return how many times longer than the trunk's the steps of heads are, by tensor, in `scaled` steps.

        An output's gradient has the factor 1/N at first. Heads with a rank reach each output through R
        numbers that act on all: a step of R times the gradient is the best approximation with R codes of a
        step of N times it.
        """
        if self.rank is None:
            return {"heads.weight": self.num_clients, "heads.bias": self.num_clients}
        return {"heads.weight": min(self.num_clients, self.rank), "heads.bias": self.num_clients}

    def initial_codes(self, seed: int, head_init: HeadInit) -> Tensors:
        """Draw the codes [1, L, N, R] from N(0, 1/R); empty without a rank.

        With heads of `uniform`, codes are the absolute values, so that all outputs are positive at first.
        """
        if self.rank is None:
            return {}
        codes = torch.empty(1, self.num_layers, self.num_clients, self.rank)
        codes.normal_(0, self.rank**-0.5, generator=torch_stream(seed, "codes"))
        return {CODES: codes.abs_() if head_init == "uniform" else codes}

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

    def outputs(self, state: Tensors, clients: Sequence[int] = ()) -> Tensor:
        """Run the hypernetworks of S clients, tensors [S, ...]: raw outputs [S, L, N].

        With a rank, the state has the codes, too, and the ids of the clients are needed.
        """
        hidden = state["embedding"]
        for number in range(1, self.hidden_layers + 1):
            hidden = _linear(hidden, state[f"trunk{number}.weight"], state[f"trunk{number}.bias"]).relu()
        bias = state["heads.bias"]
        weight = state["heads.weight"]
        if self.rank is None:
            return _linear(hidden, weight.flatten(1, 2), bias.flatten(1)).view_as(bias)
        no_bias = bias.new_zeros(len(bias), self.num_layers * self.rank)
        chosen = _linear(hidden, weight.flatten(1, 2), no_bias).view(-1, self.num_layers, self.rank)
        outputs = torch.bmm(chosen.transpose(0, 1), state[CODES][0].mT).transpose(0, 1)
        own = torch.tensor(list(clients)).view(-1, 1, 1).expand_as(bias)
        return outputs.scatter_add(2, own, bias)


class _Linear(torch.autograd.Function):
    """Linear layers of S networks, each on its own input vector: [S, I], [S, O, I], [S, O] -> [S, O].

    Four times faster than batched products under autograd, which treat the vectors as thin matrices.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return torch.bmm(hidden.unsqueeze(1), weight.mT).squeeze(1).add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (outputs,) = gradients
        hidden, weight = ctx.saved_tensors
        of_hidden = torch.bmm(outputs.unsqueeze(1), weight).squeeze(1)
        return of_hidden, outputs.unsqueeze(2) * hidden.unsqueeze(1), outputs


_linear: Callable[[Tensor, Tensor, Tensor], Tensor] = _Linear.apply


def descend(
    state: Tensors,
    moments: Tensors,
    gradients: Tensors,
    rows: Sequence[int],
    optimiser: HypernetworkOptimiser,
    lr: float,
    frozen: Tensor,
) -> None:
    """Take one step on the hypernetworks of some clients, or on the codes as row 0, in place.

    `state` and `moments` hold [N, ...]; `gradients` [S, ...] belong to `rows`. Heads (or codes) of the layers
    in `frozen`, bool [S, L], do not move, and neither do their moments and step counts.
    """
    names = list(gradients)

    def moving(tensors: Iterable[Tensor], clients: Sequence[int]) -> list[Tensor]:
        views: list[Tensor] = []
        for name, tensor in zip(names, tensors, strict=True):
            for client, kept in zip(clients, frozen.tolist(), strict=True):
                row = tensor[client]
                views += compress(row.unbind(), map(not_, kept)) if name in HEADS else [row]
        return views

    values = moving((state[name] for name in names), rows)
    if not values:
        return
    slopes = moving(gradients.values(), range(len(rows)))
    if optimiser != "adam":
        torch._foreach_add_(values, slopes, alpha=-lr)
        return
    first, second = (moving((moments[f"{name}.{kind}"] for name in names), rows) for kind in MOMENT_ORDERS)
    steps = moving((moments["heads.steps" if name in HEADS else "steps"].float() for name in names), rows)
    adam(
        values,
        slopes,
        first,
        second,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=ADAM_BETAS[0],
        beta2=ADAM_BETAS[1],
        lr=lr,
        weight_decay=0.0,
        eps=ADAM_EPSILON,
        maximize=False,
    )
    clients = torch.as_tensor(rows)
    moments["steps"][clients] += 1
    moments["heads.steps"][clients] += ~frozen


def initial_moments(state: Tensors, optimiser: HypernetworkOptimiser) -> Tensors:
    """Return the optimiser's state for hypernetworks [N, ...], or for codes; empty for plain steps."""
    heads = next((state[name] for name in HEADS if name in state), None)
    if optimiser != "adam" or heads is None:
        return {}
    moments = {f"{name}.{kind}": torch.zeros_like(t) for name, t in state.items() for kind in MOMENT_ORDERS}
    shapes = {"steps": heads.shape[:1], "heads.steps": heads.shape[:2]}
    return moments | {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}


PLACES = (("hypernetworks/", "optimiser/"), ("common/", "common_optimiser/"))
"""Prefixes in the server's state of tensors and of their moments: of those with one row per client, and of
common ones."""


@dataclass(frozen=True)
class HypernetworkState:
    """Outputs and steps of the hypernetworks in the server's state."""

    shape: Hypernetworks
    optimiser: HypernetworkOptimiser
    lr: float

    def initial(self, seed: int, head_init: HeadInit) -> Tensors:
        """Return the part of the server's state at the start."""
        state: Tensors = {}
        drawn = self.shape.initial(seed, head_init), self.shape.initial_codes(seed, head_init)
        for (place, place_of_moments), tensors in zip(PLACES, drawn, strict=True):
            moments = initial_moments(tensors, self.optimiser)
            state |= {place + name: tensor for name, tensor in tensors.items()}
            state |= {place_of_moments + name: tensor for name, tensor in moments.items()}
        return state

    def outputs(self, server: Tensors, clients: Sequence[int]) -> Tensor:
        """Return the outputs [S, L, N] of some clients' hypernetworks."""
        return self.shape.outputs(self._rows(server, clients), clients)

    def outputs_to_differentiate(self, server: Tensors, clients: Sequence[int]) -> tuple[Tensor, Tensors]:
        """Return the outputs [S, L, N] and the leaves that `step` differentiates."""
        leaves = {name: rows.detach().requires_grad_() for name, rows in self._rows(server, clients).items()}
        return self.shape.outputs(leaves, clients), leaves

    def step(
        self, server: Tensors, clients: Sequence[int], objective: Tensor, leaves: Tensors, frozen: Tensor
    ) -> None:
        """Descend on an objective of the leaves; heads of frozen layers, bool [S, L], stay as they are."""
        gradients = torch.autograd.grad(objective, list(leaves.values()))
        slopes = dict(zip(leaves, gradients, strict=True))
        if self.optimiser == "scaled":
            slopes |= {name: slopes[name] * times for name, times in self.shape.head_steps.items()}
        moved = (clients, frozen), ([0], frozen.all(dim=0, keepdim=True))
        for (place, place_of_moments), (rows, frozen_rows) in zip(PLACES, moved, strict=True):
            state, moments = under(server, place), under(server, place_of_moments)
            of_place = {name: slopes[name] for name in state}
            descend(state, moments, of_place, rows, self.optimiser, self.lr, frozen_rows)

    def _rows(self, server: Tensors, clients: Sequence[int]) -> Tensors:
        """Return copies of some clients' own rows [S, ...], and the common tensors."""
        index = torch.tensor(list(clients))
        own, common = (under(server, place) for place, _ in PLACES)
        return {name: rows.index_select(0, index) for name, rows in own.items()} | common
