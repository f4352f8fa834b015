"""What a method may know of a run.

Shapes: N clients in training, U others, C some clients, P trainable numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property

from torch import Tensor

from hpcfl.config.keys import ClientsConfig, PrivacyConfig, ServerConfig, TrainConfig
from hpcfl.config.own_code import is_own
from hpcfl.models import Network, NetworkOptions, build_network, check_network
from hpcfl.parameters import ParameterLayout
from hpcfl.samples import SampleType


class Context:
    """The properties of the run that a method may use: sizes, seed, training settings and initial weights."""

    def __init__(
        self,
        model: str,
        model_options: NetworkOptions,
        sample: SampleType,
        num_classes: int,
        num_samples: Tensor,
        *,
        train: TrainConfig,
        seed: int,
        num_samples_of_unseen: Tensor | None = None,
        server: ServerConfig | None = None,
        privacy: PrivacyConfig | None = None,
        clients: ClientsConfig | None = None,
    ) -> None:
        self.num_samples = num_samples
        """Training samples of each client, int64 [N]."""
        none = num_samples.new_empty(0)
        self.num_samples_of_unseen = none if num_samples_of_unseen is None else num_samples_of_unseen
        """Training samples of each client that takes no part in training, int64 [U]."""
        self.num_clients = len(num_samples)
        """Clients that take part in training, N; their ids are 0 to N - 1."""
        self.num_classes = num_classes
        self.sample = sample
        self.train = train
        self.server = server or ServerConfig()
        self.privacy = privacy or PrivacyConfig()
        self.clients = clients or ClientsConfig()
        self.seed = seed
        self.model_name = model
        self.build_network: Callable[[int], Network] = lambda draw: build_network(
            model, sample, num_classes, model_options, seed, draw
        )
        """Builds the model with the initial weights of a draw: a client's id, or -1 for the common draw."""
        self.network = self.build_network(-1)
        if is_own("model.path", model):
            check_network(model, self.network, sample, num_classes)
        self.weights_are_given = getattr(model_options, "weights", None) is not None
        """Whether a file holds the initial weights, so that all draws are alike."""
        self.layout = ParameterLayout(self.network)
        self._theta, _ = self.layout.flatten(self.network)

    def forget_numbers(self) -> None:
        """Replace the initial weights by their shapes, on torch's meta device."""
        self.network.to("meta")
        self._theta = self._theta.to("meta")

    @cached_property
    def fewest_samples(self) -> int:
        """Fewest samples of a mini-batch: 2 if a BatchNorm layer cannot compute statistics of one, else 1."""
        network = copy.deepcopy(self.network).train()
        try:
            network(self.sample.zeros(1))
        except ValueError:
            return 2
        return 1

    def different_starts(self, count: int) -> Tensor:
        """Return `count` initial models [count, P]: the common one first, then independent draws."""
        return self.initial_parameters(range(-1, -1 - count, -1), own=True)

    def initial_parameters(self, clients: Sequence[int] | None = None, own: bool = False) -> Tensor:
        """Return the initial weights: [P], or [C, P] for some clients, common to all unless `own`."""
        if clients is None:
            return self._theta.clone()
        if own:
            rows = self._theta.new_empty(len(clients), self.layout.size)
            for row, client in zip(rows, clients, strict=True):
                row.copy_(self.layout.flatten(self.build_network(client))[0])
            return rows
        return self._theta.expand(len(clients), -1).clone()
