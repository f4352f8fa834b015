"""Calls a method's hooks for the round loop, and carries the running statistics of BatchNorm along.

Shapes: S clients of a cohort, C clients of a group, U running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hpcfl.communication.means import weighted_means
from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods.base import Method, State
from hpcfl.parameters import ParameterLayout
from hpcfl.training.clients import Clients


class Driver:
    """One method as the round loop calls it: the method's hooks, with running statistics added or stored."""

    def __init__(self, method: Method) -> None:
        self.method = method
        if method.layout.parameters != ParameterLayout(method.network).parameters:
            raise TypeError(
                f"{type(method).__name__} set network after layout and layers were made from another; return "
                "it from make_network"
            )

    def initial_server(self) -> State:
        """Return the whole server state, running statistics included."""
        method = self.method
        if not method.averages_buffers:
            return method.server_state()
        return method.server_state() | {BUFFERS: method.server_buffers()}

    def initial_clients(self, clients: Sequence[int]) -> State:
        """Return the whole state [C, ...] of some clients, running statistics included."""
        own = self.method.buffers == "local" and self.method.layout.buffer_size
        buffers = {BUFFERS: self.method.initial_buffers(clients)} if own else {}
        return self.method.client_state(clients) | buffers

    def send(self, server: State, cohort: Cohort, for_evaluation: bool = False) -> Message:
        """Return the download of a cohort."""
        return self._sent(self.method.scored if for_evaluation else self.method.download, server, cohort)

    def welcome(self, server: State, cohort: Cohort) -> Message:
        """Return what clients get that take no part in training.

        Raises TypeError where the method looks for them in state that has no rows of theirs.
        """
        try:
            return self._sent(self.method.welcome, server, cohort)
        except IndexError as error:
            name = type(self.method).__name__
            raise TypeError(
                f"{name}.welcome looks in the server's state for clients {cohort.clients[0]} and on, which "
                "take no part in training; let it return what new clients get, or set data.unseen_clients=0"
            ) from error

    def _sent(self, hook: Callable[[State, Cohort], Message], server: State, cohort: Cohort) -> Message:
        """Return a hook's message to a cohort, with the averaged running statistics if it has none."""
        message = self._message(hook.__name__, hook(server, cohort), len(cohort))
        if BUFFERS in message or not self.method.averages_buffers:
            return message
        buffers = self.method.download_buffers(server, cohort)
        return message | self._message("download_buffers", buffers, len(cohort))

    def ask(self, clients: Clients, down: Message) -> Message:
        """Return a group's request."""
        down = self._arrived(clients, down)
        return self._rows("request", self.method.request(clients, down), len(clients))

    def answer(self, server: State, cohort: Cohort, requests: State) -> Message:
        """Return what a cohort gets upon its requests."""
        return self._message("supply", self.method.supply(server, cohort, requests), len(cohort))

    def work(self, clients: Clients, down: Message) -> Message:
        """Train a group and return its upload."""
        down = self._arrived(clients, down)
        up = self._rows("train", self.method.train(clients, down), len(clients))
        if self.method.layout.buffer_size:
            if self.method.buffers == "local":
                clients[BUFFERS] = clients.buffers
            else:
                up.rows[BUFFERS] = clients.buffers
        return up

    def receive(self, server: State, cohort: Cohort, up: Upload) -> None:
        """Update the server from a cohort's upload. Collective through the upload.

        Where all members were left out, so that the cohort is empty, only the round ends.
        """
        if not len(cohort):
            up.drain()
            self.method.end_round(server, cohort)
            return
        weights = self.method.weights_of_buffers(cohort) if self.method.averages_buffers else None
        averaged = {} if weights is None else weighted_means(up, {BUFFERS: weights})
        self.method.aggregate(server, cohort, up)
        up.drain()
        server |= averaged
        self.method.end_round(server, cohort)

    def evaluated(self, clients: Clients, down: Message) -> Message:
        """Return the evaluated models of a group, with `buffers`, fine-tuned if the run says so."""
        down = self._arrived(clients, down)
        epochs = self.method.context.train.finetune_epochs
        if epochs:
            return self._with_buffers("finetune", clients, self.method.finetune(clients, down, epochs))
        return self._with_buffers("personalised", clients, self.method.personalised(clients, down))

    def adapted(self, clients: Clients, down: Message) -> Message:
        """Return the models of a group that takes no part in training, with `buffers`."""
        down = self._arrived(clients, down)
        return self._with_buffers("adapt", clients, self.method.adapt(clients, down))

    def after_download(self, clients: Clients, down: Message) -> Message:
        """Return a group's models right after a download, with `buffers`; empty where there are none."""
        down = self._arrived(clients, down)
        return self._with_buffers("received", clients, self.method.received(clients, down))

    def after_training(self, clients: Clients, down: Message, up: Message) -> Message:
        """Return a group's models right after `work`, with `buffers`; empty where there are none."""
        down = down.to(clients.device)
        return self._with_buffers("trained", clients, self.method.trained(clients, down, up))

    def _arrived(self, clients: Clients, down: Message) -> Message:
        """Return a message on the group's device; set the group's running statistics from it or the state."""
        down = down.to(clients.device)
        if BUFFERS in down:
            clients.buffers = down[BUFFERS].clone(memory_format=torch.contiguous_format)
        elif BUFFERS in clients:
            clients.buffers = clients[BUFFERS].clone()
        return down

    def _message(self, hook: str, value: Message, count: int) -> Message:
        """Return a hook's message for `count` clients; raise TypeError or ValueError if it is not one."""
        place = f"{type(self.method).__name__}.{hook}"
        if not isinstance(value, Message):
            raise TypeError(
                f"{place} returned a {type(value).__name__}; return Message(shared={{...}}, rows={{...}})"
            )
        for name, rows in value.rows.items():
            if len(rows) != count:
                raise ValueError(
                    f"{place} returned {len(rows)} rows of {name!r} for {count} clients; give one a client, "
                    "or under `shared` a tensor that all have in common"
                )
        return value.of(count)

    def _rows(self, hook: str, value: Message, count: int) -> Message:
        """Return the message that a hook sends to the server; raise ValueError if it has shared tensors."""
        message = self._message(hook, value, count)
        if message.shared:
            names = ", ".join(message.shared)
            raise ValueError(f"{type(self.method).__name__}.{hook} returned {names} as shared; return rows")
        return message

    def _with_buffers(self, hook: str, clients: Clients, models: Message) -> Message:
        """Return models with running statistics.

        These are shared if the models have a shared part and the server averages running statistics;
        otherwise there is one row per client.
        """
        models = self._message(hook, models, len(clients))
        if not models:
            return models
        if models.shared and self.method.buffers == "average":
            models.shared[BUFFERS] = clients.buffers[0]
        else:
            models.rows[BUFFERS] = clients.buffers
        return models
