"""A hypernetwork that generates models: one for all clients, fed with an embedding of each.

An embedding goes through a trunk of linear layers with ReLU between them to one linear head, whose outputs
are the numbers of a model (pFedHN, section 3; its authors have a head for each tensor, which is the same
map). Shapes: N clients, S of a cohort, E embedding, H hidden, P numbers generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from hpcfl.parameters import Tensors
from hpcfl.randomness import draw_linear, torch_stream

EMBEDDING, HEAD = "embedding", "head"
HEAD_WEIGHT = f"{HEAD}.weight"


@dataclass(frozen=True)
class Gradients:
    """Derivatives of a generator for S clients.

    That of the head's weight is the product slopes^T features [P, H], as large as a hundred models, and is
    not formed.
    """

    others: Tensors
    """All but the head's weight, by name; that of the embeddings has the S clients' rows only, [S, E]."""
    slopes: Tensor
    """[S, P]"""
    features: Tensor
    """Input of the head, [S, H]."""

    def norm(self) -> Tensor:
        """Return the length of all derivatives together."""
        # ||sum_s d_s f_s^T||^2 = sum_st <d_s, d_t> <f_s, f_t>
        of_head = (
            ((self.slopes @ self.slopes.T) * (self.features @ self.features.T)).sum().clamp(min=0).sqrt()
        )
        return torch.stack([of_head, *(gradient.norm() for gradient in self.others.values())]).norm()


@dataclass(frozen=True)
class Generator:
    """The shape of a generator; its weights live in a state dictionary."""

    num_clients: int
    outputs: int
    embedding: int
    hidden: int
    hidden_layers: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.num_clients, self.embedding)}
        inputs = self.embedding
        for name in [*self._trunk(), HEAD]:
            outputs = self.outputs if name == HEAD else self.hidden
            shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)
            inputs = outputs
        return shapes

    def initial(self, seed: int, start: Tensor | None = None) -> Tensors:
        """Draw embeddings from N(0, 1) and linear layers from U(-1, 1) / sqrt(inputs), as PyTorch does.

        With `start` [P] the head's weights are zero and its bias is `start`: every model starts there.
        """
        stream = torch_stream(seed, "generator")
        state, inputs = {}, 0
        for name, shape in self.shapes().items():
            if name == EMBEDDING:
                state[name] = torch.empty(shape).normal_(generator=stream)
                continue
            inputs = shape[1] if name.endswith("weight") else inputs
            state[name] = draw_linear(shape, inputs, stream)
        if start is not None:
            state[HEAD_WEIGHT].zero_()
            state[f"{HEAD}.bias"].copy_(start)
        return state

    def generate(self, state: Tensors, clients: Sequence[int]) -> Tensor:
        """Return the models [S, P] of some clients."""
        features = self._features(state, state[EMBEDDING][list(clients)])
        return linear(features, state[HEAD_WEIGHT], state[f"{HEAD}.bias"])

    def gradients(self, state: Tensors, clients: Sequence[int], slopes: Tensor) -> Gradients:
        """Return the derivative of the sum of <models, slopes> over some clients, slopes [S, P]."""
        leaves = {
            name: tensor.detach().requires_grad_()
            for name, tensor in state.items()
            if name.startswith("trunk")
        }
        leaves[EMBEDDING] = state[EMBEDDING][list(clients)].requires_grad_()
        features = self._features(leaves, leaves[EMBEDDING])
        found = torch.autograd.grad(features, list(leaves.values()), slopes @ state[HEAD_WEIGHT])
        others = dict(zip(leaves, found, strict=True)) | {f"{HEAD}.bias": slopes.sum(dim=0)}
        return Gradients(others, slopes, features.detach())

    def _features(self, state: Tensors, embeddings: Tensor) -> Tensor:
        """Return the input of the head, [S, H]."""
        features = embeddings
        for number, name in enumerate(self._trunk()):
            features = features.relu() if number else features
            features = linear(features, state[f"{name}.weight"], state[f"{name}.bias"])
        return features

    def _trunk(self) -> list[str]:
        return [f"trunk{number}" for number in range(1, self.hidden_layers + 2)]
