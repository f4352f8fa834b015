"""A hypernetwork that generates models: one for all clients, fed with an embedding of each.

An embedding goes through a trunk of linear layers with ReLU between them to one linear head, whose outputs
are the numbers of a model (pFedHN, section 3; its authors have a head for each tensor, which is the same
map). Shapes: N clients, S of a cohort, E embedding, H hidden, P numbers generated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from hpcfl.parameters import Tensors
from hpcfl.randomness import draw_linear, torch_stream

EMBEDDING, HEAD = "embedding", "head"


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

    @property
    def size(self) -> int:
        """Numbers in the generator, embeddings included."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def initial(self, seed: int, start: Tensor | None = None) -> Tensors:
        """Draw embeddings from N(0, 1) and linear layers from U(-1, 1) / sqrt(inputs), as PyTorch does.

        With `start` [P] the head's weights are zero and its bias is `start`: every model begins there.
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
            state[f"{HEAD}.weight"].zero_()
            state[f"{HEAD}.bias"].copy_(start)
        return state

    def generate(self, state: Tensors, clients: Sequence[int]) -> Tensor:
        """Return the models [S, P] of some clients."""
        return self._from_embeddings(state, state[EMBEDDING][list(clients)])

    def gradients(self, state: Tensors, clients: Sequence[int], slopes: Tensor) -> Tensors:
        """Return the derivative of the sum of <models, slopes> over some clients, slopes [S, P].

        That of the embeddings has the clients' rows only, [S, E].
        """
        leaves = {
            name: tensor.detach().requires_grad_() for name, tensor in state.items() if name != EMBEDDING
        }
        leaves[EMBEDDING] = state[EMBEDDING][list(clients)].requires_grad_()
        models = self._from_embeddings(leaves, leaves[EMBEDDING])
        return dict(zip(leaves, torch.autograd.grad(models, list(leaves.values()), slopes), strict=True))

    def _from_embeddings(self, state: Tensors, embeddings: Tensor) -> Tensor:
        features = embeddings
        for number, name in enumerate(self._trunk()):
            features = features.relu() if number else features
            features = linear(features, state[f"{name}.weight"], state[f"{name}.bias"])
        return linear(features, state[f"{HEAD}.weight"], state[f"{HEAD}.bias"])

    def _trunk(self) -> list[str]:
        return [f"trunk{number}" for number in range(1, self.hidden_layers + 2)]
