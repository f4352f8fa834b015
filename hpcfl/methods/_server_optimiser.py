"""The server's step along the mean of its clients, for every method whose server averages.

FedAvgM: Hsu, Qi, Brown, Measuring the effects of non-identical data distribution for federated visual
classification, 2019. The others: Reddi et al., Adaptive federated optimization, ICLR 2021, Algorithm 2.

    Delta    = what the method's own server step would add to x: with FedAvg sum_i n_i (x_i - x) / n
    momentum   m <- beta1 m + Delta,                     x <- x + lr m
    others     m <- beta1 m + (1 - beta1) Delta,         x <- x + lr m / (sqrt(v) + tau)
      adagrad  v <- v + Delta^2
      adam     v <- beta2 v + (1 - beta2) Delta^2
      yogi     v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)

m_0 = 0 and v_0 = tau^2; there is no bias correction, as the algorithm is printed. All operations are element
by element, so the bits do not depend on ranks.

Choices:
  what moves   the tensors that the method's `Traits.averages` name; running statistics of BatchNorm are
               averaged as before
  idle layers  a layer that no client of the round sent, such as a module of FedMN or the model of an empty
               cluster of IFCA, has a Delta of 0: it stays, with its m and v. (FedMN's printed sum,
               `method.aggregation=sum`, gives such a module a mean of 0, and so a Delta of -x.) A layer
               that comes back unchanged stays, too, as from the only client of a round with `fedlc` if it
               has one class; in the papers it moves by its m
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcfl.config.keys import ServerConfig
from hpcfl.parameters import Layer, Tensors

FIRST, SECOND = "server_m/", "server_v/"
"""Where the server's state has m and v of each tensor."""


class ServerOptimiser:
    """One optimiser of the server, whose moments are in the server's state."""

    def __init__(self, settings: ServerConfig, names: Sequence[str], layers: Sequence[Layer]) -> None:
        self._optimiser, self._constants, self._layers = settings.optimiser, settings.in_use(), layers
        self.names = () if settings.optimiser is None else tuple(names)
        """Tensors of the server's state that it moves; none without an optimiser."""

    def initial(self, server: Tensors) -> Tensors:
        """Return m and v at the start, as a part of the server's state."""
        moments = {}
        for name in self.names:
            if name in server:
                moments[FIRST + name] = torch.zeros_like(server[name])
                if self._has_second:
                    moments[SECOND + name] = torch.full_like(server[name], self._constants["tau"] ** 2)
        return moments

    def before(self, server: Tensors, sent: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        """Let the method average from tensors as they were `sent`: a codec's rounding is no client's change.

        Returns x and what was sent in its place, of each tensor that the method is about to average.
        """
        before = {}
        for name in self.names:
            if name in server:
                x = server[name]
                before[name] = x, sent.get(name, x)
                # a copy, since some methods average in place
                server[name] = before[name][1].clone()
        return before

    def step(self, server: Tensors, before: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Replace the method's own step, from what was sent to the state as it is now, by the optimiser's."""
        for name, (x, start) in before.items():
            delta = server[name] - start
            moves = self._moves(delta)
            m = server[FIRST + name].where(~moves, self._first(server[FIRST + name], delta))
            step = m
            if self._has_second:
                v = server[SECOND + name].where(~moves, self._second(server[SECOND + name], delta))
                server[SECOND + name] = v
                step = m / (v.sqrt() + self._constants["tau"])
            server[FIRST + name] = m
            server[name] = x.where(~moves, x + self._constants["lr"] * step)

    @property
    def _has_second(self) -> bool:
        return self._optimiser != "momentum"

    def _first(self, m: Tensor, delta: Tensor) -> Tensor:
        beta1 = self._constants["beta1"]
        return beta1 * m + ((1 - beta1) * delta if self._has_second else delta)

    def _second(self, v: Tensor, delta: Tensor) -> Tensor:
        square = delta.square()
        if self._optimiser == "adagrad":
            return v + square
        beta2 = self._constants["beta2"]
        if self._optimiser == "adam":
            return beta2 * v + (1 - beta2) * square
        return v - (1 - beta2) * square * (v - square).sign()

    def _moves(self, delta: Tensor) -> Tensor:
        """Return which numbers of Delta [..., P] are in layers that some client sent."""
        moves = torch.zeros_like(delta, dtype=torch.bool)
        is_model = delta.shape[-1] == self._layers[-1].stop
        for part in [slice(layer.start, layer.stop) for layer in self._layers] if is_model else [slice(None)]:
            moves[..., part] = (delta[..., part] != 0).any(dim=-1, keepdim=True)
        return moves
