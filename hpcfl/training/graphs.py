"""Plain local SGD whose steps a GPU replays from a recording: one CUDA graph for each shape of step.

A step of small networks is some hundred kernels that take less time than their launches; a graph launches
them at once. It reads and writes fixed memory only: each group's models, velocities, running statistics and
loss sums stand in tensors of their own, into which a mini-batch is copied; its sample indices are not, since
the cross-entropy does not read them.

Everything but `recorder_on` is tested without a GPU. No graph has been recorded on one yet, so that
`run.cuda_graphs` is off by default.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpcfl.training.batches import Batch
from hpcfl.training.engines import BatchedEngine
from hpcfl.training.losses import cross_entropy_loss
from hpcfl.training.settings import TrainConfig
from hpcfl.training.sgd import Descent

Step = Callable[[], None]
Recorder = Callable[[Step], Step]
"""Returns what does a step again, in the same memory; may do the step any number of times before that."""


@dataclass
class Group:
    """The fixed memory of C clients: models, velocities, running statistics [C, U] and loss sums [C]."""

    descent: Descent
    buffers: Tensor
    loss_sum: Tensor
    steps: dict[tuple[object, ...], tuple[Batch, Step]] = field(default_factory=dict)
    """By shape: the mini-batch that a step reads, and what does the step."""

    @property
    def state(self) -> list[Tensor]:
        """What a step changes."""
        return [*self.descent.state, self.buffers, self.loss_sum]


class GraphedSGD:
    """The steps of plain local training by the batched engine, recorded at the first of each shape.

    Recordings hold for one step size: with `train.lr_decay`, every round makes its own.
    """

    def __init__(self, engine: BatchedEngine, train: TrainConfig, recorder: Recorder) -> None:
        self._engine, self._train, self._recorder = engine, train, recorder
        self._groups: dict[tuple[object, ...], Group] = {}
        self._lr: float | None = None

    def start(self, theta: Tensor, buffers: Tensor, loss_sum: Tensor, lr: float, trained: slice) -> Group:
        """Return the group's memory with copies of theta [C, P], buffers [C, U] and loss_sum [C]."""
        if lr != self._lr:
            self._groups.clear()
            self._lr = lr
        key = (theta.shape, theta.dtype, buffers.shape, trained.start, trained.stop)
        if key not in self._groups:
            descent = Descent(theta, lr, self._train, trained)
            contiguous = torch.contiguous_format
            self._groups[key] = Group(descent, buffers.clone(memory_format=contiguous), loss_sum.clone())
        group = self._groups[key]
        group.descent.start_again(theta)
        group.buffers.copy_(buffers)
        group.loss_sum.copy_(loss_sum)
        return group

    def step(self, group: Group, batch: Batch) -> None:
        """Do one training step of the batch's clients."""
        everyone = isinstance(batch.members, slice)
        key = (everyone, batch.x.shape)
        if key not in group.steps:
            members = slice(None) if isinstance(batch.members, slice) else batch.members.clone()
            fixed = Batch(members, batch.x.clone(), batch.y.clone(), batch.index.clone())
            group.steps[key] = (fixed, self._recorded(group, fixed))
        fixed, step = group.steps[key]
        if isinstance(fixed.members, Tensor) and isinstance(batch.members, Tensor):
            fixed.members.copy_(batch.members)
        fixed.x.copy_(batch.x)
        fixed.y.copy_(batch.y)
        step()

    def _recorded(self, group: Group, fixed: Batch) -> Step:
        """Return what does a step; where it cannot be recorded, the step itself."""

        def step() -> None:
            members, everyone = fixed.members, isinstance(fixed.members, slice)
            statistics = group.buffers[members]
            weights = {"theta": group.descent.theta[members]}
            gradients, losses = self._engine.gradient(cross_entropy_loss, weights, statistics, fixed)
            if not everyone:
                group.buffers[members] = statistics
            group.descent.step(members, gradients["theta"])
            group.loss_sum[members] += losses

        kept = [tensor.clone() for tensor in group.state]
        try:
            recorded = self._recorder(step)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            warnings.warn(f"run.cuda_graphs=true: steps are not recorded here ({reason})", stacklevel=2)
            recorded = step
        # recording does steps of its own
        for tensor, before in zip(group.state, kept, strict=True):
            tensor.copy_(before)
        return recorded


def recorder_on(device: torch.device) -> Recorder:
    """Return the recorder of CUDA graphs."""

    def record(step: Step) -> Step:
        with torch.cuda.device(device):
            here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                # libraries choose algorithms and take memory in their first calls
                for _ in range(3):
                    step()
            here.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        return graph.replay

    return record
