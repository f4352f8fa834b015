"""The hooks of a method, with the default behaviour that every method inherits.

Shapes: N clients of a run, S clients of a cohort, C clients of a group (those that one rank trains or
evaluates at once), P trainable numbers, U running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.sharded import ShardedRows
from hpcfl.communication.upload import Upload
from hpcfl.config.keys import Params, PrivacyUnit
from hpcfl.methods.buffers import Buffers
from hpcfl.methods.checks import check_class, check_private, check_settings
from hpcfl.methods.context import Context
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.methods.traits import Traits
from hpcfl.models import check_outputs
from hpcfl.parameters import ParameterLayout, Tensors
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.losses import class_probabilities

State = Tensors
"""What a server or client keeps, by name."""


class Method:
    """One federated method, written as hooks that the round loop calls; a subclass overrides some of them.

    Hooks receive all state as arguments and return messages or tensors. Everything that lasts from round to
    round is in two state dictionaries, the server's and the clients', which every checkpoint holds.
    `hpcfl.methods.adapter` calls the hooks and handles the running statistics of BatchNorm.
    """

    # what the class says

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

    # what a class or its __init__ says

    sharded: ShardedRows | None = None
    """The client state [N, P] whose rows the server's hooks mix and compare; None: no state. In `aggregate`
    it raises RuntimeError until all of the upload is read."""
    sequential: str | None = None
    """The setting, such as `method.order=chain`, that makes each client of a round start where the client
    before it ended (`ClientGroup.handover`); this needs a single worker. None: clients are independent."""

    _is_unchangeable = False

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a class whose hooks contradict each other, or that has one misspelt."""
        super().__init_subclass__()
        if "privacy_units" not in vars(cls):
            cls.privacy_units = ()
        check_class(cls, Method)

    def __init__(self, context: Context, params: Any) -> None:
        self.context = context
        self.params = params
        check_settings(self.name, self.traits, context)
        self.network = self.make_network()
        """What clients train."""
        if self.network is not context.network and self.traits.predicts_by == "network":
            key = f"method.name={self.name}, make_network"
            check_outputs(key, self.network, context.sample, context.num_classes)
        self.layout = ParameterLayout(self.network)
        self.layers = self.layout.layers()
        """The units of weights, masks and byte counts: one layer per module, unless a class's __init__ sets
        other ones."""
        policy = context.train.buffers or self.traits.buffers[0]
        self.buffers = Buffers(policy, self.network, self.layout, self.traits.averages_own_buffers)
        """The running statistics of BatchNorm; a class whose clients get several models changes it to those
        `of_models`."""
        check_private(self.name, self.privacy_units, context, self.buffers)

    @property
    def body_layers(self) -> Tensor:
        """Which layers make up the feature extractor, bool [L]."""
        return torch.tensor([layer.stop <= self.layout.body.stop for layer in self.layers])

    def forbid_changes(self) -> None:
        """Make setting an attribute raise TypeError: checkpoints would not hold it, nor ranks share it."""
        # a method may have several adapters, each of which calls this
        vars(self)["_is_unchangeable"] = True

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; raise TypeError after `forbid_changes`."""
        if self._is_unchangeable:
            raise TypeError(
                f"{type(self).__name__}.{name} cannot be set in a round: a resumed run and other ranks would "
                "not have it; keep it in server_state or client_state"
            )
        super().__setattr__(name, value)

    # made once, before the first round

    def make_network(self) -> nn.Module:
        """Return what clients train, with its first weights; default: the configured model."""
        return self.context.network

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

        A codec may send the tensors that `traits.differences` names as differences to those of the download:
        give them names of their own if they are anything but new values of these, such as updates.
        """
        raise NotImplementedError

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        """Update the server's state from the cohort's upload: means of its tensors first, then its blocks.

        It is called on the server only; reading the upload is collective, and each tensor can be read once.
        """

    def averages_in(self, down: Message) -> State:
        """Return the tensors of `traits.averages` that the server's messages of a round contain.

        A codec rounds them, which is no step of `server.optimiser`. Default: those under their own names.
        """
        return {name: down.shared[name] for name in self.traits.averages if name in down.shared}

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

        Default: the evaluated models, if `eval_after` is not "training" with the upload's `theta`. A
        method that uploads anything but the trained model, such as a difference, overrides this hook. The
        clients' state cannot be written here.
        """
        if self.traits.eval_after == "training":
            return self.eval_model(clients, down)
        if self.traits.predicts_by == "network":
            return Message(per_client={"theta": up["theta"]})
        model = self.eval_model(clients, down)
        if "theta" not in model:
            raise TypeError(
                f"{type(self).__name__}.eval_model returns no theta to replace by the trained one: override "
                "model_after_training"
            )
        return self._with_theta(model, clients, up["theta"])

    @staticmethod
    def _with_theta(model: Message, clients: ClientGroup, theta: Tensor) -> Message:
        """Return models with other `theta` [C, P], and rows of all else."""
        model = model.with_clients(len(clients))
        return Message(per_client={name: model[name] for name in model.names} | {"theta": theta})

    def finetune(self, clients: ClientGroup, down: Message, epochs: int) -> Message:
        """Return the evaluated models after local adaptation; default: SGD on `theta`. The clients' state
        cannot be written here."""
        return self._finetuned(clients, self.eval_model(clients, down), epochs)

    def _finetuned(self, clients: ClientGroup, model: Message, epochs: int, **settings: Any) -> Message:
        """Return models whose `theta` is adapted; `settings` are further arguments of `ClientGroup.sgd`."""
        theta = model.with_clients(len(clients))["theta"]
        tuned = clients.sgd(theta, epochs=epochs, purpose="finetune", **settings)
        return self._with_theta(model, clients, tuned.theta)

    def predict(self, clients: ClientGroup, model: Message, position: int, x: Tensor) -> Tensor:
        """Return class probabilities [n, K] of samples x [n, ...] for one client of the group; default: one
        forward pass. It has the model alone, neither the client's state nor its own samples."""
        return clients.outputs(model, position, class_probabilities, x)

    def as_module(self, model: Tensors) -> nn.Module:
        """Return a client's evaluated model as a module from images to logits, whose softmax is `predict`'s.

        `model` has `theta` [P], `buffers` [U], and what else `eval_model` returns, without a client axis. A
        method that overrides `predict` overrides this hook too, or has no equivalent module: see
        `traits.predicts_by`. Default: the network that clients train.
        """
        return self.layout.filled(self.network, model["theta"], model[BUFFERS])

    # clients that never took part in training

    def new_client_download(self, server: State, cohort: Cohort) -> Message:
        """Return the message to clients that never took part in training; its bytes do not count.

        Their ids are N or more, so the server's state has no rows for them. Default: `eval_download`;
        override it if that message has one row per client.
        """
        return self.eval_download(server, cohort)

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        """Return the evaluated models of clients that never took part in training; see `eval_model`.

        `down` is what `new_client_download` returned; the clients' state is that of new clients, and can be
        written inside `clients.temporary_state()` only. Local epochs are `train.unseen_epochs`. Default: the
        client's first round if `eval_after` is "training", else fine-tuning. Override it if a part must stay
        fixed, or if `train` needs the response to a request.
        """
        if self.traits.eval_after == "training":
            with clients.temporary_state():
                self.train(clients, down)
            return self.eval_model(clients, down)
        return self.finetune(clients, down, clients.local_epochs)


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
