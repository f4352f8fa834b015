"""The choice of a global model, shared by clustered methods."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcfl.communication.messages import BUFFERS
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.losses import sample_losses


def best_model(clients: ClientGroup, models: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of k models [C, k, P] has the smallest training loss, [C], and this model, [C, P].

    Losses are computed in evaluation mode; ties go to the lowest number. Each client takes over the running
    statistics of its model.
    """
    count = models.shape[1]
    buffers = clients.buffers
    if buffers.dim() == 2:
        # the client's own statistics, for any model
        buffers = buffers.unsqueeze(1).expand(-1, count, -1)
    losses = []
    for number in range(count):
        model = {"theta": models[:, number], BUFFERS: buffers[:, number]}
        losses.append(clients.over_training_set(model, sample_losses).sum(dim=1))
    # a diverged model has no loss, and argmin would take it
    chosen = torch.stack(losses, dim=1).nan_to_num(nan=torch.inf).argmin(dim=1)
    everyone = torch.arange(len(clients), device=chosen.device)
    clients.buffers = buffers[everyone, chosen]
    return chosen, models[everyone, chosen]
