"""Means over the clients of an upload, and over rows on one rank.

Shapes: S clients of the cohort, P trainable numbers, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hpcfl.communication.upload import Upload
from hpcfl.parameters import Layer, Tensors, columns


def weighted_mean(up: Upload, name: str, weights: Tensor) -> Tensor:
    """Return the mean over a cohort's rows `name` [S, ...] with weights [S], normalised over the cohort."""
    return weighted_means(up, {name: weights})[name]


def weighted_means(up: Upload, weights: Mapping[str, Tensor]) -> Tensors:
    """Return `weighted_mean` of several names, each with its own weights [S]."""
    shares = {name: _normalised(of_clients).unsqueeze(0) for name, of_clients in weights.items()}
    return {name: sums[0] for name, sums in up.sums(shares).items()}


def layer_means(
    up: Upload,
    weights: Mapping[str, Tensor],
    layers: Sequence[Layer],
    old: Tensors,
    total: Tensor | None = None,
) -> Tensors:
    """Return the means of rows [S, ..., P] by name, with weights [S, ..., L] of their own for each layer.

    They are divided by `total` [..., L] (default: their sum over the cohort); where that is 0, the mean keeps
    the numbers of `old` [..., P].
    """
    shares, is_left = {}, {}
    for name, of_clients in weights.items():
        divisor = of_clients.double().sum(dim=0) if total is None else total.double()
        shares[name] = (of_clients.double() / divisor.where(divisor > 0, 1.0)).unsqueeze(0)
        is_left[name] = columns(tuple(layers), divisor == 0)
    sums = up.sums(shares, [layer.size for layer in layers])
    return {name: old[name].where(is_left[name], of_all[0]) for name, of_all in sums.items()}


def cluster_means(
    up: Upload, names: Iterable[str], weights: Tensor, cluster: Tensor, old: Tensors
) -> Tensors:
    """Return the weighted mean [k, ...] of each cluster's clients by name, given the cluster [S] of each.

    Weights [S] are normalised over each cluster's members; a cluster without members keeps its row of `old`
    [k, ...]. With one cluster this is `weighted_mean` to the bit.
    """
    names = [*names]
    found = {name: old[name].clone() for name in names}
    numbers = cluster.unique().tolist()
    shares = torch.zeros(len(numbers), len(cluster), dtype=torch.float64)
    for place, number in enumerate(numbers):
        is_member = cluster == number
        shares[place, is_member] = _normalised(weights[is_member])
    for name, means in up.sums(dict.fromkeys(names, shares)).items():
        found[name][numbers] = means
    return found


def mean_of(rows: Sequence[Tensor]) -> Tensor:
    """Return the plain mean of rows [...], at least one, which are not copied."""
    mean = torch.zeros_like(rows[0])
    for row in rows:
        mean.add_(row, alpha=1 / len(rows))
    return mean


def _normalised(weights: Tensor) -> Tensor:
    return weights.double() / weights.double().sum()
