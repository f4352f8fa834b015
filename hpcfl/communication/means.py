"""Means over clients that take blocks as they come, in client order.

Shapes: S clients of the cohort, C clients of a block, P trainable numbers, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpcfl.communication.channel import Upload
from hpcfl.parameters import Layer, Tensors, columns


class WeightedMean:
    """A weighted mean over clients that takes blocks as they come, in client order.

    One fused multiply-add a client, so that the bits do not depend on how the cohort is cut in blocks.
    """

    def __init__(self, weights: Tensor) -> None:
        self._weights = (weights.double() / weights.double().sum()).tolist()
        self.value: Tensor | None = None

    def add(self, positions: slice, rows: Tensor) -> None:
        """Add the clients at these positions of the cohort, rows [C, ...]."""
        if self.value is None:
            self.value = torch.zeros_like(rows[0])
        for row, weight in zip(rows, self._weights[positions], strict=True):
            self.value.add_(row, alpha=weight)


class LayerMean:
    """A mean over clients with weights of its own for each layer (and branch), taking blocks as they come.

    `weights` [S, ..., L] are divided by `total` [..., L] (default: their sum over the cohort); where that is
    0, the mean keeps the numbers of `old` [..., P].
    """

    def __init__(
        self, weights: Tensor, layers: Sequence[Layer], old: Tensor, total: Tensor | None = None
    ) -> None:
        weights = weights.double()
        total = weights.sum(dim=0) if total is None else total.double()
        self._weights = weights / total.where(total > 0, 1.0)
        self._layers = layers
        self.value = old.where(columns(tuple(layers), total == 0), 0.0)

    def add(self, positions: slice, rows: Tensor) -> None:
        """Add the clients at these positions of the cohort, rows [C, ..., P]."""
        for row, weights in zip(rows, self._weights[positions], strict=True):
            for number, layer in enumerate(self._layers):
                mean, numbers = (tensor[..., layer.start : layer.stop] for tensor in (self.value, row))
                for index in np.ndindex(weights.shape[:-1]):
                    # a weight of 0 is skipped: it would turn -0 into 0 and add nan for a diverged client
                    if weight := float(weights[(*index, number)]):
                        mean[index].add_(numbers[index], alpha=weight)


def weighted_mean(up: Upload, name: str, weights: Tensor) -> Tensor:
    """Return the mean over a cohort's rows `name` [S, ...] with weights [S], normalised over the cohort."""
    return weighted_means(up, {name: weights})[name]


def weighted_means(up: Upload, weights: Tensors) -> Tensors:
    """Return `weighted_mean` of several names, each with its own weights [S]; reads the upload once."""
    means = {name: WeightedMean(of_clients) for name, of_clients in weights.items()}
    for positions, block in up:
        for name, mean in means.items():
            mean.add(positions, block.rows[name])
    values = {name: mean.value for name, mean in means.items() if mean.value is not None}
    assert len(values) == len(weights)
    return values


class ClusterMeans:
    """The weighted mean of each cluster's clients, taking blocks as they come, in client order.

    Weights [S] of a cohort are normalised over each cluster's members; a cluster without members keeps its
    row of `old` [k, ...]. With one cluster this is WeightedMean to the bit.
    """

    def __init__(self, weights: Tensor, old: Tensor) -> None:
        self._weights = (weights.double() / weights.double().sum()).tolist()
        self._samples = weights.double()
        self._old, self._sums = old, torch.zeros_like(old)
        self._cluster = torch.full((len(weights),), -1)

    def add(self, positions: slice, rows: Tensor, cluster: Tensor) -> None:
        """Add the clients at these positions of the cohort, rows [C, ...] of clusters [C]."""
        self._cluster[positions] = cluster
        for row, weight, number in zip(rows, self._weights[positions], cluster.tolist(), strict=True):
            self._sums[number].add_(row, alpha=weight)

    def value(self) -> Tensor:
        """Return the means [k, ...]."""
        means = self._old.clone()
        for number in self._cluster.unique().tolist():
            share = float(self._samples[self._cluster == number].sum() / self._samples.sum())
            means[number] = self._sums[number] / share
        return means
