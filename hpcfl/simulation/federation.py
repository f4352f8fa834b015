"""The clients of a run on one rank: cohorts, this rank's groups, and messages to and from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from hpcfl.communication.channel import Channel
from hpcfl.communication.codecs import IDENTITY, UNSENT, ErrorFeedback, Frame, TopK, UploadCoding, codec_of
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import BUFFERS, Cohort, Message, SameKinds
from hpcfl.communication.sharded import shard_unit_of
from hpcfl.communication.traffic import count_bytes
from hpcfl.communication.upload import Upload
from hpcfl.methods.base import State
from hpcfl.setup.experiment import Experiment
from hpcfl.simulation.migration import ClientMigration
from hpcfl.terminal import LOG
from hpcfl.training.client_group import ClientGroup, WorkerContext

T = TypeVar("T")

EVALUATED_ELEMENTS = 2**27
"""Largest number of model elements that are evaluated at once. A constant, unlike `run.max_elements`: a
different split of the clients may change the last bits of a product."""


@dataclass(frozen=True)
class Delivery:
    """A message from the server as the clients received it."""

    received: Message
    """The message for this rank's members of the cohort."""
    sent: Message | None
    """The message for all members, on the server; None elsewhere."""

    def select(self, here: list[int], everywhere: list[int]) -> Delivery:
        """Return the delivery to some members: by their positions on this rank, and in the cohort."""
        sent = None if self.sent is None else self.sent.select(everywhere)
        return Delivery(self.received.select(here), sent)

    def __or__(self, later: Delivery) -> Delivery:
        """Return both as one; where a name is in both, the later tensor."""
        sent = None if self.sent is None or later.sent is None else self.sent | later.sent
        return Delivery(self.received | later.received, sent)


class Federation:
    """Cohorts and groups of one run on one rank, and the channel between ranks. Making one is collective."""

    def __init__(self, experiment: Experiment, world: Communicator) -> None:
        self.experiment, self.world = experiment, world
        self.method, self.adapter = experiment.method, experiment.adapter
        self.worker_context = experiment.worker_context
        self.num_clients = experiment.num_clients
        """Clients that take part in training, N."""
        self.num_unseen = len(experiment.num_train) - self.num_clients
        """Clients that do not, U."""
        self.in_training = range(self.num_clients)
        self.unseen = range(self.num_clients, len(experiment.num_train))
        self._shard_unit = shard_unit_of(self.method.sharded)
        self.channel = Channel(world, self.method.layers, self.num_clients, self._shard_unit)
        """Sends tensors without a codec: those of checkpoints and diagnostics."""
        self._down, self._up = codec_of(experiment.comm, "down"), codec_of(experiment.comm, "up")
        self.migration = ClientMigration(world, self.channel, self.worker_context, experiment.run.placement)
        self._has_warned_of_topk = False

    @property
    def leaves_out(self) -> bool:
        """Whether the round of a client that diverges is undone (`run.on_divergence`)."""
        return self.experiment.run.on_divergence != "continue"

    def select(self, cohort: Cohort, places: Sequence[int]) -> tuple[Cohort, list[int]]:
        """Return the members at some positions in a cohort, and the places of this rank's among its own."""
        chosen = {*places}
        here = [n for n, place in enumerate(self.channel.own(cohort)) if place in chosen]
        return cohort.select(places), here

    def cohort_of(self, round: int, clients: Sequence[int]) -> Cohort:
        """Return a cohort of given clients in ascending order, all in training or all unseen."""
        num_samples, workers = torch.from_numpy(self.experiment.num_train[list(clients)]), None
        if clients and clients[0] in self.unseen:
            numbers = [client - self.num_clients for client in clients]
            workers = tuple(self.world.homes(numbers, self.num_unseen, self._shard_unit))
        return Cohort(round, tuple(clients), num_samples, workers)

    def cohorts(self, round: int, clients: range) -> Iterator[Cohort]:
        """Yield `in_training` or `unseen` in cohorts of bounded size, the same for any number of ranks.

        Each cohort is spread evenly over the shards.
        """
        parts = num_evaluated_cohorts(len(clients), self.method.layout.size)
        for part in range(parts):
            yield self.cohort_of(round, clients[part::parts])

    def is_unseen(self, cohort: Cohort) -> bool:
        """Whether a cohort's clients take no part in training."""
        return cohort.clients[0] in self.unseen

    def own(self, cohort: Cohort) -> list[int]:
        """Return the members that train on this rank, in ascending order."""
        return [cohort.clients[position] for position in self.channel.own(cohort)]

    def groups(self, cohort: Cohort) -> Iterator[tuple[slice, ClientGroup]]:
        """Yield this rank's cohort members in groups as large as the engine takes, with their positions."""
        own = self.own(cohort)
        size = self.worker_context.engine.clients_at_once
        for start in range(0, len(own), size):
            members = own[start : start + size]
            worker_context = self._worker_context_of(members[0])
            yield slice(start, start + size), ClientGroup(worker_context, members, cohort.round)

    def _worker_context_of(self, client: int) -> WorkerContext:
        """Return the context of a client that trains on this rank: at home, migrated here, or unseen."""
        contexts = (self.worker_context, self.migration.worker_context, self.experiment.unseen)
        return next(context for context in contexts if client in context.clients)

    def deliver(self, message: Message | None, cohort: Cohort) -> Delivery:
        """Bring the server's message to the cohort; it is None on other ranks. Collective."""
        received = self.channel.down(message, cohort, self._down)
        return Delivery(received, None if message is None else self.channel.as_received(message, self._down))

    def send_requests(self, requests: Message, cohort: Cohort) -> Upload:
        """Send the requests of this rank's members to the server. Collective, and so is the result."""
        sent = Message(num_clients=len(cohort)) if self.world.is_server else None
        return self.upload(requests, cohort, Delivery(Message(num_clients=requests.num_clients), sent))

    def upload(self, message: Message, cohort: Cohort, delivered: Delivery) -> Upload:
        """Send the uploads of this rank's members to the server. Collective, and so is the result.

        `delivered` is everything that the members received in this round.
        """
        up = self.channel.up(message, cohort, delivered.sent, self._coding(cohort, delivered.received))
        if isinstance(self._up, TopK) and self.world.is_server and not self._has_warned_of_topk:
            self._warn_of_topk(up.outline)
        return up

    def _warn_of_topk(self, outline: Message) -> None:
        """Warn if topk does not compress more than a tenth of an upload's numbers, but for running
        statistics, which it never compresses."""
        sizes = {
            name: math.prod(rows.shape[1:])
            for name, rows in outline.per_client.items()
            if rows.is_floating_point() and name != BUFFERS
        }
        whole = [name for name in sizes if not any(piece.is_index for piece in outline.pieces[name])]
        if 10 * sum(sizes[name] for name in whole) > sum(sizes.values()):
            LOG.warning(
                f"comm.codec=topk does not compress {', '.join(whole)} in the uploads of method.name="
                f"{self.method.name}: it compresses models whose earlier values were in the download; int8 "
                "and float16 compress the others too"
            )
            self._has_warned_of_topk = True

    def upload_bytes(self, up: Message, received: Message, round: int) -> Tensor:
        """Return the bytes that each client of a group sends, int64 [C], as the server would count them.

        `received` is what these clients received in this round.
        """
        outline = up.with_clients(up.num_clients)
        for name in up.per_client:
            frame = Frame.from_message(up, name, self.method.layers)
            if name in self.method.traits.differences:
                frame = frame.after(received)
            outline.pieces[name] = self._up.for_frame(frame).pieces(frame)
        names_layers = not self.adapter.needs_request(round)
        return torch.from_numpy(count_bytes(outline, self.method.layers, names_layers).total)

    def _coding(self, cohort: Cohort, received: Message) -> UploadCoding | None:
        if self._up is IDENTITY:
            return None
        states = [
            (context.state, len(context.clients))
            for context in (self.worker_context, self.migration.worker_context)
        ]
        found = [(self._worker_context_of(client), client) for client in self.own(cohort)]
        rows = [(context.state, context.clients.index(client)) for context, client in found]
        unsent = ErrorFeedback(states, rows)
        return UploadCoding(self._up, received, self.method.traits.differences, unsent)

    def on_device(self, received: Message) -> Message:
        """Copy shared tensors to the device, once for all groups; rows follow group by group."""
        shared = {name: tensor.to(self.worker_context.device) for name, tensor in received.shared.items()}
        return replace(received, shared=shared)

    def downloads(self, server: State, cohort: Cohort) -> Iterator[tuple[ClientGroup, Message]]:
        """Yield groups of this rank's clients with the server's message before an evaluation. Collective."""
        adapter = self.adapter
        hook = adapter.new_client_download if self.is_unseen(cohort) else adapter.eval_download
        message = self.on_server(lambda: hook(server, cohort))
        down = self.on_device(self.channel.down(message, cohort, self._down))
        for part, clients in self.groups(cohort):
            yield clients, down.select(part).to(clients.device)
            self.world.heartbeat()

    def on_server(self, hook: Callable[[], T]) -> T | None:
        """Call a hook on the server and return its result, None elsewhere; workers serve its requests.
        Collective."""
        sharded = self.method.sharded
        if not self.world.is_server:
            if sharded is not None:
                sharded.serve()
            return None
        found = hook()
        if sharded is not None:
            sharded.end()
        return found

    def kept_by_codec(self) -> State:
        """Return the codec's part of this rank's client state; all ranks have the same names."""
        return {name: rows for name, rows in self.worker_context.state.items() if name.startswith(UNSENT)}


class Uploads:
    """Collects the uploads of this rank's groups in one message on the CPU."""

    def __init__(self, clients: Sequence[int]) -> None:
        """Take the ids of this rank's clients."""
        self.message = Message(num_clients=len(clients))
        self._clients, self._same = clients, SameKinds()

    def add(self, part: slice, up: Message) -> None:
        """Add the upload of the clients at these positions; DifferentTensorsError if it has other tensors
        than the first."""
        whole, count = self.message, self.message.num_clients
        if not part.start:
            for name, rows in up.per_client.items():
                whole.per_client[name] = torch.empty(count, *rows.shape[1:], dtype=rows.dtype)
            for name, mask in up.layer_mask.items():
                whole.layer_mask[name] = mask if mask.dim() == 1 else mask.new_empty(count, *mask.shape[1:])
        self._same.check(self._clients[part.start], up.row_kinds())
        for name, rows in whole.per_client.items():
            rows[part] = up.per_client[name]
        for name, mask in whole.layer_mask.items():
            if mask.dim() == 2:
                mask[part] = up.layer_mask[name]


def num_evaluated_cohorts(num_clients: int, size: int) -> int:
    """Return the number of cohorts in which clients with models of `size` numbers are evaluated."""
    return min(num_clients, max(1, math.ceil(num_clients * size / EVALUATED_ELEMENTS)))


def stack(messages: Sequence[Message], clients: Sequence[int]) -> Message:
    """Join the messages of this rank's groups of clients; rows are copied to the CPU group by group."""
    whole = Uploads(clients)
    start = 0
    for message in messages:
        whole.add(slice(start, start + message.num_clients), message)
        start += message.num_clients
    return whole.message
