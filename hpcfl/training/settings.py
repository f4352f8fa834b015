"""The keys under `train.*`."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from hpcfl.settings import Settings

BufferPolicy = Literal["local", "average", "mixed"]
Precision = Literal["float32", "bfloat16"]
LastBatch = Literal["even", "drop", "keep"]


class TrainConfig(Settings):
    """The keys under `train.*`: how long and how clients train."""

    rounds: int = Field(30, ge=1)
    """Number of communication rounds."""
    participation: float = Field(1.0, gt=0, le=1)
    """Share p of the N clients in a round: a cohort of max(1, floor(p N + 0.5))."""
    local_epochs: int = Field(5, ge=1)
    """Passes over a client's training data in a round."""
    batch_size: int = Field(16, ge=2)
    """Largest number B of samples in a mini-batch; a single left-over sample may make it B + 1 (see
    `train.last_batch`)."""
    last_batch: LastBatch = "even"
    """How n samples are cut into mini-batches of at most B.

    even: ceil(n / B) mini-batches, whose sizes differ by at most one. drop: each epoch leaves out n mod B
    samples; a client with fewer than B samples keeps its only mini-batch. keep: the n mod B samples form
    a smaller last mini-batch, whose step has the same step size as the others and is the last one before the
    model is sent or scored. A single sample that is not left out always joins the mini-batch before it."""
    lr: float = Field(0.05, gt=0)
    """Step size of local SGD, with a fresh optimiser each round."""
    lr_decay: float = Field(1.0, gt=0, le=1)
    """Factor on the step size after each round; 1 keeps it constant."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of local SGD, starting from zero each round."""
    weight_decay: float = Field(0.0, ge=0)
    """L2 penalty's factor in the gradient."""
    precision: Precision = "float32"
    """In which numbers local training multiplies.

    bfloat16: a CPU with AVX-512 BF16 or AMX rounds the factors of convolutions and linear layers to 8 bits
    and adds in 32; weights, gradients and evaluations keep 32. Worth it for networks of many channels
    (`hpcfl bench --parts steps` tells); the loop engine only."""
    finetune_epochs: int = Field(0, ge=0)
    """Local epochs before each evaluation, on a copy that is thrown away; 0 is none."""
    unseen_epochs: int | None = Field(None, ge=1)
    """Local epochs for which a client of `data.unseen_clients` adapts before it is scored; default:
    `train.local_epochs`."""
    buffers: BufferPolicy | None = None
    """Running statistics of BatchNorm: kept by the client, averaged like parameters, or (pFedLA) mixed with
    the weights of their BatchNorm layer; default: the method's."""

    def of_unseen(self) -> TrainConfig:
        """Return the settings of clients that take no part in the rounds, and adapt before an evaluation."""
        return self.model_copy(update={"local_epochs": self.unseen_epochs or self.local_epochs})

    def cohort_size(self, num_clients: int) -> int:
        """Return how many of N clients take part in a round."""
        return max(1, math.floor(self.participation * num_clients + 0.5))
