"""What a run is configured by: the keys under `data.*` and `run.*`, and all of them together."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from hpcfl.communication.settings import CommConfig
from hpcfl.config.choices import CHOICES
from hpcfl.config.trees import flatten
from hpcfl.data.partition_request import PartitionOptions
from hpcfl.errors import UserError
from hpcfl.methods import Params
from hpcfl.models import NetworkOptions
from hpcfl.settings import Settings
from hpcfl.training.settings import TrainConfig

ENVIRONMENT = "environment"
"""Group of a run folder's config.yaml that records how and where it was run; ignored as configuration."""

GROUPS = ("method", "data", "model", "train", "comm", "run")


class DataConfig(Settings):
    """The keys under `data.*`, without the partition's."""

    source: str = "digits"
    """Where samples come from; see `hpcfl list`."""
    root: str = "data"
    """Folder of downloaded data sets; changes no result."""
    path: str | None = None
    """File of source `npz`; folder of sources `femnist` and `pfllib`."""
    layout: Literal["NHWC", "NCHW"] | None = None
    """Axis order of source `npz`; other sources know theirs."""
    split: str = "mnist"
    """Split of source `emnist`, such as letters or byclass."""
    clients: int | None = Field(None, ge=1)
    """Number of clients N; default: 10, or with partition `given` all that the source has."""
    per_client: int | None = Field(None, ge=2)
    """Samples a client, all splits together; default: the most that is equal for all."""
    test_fraction: float = Field(0.3, gt=0, lt=1)
    """Share of a client's samples for testing."""
    val_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of a client's training samples cut off for validation."""
    subset_per_class: int | None = Field(None, ge=1)
    """Use a seeded, class-balanced subset of the source."""
    subset_fraction: float | None = Field(None, gt=0, le=1)
    """Use a seeded share of the source, drawn whatever the classes, so that their shares stay as they are."""
    normalise: str | list[list[float]] = "auto"
    """`auto` (the source's constants), `none`, `half`, a source's name, or [[means], [deviations]]."""
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    """Seed of subset, partition and unseen clients; default: run.seed."""
    unseen_clients: float | None = Field(None, ge=0, lt=1)
    """Share of the N clients, drawn at random, that take no part in training: max(1, floor(share N + 0.5)) of
    them, of whom one stays at least. They get the last ids. At every evaluation they adapt as clients of that
    moment that are new (`train.unseen_epochs`) and are scored apart. Default, or 0: there are none."""

    @field_validator("unseen_clients")
    @classmethod
    def _none_is_null(cls, share: float | None) -> float | None:
        return share or None

    def num_unseen(self, num_clients: int) -> int:
        """Return how many of N clients take no part in training; UserError where none would be left."""
        if not self.unseen_clients:
            return 0
        if num_clients == 1:
            raise UserError(
                f"data.unseen_clients={self.unseen_clients:g} leaves none of 1 client to train; set "
                "data.clients=2 or more, or data.unseen_clients=0"
            )
        return min(num_clients - 1, max(1, math.floor(self.unseen_clients * num_clients + 0.5)))


class RunConfig(Settings):
    """The keys under `run.*`."""

    seed: int = Field(0, ge=0, le=2**63 - 1)
    """Seed of everything random."""
    eval_every: int = Field(1, ge=1)
    """Rounds between evaluations; the last round always has one. Changes no training result."""
    eval_split: Literal["test", "val"] = "test"
    """What evaluations score: choose hyper-parameters on val, report on test."""
    checkpoint_every: int = Field(10, ge=1)
    """Rounds between checkpoints; the last round always has one. Changes no result."""
    engine: Literal["auto", "loop", "batched"] = "auto"
    """Local training client by client, or many clients as one computation; auto: batched on CUDA."""
    clients_at_once: int | None = Field(None, ge=1)
    """Clients in one computation of the batched engine; default: 32, or on CUDA as many as its free memory
    holds. Another number gives other last bits; config.yaml names the one taken on CUDA."""
    placement: Literal["balanced", "home"] = "balanced"
    """Which worker trains a client of a round. home: the one that keeps it. balanced: members of a cohort
    visit less busy workers, with their samples and state, where clients train one at a time. Changes no
    result."""
    on_divergence: Literal["stop", "skip", "continue"] = "stop"
    """What happens when a client's training loss, or a number that it sends or keeps, is nan or infinite.
    stop: the run ends with exit code 3, and its newest checkpoint stays; so it does where the loss of a model
    that is scored is nan. skip: the client's round is undone and left out, as if the client had not been in
    the cohort; the run still stops where the server's own numbers are nan or infinite. continue: these
    numbers go where they go. A run may go on with another value."""
    threads: int = Field(1, ge=1)
    """CPU threads a rank; another number gives other bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where workers train; auto: a GPU if there is one."""
    state: Literal["auto", "device", "host"] = "auto"
    """Where a worker with a GPU keeps its clients' state. device: on the GPU for the whole run. host: on the
    CPU, and each group of clients brings its own to the GPU and back in every round. auto: on the GPU if it
    takes at most a quarter of this worker's share of the memory that is free there when the run begins. What
    a codec keeps, and the models of `method.server=sharded`, stay on the CPU. No effect on a CPU; changes no
    result."""
    convolutions: Literal["grouped", "unfold"] = "grouped"
    """How the batched engine convolves with each client's own weights: one grouped convolution, or unfolded
    images and batched products. The two differ in the last bits."""
    tf32: bool = False
    """Whether a GPU rounds the factors of float32 products to 10 bits, which is faster; a CPU does not."""
    max_elements: int = Field(2**27, ge=1, lt=2**28)
    """Numbers in one block of a message; changes no result."""
    timeout: float | None = Field(3600.0, ge=1)
    """Seconds without a heartbeat of another rank after which a rank that waits ends the run; the last
    checkpoint stays. A rank is heard of while it waits, and after each group of clients that it trains or
    scores. Keep it longer than the longest such piece of work, and than writing and verifying a checkpoint
    takes; null: wait for ever. Changes no result."""
    report: bool = True
    """Whether a run ends by writing report.html, a page of what it gave; changes no result."""
    tensorboard: bool = False
    """Whether the run folder has a file for TensorBoard: the columns of metrics.csv and the distribution of
    the clients' accuracy, by round. Needs the package tensorboardX; changes no result."""


RESULT_NEUTRAL = (
    "data.root",
    "data.partition.path",
    "data.reader",
    "method.path",
    "model.path",
    "run.checkpoint_every",
    "run.max_elements",
    "run.on_divergence",
    "run.placement",
    "run.report",
    "run.state",
    "run.tensorboard",
    "run.timeout",
)
"""Keys that may differ between a run folder and the command that resumes it."""


@dataclass(frozen=True)
class Config:
    """A validated configuration."""

    method: str
    params: Params
    data: DataConfig
    partition: str
    partition_options: PartitionOptions
    model: str
    model_options: NetworkOptions
    train: TrainConfig
    comm: CommConfig
    run: RunConfig
    own: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The user's own files by group (`method`, `data`, `data.partition`, `model`): `path` (`reader` for a
    source), and `code`, a digest of the file; runs with another digest are other runs."""

    @property
    def data_seed(self) -> int:
        return self.run.seed if self.data.seed is None else self.data.seed

    def tree(self) -> dict[str, Any]:
        """Return the configuration as it stands in YAML, every default written out."""
        own = {group: self.own.get(group, {}) for group in (*CHOICES, "data")}
        options = self.partition_options.model_dump()
        partition = {"name": self.partition, **own["data.partition"], **options}
        return {
            "method": {"name": self.method, **own["method"], **self.params.model_dump()},
            "data": {**self.data.model_dump(), **own["data"], "partition": partition},
            "model": {"name": self.model, **own["model"], **self.model_options.model_dump()},
            "train": self.train.model_dump(),
            "comm": self.comm.model_dump(),
            "run": self.run.model_dump(),
        }

    def yaml(self) -> str:
        return yaml.safe_dump(self.tree(), sort_keys=False)

    def result_keys(self) -> dict[str, Any]:
        """Return the keys that change results, flat, with their values."""
        return {key: value for key, value in flatten(self.tree()).items() if key not in RESULT_NEUTRAL}

    def short_hash(self) -> str:
        """Return 8 hexadecimal digits over all keys that change results, `train.rounds` left out.

        Keys that are null do not count, so that a name stays when there are more of them.
        """
        keys = {k: v for k, v in self.result_keys().items() if v is not None and k != "train.rounds"}
        return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:8]

    def run_name(self) -> str:
        return f"{self.method}-{self.data.source}-s{self.run.seed}-{self.short_hash()}"
