"""Accuracy and loss of several clients' models at once: evaluation in the batched engine.

Shapes: C clients, P trainable numbers, U running statistics, n samples, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from hpcfl.communication.messages import BUFFERS, Message
from hpcfl.data.shard import Shard
from hpcfl.parameters import ParameterLayout
from hpcfl.training.engines import training_copy, without_cudnn_batchnorm
from hpcfl.training.forward import Forward

SAMPLES_AT_ONCE = 2048
"""Most samples, of all clients together, that go through a network at once."""


class BatchedScorer:
    """Scores a model that clients share on all their samples in one pass, and models of their own by vmap."""

    def __init__(self, network: nn.Module, layout: ParameterLayout) -> None:
        self._network, self._layout = without_cudnn_batchnorm(training_copy(network)).eval(), layout

    @torch.no_grad()
    def scores(self, model: Message, shard: Shard, split: str, local: Sequence[int]) -> Tensor:
        """Return (accuracy, mean loss) of each client's model, float64 [C, 2] on the CPU.

        `model` has theta and buffers of the C clients; `local` are these clients' places in the shard, whose
        samples of a split are scored.
        """
        offset, count = shard.offset[split][local], shard.count[split][local]
        sizes = count.tolist()
        if "theta" in model.shared and (BUFFERS in model.shared or not self._layout.buffer_size):
            theta, buffers = model.shared["theta"], model[BUFFERS][0]
            positions = offset.repeat_interleave(count) + torch.cat([torch.arange(n) for n in sizes])
            parts = [
                _figures(self._logits(theta, buffers, shard.x[part]), shard.y[part])
                for part in positions.to(shard.x.device).split(SAMPLES_AT_ONCE)
            ]
            table = pad_sequence(list(torch.cat(parts).split(sizes)), batch_first=True)
        else:
            columns = torch.arange(max(sizes))
            is_sample = columns < count.unsqueeze(1)
            # clients with fewer samples repeat their first one
            positions = offset.unsqueeze(1) + columns.where(is_sample, 0)
            parts = [
                _figures(vmap(self._logits)(model["theta"], model[BUFFERS], shard.x[part]), shard.y[part])
                for part in positions.to(shard.x.device).split(max(1, SAMPLES_AT_ONCE // len(local)), dim=1)
            ]
            table = torch.cat(parts, dim=1).cpu().where(is_sample.unsqueeze(2), 0.0)
        return table.sum(dim=1).cpu() / count.unsqueeze(1)

    def _logits(self, theta: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
        return Forward(self._network, self._layout, buffers.clone()).logits(theta, x)


def correctness_and_loss(probabilities: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each sample's class [..., n] is the likeliest of [..., n, K], and its loss; float64.

    A sample whose probabilities are nan is not right. A loss is 87.3 at most, that of the smallest float32.
    """
    chosen = probabilities.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    # argmax takes nan for the largest
    is_right = ((probabilities.argmax(dim=-1) == y) & ~chosen.isnan()).double()
    return is_right, -chosen.clamp(min=torch.finfo(chosen.dtype).tiny).double().log()


def _figures(logits: Tensor, y: Tensor) -> Tensor:
    """Return correctness and loss of samples, stacked as [..., n, 2]."""
    return torch.stack(correctness_and_loss(logits.softmax(dim=-1), y), dim=-1)
