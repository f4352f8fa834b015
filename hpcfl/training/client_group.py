"""The clients that a hook gets: their data, state, random streams and local training.

Shapes: C clients of the group, P trainable numbers, U running statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hpcfl.communication.messages import Message
from hpcfl.config.keys import ClientsConfig, TrainConfig
from hpcfl.data.shard import Shard
from hpcfl.parameters import Tensors
from hpcfl.randomness import seeded_hook, stream_seed, torch_stream, uniform_by_key
from hpcfl.training.augmentation import DRAWS, Augmentation
from hpcfl.training.batches import Batch, same_size_groups
from hpcfl.training.engines import Engine, LoopEngine
from hpcfl.training.local_work import Work
from hpcfl.training.losses import Loss
from hpcfl.training.optimiser import Descent, Trained
from hpcfl.training.private_gradients import PrivateGradients
from hpcfl.training.scoring import BatchedScorer

_Planned = tuple[list[int], list[Tensor]]
"""A planned mini-batch: its clients' positions in the group, and the sample indices of each."""

GradientOf = Callable[[Tensor, Batch], tuple[Tensor, Tensor]]
"""Function of the weights [C, ...] of a batch's C members and the batch: returns gradient and losses [C]."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What all clients of one rank share: samples, engines, settings, and the state of each client.

    `state` maps names to tensors [clients, ...], in the order of `clients`, on `device` or on the CPU
    (`run.state`); `scorer` (may be None) scores many clients' models at once, `augmentation` (may be None)
    changes the images of mini-batches, `private` (may be None) makes the gradients of `privacy.unit=sample`,
    and `unequal` says how much clients train.
    """

    shard: Shard
    clients: Sequence[int]
    engine: Engine
    evaluator: LoopEngine
    train: TrainConfig
    seed: int
    device: torch.device
    state: Tensors
    scorer: BatchedScorer | None = None
    augmentation: Augmentation | None = None
    private: PrivateGradients | None = None
    unequal: ClientsConfig = field(default_factory=ClientsConfig)

    @property
    def work(self) -> Work:
        """How much each client trains."""
        return Work(self.train, self.seed, self.unequal)

    def of_unseen(self, shard: Shard, clients: Sequence[int], state: Tensors) -> WorkerContext:
        """Return the context of clients that take no part in the rounds, and adapt before an evaluation."""
        return replace(
            self,
            shard=shard,
            clients=clients,
            state=state,
            train=self.train.of_unseen(),
            unequal=self.unequal.of_unseen(),
        )


class ClientGroup:
    """Some clients of this rank in one round: the argument of `train`, `eval_model` and `finetune`.

    `clients[name]` reads and writes the clients' state [C, ...], on `device`. Writes stay in this object
    until `commit`, which the round loop calls after training and never after an evaluation. A hook that only
    returns models cannot write (`read_only`).
    """

    def __init__(self, worker: WorkerContext, ids: Sequence[int], round: int) -> None:
        self._worker = worker
        self.ids = list(ids)
        self.round = round
        self._local = [worker.clients.index(client) for client in self.ids]
        self._written: Tensors = {}
        self._versions: dict[str, int] = {}
        self.device = worker.device
        self.buffers = torch.empty(len(self.ids), 0, device=self.device)
        """Running statistics that training and evaluation use and update in place: [C, U], or [C, M, U] of M
        models a client. A hook may set others."""
        self.steps = torch.zeros(len(self.ids), dtype=torch.int64)
        """Training steps done by each client through this object [C], on the CPU."""
        self.loss_sum = torch.zeros(len(self.ids), dtype=torch.float64, device=self.device)
        """Sum of the losses of these steps [C]."""
        self.scratch: Tensors = {}
        """Values that `client_request` stores for `train`, [C, ...] by name; dropped after the round."""
        self.handover = Message()
        """Of a sequential method: what the next groups of this round get in place of the download's tensors
        of the same names. That of a group that diverged and is left out is not used."""
        self._can_write = True
        self._has_model_only = False
        self._noise_of = ""
        self._noise: dict[tuple[str, int], torch.Generator] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, name: str) -> bool:
        return name in self._worker.state

    def __getitem__(self, name: str) -> Tensor:
        self._check_reads(f"clients[{name!r}]")
        if name not in self._written:
            self._written[name] = self._stored(name)[self._local].to(self.device)
        return self._written[name]

    def _stored(self, name: str) -> Tensor:
        if name not in self._worker.state:
            names = ", ".join(self._worker.state) or "nothing"
            raise KeyError(f"clients[{name!r}]: client_state does not return it; it returns {names}")
        return self._worker.state[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        if not self._can_write:
            raise self._not_writable(name)
        stored = self._stored(name)
        if not isinstance(value, Tensor) or value.requires_grad:
            raise TypeError(f"clients[{name!r}] cannot be {type(value).__name__}: set a tensor, detached")
        if value.shape != (len(self), *stored.shape[1:]) or value.dtype != stored.dtype:
            raise ValueError(
                f"clients[{name!r}] cannot have the shape {[*value.shape]} and type {value.dtype}: "
                f"client_state has {[*stored.shape[1:]]} and {stored.dtype} for each client, and "
                f"{len(self)} clients are in this group"
            )
        self._written[name] = value

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Make writes to the state raise TypeError: at once, or at the end of the block those in place."""
        before, self._can_write = self._can_write, False
        self._note_versions()
        yield
        for name, rows in self._written.items():
            if rows._version != self._versions.get(name, 0):
                raise self._not_writable(name)
        self._can_write = before

    def _note_versions(self) -> None:
        """Note how often each tensor of the state was changed in place."""
        self._versions = {name: rows._version for name, rows in self._written.items()}

    @staticmethod
    def _not_writable(name: str) -> TypeError:
        return TypeError(
            f"clients[{name!r}] cannot be written here: evaluations change no state; write it in `train` "
            "(new_client_model: inside `clients.temporary_state()`)"
        )

    @contextmanager
    def with_model_only(self) -> Iterator[None]:
        """Make the clients' state and samples raise TypeError inside the block: `predict` has the model
        alone, as it has after the run."""
        before, self._has_model_only = self._has_model_only, True
        yield
        self._has_model_only = before

    def _check_reads(self, what: str) -> None:
        if self._has_model_only:
            raise TypeError(
                f"predict reads {what}, which a finished run does not have; let eval_model return what it "
                "needs beside theta, as a tensor of the model"
            )

    @contextmanager
    def seeding_generators(self) -> Iterator[None]:
        """Give the own generators of torch, NumPy and Python a stream of (seed, round, first client of the
        group) inside the block: dropout draws from torch's. With the loop engine a group is one client."""
        stream = (self._worker.seed, "torch", self.round, self.ids[0])
        with seeded_hook(*stream):
            if self.device.type == "cuda":
                torch.cuda.manual_seed(stream_seed(*stream))
            yield

    @contextmanager
    def temporary_state(self, **state: Tensor) -> Iterator[None]:
        """Replace some of the clients' state, and allow writes to it inside the block, in `new_client_model`:
        they last to the end of the evaluation."""
        before, self._can_write = self._can_write, True
        self._written |= state
        yield
        self._can_write = before
        self._note_versions()

    @property
    def kept(self) -> Tensors:
        """The state [C, ...] that `commit` writes: all that was read or written through this object."""
        return self._written

    def commit(self, members: Sequence[int] | None = None) -> None:
        """Write the clients' state back to the rank's: of the group's `members`, or of all."""
        for name, rows in self._written.items():
            stored = self._worker.state[name]
            if members is None:
                stored[self._local] = rows.to(stored.device)
            elif members:
                stored[[self._local[n] for n in members]] = rows[list(members)].to(stored.device)
        self._written.clear()

    @contextmanager
    def buffers_of_model(self, number: int) -> Iterator[None]:
        """Use and update those of one of the clients' M models inside the block, as [C, U]."""
        of_all = self.buffers
        self.buffers = of_all[:, number].clone()
        yield
        of_all[:, number] = self.buffers
        self.buffers = of_all

    @contextmanager
    def discarding_buffer_updates(self, clients: Tensor | None = None) -> Iterator[None]:
        """Discard updates of the running statistics inside the block, of some clients, bool [C, 1], or of
        all: they belong to a model that is not evaluated."""
        kept = self.buffers.clone()
        yield
        self.buffers = kept if clients is None else torch.where(clients, kept, self.buffers)

    @property
    def num_samples(self) -> Tensor:
        """Number of training samples of each client, int64 [C]."""
        self._check_reads("clients.num_samples")
        return self._worker.shard.count["train"][self._local]

    def class_counts(self, num_classes: int) -> Tensor:
        """Return each client's training samples by class, [C, num_classes] in the models' type."""
        everyone = range(len(self))
        counts = [self.labels("train", n).bincount(minlength=num_classes) for n in everyone]
        return torch.stack(counts).to(self.buffers.dtype)

    @property
    def pool(self) -> Tensors:
        """What `samples` returns views of, for all clients of this rank, by its name in errors."""
        return {"y of its samples": self._worker.shard.y}

    def samples(self, split: str, position: int) -> tuple[Tensor, Tensor]:
        """Return one client's (a copy of x [n, ...], y [n]) of a split: "train", "val" or "test"."""
        self._check_reads("the clients' samples")
        return self._worker.shard.samples(split, self._local[position])

    def labels(self, split: str, position: int) -> Tensor:
        """Return y [n] of `samples`, without the copy of x."""
        self._check_reads("the clients' labels")
        return self._worker.shard.labels(split, self._local[position])

    def batches(
        self,
        purpose: str = "batches",
        epochs: int | None = None,
        *,
        steps: int | None = None,
        samples: Sequence[Tensor] | None = None,
        augmented: bool = True,
    ) -> Iterator[Batch]:
        """Yield mini-batches of the training split in an order given by (seed, purpose, round, client).

        Clients whose current mini-batches have equal sizes share one Batch. The order of all samples is
        copied to the device before the first mini-batch, so that a GPU need not wait for the host between
        them. `epochs` defaults to `train.local_epochs`, or to what `clients.local_epochs` draws for each
        client; if `steps` is given, each client gets `steps` mini-batches instead. `samples` are the sample
        indices to use, one int64 tensor per client with at least one entry; default: all. Images are changed
        as `train.augment` says, unless a method measures something with them and sets `augmented` to False.

        With `privacy.unit=sample`, a mini-batch has each sample with the probability `Work.sampling_rate`:
        mini-batches have unequal sizes, maybe 0, and each client has its own.
        """
        work = self._worker.work
        if self._worker.private is not None:
            if samples is not None:
                raise TypeError(
                    "with privacy.unit=sample, mini-batches are drawn from all samples of a client"
                )
            self._noise_of = purpose
        if samples is None:
            samples = [torch.arange(n) for n in self.num_samples.tolist()]
        cuts = [
            work.minibatches(client, len(chosen)) for client, chosen in zip(self.ids, samples, strict=True)
        ]
        streams = [torch_stream(self._worker.seed, purpose, self.round, client) for client in self.ids]
        done = [0] * len(self)
        if steps is not None:
            most = [steps] * len(self)
        else:
            times = [
                work.local_epochs(self.round, client) if epochs is None else epochs for client in self.ids
            ]
            most = [number * len(cut) for number, cut in zip(times, cuts, strict=True)]
        plan: list[_Planned] = []
        if self._worker.private is not None:
            plan += self._drawn(streams, most)
            done = most
        while any(n < limit for n, limit in zip(done, most, strict=True)):
            orders = [
                chosen[torch.randperm(len(chosen), generator=stream)]
                for chosen, stream in zip(samples, streams, strict=True)
            ]
            for step in range(max(map(len, cuts), default=0)):
                spans = [
                    cut[step] if step < len(cut) and n < limit else (0, 0)
                    for cut, n, limit in zip(cuts, done, most, strict=True)
                ]
                done = [n + (stop > start) for n, (start, stop) in zip(done, spans, strict=True)]
                for alike in same_size_groups([stop - start for start, stop in spans]):
                    plan.append((alike, [orders[m][slice(*spans[m])] for m in alike]))
        batches = self._planned(plan) if plan else iter(())
        augmentation = self._worker.augmentation
        if augmentation is None or not augmented:
            yield from batches
            return
        uniform = self.uniform(f"augment/{purpose}")
        for batch in batches:
            yield replace(batch, x=augmentation(batch.x, uniform(batch, DRAWS)))

    def _drawn(self, streams: Sequence[torch.Generator], steps: Sequence[int]) -> Iterator[_Planned]:
        """Yield each client's mini-batches, `steps` of them, that have each sample with a probability."""
        for position, (n, stream) in enumerate(zip(self.num_samples.tolist(), streams, strict=True)):
            share = self._worker.work.sampling_rate(self.ids[position], n)
            for _ in range(steps[position]):
                is_drawn = torch.rand(n, generator=stream, dtype=torch.float64) < share
                yield [position], [is_drawn.nonzero().squeeze(1)]

    def _planned(self, plan: list[_Planned]) -> Iterator[Batch]:
        """Yield planned mini-batches; their indices are copied to the device in one piece, before the
        first."""
        shard = self._worker.shard
        pieces = [piece for _, of_batch in plan for piece in of_batch]
        owners = torch.tensor([member for alike, _ in plan for member in alike])
        lengths = torch.tensor([len(piece) for piece in pieces])
        index = torch.cat(pieces)
        position = index + shard.offset["train"][self._local][owners].repeat_interleave(lengths)
        some = {tuple(alike): torch.tensor(alike) for alike, _ in plan if len(alike) < len(self)}
        there = torch.cat([index, position, *some.values()]).to(self.device)
        sizes = [sum(map(len, of_batch)) for _, of_batch in plan]
        parts = iter(there.split([*sizes, *sizes, *map(len, some)]))
        indices, positions = ([next(parts) for _ in plan] for _ in range(2))
        members = dict(zip(some, parts, strict=True))
        for (alike, _), flat, found in zip(plan, indices, positions, strict=True):
            everyone = len(alike) == len(self)
            group = slice(None) if everyone else members[tuple(alike)]
            where = found.view(len(alike), -1)
            x = shard.at(found).unsqueeze(0) if len(alike) == 1 else shard.x[where]
            counted = slice(None) if everyone else some[tuple(alike)]
            yield Batch(group, x, shard.y[where], flat.view(len(alike), -1), counted)

    def divided(
        self, purpose: str, share: float, *, fewest: tuple[int, int], round: int = 0
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Divide each client's training samples at random: a `share` of them, and the rest.

        Returns sample indices as `batches` takes them, the same for the same (seed, purpose, round, client).
        The parts have at least `fewest` samples, if the client has that many.
        """
        first, rest = [], []
        for client, size in zip(self.ids, self.num_samples.tolist(), strict=True):
            order = torch.randperm(size, generator=torch_stream(self._worker.seed, purpose, round, client))
            cut = max(fewest[0], min(math.floor(share * size + 0.5), size - fewest[1]))
            first.append(order[:cut])
            rest.append(order[cut:])
        return first, rest

    def gradient(self, loss: Loss, tensors: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
        """Differentiate a per-client loss on a batch with respect to tensors [len(batch), ...].

        Running statistics of these clients are updated. Returns gradients by name and losses.
        """
        with self._buffers_of(batch) as buffers:
            return self._worker.engine.gradient(loss, tensors, buffers, batch)

    @contextmanager
    def _buffers_of(self, batch: Batch) -> Iterator[Tensor]:
        """Give the running statistics of a batch's members, which the block updates in place."""
        if isinstance(batch.members, slice):
            yield self.buffers
            return
        buffers = self.buffers[batch.members]
        yield buffers
        self.buffers[batch.members] = buffers

    def sgd(
        self,
        theta: Tensor,
        *,
        epochs: int | None = None,
        lr: float | None = None,
        gradient: GradientOf | None = None,
        extra_gradient: Callable[[Tensor, slice | Tensor], Tensor] | None = None,
        trained: slice = slice(None),
        purpose: str = "batches",
        samples: Sequence[Tensor] | None = None,
    ) -> Trained:
        """Train with the run's optimiser from theta [C, ..., P], which is not changed.

        `gradient(theta, batch)` returns gradient and losses on a batch; default: those of the cross-entropy
        of models [C, P]. `extra_gradient(theta, members)`, such as a proximal pull, is added to the gradient;
        its argument theta [len(members), ...] holds the current weights of the group's clients `members`.
        `trained`: see Descent; `samples`: see `batches`. Raises TypeError for the default gradient of other
        tensors, ValueError for an extra gradient of another shape than the gradient.
        """
        if gradient is None and (theta.dim() != 2 or len(theta) != len(self)):
            raise TypeError(
                f"clients.sgd got theta of shape {[*theta.shape]}; expected: models [{len(self)}, P]; other "
                "tensors need a gradient of their own (gradient=...)"
            )
        descent = self.descent(theta, lr=lr, trained=trained)
        gradient = gradient or self._plain_gradient
        steps_before = self.steps.clone()
        for batch in self.batches(purpose, epochs, samples=samples):
            weights = descent.theta[batch.members]
            slope, losses = gradient(weights, batch)
            if extra_gradient is not None:
                extra = extra_gradient(weights, batch.members)
                if extra.shape != slope.shape:
                    raise ValueError(
                        f"extra_gradient returned a tensor of shape {[*extra.shape]}; expected: that of the "
                        f"gradient, {[*slope.shape]}"
                    )
                slope = slope + extra
            descent.step(batch.members, slope)
            self.record(batch, losses)
        return Trained(descent.theta, self.steps - steps_before)

    def descent(self, theta: Tensor, *, lr: float | None = None, trained: slice = slice(None)) -> Descent:
        """Return the run's optimiser from theta [C, ...] for a method's own training loop.

        `lr` defaults to this round's.
        """
        return Descent(theta, self.lr if lr is None else lr, self._worker.train, trained)

    @property
    def local_epochs(self) -> int:
        """Default of `epochs`: `train.local_epochs`, or `train.unseen_epochs` of clients that are new.

        With `clients.local_epochs` clients in training differ: a hook that trains them leaves `epochs` out.
        """
        return self._worker.train.local_epochs

    @property
    def lr(self) -> float:
        """The learning rate of this round."""
        return self._worker.train.lr * self.lr_decay

    @property
    def lr_decay(self) -> float:
        """The factor of this round's learning rate: `train.lr_decay` and what else changes it by round."""
        return self._worker.train.lr_factor(self.round)

    def record(self, batch: Batch, losses: Tensor) -> None:
        """Count one training step of the batch's clients, with their losses [len(batch.members)]."""
        self.loss_sum[batch.members] += losses
        self.steps[batch.members if batch.counted is None else batch.counted] += 1

    def find_statistics(self, theta: Tensor, gradient: GradientOf | None = None) -> None:
        """Update the running statistics by one pass over the training samples with models theta [C, P].

        For new clients that keep their own and do not train. `gradient` is what computes the models; default:
        `plain_gradient`.
        """
        for batch in self.batches("statistics", augmented=False):
            (gradient or self.plain_gradient)(theta[batch.members], batch)

    def plain_gradient(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the gradient of the cross-entropy of models [len(batch.members), P], and the losses."""
        gradient, losses = self._plain_gradient(theta, batch)
        return gradient.clone(), losses

    def _plain_gradient(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the same as `plain_gradient`; the next call may overwrite the gradient."""
        if self._worker.private is not None:
            return self._private_gradient(self._worker.private, theta, batch)
        with self._buffers_of(batch) as buffers:
            return self._worker.engine.plain_gradient(theta, buffers, batch)

    def _private_gradient(
        self, private: PrivateGradients, theta: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient and losses of `privacy.unit=sample`."""
        members = torch.arange(len(self))[batch.members if batch.counted is None else batch.counted].tolist()
        purpose = self._noise_of
        for m in members:
            if (purpose, m) not in self._noise:
                name = f"private gradient/{purpose}"
                self._noise[purpose, m] = torch_stream(self._worker.seed, name, self.round, self.ids[m])
        sizes, share = self.num_samples.tolist(), self._worker.work.sampling_rate
        expected = [sizes[m] * share(self.ids[m], sizes[m]) for m in members]
        return private.gradient(theta, batch, expected, [self._noise[purpose, m] for m in members])

    def gradient_with_constants(self, loss: Loss, known: Callable[[Batch], Tensors]) -> GradientOf:
        """Return the `gradient` for `sgd` of a loss that reads `theta` and the constants `known(batch)`."""

        def gradient(theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            gradients, losses = self.gradient(loss, {"theta": theta} | known(batch), batch)
            return gradients["theta"], losses

        return gradient

    def uniform(self, purpose: str) -> Callable[[Batch, int], Tensor]:
        """Return a function of a batch and a width that draws from U(0, 1), float32 [members, B, width].

        Each call draws new numbers, on `device`, from the streams of (seed, purpose, round, client).
        """
        seeds = [stream_seed(self._worker.seed, purpose, self.round, client) for client in self.ids]
        keys = torch.tensor(seeds).to(self.device)

        def draw(batch: Batch, width: int) -> Tensor:
            shape = (batch.y.shape[1], width)
            numbers, keys[batch.members] = uniform_by_key(keys[batch.members], shape)
            return numbers

        return draw

    def outputs(
        self, model: Tensors | Message, position: int, call: Callable[..., Tensor], *samples: Tensor
    ) -> Tensor:
        """Return call(network, *samples) of one client's model (`theta` and `buffers`, one row per client).

        The network is in evaluation mode; samples [n, ...] come in parts.
        """
        theta, buffers = model["theta"][position], model["buffers"][position]
        return self._worker.evaluator.outputs(theta, buffers, call, *samples)

    def training_outputs(
        self, model: Tensors | Message, call: Callable[..., Tensor], samples: Sequence[Tensor] | None = None
    ) -> Iterator[Tensor]:
        """Yield call(network, x, y) of each client's model on its training samples, [n, ...].

        The network is in evaluation mode; `samples`: see `batches`. Both engines process one client after the
        other: one client's samples fill a device, and vmap would need padding.
        """
        if samples is not None:
            samples = torch.cat(list(samples)).to(self.device).split([len(chosen) for chosen in samples])
        for position in range(len(self)):
            x, y = self.samples("train", position)
            if samples is not None:
                x, y = x[samples[position]], y[samples[position]]
            yield self.outputs(model, position, call, x, y)

    def over_training_set(
        self, model: Tensors | Message, call: Callable[..., Tensor], samples: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Return the `training_outputs` of all clients, [C, most, ...].

        Rows beyond a client's number of samples are zero. If all samples are used, `Batch.pick` finds the
        rows of a mini-batch.
        """
        return pad_sequence(list(self.training_outputs(model, call, samples)), batch_first=True)

    def scores(self, model: Message, split: str) -> Tensor | None:
        """Return (accuracy, mean loss) of each client's model on its samples of a split, float64 [C, 2].

        They are on the CPU; None if models are scored client by client.
        """
        place = self._worker
        return None if place.scorer is None else place.scorer.scores(model, place.shard, split, self._local)
