"""From a configuration to everything a rank needs: data, model, method, engines and clients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from hpcfl.communication.communicator import Communicator
from hpcfl.communication.sharded import BLOCK_CLIENTS, ShardedRows
from hpcfl.config import Config
from hpcfl.data.partitions import ClientIndices, count_classes, partition
from hpcfl.data.shard import Shard, resolve_normalisation
from hpcfl.data.sources import Arrays, load_arrays, subset_fraction, subset_per_class
from hpcfl.methods import METHODS, Context, Method
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.randomness import numpy_stream
from hpcfl.setup.device_memory import (
    abort_out_of_memory,
    bytes_for_device,
    clients_at_once,
    for_device,
    state_device,
)
from hpcfl.setup.validate import (
    check_chain,
    check_large_state,
    check_single_samples,
    check_slow_precision,
    check_small_blocks,
)
from hpcfl.storage.snapshot import DataRecord
from hpcfl.training.client_group import WorkerContext
from hpcfl.training.convolutions import with_convolutions
from hpcfl.training.engines import BatchedEngine, Engine, LoopEngine
from hpcfl.training.scoring import BatchedScorer


@dataclass(frozen=True)
class Unseen:
    """The U clients that take no part in training, with ids from N on, and those of them on this rank."""

    workplace: WorkerContext
    num_train: np.ndarray
    """Training samples of each, int64 [U]."""
    num_evaluated: np.ndarray
    """Samples of each in `run.eval_split`, int64 [U]."""


@dataclass(frozen=True)
class Experiment:
    """What a run consists of on one rank; its N clients are those that take part in training."""

    config: Config
    method: Method
    workplace: WorkerContext
    data: DataRecord
    num_train: np.ndarray
    """Training samples of each client, int64 [N]."""
    num_evaluated: np.ndarray
    """Samples of each client in `run.eval_split`, int64 [N]."""
    unseen: Unseen
    samples_by_class: tuple[np.ndarray, np.ndarray] | None
    """Samples in training and in `run.eval_split` by class, int64 [N + U, classes] each; on the server."""
    engine_name: str
    """The engine and, on a GPU, what was chosen for it."""
    state_device: torch.device
    """Where this rank keeps its clients' state during the run, but for what `for_device` leaves out."""

    @property
    def driver(self) -> MethodAdapter:
        """What calls the method's hooks."""
        return MethodAdapter(self.method)

    def place_state(self) -> None:
        """Bring the clients' state, made on the CPU, to where it is kept during the run.

        Not before all ranks are built: they may share a GPU, and measure its free memory.
        """
        state = self.workplace.state
        for name, rows in for_device(self.method, state).items():
            state[name] = rows.to(self.state_device)

    @property
    def bytes_of_state_on_device(self) -> int:
        """What the clients' state takes of a GPU's memory during the run; 0 where the CPU keeps it."""
        return 0 if self.state_device.type == "cpu" else bytes_for_device(self.method, self.workplace.state)


def load_data(config: Config) -> tuple[Arrays, list[ClientIndices]]:
    """Read the source and deal its samples to the clients; the same on every rank. May raise UserError."""
    arrays = read_source(config)
    return arrays, deal(config, arrays)


def read_source(config: Config) -> Arrays:
    """Return the samples of the source. Raises UserError where they cannot be read."""
    data = config.data
    return load_arrays(data.source, root=data.root, path=data.path, layout=data.layout, split=data.split)


def deal(config: Config, arrays: Arrays) -> list[ClientIndices]:
    """Return each client's samples as indices into the arrays. May raise UserError.

    Clients that take no part in training (`data.unseen_clients`) come last; the order is otherwise that of
    the partition.
    """
    data = config.data
    chosen = np.arange(len(arrays.y))
    if data.subset_per_class is not None:
        chosen = subset_per_class(arrays.y, data.subset_per_class, config.data_seed)
    if data.subset_fraction is not None:
        chosen = subset_fraction(len(arrays.y), data.subset_fraction, config.data_seed)
    parts = partition(
        config.partition.name,
        arrays.y[chosen],
        arrays.num_classes,
        num_clients=data.clients,
        per_client=data.per_client,
        test_fraction=data.test_fraction,
        val_fraction=data.val_fraction,
        seed=config.data_seed,
        options=config.partition.options,
        owner=None if arrays.owner is None else arrays.owner[chosen],
        is_test=None if arrays.is_test is None else arrays.is_test[chosen],
    )
    num_unseen = data.num_unseen(len(parts))
    if num_unseen:
        drawn = numpy_stream(config.data_seed, "unseen clients").permutation(len(parts))
        order = [*sorted(drawn[num_unseen:]), *sorted(drawn[:num_unseen])]
        parts = [parts[number] for number in order]
    return [ClientIndices(chosen[p.train], chosen[p.val], chosen[p.test]) for p in parts]


def describe(config: Config, arrays: Arrays, parts: list[ClientIndices]) -> DataRecord:
    """Return what a method and its networks need to know of the data. May raise UserError."""
    _, channels, height, width = arrays.x.shape
    mean, std = resolve_normalisation(arrays, config.data.normalise)
    return DataRecord(
        (channels, height, width),
        str(arrays.x.dtype),
        float(arrays.scale),
        tuple(map(float, mean)),
        tuple(map(float, std)),
        arrays.num_classes,
        tuple(len(part.train) for part in parts),
    )


def make_method(config: Config, arrays: Arrays, parts: list[ClientIndices]) -> Method:
    """Build the network's layout and the method. May raise UserError."""
    return method_of(config, describe(config, arrays, parts))


def method_of(config: Config, data: DataRecord) -> Method:
    """Build the network's layout and the method without the data. May raise UserError."""
    num_samples = torch.tensor(data.num_samples)
    num_clients = len(num_samples) - config.data.num_unseen(len(num_samples))
    context = Context(
        config.model.name,
        config.model.options,
        data.image_shape,
        data.num_classes,
        num_samples[:num_clients],
        config.train,
        config.run.seed,
        num_samples[num_clients:],
    )
    return METHODS[config.method.name](context, config.method.options)


def build(config: Config, world: Communicator) -> Experiment:
    """Build this rank's part of a run. Collective. May raise UserError on any rank."""
    torch.set_num_threads(config.run.threads)
    world.max_elements = config.run.max_elements
    device = world.device(config.run.device)
    # by itself a GPU would round the factors of convolutions
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.run.tf32
    arrays, parts = load_data(config)
    data = describe(config, arrays, parts)
    method = method_of(config, data)
    check_chain(method, world.num_workers)
    check_large_state(method, world)
    check_small_blocks(config, method)
    check_single_samples(config, method)
    world.shard_unit = 1 if method.sharded_state is None else BLOCK_CLIENTS
    num_clients = method.context.num_clients
    clients = world.shard(num_clients)
    own_unseen = world.shard(len(parts) - num_clients)
    unseen = range(num_clients + own_unseen.start, num_clients + own_unseen.stop)
    return assemble(config, world, device, method, data, arrays, parts, clients, unseen)


def assemble(
    config: Config,
    world: Communicator,
    device: torch.device,
    method: Method,
    data: DataRecord,
    arrays: Arrays,
    parts: list[ClientIndices],
    clients: Sequence[int],
    unseen: Sequence[int],
) -> Experiment:
    """Put this rank's part of a run together. May raise UserError on any rank.

    Args:
        clients: ids of the clients in training that live here.
        unseen: those of clients that take no part in training.
    """
    num_clients = method.context.num_clients
    many_at_once = is_batched(config, device)
    check_slow_precision(config, many_at_once or device.type != "cpu")
    try:
        shard = Shard.build(arrays, parts, clients, data.mean, data.std, device)
        unseen_shard = Shard.build(arrays, parts, unseen, data.mean, data.std, device)
        network = copy.deepcopy(method.network).to(device)
    except torch.OutOfMemoryError:
        abort_out_of_memory(
            world,
            f"{device} of rank {world.rank} on {world.host} has no memory for the samples of its "
            f"{len(clients) + len(unseen)} clients; use more GPUs, fewer data.clients, or run.device=cpu",
        )
    state = MethodAdapter(method).initial_clients(clients)
    if method.sharded_state is not None:
        method.sharded = ShardedRows(world, state[method.sharded_state], method.layers, num_clients)
    sharing, state_bytes = world.workers_on_device, bytes_for_device(method, state)
    kept_on = state_device(config, device, sharing, state_bytes)
    evaluator = LoopEngine(network, method.layout, config.train.precision)
    engine: Engine = evaluator
    scorer, engine_name = None, "loop"
    if many_at_once:
        beside = 0 if kept_on.type == "cpu" else state_bytes
        batched, engine_name = batched_engine(config, method, network, device, sharing, len(clients), beside)
        engine = batched
        scorer = BatchedScorer(network, method.layout)
    workplace = WorkerContext(
        shard, clients, engine, evaluator, config.train, config.run.seed, device, state, scorer
    )
    unseen_workplace = replace(
        workplace,
        shard=unseen_shard,
        clients=unseen,
        train=config.train.of_unseen(),
        state=MethodAdapter(method).initial_clients(unseen),
    )
    train = [part.train for part in parts]
    evaluated = [getattr(part, config.run.eval_split) for part in parts]
    num_train, num_evaluated = np.array(list(map(len, train))), np.array(list(map(len, evaluated)))
    samples_by_class = None
    if world.is_server:
        samples_by_class = (
            count_classes(arrays.y, train, arrays.num_classes),
            count_classes(arrays.y, evaluated, arrays.num_classes),
        )
    return Experiment(
        config,
        method,
        workplace,
        data,
        num_train[:num_clients],
        num_evaluated[:num_clients],
        Unseen(unseen_workplace, num_train[num_clients:], num_evaluated[num_clients:]),
        samples_by_class,
        engine_name,
        kept_on,
    )


def batched_engine(
    config: Config,
    method: Method,
    network: nn.Module,
    device: torch.device,
    sharing: int,
    most: int,
    state_bytes: int = 0,
) -> tuple[BatchedEngine, str]:
    """Return the batched engine for a network on a device, and its name with what was chosen on a GPU.

    `sharing`, `most` and `state_bytes`: see `clients_at_once`.
    """
    at_once = clients_at_once(config, method, device, sharing, most, state_bytes)
    # a choice decides the last bits, so that the record must have it
    name = "batched" if device.type == "cpu" else f"batched by {at_once}"
    return BatchedEngine(with_convolutions(network, config.run.convolutions), method.layout, at_once), name


def is_batched(config: Config, device: torch.device) -> bool:
    """Whether a run trains with the batched engine on a device."""
    return config.run.engine == "batched" or (config.run.engine == "auto" and device.type == "cuda")
