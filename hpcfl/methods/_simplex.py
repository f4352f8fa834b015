"""Weights that are not negative and sum to one."""

from __future__ import annotations

import torch
from torch import Tensor


def project_to_simplex(points: Tensor) -> Tensor:
    """Return the nearest points [..., B] with entries that are not negative and sum to one.

    Duchi et al., Efficient projections onto the l1-ball for learning in high dimensions, 2008, figure 1.
    """
    # the result depends on differences only; with the maximum at 0, rounding loses none of them
    points = points - points.amax(dim=-1, keepdim=True)
    falling = points.sort(dim=-1, descending=True).values
    rank = torch.arange(1, points.shape[-1] + 1, dtype=points.dtype, device=points.device)
    excess = (falling.cumsum(dim=-1) - 1) / rank
    last = (falling > excess)[..., 1:].sum(dim=-1, keepdim=True)
    nearest = (points - excess.gather(-1, last)).clamp(min=0)
    # removes the rounding error of the sum, since a single branch must have a weight of exactly 1
    return nearest / nearest.sum(dim=-1, keepdim=True)
