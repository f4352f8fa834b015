"""What a checkpoint holds, as it is handed over to be written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hpcfl.parameters import Slot
from hpcfl.samples import SampleType

Block = tuple[np.ndarray, Mapping[str, torch.Tensor]]
"""The ids of some clients, int64 [n] and strictly increasing, and by name their rows [n, ...]."""


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """The data of a run: a network's input is (sample / scale - mean) / std of samples as they are stored, or
    the tokens as they are."""

    sample: SampleType
    dtype: str
    """How the source stores samples: "uint8", "float32" or, tokens, "int64"."""
    scale: float
    mean: tuple[float, ...]
    """One number per channel or feature, as `std`; none for tokens."""
    std: tuple[float, ...]
    num_classes: int
    num_samples: tuple[int, ...]
    """Training samples of each client [N]."""
    digest: int = 0
    """Checksum of all data; 0 where it is not known."""
    partition_digest: int = 0
    """Checksum of how clients' samples are divided; 0 where it is not known."""


@dataclass(frozen=True)
class Rows:
    """Named datasets with a leading client axis, and the blocks that bring their rows.

    A block may bring any of the names; all blocks together, in any order, bring each row of each name exactly
    once. A dataset that all clients share has one row, with id 0.
    """

    shapes: Mapping[str, torch.Tensor]
    """Shape and type of each dataset, as a tensor without numbers (`device="meta"`)."""
    blocks: Iterable[Block]


@dataclass(frozen=True)
class LedgerTable:
    """Numbers [rows, columns] and the names of the columns."""

    values: np.ndarray
    columns: Sequence[str]

    def column(self, name: str) -> np.ndarray:
        """Return a column by its name [rows]."""
        found: np.ndarray = self.values[:, list(self.columns).index(name)]
        return found


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that a checkpoint holds. Names with '/' become HDF5 groups.

    `derived` is written beside the server's state for readers of the file and is not loaded again.
    `models` are the evaluated models by group: "personalised" and, where there are clients that take no part
    in training, "unseen", whose models are adapted and in the order of their ids; only the last checkpoint
    has them. The writer calls each of them after it has written all blocks of `clients` and of those before
    it, then `history` and `ledger`.
    """

    method: str
    round: int
    """Completed rounds."""
    config: str
    """The configuration as YAML."""
    layout: tuple[tuple[Slot, ...], tuple[Slot, ...]]
    """The model's `ParameterLayout.slots`."""
    data: DataRecord
    server: Mapping[str, torch.Tensor]
    derived: Mapping[str, torch.Tensor]
    clients: Rows
    history: Callable[[], Mapping[str, np.ndarray]]
    ledger: Callable[[], Mapping[str, LedgerTable]]
    models: Mapping[str, Callable[[], Rows]] = field(default_factory=dict)
