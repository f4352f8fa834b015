"""Calls a method's hooks for the round loop, and carries the running statistics of BatchNorm along.

Shapes: S clients of a cohort, C clients of a group, U running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods._server_optimiser import ServerOptimiser
from hpcfl.methods.base import Method, State, TwoPhaseMethod
from hpcfl.parameters import ParameterLayout
from hpcfl.privacy import PrivateUploads
from hpcfl.randomness import generator_states, seeded_generators, seeded_hook
from hpcfl.training.client_group import ClientGroup


class MethodAdapter:
    """One method as the round loop calls it: the method's hooks, with running statistics added or stored.

    A function has the name of the hook that it calls.
    """

    def __init__(self, method: Method) -> None:
        self.method = method
        vars(method)["_is_ready"] = True
        if method.layout.parameters != ParameterLayout(method.network).parameters:
            raise TypeError(
                f"{type(method).__name__} set network after layout and layers were made from another; return "
                "it from make_network"
            )
        self._scores_theta = (
            method.traits.eval_after == "download"
            and type(method).model_after_training is Method.model_after_training
        )
        self._optimiser = ServerOptimiser(method.context.server, method.traits.averages, method.layers)
        context = method.context
        self._private = PrivateUploads(
            context.privacy,
            method.traits.averages,
            method.layers,
            context.num_clients,
            context.train.participation,
            context.seed,
        )

    def initial_server(self) -> State:
        """Return the whole server state, with running statistics and the moments of `server.optimiser`."""
        with seeded_generators(self.method.context.seed, "server_state"):
            state = self.method.server_state()
        averages = self.method.traits.averages
        if averages and not state.keys() & averages:
            raise TypeError(
                f"{type(self.method).__name__}.traits.averages names {', '.join(averages)}, which "
                "server_state does not return"
            )
        state |= self.method.buffers.in_server(state)
        return state | self._optimiser.initial(state)

    def initial_clients(self, clients: Sequence[int]) -> State:
        """Return the whole state [C, ...] of some clients, running statistics included."""
        before = generator_states()
        state = self.method.client_state(clients)
        if generator_states() != before:
            raise TypeError(
                f"{type(self.method).__name__}.client_state drew from torch's, NumPy's or Python's own "
                "generator, whose numbers would depend on ranks; draw from "
                "hpcfl.randomness.torch_stream(seed, purpose, 0, client)"
            )
        self._check_rows("client_state", state, len(clients))
        return state | self.method.buffers.in_clients(clients)

    def download(self, server: State, cohort: Cohort) -> Message:
        """Return the download of a cohort."""
        return self._sent(self.method.download, server, cohort)

    def eval_download(self, server: State, cohort: Cohort) -> Message:
        """Return the download of a cohort for an evaluation."""
        return self._sent(self.method.eval_download, server, cohort)

    def new_client_download(self, server: State, cohort: Cohort) -> Message:
        """Return the download of clients that take no part in training."""
        try:
            return self._sent(self.method.new_client_download, server, cohort)
        except IndexError as error:
            error.add_note(
                f"The server's state has no rows of clients {cohort.clients[0]} and on, which take no part "
                f"in training: if {type(self.method).__name__} looks for them, override new_client_download, "
                "or set data.unseen_clients=0"
            )
            raise

    def _sent(self, hook: Callable[[State, Cohort], Message], server: State, cohort: Cohort) -> Message:
        """Return a hook's message to a cohort, with the averaged running statistics if it has none."""
        message = self._message(hook.__name__, self._seeded(hook, server, cohort), len(cohort))
        return self.method.buffers.in_download(message, server)

    def needs_request(self, round: int) -> bool:
        """Return whether clients answer this round's download with a request."""
        return isinstance(self.method, TwoPhaseMethod) and self.method.needs_request(round)

    def client_request(self, clients: ClientGroup, down: Message) -> Message:
        """Return a group's request."""
        assert isinstance(self.method, TwoPhaseMethod)
        down = self.method.buffers.receive(clients, down)
        with clients.seeding_generators():
            request = self.method.client_request(clients, down)
        return self._rows("client_request", request, len(clients))

    def server_response(self, server: State, cohort: Cohort, requests: State) -> Message:
        """Return the server's response to a cohort's requests."""
        assert isinstance(self.method, TwoPhaseMethod)
        response = self._seeded(self.method.server_response, server, cohort, requests)
        return self._message("server_response", response, len(cohort))

    def train(self, clients: ClientGroup, down: Message) -> Message:
        """Train a group and return its upload."""
        down = self.method.buffers.receive(clients, down)
        with clients.seeding_generators():
            up = self._rows("train", self.method.train(clients, down), len(clients))
        if self._scores_theta and "theta" not in up:
            raise TypeError(
                f"{type(self.method).__name__}.train uploads no theta: override model_after_training to "
                "return the trained models, or Message() if there are none"
            )
        self.method.buffers.keep(clients, up)
        return up

    def sent(self, down: Message, up: Message) -> Message:
        """Return a group's upload as it leaves the clients, clipped if `privacy.unit` is client."""
        return self._private.clipped(down, up)

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        """Update the server from a cohort's upload. Collective through the upload.

        If the cohort is empty, because all members were left out or nobody was drawn, nothing is averaged.
        """
        before, unnoised = self._optimiser.before(server), self._private.before(server)
        averaged: State = {}
        if len(cohort):
            averaged = self.method.buffers.mean(up, cohort)
            self._aggregate(server, self._private.with_equal_weights(cohort), up)
        up.drain()
        # with privacy, the model also moves in a round without clients: by noise
        if len(cohort) or self._private.is_on:
            self._private.step(server, unnoised, cohort, {} if up.sent is None else up.sent.layer_mask)
            self._optimiser.step(server, before)
        server |= averaged
        self._seeded(self.method.end_round, server, cohort)

    def _aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        """Call `aggregate`, in which the upload must be read before the sharded state is used."""
        sharded = self.method.sharded
        with nullcontext() if sharded is None else sharded.after(up):
            returned = self._seeded(self.method.aggregate, server, cohort, up)
        if returned is not None:
            raise TypeError(
                f"{type(self.method).__name__}.aggregate returned a {type(returned).__name__}, which nobody "
                "reads; write into server, as in server['theta'] = ..."
            )

    def _seeded(self, hook: Callable[..., Any], server: State, cohort: Cohort, *more: object) -> Any:
        """Call a hook of the server, in which own generators have a stream of (seed, hook, round)."""
        with seeded_hook(self.method.context.seed, hook.__name__, cohort.round):
            return hook(server, cohort, *more)

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        """Return the evaluated models of a group, with `buffers`, fine-tuned if the run says so."""
        down = self.method.buffers.receive(clients, down)
        epochs = self.method.context.train.finetune_epochs
        with clients.read_only(), clients.seeding_generators():
            if epochs:
                return self._with_buffers("finetune", clients, self.method.finetune(clients, down, epochs))
            return self._with_buffers("eval_model", clients, self.method.eval_model(clients, down))

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        """Return the models of a group that takes no part in training, with `buffers`."""
        down = self.method.buffers.receive(clients, down)
        with clients.read_only(), clients.seeding_generators():
            models = self.method.new_client_model(clients, down)
        return self._with_buffers("new_client_model", clients, models)

    def model_after_download(self, clients: ClientGroup, down: Message) -> Message:
        """Return a group's models right after a download, with `buffers`; empty where there are none."""
        down = self.method.buffers.receive(clients, down)
        with clients.read_only(), clients.seeding_generators():
            models = self.method.model_after_download(clients, down)
        return self._with_buffers("model_after_download", clients, models)

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        """Return a group's models right after `train`, with `buffers`; empty where there are none."""
        down = down.to(clients.device)
        with clients.read_only(), clients.seeding_generators():
            models = self.method.model_after_training(clients, down, up)
        return self._with_buffers("model_after_training", clients, models)

    def _message(self, hook: str, value: Message, count: int) -> Message:
        """Return a hook's message for `count` clients; raise TypeError or ValueError if it is not one."""
        place = f"{type(self.method).__name__}.{hook}"
        if not isinstance(value, Message):
            raise TypeError(
                f"{place} returned a {type(value).__name__}; return Message(shared={{...}}, "
                "per_client={...})"
            )
        self._check_rows(hook, value.per_client, count)
        self._check_theta(hook, value.shared | value.per_client)
        return value.with_clients(count)

    def _check_rows(self, hook: str, tensors: State, count: int) -> None:
        """Raise TypeError or ValueError unless a hook's tensors have a row for each of `count` clients."""
        place = f"{type(self.method).__name__}.{hook} returned"
        for name, rows in tensors.items():
            if not isinstance(rows, Tensor):
                raise TypeError(f"{place} a {type(rows).__name__} as {name!r}; return a torch.Tensor")
            if not rows.dim() or len(rows) != count:
                raise ValueError(
                    f"{place} {name!r} of shape {[*rows.shape]} for {count} clients; give a row to each, or "
                    "in a message under `shared` a tensor that all have in common"
                )

    def _check_theta(self, hook: str, tensors: State) -> None:
        """Raise ValueError for models of another size or type than the network's."""
        theta, size, kind = tensors.get("theta"), self.method.layout.size, torch.get_default_dtype()
        if theta is not None and (theta.shape[-1] != size or theta.dtype != kind):
            raise ValueError(
                f"{type(self.method).__name__}.{hook} returned 'theta' of shape {[*theta.shape]} and type "
                f"{theta.dtype}; expected: {size} numbers of type {kind} in the last axis"
            )

    def _rows(self, hook: str, value: Message, count: int) -> Message:
        """Return the message that a hook sends to the server; raise ValueError if it has shared tensors."""
        message = self._message(hook, value, count)
        if message.shared:
            names = ", ".join(message.shared)
            raise ValueError(
                f"{type(self.method).__name__}.{hook} returned {names} as shared; return them per_client"
            )
        return message

    def _with_buffers(self, hook: str, clients: ClientGroup, models: Message) -> Message:
        """Return the models of a hook with running statistics."""
        return self.method.buffers.add_to(self._message(hook, models, len(clients)), clients)
