"""The hooks a method consists of, and what every method gets for nothing.

Shapes: N clients, S of a cohort, C of a group, P trainable numbers, U running statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hpcfl.communication.channel import Upload
from hpcfl.communication.means import WeightedMean
from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.errors import UserError
from hpcfl.models import Network, NetworkOptions, build_network
from hpcfl.parameters import Layer, ParameterLayout, Tensors
from hpcfl.settings import Settings
from hpcfl.training.batches import Batch
from hpcfl.training.clients import Clients
from hpcfl.training.forward import Forward
from hpcfl.training.losses import cross_entropy_loss
from hpcfl.training.settings import BufferPolicy, TrainConfig

State = Tensors
"""What a server or client keeps, by name."""


class Params(Settings):
    """A method's hyper-parameters: the keys under `method.*` beside the name."""

    def in_use(self) -> dict[str, Any]:
        """Return the keys that change a run, with the values that it uses; two runs alike here are one.

        Keys that are known to have no effect beside the others are left out, and defaults that depend on
        them filled in.
        """
        return self.model_dump(mode="json", exclude=self.idle_keys())

    def idle_keys(self) -> set[str]:
        """Return the keys that have no effect beside the others."""
        return set()


class Context:
    """What a method may know of the run: sizes, seed, training settings and initial weights."""

    def __init__(
        self,
        model: str,
        model_options: NetworkOptions,
        image_shape: tuple[int, int, int],
        num_classes: int,
        num_samples: Tensor,
        train: TrainConfig,
        seed: int,
    ) -> None:
        self.num_samples = num_samples
        """Training samples of each client, int64 [N]."""
        self.num_clients = len(num_samples)
        self.num_classes = num_classes
        self.image_shape = image_shape
        self.train = train
        self.seed = seed
        self.model_name = model
        self.build_network: Callable[[int], Network] = lambda draw: build_network(
            model, image_shape, num_classes, model_options, seed, draw
        )
        """The model with weights of a draw: a client's own, or -1 for those common to all."""
        self.network = self.build_network(-1)
        self.weights_are_given = getattr(model_options, "weights", None) is not None
        """Whether a file holds the initial weights, so that all draws are alike."""
        self.layout = ParameterLayout(self.network)
        self._theta, _ = self.layout.flatten(self.network)

    @cached_property
    def fewest_samples(self) -> int:
        """Samples that a mini-batch needs: two where BatchNorm makes statistics of them."""
        network = copy.deepcopy(self.network).train()
        try:
            network(torch.zeros(1, *self.image_shape))
        except ValueError:
            return 2
        return 1

    def refuse_equal_starts(self, count: int, key: str) -> None:
        """Raise UserError where `different_starts` would be equal; `method.key` asked for so many.

        A file gives the body, and draws differ in the head alone (as FedEM's authors' do); that is enough.
        """
        if count > 1 and self.weights_are_given and torch.equal(*self.different_starts(2)):
            raise UserError(
                f"method.{key}={count} needs models that start differently, and model.weights starts all "
                f"alike; drop model.weights, or use method.{key}=1"
            )

    def different_starts(self, count: int) -> Tensor:
        """Return initial weights [count, P] of draws of their own; the first are the common ones."""
        return self.initial_parameters(range(-1, -1 - count, -1), own=True)

    def initial_parameters(self, clients: Sequence[int] | None = None, own: bool = False) -> Tensor:
        """Return the initial weights: [P], or [C, P] for some clients, common to all unless `own`."""
        if clients is None:
            return self._theta.clone()
        if own:
            rows = [self.layout.flatten(self.build_network(client))[0] for client in clients]
            return torch.stack(rows) if rows else self._theta.new_empty(0, self.layout.size)
        return self._theta.expand(len(clients), -1).clone()


class Method:
    """One federated method as hooks around a round; a subclass overrides what it does differently.

    Hooks get explicit state and return messages or tensors; what they keep is in the two state
    dictionaries, which every checkpoint holds. `hpcfl.simulation.driver` calls them, and carries the running
    statistics of BatchNorm along.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    Params: ClassVar[Any] = Params
    buffer_policies: ClassVar[tuple[BufferPolicy, ...]] = ("average", "local")
    """What `train.buffers` may be; the first is the default."""
    train_defaults: ClassVar[dict[str, Any]] = {}
    """Defaults under `train.*` that differ from everybody's."""
    scored_moment: ClassVar[Literal["download", "training"]] = "download"
    """What makes the models that `personalised` returns: a download, or local training."""
    schedule_uses_rounds: ClassVar[bool] = False
    """Whether an earlier round would differ if `train.rounds` did, so that a run cannot be prolonged."""
    history_axes: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Of what is in the history, the axes of tensors that tables sum up: client first, then layer, branch or
    once more client."""

    needs_body: ClassVar[bool] = False
    """Whether the method tells a network's feature extractor from its head, so that it needs both."""

    chain: str | None = None
    """The setting by which a round's clients train one after the other, each from the one before it, so that
    they need one worker; None: each from what it received."""

    def __init__(self, context: Context, params: Any) -> None:
        self.context = context
        self.params = params
        self.network = self.make_network()
        """What clients train."""
        self.layout = ParameterLayout(self.network)
        self.layers = self.make_layers()
        self.buffers: BufferPolicy = context.train.buffers or self.buffer_policies[0]
        if self.buffers not in self.buffer_policies:
            raise UserError(
                f"train.buffers={self.buffers} does not go with method.name={self.name}; "
                f"allowed: {', '.join(self.buffer_policies)}"
            )
        if self.needs_body:
            self.refuse_without_body()

    def make_network(self) -> nn.Module:
        """Return what clients train, with its first weights; default: the configured model."""
        return self.context.network

    def make_layers(self) -> tuple[Layer, ...]:
        """Return the layers that are weighed, left out and counted as one; default: the modules."""
        return self.layout.layers()

    def refuse_without_body(self) -> None:
        """Raise UserError where the network has no layers before its head."""
        if not self.body_layers.any():
            raise UserError(
                f"method.name={self.name} tells a feature extractor from a head, and model.name="
                f"{self.context.model_name} has no layers before its head here; use a model that has"
            )

    def server_state(self) -> State:
        """Return the server's tensors at the start: kept on rank 0, written to every checkpoint."""
        return {}

    def client_state(self, clients: Sequence[int]) -> State:
        """Return tensors [C, ...] of some clients at the start: kept by their worker, checkpointed."""
        return {}

    def download(self, server: State, cohort: Cohort) -> Message:
        """Return what goes down to the cohort. Must not change the state."""
        return Message()

    def scored(self, server: State, cohort: Cohort) -> Message:
        """Return what clients need to be evaluated, which costs no traffic; default: the download."""
        return self.download(server, cohort)

    def negotiates(self, round: int) -> bool:
        """Whether clients answer the download of this round with a request, and the server sends more."""
        return False

    def request(self, clients: Clients, down: Message) -> Message:
        """Return what a group asks for, rows [C, ...]; `train` finds it in its message."""
        raise NotImplementedError

    def supply(self, server: State, cohort: Cohort, requests: State) -> Message:
        """Return what goes down to the cohort upon its requests, [S, ...] a name."""
        raise NotImplementedError

    def train(self, clients: Clients, down: Message) -> Message:
        """Train the clients of a group; return what goes up, rows [C, ...]."""
        raise NotImplementedError

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        """Update the server's state from the cohort's upload, which can be read once, block by block."""

    def server_buffers(self) -> Tensor:
        """Return averaged running statistics for the server to start with: [U], of several models [M, U]."""
        return self.initial_buffers()

    def download_buffers(self, server: State, cohort: Cohort) -> Message:
        """Return the averaged running statistics that go down with a download; default: all to everybody."""
        return Message(shared={BUFFERS: server[BUFFERS]})

    def mean_of_buffers(self, cohort: Cohort) -> WeightedMean | None:
        """Return what averages the running statistics of a cohort's upload; None: `aggregate` does it."""
        return WeightedMean(cohort.num_samples)

    def end_round(self, server: State, cohort: Cohort) -> None:
        """Update the server's state once models and running statistics are aggregated; default: nothing."""

    def personalised(self, clients: Clients, down: Message) -> Message:
        """Return the models that are evaluated: `theta`, or a model's parts by name.

        A part that all clients have in common is `shared` [P], the others are rows [C, P].
        """
        raise NotImplementedError

    def received(self, clients: Clients, down: Message) -> Message:
        """Return the models right after a download, before local training; empty where there are none.

        `down` is what `scored` returned. Default: the evaluated models, if a download makes them.
        """
        return self.personalised(clients, down) if self.scored_moment == "download" else Message()

    def trained(self, clients: Clients, down: Message, up: Message) -> Message:
        """Return the models of a group right after `train`, which returned `up`; empty where there are none.

        Default: the evaluated models, if training makes them, else the upload's `theta`; a method
        that uploads anything but the trained model, such as a difference, overrides this.
        """
        if self.scored_moment == "training":
            return self.personalised(clients, down)
        return Message(rows={"theta": up.rows["theta"]}) if "theta" in up.rows else Message()

    def predict(self, clients: Clients, model: Message, position: int, x: Tensor) -> Tensor:
        """Return class probabilities [n, K] for one client of the group; default: one forward pass."""
        return clients.probabilities(model, position, x)

    def finetune(self, clients: Clients, down: Message, epochs: int) -> Message:
        """Return the evaluated models after local adaptation; default: local SGD on `theta`."""
        theta = self.personalised(clients, down).of(len(clients))["theta"]
        return Message(rows={"theta": clients.sgd(theta, epochs=epochs, purpose="finetune").theta})

    def derived(self, server: State) -> State:
        """Return tensors written to checkpoints for readers only."""
        return {}

    def history(self, server: State) -> State:
        """Return the method's diagnostics, one tensor a name, kept for every evaluation."""
        return {}

    def client_history(self, clients: Clients) -> State:
        """Return the same of what clients keep, [C, ...] a name."""
        return {}

    def memory(self) -> dict[str, int]:
        """Return the server's bytes by part, for `hpcfl plan`."""
        return {}

    @property
    def body_layers(self) -> Tensor:
        """Which layers make up the feature extractor, bool [L]."""
        return torch.tensor([layer.stop <= self.layout.body.stop for layer in self.layers])

    @property
    def row_size(self) -> int:
        """Most numbers of one client in a tensor that travels."""
        return self.layout.size

    @classmethod
    def gradient_epochs(cls, params: Any, train: TrainConfig) -> float:
        """Return about how many gradients of each mini-batch a client takes in a round."""
        return train.local_epochs

    @classmethod
    def finetuning_gradients(cls, params: Any) -> float:
        """Return about how many gradients of each mini-batch an epoch of fine-tuning takes."""
        return 1

    def timed_loss(self, forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
        """Return the loss of `theta` whose gradient `hpcfl table --plan` times; default: cross-entropy."""
        return cross_entropy_loss(forward, tensors, batch)

    @property
    def epochs_a_round(self) -> float:
        """`gradient_epochs` of this run."""
        return self.gradient_epochs(self.params, self.context.train)

    def initial_buffers(self, clients: Sequence[int] | None = None) -> Tensor:
        """Return the initial running statistics: [U], or [C, U] for some clients."""
        buffers = self.layout.flatten(self.network)[1]
        return buffers if clients is None else buffers.expand(len(clients), -1).clone()

    @property
    def averages_buffers(self) -> bool:
        """Whether the server keeps an average of the clients' running statistics."""
        return self.buffers == "average" and self.layout.buffer_size > 0


def buffers_of_models(clients: Clients, count: int) -> Tensor:
    """Return running statistics [C, count, U] for several models a client: received ones, or its own."""
    buffers = clients.buffers
    return buffers if buffers.dim() == 3 else buffers.unsqueeze(1).expand(-1, count, -1)


def pull_towards(anchor: Tensor, strength: float) -> Callable[[Tensor, slice | Tensor], Tensor]:
    """Return the gradient of strength / 2 ||theta - anchor||^2, anchor [C, P], for `Clients.sgd`."""
    return lambda theta, members: strength * (theta - anchor[members])
