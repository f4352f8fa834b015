"""How much each client trains in a round: local epochs and the size of its mini-batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcfl.config.keys import ClientsConfig, TrainConfig
from hpcfl.randomness import uniform
from hpcfl.training.batches import minibatches


@dataclass(frozen=True)
class Work:
    """The settings of a run that say so; draws depend on seed, round and client only."""

    train: TrainConfig
    seed: int = 0
    clients: ClientsConfig = field(default_factory=ClientsConfig)

    def local_epochs(self, round: int, client: int) -> int:
        """Return a client's local epochs in a round."""
        if self.clients.local_epochs is None:
            return self.train.local_epochs
        least, most = self.clients.local_epochs
        return least + int((most - least + 1) * uniform(self.seed, "local epochs", round, client))

    def minibatches(self, client: int, num_samples: int) -> list[tuple[int, int]]:
        """Divide an epoch of a client on this many samples into (start, stop)."""
        return minibatches(num_samples, self.batch_size(client), self.train.last_batch)

    def sampling_rate(self, client: int, num_samples: int) -> float:
        """Return the probability with which a mini-batch of `privacy.unit=sample` has each sample.

        An epoch has as many mini-batches as without privacy, and each sample is in one of them in the mean.
        """
        return 1 / max(1, len(self.minibatches(client, num_samples)))

    def batch_size(self, client: int) -> int:
        """Return the largest number of samples in a client's mini-batches."""
        sizes = self.clients.batch_size or [self.train.batch_size]
        return sizes[int(len(sizes) * uniform(self.seed, "batch size", client=client))]
