"""How much each client trains in a round: local epochs and the size of its mini-batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcfl.config.keys import ClientsConfig, TrainConfig
from hpcfl.randomness import uniform


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

    def batch_size(self, client: int) -> int:
        """Return the largest number of samples in a client's mini-batches."""
        sizes = self.clients.batch_size or [self.train.batch_size]
        return sizes[int(len(sizes) * uniform(self.seed, "batch size", client=client))]
