"""The models in a run's checkpoint: as tensors, as networks, and their predictions.

Shapes: P trainable numbers, U running statistics, n samples, K classes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import nn

from hpcfl.communication.messages import BUFFERS, Message
from hpcfl.config.keys import Config, Layout
from hpcfl.data.arrays import Arrays
from hpcfl.data.npz import as_pixels, as_tokens
from hpcfl.data.partitions import ClientIndices
from hpcfl.data.shard import Shard
from hpcfl.errors import UserError, one_line
from hpcfl.methods import METHODS, Method
from hpcfl.parameters import Tensors
from hpcfl.setup.experiment import method_of
from hpcfl.storage.hdf5 import LoadedCheckpoint
from hpcfl.terminal import silenced
from hpcfl.training.client_group import ClientGroup, WorkerContext
from hpcfl.training.engines import LoopEngine

GLOBAL: Literal["global"] = "global"
ClientName = int | Literal["global"]
"""A client's id, or "global" for the server's model."""


class TrainedModels:
    """The models in a checkpoint, with their method; the run's data set is not needed."""

    def __init__(self, config: Config, checkpoint: LoadedCheckpoint) -> None:
        self.config, self._checkpoint = config, checkpoint
        self.path, self.data = checkpoint.path, checkpoint.data
        self.round = checkpoint.round
        """Number of rounds that these models were trained."""
        self.num_clients = checkpoint.num_clients + checkpoint.num_unseen
        """Clients that have a model after the last round, including those that take no part in training."""

    @cached_property
    def method(self) -> Method:
        """The run's method; raises UserError if a part of it is not available."""
        config, options = self.config, self.config.model.options
        if getattr(options, "weights", None) is not None:
            # trained weights replace those of the file model.weights, which may be missing here
            config = replace(
                config, model=replace(config.model, options=options.model_copy(update={"weights": None}))
            )
        # the run has printed its warnings already
        with silenced():
            method = method_of(config, self.data)
        if method.layout.slots != self._checkpoint.layout:
            raise UserError(
                f"{self.path} holds a model of another structure, written by another version of hpcfl or of "
                "torchvision; use that version"
            )
        return method

    def saved(self, client: ClientName) -> Tensors:
        """Return a model's parts: `theta` [P] and `buffers` [U], or other parts that the method evaluates.

        Raises:
            UserError: there is no such model.
        """
        model = self._global() if client == GLOBAL else self._of_client(self.number(client))
        if BUFFERS not in model:
            theta = model.get("theta", torch.empty(0))
            model[BUFFERS] = theta.new_empty(*theta.shape[:-1], 0)
        return model

    def _of_client(self, client: int) -> Tensors:
        """Return a client's model; raise UserError before the checkpoint has them."""
        if not self._checkpoint.has_models:
            has_global = self.method.traits.has_global_model
            instead = f", or take {GLOBAL}, which is there already" if has_global else ""
            raise UserError(
                f"{self.path} is of round {self.round} of {self.config.train.rounds} and has no personalised "
                "models yet; they are saved after the last round; let the run finish (run its command again "
                f"to resume){instead}"
            )
        return self._checkpoint.model(client)

    def network(self, client: ClientName) -> nn.Module:
        """Return what `Run.network` does."""
        if not self.is_network:
            raise UserError(
                f"method.name={self.config.method.name} predicts by a rule of its own (predict), "
                "not by one network (as_module); use `hpcfl predict`, or the tensors of `hpcfl export`"
            )
        try:
            return self.method.as_module(self.saved(client)).eval()
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.path} holds no model of method.name={self.config.method.name}: its parts do not fit "
                f"({one_line(error)}); restore it from a backup, or name the folder of another run"
            ) from error

    @property
    def is_network(self) -> bool:
        """Whether the method predicts by one network or module, not by a rule of its own."""
        return self.method.traits.predicts_by != "rule"

    def tensors(self, client: ClientName) -> Tensors:
        """Return a model by named tensors: the state of its network, or else its parts.

        Names of parts begin with the part's name, such as `theta.body.conv1.weight`.
        """
        if self.is_network:
            state = self.network(client).state_dict()
            # hpcfl does not count BatchNorm's mini-batches
            return {name: t for name, t in state.items() if not name.endswith("num_batches_tracked")}
        layout, found = self.method.layout, {}
        for part, tensor in self.saved(client).items():
            views = {}
            if part == "theta" and tensor.shape == (layout.size,):
                views = layout.views(tensor)
            elif part == BUFFERS and tensor.shape == (layout.buffer_size,):
                views = layout.buffer_views(tensor)
            elif tensor.numel():
                found[part] = tensor
            found |= {f"{part}.{name}": view for name, view in views.items()}
        return found

    def probabilities(
        self, client: ClientName, samples: object, layout: Layout | None = None, where: str = "samples"
    ) -> np.ndarray:
        """Return what `Run.predict` does; `where` begins the messages of its errors."""
        x = self._as_stored(samples, layout, where)
        model = Message(per_client={name: tensor.unsqueeze(0) for name, tensor in self.saved(client).items()})
        clients = self._client_of(0 if client == GLOBAL else client, x)
        samples, _ = clients.samples("test", 0)
        with torch.no_grad(), clients.with_model_only():
            return self.method.predict(clients, model, 0, samples).numpy()

    @cached_property
    def _engine(self) -> LoopEngine:
        """The engine of all predictions, with a copy of the network."""
        return LoopEngine(self.method.network, self.method.layout)

    def _client_of(self, client: int, x: np.ndarray) -> ClientGroup:
        """Return a group of one client whose test samples are given, on the CPU."""
        data, nothing = self.data, np.empty(0, np.int64)
        labels = np.zeros(len(x), np.int64)
        vocabulary = data.sample.vocabulary
        arrays = Arrays(x, labels, data.num_classes, data.scale, data.mean, data.std, vocabulary=vocabulary)
        part = ClientIndices(nothing, nothing, np.arange(len(x)))
        shard = Shard.build(arrays, [part], range(1), data.mean, data.std, "cpu")
        worker_context = WorkerContext(
            shard=shard,
            clients=[client],
            engine=self._engine,
            evaluator=self._engine,
            train=self.config.train,
            seed=self.config.run.seed,
            device=torch.device("cpu"),
            state={},
        )
        return ClientGroup(worker_context, [client], self.round)

    def _as_stored(self, samples: object, layout: Layout | None, where: str) -> np.ndarray:
        """Return samples [n, ...] of the run's type; raise UserError if they are not like the run's."""
        x = given = np.asarray(samples)
        data, sample = self.data, self.data.sample
        channels, *sides = sample.shape
        first, last = ("NCHW", "NHWC") if sample.kind == "images" else ("NCL", "NLC")
        if sample.kind == "images" and x.ndim == 3:
            x = x[:, None]
        elif sides and x.ndim == len(sample.shape) + 1:
            fits_first, fits_last = (x.shape[1:] == shape for shape in (sample.shape, (*sides, channels)))
            # data.layout decides only if both fit
            of_run = self.config.data.layout if fits_first and fits_last else None
            if (layout or of_run or (first if fits_first else last)) == last:
                x = np.moveaxis(x, -1, 1)
        if x.shape[1:] != sample.shape or not len(x):
            allowed = f"[n, {', '.join(map(str, sample.shape))}]"
            if sides:
                text = ", ".join(map(str, sides))
                allowed = f"[n, {text}, {channels}] with layout {last}, {allowed} with {first}"
                allowed += f", [n, {text}]" if sample.kind == "images" and channels == 1 else ""
            raise UserError(f"{where}: x has shape {list(given.shape)}; allowed: {allowed}, for some n")
        if sample.vocabulary is not None:
            if x.dtype.kind not in "iu":
                raise UserError(f"{where}: x has type {x.dtype}; allowed: whole numbers, the tokens")
            return as_tokens(x, where, sample.vocabulary)[0]
        if (x.dtype == np.uint8) != (data.dtype == "uint8"):
            top = f"{data.scale:g}"
            allowed, remedy = "float, as the run's data set", "x.astype('float32')"
            if data.dtype == "uint8":
                allowed = f"uint8, 0..{top}"
                remedy = f"x.astype('uint8'), or where x is 0..1, (x * {top}).round().astype('uint8')"
            raise UserError(
                f"{where}: x has type {x.dtype}; allowed: {allowed}, not normalised, because hpcfl does that"
                f"; convert it with {remedy}"
            )
        return as_pixels(x, where)

    def _global(self) -> Tensors:
        """Return the server's model; raise UserError if it has no model for all clients."""
        method, name = self.method, self.config.method.name
        theirs = f"take a client's, 0 to {self.num_clients - 1}"
        if not method.traits.has_global_model:
            others = ", ".join(name for name, kind in METHODS.items() if kind.traits.has_global_model)
            raise UserError(f"method.name={name} has no global model; {theirs}; methods with one: {others}")
        server = self._checkpoint.server
        if method.layout.buffer_size and BUFFERS not in server:
            raise UserError(
                f"the global model of method.name={name} has no running statistics of BatchNorm, which stay "
                f"with the clients (train.buffers={method.buffers.policy}); {theirs}"
            )
        return {name: server[name] for name in ("theta", BUFFERS) if name in server}

    def number(self, client: int) -> int:
        """Return a client's number as an int, from columns of CSV files too; UserError for another."""
        is_number = isinstance(client, int | float | np.number) and not isinstance(client, bool)
        if not is_number or client not in range(self.num_clients):
            raise UserError(
                f"client {client!r} is not in this run; allowed: 0 to {self.num_clients - 1}, or {GLOBAL} "
                "for the model of a method that has one for all"
            )
        return int(client)
