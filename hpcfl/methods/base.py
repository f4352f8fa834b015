"""The hooks of a method, with the default behaviour that every method inherits.

Shapes: N clients of a run, S clients of a cohort, C clients of a group (those that one rank trains or
evaluates at once), P trainable numbers, U running statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.sharded import ShardedRows
from hpcfl.communication.upload import Upload
from hpcfl.errors import UserError
from hpcfl.models import Network, NetworkOptions, build_network
from hpcfl.parameters import Layer, ParameterLayout, Tensors
from hpcfl.pictures import Picture
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
        """Return the keys that affect a run, with the values that the run uses.

        Two runs that agree on these keys are the same run as far as the method is concerned. The result
        leaves out `idle_keys` and fills in the defaults that depend on other keys.
        """
        return self.model_dump(mode="json", exclude=self.idle_keys())

    def idle_keys(self) -> set[str]:
        """Return the keys that have no effect, given the values of the other keys."""
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
        num_samples_of_unseen: Tensor | None = None,
    ) -> None:
        self.num_samples = num_samples
        """Training samples of each client, int64 [N]."""
        nobody = num_samples.new_empty(0)
        self.num_samples_of_unseen = nobody if num_samples_of_unseen is None else num_samples_of_unseen
        """Training samples of each client that takes no part in training, int64 [U]; a method needs it only
        to refuse too few."""
        self.num_clients = len(num_samples)
        """Clients that take part in training, N; their ids are 0 to N - 1."""
        self.num_classes = num_classes
        self.image_shape = image_shape
        self.train = train
        self.seed = seed
        self.model_name = model
        self.build_network: Callable[[int], Network] = lambda draw: build_network(
            model, image_shape, num_classes, model_options, seed, draw
        )
        """Builds the model with the initial weights of a draw: a client's id, or -1 for the common draw."""
        self.network = self.build_network(-1)
        self.weights_are_given = getattr(model_options, "weights", None) is not None
        """Whether a file holds the initial weights, so that all draws are alike."""
        self.layout = ParameterLayout(self.network)
        self._theta, _ = self.layout.flatten(self.network)

    @cached_property
    def fewest_samples(self) -> int:
        """Fewest samples of a mini-batch: 2 if a BatchNorm layer cannot compute statistics of one, else 1."""
        network = copy.deepcopy(self.network).train()
        try:
            network(torch.zeros(1, *self.image_shape))
        except ValueError:
            return 2
        return 1

    def refuse_equal_starts(self, count: int, key: str) -> None:
        """Raise UserError if `different_starts(count)`, which `method.<key>` asked for, would all be equal.

        If a file gives the initial weights of the body only, draws still differ in their heads, as in the
        code of FedEM's authors. This difference is sufficient.
        """
        if count > 1 and self.weights_are_given and torch.equal(*self.different_starts(2)):
            raise UserError(
                f"method.{key}={count} needs models that start differently, and model.weights starts all "
                f"alike; drop model.weights, or use method.{key}=1"
            )

    def different_starts(self, count: int) -> Tensor:
        """Return `count` initial models [count, P]: the common one first, then independent draws."""
        return self.initial_parameters(range(-1, -1 - count, -1), own=True)

    def initial_parameters(self, clients: Sequence[int] | None = None, own: bool = False) -> Tensor:
        """Return the initial weights: [P], or [C, P] for some clients, common to all unless `own`."""
        if clients is None:
            return self._theta.clone()
        if own:
            rows = self._theta.new_empty(len(clients), self.layout.size)
            for row, client in zip(rows, clients, strict=True):
                row.copy_(self.layout.flatten(self.build_network(client))[0])
            return rows
        return self._theta.expand(len(clients), -1).clone()


class Method:
    """One federated method, written as hooks that the round loop calls; a subclass overrides some of them.

    Hooks receive all state as arguments and return messages or tensors. Everything that lasts from round to
    round is in two state dictionaries, the server's and the clients', which every checkpoint holds.
    `hpcfl.simulation.driver` calls the hooks and handles the running statistics of BatchNorm.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    Params: ClassVar[Any] = Params
    buffer_policies: ClassVar[tuple[BufferPolicy, ...]] = ("average", "local")
    """What `train.buffers` may be; the first is the default."""
    train_defaults: ClassVar[dict[str, Any]] = {}
    """Defaults under `train.*` that differ from everybody's."""
    scored_moment: ClassVar[Literal["download", "training"]] = "download"
    """Whether the models that `personalised` returns exist after a download, or only after local training."""
    growing_state: ClassVar[frozenset[str]] = frozenset()
    """Tensors of the server's state whose shapes change with rounds; all others keep those of the start."""
    schedule_uses_rounds: ClassVar[bool] = False
    """Whether a round depends on `train.rounds`; a run of such a method cannot be extended to more rounds."""
    history_axes: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Axes of the diagnostics that tables summarise and pictures draw, by name: "client" first, then "layer",
    "branch", "component", "path" or a second "client"."""
    pictures: ClassVar[tuple[Picture, ...]] = ()
    """What the method is known by, of diagnostics with `history_axes`."""

    needs_body: ClassVar[bool] = False
    """Whether the method treats feature extractor and head differently; the network must then have both."""

    sharded_state: str | None = None
    """The client state [N, P] that the server's hooks mix and compare through `sharded`; None: no state."""
    sharded: ShardedRows
    """The rows of `sharded_state`, set when a run begins; a hook that gets an upload reads that to its end
    first."""

    has_global_model: ClassVar[bool] = False
    """Whether the server's `theta` [P], with the running statistics it averages, is one model for all."""

    chain: str | None = None
    """The setting, such as `method.order=chain`, that makes each client of a round start from the weights of
    the client before it; this needs a single worker. None: every client starts from its download."""

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
        """Return the layers, the units of weights, masks and byte counts; default: one layer per module."""
        return self.layout.layers()

    def refuse_without_body(self) -> None:
        """Raise UserError where the network has no layers before its head."""
        if not self.body_layers.any():
            raise UserError(
                f"method.name={self.name} tells a feature extractor from a head, and model.name="
                f"{self.context.model_name} has no layers before its head here; use a model that "
                "has, such as model.name=lenet"
            )

    def server_state(self) -> State:
        """Return the server's tensors at the start: kept on rank 0, written to every checkpoint."""
        return {}

    def client_state(self, clients: Sequence[int]) -> State:
        """Return tensors [C, ...] of some clients at the start, on the CPU; their worker keeps them.

        They are in every checkpoint. A worker with a GPU may keep them there (`run.state`).
        """
        return {}

    def download(self, server: State, cohort: Cohort) -> Message:
        """Return the message from the server to the cohort. Must not change the state."""
        return Message()

    def scored(self, server: State, cohort: Cohort) -> Message:
        """Return the message that an evaluation needs; its bytes do not count. Default: the download."""
        return self.download(server, cohort)

    def negotiates(self, round: int) -> bool:
        """Return whether clients answer this round's download with a request, and the server sends more."""
        return False

    def request(self, clients: Clients, down: Message) -> Message:
        """Return the request of a group, rows [C, ...]; the message `down` of `train` contains it."""
        raise NotImplementedError

    def supply(self, server: State, cohort: Cohort, requests: State) -> Message:
        """Return the server's answer to the cohort's requests, which are tensors [S, ...] by name."""
        raise NotImplementedError

    def train(self, clients: Clients, down: Message) -> Message:
        """Train the clients of a group; return their upload, rows [C, ...].

        A codec may send a tensor with the name and shape of one in the download as a difference to it: name
        only new values of the same thing so, and anything else, such as an update, otherwise.
        """
        raise NotImplementedError

    def leave_out(self, clients: Clients) -> None:
        """Forget what `train` has just left in this object, if anything: a client of the group has diverged.

        What it wrote to the clients' state is forgotten without this hook.
        """

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        """Update the server's state from the cohort's upload: means of its tensors first, then its blocks."""

    def server_buffers(self) -> Tensor:
        """Return the server's initial averaged running statistics: [U], or [M, U] of M models."""
        return self.initial_buffers()

    def download_buffers(self, server: State, cohort: Cohort) -> Message:
        """Return the averaged running statistics that go down with a download; default: all to everybody."""
        return Message(shared={BUFFERS: server[BUFFERS]})

    def weights_of_buffers(self, cohort: Cohort) -> Tensor | None:
        """Return the weights [S] of the clients' running statistics; None: `aggregate` averages them."""
        return cohort.num_samples

    def end_round(self, server: State, cohort: Cohort) -> None:
        """Update the server's state once models and running statistics are aggregated; default: nothing.

        The cohort may be empty: its clients have all diverged, and nothing was aggregated.
        """

    def personalised(self, clients: Clients, down: Message) -> Message:
        """Return the models that are evaluated: `theta`, or a model's parts by name.

        A part that all clients have in common is `shared` [P], the others are rows [C, P].
        """
        raise NotImplementedError

    def received(self, clients: Clients, down: Message) -> Message:
        """Return the models right after a download, before local training; empty where there are none.

        `down` is what `scored` returned. Default: the evaluated models if `scored_moment` is "download".
        """
        return self.personalised(clients, down) if self.scored_moment == "download" else Message()

    def trained(self, clients: Clients, down: Message, up: Message) -> Message:
        """Return the models of a group right after `train`, which returned `up`; empty where there are none.

        Default: the evaluated models if `scored_moment` is "training", else the upload's `theta`. A method
        that uploads anything but the trained model, such as a difference, overrides this hook.
        """
        if self.scored_moment == "training":
            return self.personalised(clients, down)
        return Message(rows={"theta": up.rows["theta"]}) if "theta" in up.rows else Message()

    def predict(self, clients: Clients, model: Message, position: int, x: Tensor) -> Tensor:
        """Return class probabilities [n, K] for one client of the group; default: one forward pass."""
        return clients.probabilities(model, position, x)

    def network_of(self, model: Tensors) -> nn.Module:
        """Return a client's evaluated model as a network from images to logits.

        `model` has `theta` [P], `buffers` [U], and what else `personalised` returns, without a client axis.
        The softmax of the logits is what `predict` returns: a method that overrides one overrides both.
        Default: the network that clients train.
        """
        return self.with_weights(model["theta"], model[BUFFERS])

    def with_weights(self, theta: Tensor, buffers: Tensor) -> nn.Module:
        """Return a copy of the network with weights [P] and running statistics [U], in evaluation mode."""
        network = copy.deepcopy(self.network).eval()
        network.load_state_dict(self.layout.views(theta) | self.layout.buffer_views(buffers))
        return network

    def finetune(self, clients: Clients, down: Message, epochs: int) -> Message:
        """Return the evaluated models after local adaptation; default: local SGD on `theta`."""
        theta = self.personalised(clients, down).of(len(clients))["theta"]
        return Message(rows={"theta": clients.sgd(theta, epochs=epochs, purpose="finetune").theta})

    def welcome(self, server: State, cohort: Cohort) -> Message:
        """Return the message to clients that never took part in training; its bytes do not count.

        Their ids are N or more, so that no state of the server has rows of theirs. Default: `scored`, which
        a method overrides whose message has a row a client.
        """
        return self.scored(server, cohort)

    def adapt(self, clients: Clients, down: Message) -> Message:
        """Return the evaluated models of clients that never took part in training; see `personalised`.

        `down` is what `welcome` returned; the clients' state is a new client's, and what is written to it is
        forgotten. Local epochs are `train.unseen_epochs`. Default: the client's first round where models
        exist after local training only, else fine-tuning. Overridden where a part is to stay as it is, and
        where `train` needs the answer to a request.
        """
        if self.scored_moment == "training":
            self.train(clients, down)
            return self.personalised(clients, down)
        return self.finetune(clients, down, clients.local_epochs)

    def fixed_buffers(self, clients: Clients) -> AbstractContextManager[None]:
        """Keep running statistics that the server averages as they are, for `adapt` of a part beside them."""
        return clients.buffers_aside() if self.averages_buffers else nullcontext()

    def derived(self, server: State) -> State:
        """Return tensors for readers of a checkpoint; a resumed run does not load them."""
        return {}

    def history(self, server: State) -> State:
        """Return the method's diagnostics, one tensor per name, recorded at every evaluation."""
        return {}

    def client_history(self, clients: Clients) -> State:
        """Return the diagnostics of a group, one tensor [C, ...] per name, recorded at every evaluation."""
        return {}

    def server_bytes(self) -> dict[str, int]:
        """Return the server's bytes by part, for `hpcfl plan`."""
        return {}

    @property
    def memory_advice(self) -> str:
        """What to set where the server's state does not fit in memory; empty: nothing helps."""
        return ""

    @property
    def body_layers(self) -> Tensor:
        """Which layers make up the feature extractor, bool [L]."""
        return torch.tensor([layer.stop <= self.layout.body.stop for layer in self.layers])

    @property
    def largest_row(self) -> int:
        """Largest number of elements that one client has in any tensor that travels."""
        return self.layout.size

    @classmethod
    def entry_names(cls, axis: str, params: Any) -> list[str]:
        """Return what the entries along an axis of `history_axes` are called; empty: by their numbers."""
        return []

    @classmethod
    def gradient_epochs(cls, params: Any, train: TrainConfig) -> float:
        """Return roughly how many gradients per mini-batch of its data a client computes in a round."""
        return train.local_epochs

    @classmethod
    def finetuning_gradients(cls, params: Any) -> float:
        """Return roughly how many gradients per mini-batch one epoch of fine-tuning computes."""
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
    """Return running statistics [C, count, U] of `count` models per client.

    These are the received statistics of each model, or else the client's own [C, U], repeated for each model.
    """
    buffers = clients.buffers
    return buffers if buffers.dim() == 3 else buffers.unsqueeze(1).expand(-1, count, -1)


def pull_towards(anchor: Tensor, strength: float) -> Callable[[Tensor, slice | Tensor], Tensor]:
    """Return the gradient of strength / 2 ||theta - anchor||^2, anchor [C, P], for `Clients.sgd`."""
    return lambda theta, members: strength * (theta - anchor[members])
