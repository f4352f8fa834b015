"""What a run does with BatchNorm's running statistics, as `train.buffers` says.

Shapes: C clients of a group, M models of a client, U running statistics of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hpcfl.communication.aggregation import weighted_means
from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.config.keys import BufferPolicy
from hpcfl.parameters import ParameterLayout, Tensors
from hpcfl.training.client_group import ClientGroup


@dataclass(frozen=True)
class Buffers:
    """The running statistics of what clients train: where they are kept, and what travels.

    local: each client keeps its own. average: the server averages what clients send. mixed: clients send
    theirs, and the method mixes them. The adapter calls `in_server`, `in_clients`, `in_download`, `receive`,
    `keep`, `mean` and `add_to`.
    """

    policy: BufferPolicy
    network: nn.Module
    layout: ParameterLayout
    are_averaged_by_method: bool = False
    """Whether `aggregate` averages them, not this object."""
    num_models: int | None = None
    """Number M of models that a client gets and trains, each with statistics of its own: those of a group are
    [C, M, U]. None: one model, and [C, U]."""

    def of_models(self, count: int) -> Buffers:
        """Return the same for clients that get and train `count` models each."""
        return replace(self, num_models=count)

    def has_policy(self, policy: BufferPolicy) -> bool:
        """Return whether there are running statistics, with this policy."""
        return self.policy == policy and self.layout.buffer_size > 0

    def initial(self, clients: Sequence[int] | None = None) -> Tensor:
        """Return those of the initial network: [U], or [C, U] for some clients."""
        buffers = self.layout.flatten(self.network)[1]
        return buffers if clients is None else buffers.expand(len(clients), -1).clone()

    def keeping_averages(self, clients: ClientGroup) -> AbstractContextManager[None]:
        """Discard updates of averaged statistics inside the block, while another part of a model adapts."""
        return clients.discarding_buffer_updates() if self.has_policy("average") else nullcontext()

    def in_server(self, state: Tensors) -> Tensors:
        """Return the averages at the start, unless there are none or the server's state has them already."""
        if BUFFERS in state or not self.has_policy("average"):
            return {}
        buffers = self.initial()
        return {BUFFERS: buffers if self.num_models is None else buffers.repeat(self.num_models, 1)}

    def in_clients(self, clients: Sequence[int]) -> Tensors:
        """Return what the state of some clients has of them at the start."""
        return {BUFFERS: self.initial(clients)} if self.has_policy("local") else {}

    def in_download(self, message: Message, server: Tensors) -> Message:
        """Return a download with the averages, unless the method has put statistics there."""
        if BUFFERS in message or not self.has_policy("average"):
            return message
        return message | Message(shared={BUFFERS: server[BUFFERS]}, num_clients=message.num_clients)

    def receive(self, clients: ClientGroup, down: Message) -> Message:
        """Let a group compute with the statistics of a download, or else with those of its state.

        Returns the download on the group's device.
        """
        down, buffers = down.to(clients.device), clients.buffers
        if BUFFERS in down:
            buffers = down[BUFFERS].clone(memory_format=torch.contiguous_format)
        elif BUFFERS in clients:
            buffers = clients[BUFFERS].clone()
        if self.num_models is not None and buffers.dim() == 2:
            # each of the client's models starts from the client's statistics
            buffers = buffers.unsqueeze(1).repeat(1, self.num_models, 1)
        clients.buffers = buffers
        return down

    def keep(self, clients: ClientGroup, up: Message) -> None:
        """Put the statistics of a trained group into its state, or into its upload."""
        if self.has_policy("local"):
            clients[BUFFERS] = clients.buffers
        elif self.layout.buffer_size:
            up.per_client[BUFFERS] = clients.buffers

    def mean(self, up: Upload, cohort: Cohort) -> Tensors:
        """Return the server's new averages; {} if there are none, or `aggregate` averages. Collective."""
        if not self.has_policy("average") or self.are_averaged_by_method:
            return {}
        return weighted_means(up, {BUFFERS: cohort.num_samples})

    def add_to(self, models: Message, clients: ClientGroup, are_received: bool) -> Message:
        """Return a group's models with their statistics.

        These are shared if the models have a shared part, the server averages, and clients have not trained
        since they received them; otherwise there is one row per client.
        """
        if models.shared and self.policy == "average" and are_received:
            models.shared[BUFFERS] = clients.buffers[0]
        elif models:
            models.per_client[BUFFERS] = clients.buffers
        return models
