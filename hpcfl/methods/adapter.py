"""Calls a method's hooks for the round loop, and carries the running statistics of BatchNorm along.

Shapes: S clients of a cohort, C clients of a group, U running statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods import diagnostics
from hpcfl.methods._server_optimiser import ServerOptimiser
from hpcfl.methods.base import Method, State, TwoPhaseMethod
from hpcfl.methods.diagnostics import AXES, Diagnostic
from hpcfl.methods.hook_results import (
    check_kinds,
    check_message,
    check_probabilities,
    check_rows,
    check_same_alone,
    check_state,
    check_type,
    kinds,
    separate,
    unchanged,
    unchanged_state,
)
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
        method.forbid_changes()
        for hook in ("train", "eval_model", "client_request", "server_response"):
            if getattr(method, hook, None) and getattr(type(method), hook) is getattr(TwoPhaseMethod, hook):
                raise TypeError(f"{type(method).__name__} needs the hook {hook}")
        if method.layout.parameters != ParameterLayout(method.network).parameters:
            raise TypeError(
                f"{type(method).__name__} set network after layout and layers were made from another; return "
                "it from make_network"
            )
        starts = [*(layer.start for layer in method.layers), method.layout.size]
        if starts != [0, *(layer.stop for layer in method.layers)]:
            raise TypeError(
                f"{type(method).__name__}.layers leave out parameters or have them twice; set self.layers = "
                "self.layout.layers(...)"
            )
        self._scores_theta = (
            method.traits.eval_after == "download"
            and type(method).model_after_training is Method.model_after_training
        )
        self._down = Message()
        """What the server's messages of the round have for all clients, before a codec."""
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
        check_state(self._hook("server_state"), state)
        separate(state)
        averages = self.method.traits.averages
        if averages and not state.keys() & averages:
            raise TypeError(
                f"{self._hook('traits.averages')} names {', '.join(averages)}, which server_state does not "
                "return"
            )
        self._check_diagnostics(state)
        state |= self.method.buffers.in_server(state)
        return state | self._optimiser.initial(state)

    def _check_diagnostics(self, server: State) -> None:
        """Raise TypeError for a diagnostic that nothing would record, or whose values have other axes."""
        of_client = self.method.client_state([0])
        for one in self.method.diagnostics:
            if one.of_server is not None or one.of_clients is not None:
                continue
            if one.name in server:
                self._check_axes(one, server[one.name], self.method.context.num_clients)
            elif one.name in of_client:
                self._check_axes(one, of_client[one.name], 1)
            else:
                raise TypeError(
                    f"{self._hook('diagnostics')} names {one.name!r}, which neither server_state nor "
                    "client_state returns; return it from one of them, such as torch.zeros(...)"
                )

    def initial_clients(self, clients: Sequence[int]) -> State:
        """Return the whole state [C, ...] of some clients, running statistics included."""
        hook, before = self._hook("client_state"), generator_states()
        # a worker may have no clients, and a hook need not know how to stack nothing
        asked = clients if len(clients) else [0]
        state = self.method.client_state(asked)
        if generator_states() != before:
            raise TypeError(
                f"{hook} drew from torch's, NumPy's or Python's own generator, whose numbers would depend on "
                "ranks; draw from hpcfl.randomness.torch_stream(self.context.seed, purpose, 0, client)"
            )
        check_rows(hook, state, len(asked))
        check_state(hook, state)
        if BUFFERS in state:
            raise ValueError(f"{hook} returned {BUFFERS!r}, which train.buffers=local keeps; rename it")
        if len(clients) > 1:
            check_same_alone(hook, clients[-1], state, self.method.client_state(clients[-1:]))
        # memory of its own for each tensor, for any number of clients: hooks may change it in place
        state = {
            name: rows[: len(clients)].clone(memory_format=torch.contiguous_format)
            for name, rows in state.items()
        }
        return state | self.method.buffers.in_clients(clients)

    def download(self, server: State, cohort: Cohort) -> Message:
        """Return the download of a cohort."""
        message = self._sent("download", server, cohort)
        self._down = Message(shared=message.shared)
        return message

    def eval_download(self, server: State, cohort: Cohort) -> Message:
        """Return the download of a cohort for an evaluation."""
        return self._sent("eval_download", server, cohort)

    def new_client_download(self, server: State, cohort: Cohort) -> Message:
        """Return the download of clients that take no part in training."""
        return self._sent("new_client_download", server, cohort)

    def _sent(self, hook: str, server: State, cohort: Cohort) -> Message:
        """Return a hook's message to a cohort, with the averaged running statistics if it has none."""
        with unchanged_state(self._hook(hook), server):
            message = self._message(hook, self._seeded(hook, server, cohort), len(cohort))
        return self.method.buffers.in_download(message, server)

    def needs_request(self, round: int) -> bool:
        """Return whether clients answer this round's download with a request."""
        return isinstance(self.method, TwoPhaseMethod) and self.method.needs_request(round)

    def client_request(self, clients: ClientGroup, down: Message) -> Message:
        """Return a group's request."""
        assert isinstance(self.method, TwoPhaseMethod)
        down = self.method.buffers.receive(clients, down)
        with self._on_clients("client_request", clients, down):
            request = self.method.client_request(clients, down)
        return self._rows("client_request", request, len(clients))

    def server_response(self, server: State, cohort: Cohort, requests: State) -> Message:
        """Return the server's response to a cohort's requests."""
        assert isinstance(self.method, TwoPhaseMethod)
        with self._state_of_kind("server_response", server):
            response = self._seeded("server_response", server, cohort, requests)
        message = self._message("server_response", response, len(cohort))
        self._down |= Message(shared=message.shared)
        return message

    def train(self, clients: ClientGroup, down: Message) -> Message:
        """Train a group and return its upload."""
        down = self.method.buffers.receive(clients, down)
        with self._on_clients("train", clients, down):
            up = self._rows("train", self.method.train(clients, down), len(clients))
        if self._scores_theta and "theta" not in up:
            raise TypeError(
                f"{self._hook('train')} uploads {', '.join(up.tensors) or 'nothing'}, and no theta: name the "
                "trained models theta, or override model_after_training to return them, or Message() if "
                "there are none"
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
        sent = self._averages_as_sent(server, up.sent) if up.sent is not None and len(cohort) else {}
        before, unnoised = self._optimiser.before(server, sent), self._private.before(server, up)
        averaged: State = {}
        if len(cohort):
            averaged = self.method.buffers.mean(up, cohort)
            sharded = self.method.sharded
            # the upload must be read before the sharded state is used
            with nullcontext() if sharded is None else sharded.after(up):
                self._writing("aggregate", server, self._private.with_equal_weights(cohort), up)
        up.drain()
        # with privacy, the model also moves in a round without clients: by noise
        if len(cohort) or self._private.is_on:
            self._private.step(server, unnoised, cohort, {} if up.sent is None else up.sent.layer_mask)
            self._optimiser.step(server, before)
        server |= averaged
        self._writing("end_round", server, cohort)

    def _averages_as_sent(self, server: State, sent: Message) -> State:
        """Return averaged tensors as clients received them; not those in whose place others were sent."""
        if not self._optimiser.names:
            return {}
        before, after = self.method.averages_in(self._down), self.method.averages_in(sent)
        held = [name for name in after if name in server]
        return {name: after[name] for name in held if torch.equal(before[name], server[name])}

    def _writing(self, hook: str, server: State, cohort: Cohort, *more: object) -> None:
        """Call a hook that writes into the server's state."""
        with self._state_of_kind(hook, server):
            returned = self._seeded(hook, server, cohort, *more)
        if returned is not None:
            raise TypeError(
                f"{self._hook(hook)} returned a {type(returned).__name__}, which is not used; write into "
                "server, as in server['theta'] = ..."
            )

    @contextmanager
    def _state_of_kind(self, hook: str, server: State) -> Iterator[None]:
        """Check at the end of the block that a resume finds the server's tensors as they are here."""
        before = kinds(server)
        yield
        check_kinds(self._hook(hook), before, server, self.method.traits.growing_state)
        separate(server)

    def _seeded(self, hook: str, server: State, cohort: Cohort, *more: object) -> Any:
        """Call a hook of the server, in which own generators have a stream of (seed, hook, round)."""
        with seeded_hook(self.method.context.seed, hook, cohort.round):
            return getattr(self.method, hook)(server, cohort, *more)

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        """Return the evaluated models of a group, with `buffers`, fine-tuned if the run says so."""
        epochs = self.method.context.train.finetune_epochs
        down = self.method.buffers.receive(clients, down)
        if epochs:
            return self._models("finetune", clients, down, epochs)
        return self._models("eval_model", clients, down)

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        """Return the models of a group that takes no part in training, with `buffers`."""
        return self._models("new_client_model", clients, self.method.buffers.receive(clients, down))

    def model_after_download(self, clients: ClientGroup, down: Message) -> Message:
        """Return a group's models right after a download, with `buffers`; empty where there are none."""
        return self._models("model_after_download", clients, self.method.buffers.receive(clients, down))

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        """Return a group's models right after `train`, with `buffers`; empty where there are none."""
        return self._models("model_after_training", clients, down.to(clients.device), up)

    def _models(self, hook: str, clients: ClientGroup, down: Message, *more: object) -> Message:
        """Call a hook that returns models and writes no state, and add running statistics to its models."""
        with clients.read_only(), self._on_clients(hook, clients, down, *more):
            models = self._message(hook, getattr(self.method, hook)(clients, down, *more), len(clients))
        needs_theta = self.method.traits.predicts_by == "network" and not hook.startswith("model_after")
        if needs_theta and "theta" not in models:
            names = ", ".join(models.names) or "nothing"
            raise TypeError(f"{self._hook(hook)} returned {names}, and no theta; return the models to score")
        return self.method.buffers.add_to(models, clients, hook in ("eval_model", "model_after_download"))

    def predict(
        self, clients: ClientGroup, model: Message, position: int, split: str
    ) -> tuple[Tensor, Tensor]:
        """Return class probabilities [n, K] of a client's samples of a split, and their classes [n]."""
        x, y = clients.samples(split, position)
        if self.method.traits.predicts_by == "network":
            return self.method.predict(clients, model, position, x), y
        read = clients.pool | {f"{name!r} of its model": tensor for name, tensor in model.tensors.items()}
        seeded, alone = clients.seeding_generators(), clients.with_model_only()
        with seeded, alone, unchanged(self._hook("predict"), [], read):
            found = self.method.predict(clients, model, position, x)
        check_probabilities(self._hook("predict"), found, len(y), self.method.context.num_classes)
        return found, y

    def server_diagnostics(self, server: State, done: int = 0) -> State:
        """Return what an evaluation after `done` rounds records of the server's state."""
        in_state = [one.name for one in self.method.diagnostics if not one.of_server]
        kept = {name: server[name] for name in in_state if name in server}
        return kept | self._of_server(self._diagnostics_up_to(diagnostics.HISTORY_LIMIT), server, done)

    def client_diagnostics(self, clients: ClientGroup) -> State:
        """Return what an evaluation records of a group, one tensor [C, ...] per name."""
        known = self.method.diagnostics
        kept = {one.name: clients[one.name] for one in known if one.name in clients}
        with clients.seeding_generators():
            found = {one.name: one.of_clients(self.method, clients) for one in known if one.of_clients}
        return kept | self._computed(found, len(clients))

    def _computed(self, values: State, num_rows: int) -> State:
        """Return computed values without their history of gradients; raise TypeError as `_check_axes`."""
        for one in self.method.diagnostics:
            if one.name in values:
                self._check_axes(one, values[one.name], num_rows)
                check_type(self._hook("diagnostics"), one.name, values[one.name])
        return {name: value.detach() for name, value in values.items()}

    def _check_axes(self, one: Diagnostic, found: object, num_rows: int) -> None:
        """Raise TypeError for values of a diagnostic that are not as its axes say."""
        sizes = {"client": self.method.context.num_clients, "layer": len(self.method.layers)}
        expected = [num_rows, *(sizes.get(axis, axis) for axis in one.axes[1:])]
        shape = list(found.shape) if isinstance(found, Tensor) else []
        # axes of other names may have any size
        pairs = zip(shape, expected, strict=False)
        if len(shape) != len(expected) or any(size != wanted for size, wanted in pairs if wanted not in AXES):
            kind = shape if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise TypeError(
                f"{self._hook('diagnostics')} has {one.name!r} as {kind}; expected: a tensor "
                f"[{', '.join(map(str, expected))}], by its axes {one.axes}"
            )

    def checkpoint_diagnostics(self, server: State, done: int = 0) -> State:
        """Return what a checkpoint after `done` rounds holds beside the server's state, for readers."""
        chosen = [one for one in self._diagnostics_up_to(diagnostics.CHECKPOINT_LIMIT) if one.in_checkpoints]
        return self._of_server(chosen, server, done)

    def _of_server(self, chosen: Sequence[Diagnostic], server: State, done: int) -> State:
        """Compute diagnostics of the server's state; those of random numbers have a stream of the round."""
        seeded = seeded_hook(self.method.context.seed, "diagnostics", done)
        with unchanged_state(self._hook("diagnostics"), server), seeded:
            found = {one.name: one.of_server(self.method, server) for one in chosen if one.of_server}
        return self._computed(found, self.method.context.num_clients)

    def _diagnostics_up_to(self, limit: int) -> list[Diagnostic]:
        """Return the diagnostics that have at most so many entries, and those in place of others."""
        clients, layers = self.method.context.num_clients, len(self.method.layers)
        fitting = [one for one in self.method.diagnostics if one.fits(clients, layers, limit)]
        names = [one.name for one in fitting]
        return [one for one in fitting if one.instead_of not in names]

    def _hook(self, name: str) -> str:
        """Return a hook's name in errors."""
        return f"{type(self.method).__name__}.{name}"

    @contextmanager
    def _on_clients(self, hook: str, clients: ClientGroup, *given: object) -> Iterator[None]:
        """Call a hook inside: its generators have a stream, and what others read too must not change."""
        messages = [one for one in given if isinstance(one, Message)]
        with clients.seeding_generators(), unchanged(self._hook(hook), messages, clients.pool):
            yield
        shape, expected = [*clients.buffers.shape], [len(clients), self.method.layout.buffer_size]
        # several models of a client have an axis in between
        if shape[:1] + shape[-1:] != expected:
            raise ValueError(f"{self._hook(hook)} set clients.buffers of shape {shape}; expected: {expected}")

    def _message(self, hook: str, value: Message, count: int) -> Message:
        """Return a hook's message for `count` clients; raise TypeError or ValueError if it is not one."""
        check_message(self._hook(hook), value, count, self.method.layout, len(self.method.layers))
        return value.with_clients(count)

    def _rows(self, hook: str, value: Message, count: int) -> Message:
        """Return the message that a hook sends to the server; raise ValueError if it has shared tensors."""
        message = self._message(hook, value, count)
        if message.shared:
            names = ", ".join(message.shared)
            raise ValueError(f"{self._hook(hook)} returned {names} as shared; return them per_client")
        return message
