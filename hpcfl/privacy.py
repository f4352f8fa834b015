"""Differential privacy of a client's presence, and the epsilon of a run.

`privacy.unit=client` is DP-FedAvg (McMahan et al., Learning differentially private recurrent language models,
ICLR 2018, Algorithm 1, flat clipping and the estimator with a fixed denominator). With N clients,
participation p, clip S, noise multiplier z, and the model w that all clients receive:

    C        <- each client with probability p, independently
    Delta_i  <- (theta_i - w) min(1, S / ||theta_i - w||)       what client i sends, w + Delta_i
    w        <- w + sum_{i in C} Delta_i / (p N) + N(0, (z S / (p N))^2)

`privacy.unit=sample` is DP-SGD: `hpcfl.training.private_gradients`.

Epsilon is that of adding or removing one client (or one sample), by the Renyi accountant of Google's library
dp-accounting (Mironov et al., Renyi differential privacy of the sampled Gaussian mechanism, 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.config.keys import PrivacyConfig
from hpcfl.errors import UserError, one_line
from hpcfl.parameters import Layer, Tensors, columns
from hpcfl.randomness import torch_stream

ORDERS = range(2, 257)
"""Renyi orders that are tried; whole ones, for which the divergence is a finite sum."""


def drawn_clients(num_clients: int, share: float, seed: int, round: int) -> list[int]:
    """Return the ids of a round's clients, each drawn with probability `share`; there may be none."""
    if share == 1:
        return list(range(num_clients))
    stream = torch_stream(seed, "private cohort", round)
    drawn = torch.rand(num_clients, generator=stream, dtype=torch.float64) < share
    return drawn.nonzero().squeeze(1).tolist()


class PrivateUploads:
    """Clips what clients send, and adds noise to the average; does nothing unless `privacy.unit` is client.

    `names` are the tensors that the server averages. Noise is a function of (seed, round, tensor), so that a
    resumed run has the same.
    """

    def __init__(
        self,
        settings: PrivacyConfig,
        names: Sequence[str],
        layers: Sequence[Layer],
        num_clients: int,
        share: float,
        seed: int,
    ) -> None:
        self.is_on = settings.unit == "client"
        self._clip, self._noise = settings.clip or 0.0, settings.noise or 0.0
        self._names, self._layers = tuple(names), tuple(layers)
        self._num_clients, self._share, self._seed = num_clients, share, seed

    def clipped(self, down: Message, up: Message) -> Message:
        """Return a group's upload with its updates shortened, all tensors of a client together."""
        if not self.is_on:
            return up
        unprotected = [name for name in up.per_client if name not in self._names]
        if unprotected:
            raise TypeError(
                f"clients send {', '.join(unprotected)}, which privacy.unit=client does not protect: "
                "Traits.averages must name all that they send, or privacy_units must not name client"
            )
        updates = {}
        for name in self._names:
            if name not in up.per_client:
                continue
            updates[name] = up.per_client[name] - down[name]
            mask = up.layer_mask.get(name)
            if mask is not None:
                updates[name] = updates[name] * columns(self._layers, mask).to(updates[name].device)
        norms = torch.stack([update.flatten(1).norm(dim=1) for update in updates.values()]).norm(dim=0)
        factors = (self._clip / norms).clamp(max=1.0)
        sent = {name: down[name] + factors.unsqueeze(1) * update for name, update in updates.items()}
        return up | Message(per_client=sent, num_clients=up.num_clients)

    def with_equal_weights(self, cohort: Cohort) -> Cohort:
        """Return the cohort as the average sees it: with privacy, all clients have the same weight."""
        if not self.is_on:
            return cohort
        return Cohort(cohort.round, cohort.clients, torch.ones_like(cohort.num_samples), cohort.workers)

    def before(self, server: Tensors, up: Upload) -> Tensors:
        """Return copies of what is about to be averaged; TypeError if a cohort's upload has more."""
        if not self.is_on:
            return {}
        if unprotected := [name for name in up.outline.per_client if name not in server]:
            raise TypeError(
                f"clients send {', '.join(unprotected)}, which would get no noise with privacy.unit=client: "
                "the server's state must have a tensor of that name, their mean"
            )
        return {name: server[name].clone() for name in self._names if name in server}

    def step(self, server: Tensors, before: Tensors, cohort: Cohort, masks: dict[str, Tensor]) -> None:
        """Replace the step from `before` to the mean over a cohort, which may be empty, by the private one.

        `masks` are the layers that travel, bool [L] by tensor; without one, all.
        """
        expected = self._share * self._num_clients
        for name, w in before.items():
            stream = torch_stream(self._seed, f"private mean/{name}", cohort.round)
            noise = torch.randn(w.shape, generator=stream, dtype=w.dtype) * (
                self._noise * self._clip / expected
            )
            step = (server[name] - w) * (len(cohort) / expected) + noise
            if name in masks:
                step = step * columns(self._layers, masks[name])
            server[name] = w + step


def epsilon_after(privacy: PrivacyConfig, share: float, times: int) -> float:
    """Return epsilon after this many noised sums, each over a random `share`; UserError without the extra.

    With `privacy.unit=client` these are rounds, and the participation.
    """
    divergences = times * _divergences(privacy.noise, share)
    return float(accounting_library().rdp.compute_epsilon(ORDERS, divergences, privacy.delta_in_use)[0])


def epsilon_of_samples(privacy: PrivacyConfig, shares: Sequence[float], steps: Sequence[int]) -> float:
    """Return the largest epsilon of all clients; UserError without the extra.

    Each of them has done `steps` training steps on mini-batches that have each sample with probability
    `shares`.
    """
    worst, most = 0.0, 0
    # epsilon grows with both: from the largest share on, only more steps can be worse
    for share, count in sorted(set(zip(shares, steps, strict=True)), reverse=True):
        if count > most:
            most, worst = count, max(worst, epsilon_after(privacy, share, count))
    return worst


@cache
def _divergences(noise: float, share: float) -> Any:
    """Return the Renyi divergences of one noised sum [ORDERS]: a tenth of a second for each new share."""
    library = accounting_library()
    mechanism = library.GaussianDpEvent(noise)
    event = mechanism if share == 1 else library.PoissonSampledDpEvent(share, mechanism)
    return library.rdp.RdpAccountant(ORDERS).compose(event).rdp


def accounting_library() -> Any:
    """Return the package dp-accounting; UserError if it is not installed."""
    try:
        import dp_accounting.rdp
    except ImportError as error:
        raise UserError(
            f"privacy.unit needs the package dp-accounting ({one_line(error)}); install it with: "
            'pip install -e ".[privacy]"'
        ) from error
    return dp_accounting
