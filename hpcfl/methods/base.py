"""The hooks of a method, with the default behaviour that every method inherits.

Shapes: N clients of a run, S clients of a cohort, C clients of a group (those that one rank trains or
evaluates at once), P trainable numbers, U running statistics.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.sharded import BLOCK_CLIENTS, ShardedRows
from hpcfl.communication.upload import Upload
from hpcfl.config.keys import (
    BufferPolicy,
    ClientsConfig,
    Params,
    PrivacyConfig,
    PrivacyUnit,
    ServerConfig,
    TrainConfig,
)
from hpcfl.config.messages import shown
from hpcfl.errors import UserError
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.models import Network, NetworkOptions, build_network
from hpcfl.parameters import Layer, ParameterLayout, Tensors
from hpcfl.samples import SampleType
from hpcfl.training.client_group import ClientGroup, GradientOf
from hpcfl.training.losses import class_probabilities

State = Tensors
"""What a server or client keeps, by name."""


class Context:
    """The properties of the run that a method may use: sizes, seed, training settings and initial weights."""

    def __init__(
        self,
        model: str,
        model_options: NetworkOptions,
        sample: SampleType,
        num_classes: int,
        num_samples: Tensor,
        train: TrainConfig,
        seed: int,
        num_samples_of_unseen: Tensor | None = None,
        server: ServerConfig | None = None,
        privacy: PrivacyConfig | None = None,
        clients: ClientsConfig | None = None,
    ) -> None:
        self.num_samples = num_samples
        """Training samples of each client, int64 [N]."""
        nobody = num_samples.new_empty(0)
        self.num_samples_of_unseen = nobody if num_samples_of_unseen is None else num_samples_of_unseen
        """Training samples of each client that takes no part in training, int64 [U]; a method needs it only
        to check for too few samples."""
        self.num_clients = len(num_samples)
        """Clients that take part in training, N; their ids are 0 to N - 1."""
        self.num_classes = num_classes
        self.sample = sample
        self.train = train
        self.server = server or ServerConfig()
        self.privacy = privacy or PrivacyConfig()
        self.clients = clients or ClientsConfig()
        self.seed = seed
        self.model_name = model
        self.build_network: Callable[[int], Network] = lambda draw: build_network(
            model, sample, num_classes, model_options, seed, draw
        )
        """Builds the model with the initial weights of a draw: a client's id, or -1 for the common draw."""
        self.network = self.build_network(-1)
        self.weights_are_given = getattr(model_options, "weights", None) is not None
        """Whether a file holds the initial weights, so that all draws are alike."""
        self.layout = ParameterLayout(self.network)
        self._theta, _ = self.layout.flatten(self.network)

    def forget_numbers(self) -> None:
        """Replace the initial weights by their shapes, on torch's meta device."""
        self.network.to("meta")
        self._theta = self._theta.to("meta")

    @cached_property
    def fewest_samples(self) -> int:
        """Fewest samples of a mini-batch: 2 if a BatchNorm layer cannot compute statistics of one, else 1."""
        network = copy.deepcopy(self.network).train()
        try:
            network(self.sample.zeros(1))
        except ValueError:
            return 2
        return 1

    def check_equal_starts(self, count: int, key: str) -> None:
        """Raise UserError if `different_starts(count)`, which `method.<key>` needs, would all be equal.

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


@dataclass(frozen=True)
class Traits:
    """Fixed properties of a method, for any hyper-parameters; `replace` changes some in a subclass."""

    eval_after: Literal["download", "training"] = "download"
    """Whether the evaluated models (`eval_model`) exist after a download, or only after local training."""
    buffers: tuple[BufferPolicy, ...] = ("average", "local")
    """Allowed values of `train.buffers`, the treatment of BatchNorm's running statistics; the first is the
    default. local: they stay with the client. average: the server averages them. mixed: the method mixes
    them, in its own state."""
    averages: tuple[str, ...] = ()
    """Tensors of the server's state that `aggregate` moves to means over clients: `server.optimiser` acts on
    them. (): the method refuses `server.optimiser`."""
    averages_own_buffers: bool = False
    """Whether `aggregate` averages the clients' running statistics itself, for example cluster by cluster."""
    has_global_model: bool = False
    """Whether the server's `theta` [P], with the running statistics it averages, is one model for all."""
    needs_body: bool = False
    """Whether the method treats feature extractor and head differently; the network must then have both."""
    uses_total_rounds: bool = False
    """Whether a round depends on `train.rounds`; a run of such a method cannot be extended to more rounds."""
    growing_state: frozenset[str] = frozenset()
    """Names of tensors of the server's state whose shapes change from round to round."""
    train_defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults under `train.*` that differ from the general ones."""
    server_defaults: dict[str, Any] = field(default_factory=dict)
    """The same under `server.*`."""
    refuses: dict[str, str] = field(default_factory=dict)
    """Keys under `train.*` that must keep their defaults with this method, each with the reason: half a
    sentence that begins with "whose" or "which"."""

    @property
    def defaults(self) -> dict[str, dict[str, Any]]:
        """Both kinds of defaults, by group of keys."""
        return {"train": self.train_defaults, "server": self.server_defaults}

    def replace(self, **changes: Any) -> Traits:
        """Return these traits with some changes."""
        return replace(self, **changes)


class Method:
    """One federated method, written as hooks that the round loop calls; a subclass overrides some of them.

    Hooks receive all state as arguments and return messages or tensors. Everything that lasts from round to
    round is in two state dictionaries, the server's and the clients', which every checkpoint holds.
    `hpcfl.methods.adapter` calls the hooks and handles the running statistics of BatchNorm.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    Params: ClassVar[Any] = Params
    traits: Traits = Traits()
    privacy_units: ClassVar[tuple[PrivacyUnit, ...]] = ()
    """Units of `privacy.unit` whose guarantee holds. A subclass that changes what is trained or sent must say
    so anew: it is not inherited.

    client: all that clients send is `Traits.averages`, with the layers of the download, of which the server
    makes means with weights from `cohort.num_samples`. sample: all that they send is made from models that
    `ClientGroup.sgd` has trained with its own gradient; beside these, neither samples nor labels have any
    effect on it."""
    diagnostics: tuple[Diagnostic, ...] = ()
    """Quantities that evaluations record, for pages, figures and tables."""

    sharded_state: str | None = None
    """The client state [N, P] that the server's hooks mix and compare through `sharded`; None: no state."""
    sharded: ShardedRows
    """The rows of `sharded_state`, once a run begins. A hook that gets an upload must read it to its end
    before it uses them."""
    finetuned: slice = slice(None)
    """The numbers of `theta` [P] that `finetune` trains; default: all."""
    num_models: int | None = None
    """Number M of models that a client gets and trains, each with running statistics of its own: those of a
    group are [C, M, U]. None: one model, and [C, U]."""
    sequential: str | None = None
    """The setting, such as `method.order=chain`, that makes each client of a round start where the client
    before it ended (`ClientGroup.handover`); this needs a single worker. None: clients are independent."""

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a class whose hooks contradict each other, or that has one misspelt."""
        super().__init_subclass__()
        hooks = [name for name, value in vars(Method).items() if callable(value) and name[0] != "_"]
        own = [name for name, value in vars(cls).items() if callable(value) and name[0] != "_"]
        for name in own:
            near = difflib.get_close_matches(name, hooks, n=1, cutoff=0.79)
            if near and not hasattr(super(cls, cls), name):
                raise TypeError(
                    f"{cls.__name__}.{name} is not a hook; did you mean {near[0]}? If not, name it _{name}"
                )
        if "privacy_units" not in vars(cls):
            cls.privacy_units = ()
        if "as_module" in vars(cls) and cls.predict is Method.predict:
            raise TypeError(
                f"{cls.__name__} overrides as_module but not predict, so that evaluations would not use the "
                "module; override both"
            )
        names = [diagnostic.name for diagnostic in cls.diagnostics]
        if len(names) > len(set(names)):
            raise TypeError(f"{cls.__name__} has two diagnostics of one name: {', '.join(names)}")

    def __init__(self, context: Context, params: Any) -> None:
        self.context = context
        self.params = params
        self.network = self.make_network()
        """What clients train."""
        self.layout = ParameterLayout(self.network)
        self.layers = self.make_layers()
        allowed = self.traits.buffers
        self.buffers: BufferPolicy = context.train.buffers or allowed[0]
        if self.buffers not in allowed:
            raise UserError(
                f"train.buffers={self.buffers} does not go with method.name={self.name}; "
                f"allowed: {', '.join(allowed)}"
            )
        for key, reason in self.traits.refuses.items():
            value, default = getattr(context.train, key), TrainConfig.model_fields[key].default
            if value != default:
                raise UserError(
                    f"train.{key}={shown(value)} does not go with method.name={self.name}, {reason}; "
                    f"allowed: {shown(default)}"
                )
        if context.server.optimiser is not None and not self.traits.averages:
            raise UserError(
                f"server.optimiser={context.server.optimiser} does not go with method.name={self.name}, "
                "whose server averages no model; set server.optimiser=null"
            )
        self._check_private(context.privacy.unit)
        if self.traits.needs_body:
            self.check_body()

    # made once, before the first round

    def make_network(self) -> nn.Module:
        """Return what clients train, with its first weights; default: the configured model."""
        return self.context.network

    def make_layers(self) -> tuple[Layer, ...]:
        """Return the layers, the units of weights, masks and byte counts; default: one layer per module."""
        return self.layout.layers()

    def check_body(self) -> None:
        """Raise UserError if the configured model has no layers before its head."""
        if not self.context.layout.body.stop:
            raise UserError(
                f"method.name={self.name} needs a feature extractor and a head, and model.name="
                f"{self.context.model_name} has no layers before its head here; use one that has, such as "
                "model.name=lenet"
            )

    def check_num_layers(self, key: str) -> None:
        """Raise UserError if `method.<key>` is more than the model has layers."""
        value, most = getattr(self.params, key), len(self.layers)
        if value > most:
            names = ", ".join(layer.name for layer in self.layers)
            raise UserError(
                f"method.{key}={value} is more than the model's {most} layers ({names}); "
                f"allowed: up to {most}"
            )

    def _check_private(self, unit: PrivacyUnit | None) -> None:
        """Raise UserError if `privacy.unit` would promise what does not hold."""
        if unit is None:
            return
        key = f"privacy.unit={unit}"
        if unit not in self.privacy_units:
            raise UserError(
                f"{key} does not go with method.name={self.name}, whose clients' messages it would not make "
                "private; `hpcfl list` shows the methods that it goes with"
            )
        if not self.layout.buffer_size:
            return
        if unit == "sample":
            raise UserError(
                f"{key} needs a model without BatchNorm, which mixes the samples of a mini-batch, and model."
                f"name={self.context.model_name} has it here; use another, such as model.batchnorm=false"
            )
        if self.averages_buffers:
            raise UserError(f"{key} needs train.buffers=local: running statistics would be sent as they are")

    def server_state(self) -> State:
        """Return the server's tensors at the start: kept on rank 0, written to every checkpoint."""
        return {}

    def client_state(self, clients: Sequence[int]) -> State:
        """Return tensors [C, ...] of some clients at the start, on the CPU; their worker keeps them.

        They are in every checkpoint. A worker with a GPU may keep them there (`run.state`).
        """
        return {}

    # a round

    def download(self, server: State, cohort: Cohort) -> Message:
        """Return the message from the server to the cohort. Must not change the state."""
        return Message()

    def train(self, clients: ClientGroup, down: Message) -> Message:
        """Train the clients of a group; return their upload, rows [C, ...].

        A codec may send a tensor with the name and shape of one in the download as a difference to it: use
        the same name only for a new value of the same quantity, and another name for anything else, such as
        an update.
        """
        raise NotImplementedError

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        """Update the server's state from the cohort's upload: means of its tensors first, then its blocks.

        It is called on the server only; reading the upload is collective, and each tensor can be read once.
        """

    def end_round(self, server: State, cohort: Cohort) -> None:
        """Update the server's state once models and running statistics are aggregated; default: nothing.

        The cohort may be empty: its clients have all diverged or been lost, and nothing was aggregated.
        """

    # evaluation

    def eval_download(self, server: State, cohort: Cohort) -> Message:
        """Return the message that an evaluation needs; its bytes do not count. Default: the download."""
        return self.download(server, cohort)

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        """Return the models that are evaluated: `theta`, or a model's parts by name.

        A part that all clients have in common is `shared` [P], the others are rows [C, P]. `down` is what
        `eval_download` returned. The clients' state cannot be written here.
        """
        raise NotImplementedError

    def model_after_download(self, clients: ClientGroup, down: Message) -> Message:
        """Return the models right after a download, before local training; empty if there are none.

        Arguments as for `eval_model`. Default: the evaluated models if `eval_after` is "download".
        """
        return self.eval_model(clients, down) if self.traits.eval_after == "download" else Message()

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        """Return the models of a group right after `train`, which returned `up`; empty if there are none.

        Default: the evaluated models if `eval_after` is "training", else the upload's `theta`. A
        method that uploads anything but the trained model, such as a difference, overrides this hook. The
        clients' state cannot be written here.
        """
        if self.traits.eval_after == "training":
            return self.eval_model(clients, down)
        return (
            Message(per_client={"theta": up.per_client["theta"]}) if "theta" in up.per_client else Message()
        )

    def finetune(self, clients: ClientGroup, down: Message, epochs: int) -> Message:
        """Return the evaluated models after local adaptation; default: local training of the `finetuned`
        numbers of `theta` with `local_gradient`."""
        model = self.eval_model(clients, down).with_clients(len(clients))
        theta = clients.sgd(
            model["theta"],
            gradient=self.local_gradient(clients, model),
            trained=self.finetuned,
            epochs=epochs,
            purpose="finetune",
        ).theta
        return Message(per_client=model.per_client | {"theta": theta})

    def local_gradient(self, clients: ClientGroup, model: Message) -> GradientOf | None:
        """Return the `gradient` for `ClientGroup.sgd` of local adaptation, which starts from evaluated models
        `model`; default: None, that of the cross-entropy."""
        return None

    def predict(self, clients: ClientGroup, model: Message, position: int, x: Tensor) -> Tensor:
        """Return class probabilities [n, K] for one client of the group; default: one forward pass."""
        return clients.outputs(model, position, class_probabilities, x)

    def as_module(self, model: Tensors) -> nn.Module:
        """Return a client's evaluated model as a module from images to logits, whose softmax is `predict`'s.

        `model` has `theta` [P], `buffers` [U], and what else `eval_model` returns, without a client axis. A
        method that overrides `predict` and has no equivalent module does not override this hook: its models
        are exported as tensors. Default: the network that clients train.
        """
        return self.with_weights(model["theta"], model[BUFFERS])

    # clients that never took part in training

    def new_client_download(self, server: State, cohort: Cohort) -> Message:
        """Return the message to clients that never took part in training; its bytes do not count.

        Their ids are N or more, so the server's state has no rows for them. Default: `eval_download`;
        override it if that message has one row per client.
        """
        return self.eval_download(server, cohort)

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        """Return the evaluated models of clients that never took part in training; see `eval_model`.

        `down` is what `new_client_download` returned; the clients' state is that of new clients, and writes
        to it are discarded. Local epochs are `train.unseen_epochs`. Default: the client's first round if
        `eval_after` is "training", else fine-tuning. Override it if a part must stay fixed, or if `train`
        needs the response to a request.
        """
        if self.traits.eval_after == "training":
            self.train(clients, down)
            return self.eval_model(clients, down)
        return self.finetune(clients, down, clients.local_epochs)

    # diagnostics

    def server_diagnostics(self, server: State) -> State:
        """Return what an evaluation records of the server's state, one tensor per name.

        Default: the tensors of the state that `diagnostics` name.
        """
        return {one.name: server[one.name] for one in self.diagnostics if one.name in server}

    def client_diagnostics(self, clients: ClientGroup) -> State:
        """Return what an evaluation records of a group, one tensor [C, ...] per name.

        Default: the tensors of the clients' state that `diagnostics` name.
        """
        return {one.name: clients[one.name] for one in self.diagnostics if one.name in clients}

    def derived(self, server: State) -> State:
        """Return tensors for readers of a checkpoint; a resumed run does not load them."""
        return {}

    # helpers for hooks

    @property
    def body_layers(self) -> Tensor:
        """Which layers make up the feature extractor, bool [L]."""
        return torch.tensor([layer.stop <= self.layout.body.stop for layer in self.layers])

    def class_counts(self, clients: ClientGroup) -> Tensor:
        """Return each client's training samples by class, [C, K] in the models' type."""
        everyone, classes = range(len(clients)), self.context.num_classes
        counts = [clients.samples("train", n)[1].bincount(minlength=classes) for n in everyone]
        return torch.stack(counts).to(clients.buffers.dtype)

    @property
    def averages_buffers(self) -> bool:
        """Whether the server keeps an average of the clients' running statistics."""
        return self.buffers == "average" and self.layout.buffer_size > 0

    @property
    def shard_unit(self) -> int:
        """Of how many clients each worker's shard has a multiple (but for the last one)."""
        return 1 if self.sharded_state is None else BLOCK_CLIENTS

    def take_rows(self, sharded: ShardedRows) -> None:
        """Take the rows of `sharded_state`, before the first hook that uses them."""
        self.sharded = sharded

    def initial_theta(self) -> Tensor:
        """Return the first weights [P] of what clients train."""
        return self.layout.flatten(self.network)[0]

    def initial_buffers(self, clients: Sequence[int] | None = None) -> Tensor:
        """Return the initial running statistics: [U], or [C, U] for some clients."""
        buffers = self.layout.flatten(self.network)[1]
        return buffers if clients is None else buffers.expand(len(clients), -1).clone()

    def with_weights(self, theta: Tensor, buffers: Tensor) -> nn.Module:
        """Return a copy of the network with weights [P] and running statistics [U], in evaluation mode."""
        network = copy.deepcopy(self.network).eval()
        network.load_state_dict(self.layout.views(theta) | self.layout.buffer_views(buffers))
        return network

    def keeping_averaged_buffers(self, clients: ClientGroup) -> AbstractContextManager[None]:
        """Do not change running statistics that the server averages inside the block, while another part
        adapts."""
        return clients.discarding_buffer_updates() if self.averages_buffers else nullcontext()


class TwoPhaseMethod(Method):
    """A method with a request before training: download, client's request, server's response, training,
    upload."""

    def needs_request(self, round: int) -> bool:
        """Return whether this round has a request; default: every round."""
        return True

    def client_request(self, clients: ClientGroup, down: Message) -> Message:
        """Return the request of a group, rows [C, ...]; the message `down` of `train` contains it.

        Store other values that `train` needs in `clients.scratch`.
        """
        raise NotImplementedError

    def server_response(self, server: State, cohort: Cohort, requests: State) -> Message:
        """Return the server's response to the cohort's requests, which are tensors [S, ...] by name."""
        raise NotImplementedError


def proximal_gradient(anchor: Tensor, strength: float) -> Callable[[Tensor, slice | Tensor], Tensor]:
    """Return the gradient of strength / 2 ||theta - anchor||^2, anchor [C, P], for `ClientGroup.sgd`."""
    return lambda theta, members: strength * (theta - anchor[members])
