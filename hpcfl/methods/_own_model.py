"""What methods have in common whose clients keep a model of their own, which is the one evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hpcfl.clients import Clients
from hpcfl.messages import Cohort, Message
from hpcfl.methods.base import Method, State


class OwnModel(Method):
    """Each client keeps `theta` and its running statistics; without being sampled, as they are."""

    scored_moment = "training"
    shared_parts: ClassVar[tuple[str, ...]] = ()
    buffer_policies = ("local",)

    def client_state(self, clients: Sequence[int]) -> State:
        return {"theta": self.context.initial_parameters(clients)}

    def scored(self, server: State, cohort: Cohort) -> Message:
        return Message()

    def personalised(self, clients: Clients, down: Message) -> State:
        return {"theta": clients["theta"]}

    def trained(self, clients: Clients, down: Message, up: Message) -> State:
        return {"theta": clients["theta"]}
