"""From a configuration to everything a rank needs: data, model, method, engines and clients."""

from __future__ import annotations

import copy
import gc
import logging
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from hpcfl.communication.communicator import Communicator
from hpcfl.communication.sharded import shard_unit_of
from hpcfl.config.keys import CommConfig, Config, DataConfig, RunConfig, TrainConfig
from hpcfl.data.arrays import Arrays, Channels, digest_of
from hpcfl.data.label_noise import LabelNoise
from hpcfl.data.partition_request import Request, Split
from hpcfl.data.partitions import (
    PARTITIONS,
    ClientIndices,
    class_sizes,
    count_classes,
    partition,
    partition_given,
    partition_in_domains,
)
from hpcfl.data.shard import Shard, resolve_normalisation
from hpcfl.data.shift import check_shift, shift_of
from hpcfl.data.sources import SOURCES, read_source, subset_fraction, subset_per_class
from hpcfl.errors import UserError, printable
from hpcfl.methods import METHODS, Context, Method
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.models import MODELS
from hpcfl.randomness import numpy_stream, seeded_generators
from hpcfl.setup.device_memory import clients_at_once, for_device, state_device
from hpcfl.setup.validate import (
    check_chain,
    check_settings_of_data,
    check_slow_precision,
    too_large,
)
from hpcfl.storage.snapshot import DataRecord
from hpcfl.training.augmentation import Augmentation
from hpcfl.training.client_group import WorkerContext
from hpcfl.training.engines import BatchedEngine, Engine, LoopEngine, set_cuda_arithmetic
from hpcfl.training.private_gradients import PrivateGradients
from hpcfl.training.scoring import BatchedScorer

LOG = logging.getLogger(__name__)

LARGEST_PIXEL = 20
"""Pixels larger than this are not normalised: networks train on a few units."""


@dataclass(frozen=True)
class Experiment:
    """All parts of a run on one rank: N clients in training, and U unseen clients with ids from N on."""

    run: RunConfig
    comm: CommConfig
    method: Method
    worker_context: WorkerContext
    unseen: WorkerContext
    """The context of this rank's unseen clients."""
    data: DataRecord
    num_clients: int
    """N."""
    num_train: np.ndarray
    """Training samples of each client, int64 [N + U]."""
    num_evaluated: np.ndarray
    """Samples of each client in `run.eval_split`, int64 [N + U]."""
    samples_by_class: tuple[np.ndarray, np.ndarray, dict[str, list[str]]] | None
    """Samples in training and in `run.eval_split` by class, int64 [N + U, classes] each, and
    `texts_of_clients`; on the server."""
    engine_name: str
    """The engine and, on a GPU, its automatic settings."""
    state_device: torch.device
    """Where this rank keeps its clients' state during the run, except what `for_device` leaves out."""

    @property
    def adapter(self) -> MethodAdapter:
        """What calls the method's hooks."""
        return MethodAdapter(self.method)

    def place_state(self) -> None:
        """Move the clients' state from the CPU to the device that keeps it during the run.

        Call it after all ranks are built: they may share a GPU, and measure its free memory.
        """
        state = self.worker_context.state
        for name, rows in for_device(self.method, state).items():
            state[name] = rows.to(self.state_device)


def load_data(config: Config) -> tuple[Arrays, list[ClientIndices]]:
    """Read the source and divide its samples among the clients; the same on every rank. May raise
    UserError."""
    arrays = read_source(config.data)
    return arrays, partition_samples(config, arrays)


def partition_samples(config: Config, arrays: Arrays) -> list[ClientIndices]:
    """Return each client's samples as indices into the arrays. May raise UserError.

    Clients that take no part in training (`data.unseen_clients`) come last; the order is otherwise that of
    the partition.
    """
    data = config.data
    _check_overlap(config)
    chosen = np.arange(len(arrays.y))
    if data.subset_per_class is not None:
        chosen = subset_per_class(arrays.y, data.subset_per_class, config.data_seed)
    if data.subset_fraction is not None:
        chosen = subset_fraction(len(arrays.y), data.subset_fraction, config.data_seed)
    y = arrays.y[chosen]
    owner, is_test = (None if of is None else of[chosen] for of in (arrays.owner, arrays.is_test))
    name, options = config.partition.name, config.partition.options
    split = data.test_fraction, data.val_fraction, config.data_seed
    if PARTITIONS[name].counts is None:
        parts = partition_given(
            name, owner, is_test, data.clients, data.per_client, Split(*split), arrays.owner_names
        )
    else:
        assert data.clients is not None
        sizes = class_sizes(y, arrays.num_classes)
        request = Request(*split, sizes, data.clients, data.per_client)
        if arrays.domains and owner is not None:
            parts = partition_in_domains(name, options, y, request, owner, arrays.domains)
        else:
            if owner is not None and SOURCES[data.source].partition != "given":
                LOG.warning(
                    f"data.partition.name={name} makes clients of its own, and does not use those of the "
                    "data; data.partition.name=given takes these"
                )
            parts = partition(name, options, y, request)
    num_unseen = data.num_unseen(len(parts))
    if num_unseen:
        drawn = numpy_stream(config.data_seed, "unseen clients").permutation(len(parts))
        order = [*sorted(drawn[num_unseen:]), *sorted(drawn[:num_unseen])]
        parts = [parts[number] for number in order]
    return [ClientIndices(chosen[p.train], chosen[p.val], chosen[p.test]) for p in parts]


def _check_overlap(config: Config) -> None:
    """Raise UserError if samples that share characters would be in several parts of the data."""
    data, name = config.data, config.partition.name
    if SOURCES[data.source].samples_overlap and (PARTITIONS[name].counts is not None or data.val_fraction):
        raise UserError(
            f"data.partition.name={name} data.val_fraction={data.val_fraction:g}: samples of data.source="
            f"{data.source} share characters, so that some would be known from training; set "
            "data.partition.name=given data.val_fraction=0"
        )


def texts_of_clients(config: Config, arrays: Arrays, parts: Sequence[ClientIndices]) -> dict[str, list[str]]:
    """Return each client's `domain`, or its `name` in the source; {} where the source has none."""
    is_given = PARTITIONS[config.partition.name].counts is None
    texts = arrays.domains or (arrays.names if is_given else ())
    if not texts or arrays.owner is None:
        return {}
    of_clients = [printable(texts[arrays.owner[part.train[0]]]) for part in parts]
    return {"domain" if arrays.domains else "name": of_clients}


def describe(data: DataConfig, arrays: Arrays, parts: list[ClientIndices]) -> DataRecord:
    """Return what a method and its networks need to know of the data. May raise UserError."""
    check_shift(data, arrays.sample)
    in_training = parts[: len(parts) - data.num_unseen(len(parts))]
    train = np.concatenate([part.train for part in in_training])
    mean, std = resolve_normalisation(arrays, data.normalise, train)
    _warn_of_scale(data, arrays, mean, std)
    return DataRecord(
        sample=arrays.sample,
        dtype=str(arrays.x.dtype),
        scale=float(arrays.scale),
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
        num_classes=arrays.num_classes,
        num_samples=tuple(len(part.train) for part in parts),
    )


def _warn_of_scale(data: DataConfig, arrays: Arrays, mean: Channels, std: Channels) -> None:
    """Warn of images with which networks would diverge, such as floats up to 255."""
    if arrays.sample.kind != "images":
        return
    # a scale shows in any thousand samples
    some = arrays.x[:: max(1, len(arrays.x) // 1000)]
    # one channel after the other: NumPy takes twenty times as long for the three other axes together
    channels = [some[:, channel] for channel in range(arrays.sample.channels)]
    ends = np.array([[x.min() for x in channels], [x.max() for x in channels]], np.float64)
    largest = np.abs((ends / arrays.scale - mean) / std).max()
    if largest > LARGEST_PIXEL:
        LOG.warning(
            f"pixels reach {largest:.0f} in size with data.normalise={data.normalise}, and networks expect a "
            "few units: give images of bytes (0..255) as uint8, or set data.normalise=standard"
        )


def make_method(config: Config, arrays: Arrays, parts: list[ClientIndices]) -> Method:
    """Build the network's layout and the method. May raise UserError."""
    return method_of(config, describe(config.data, arrays, parts))


def method_of(config: Config, data: DataRecord) -> Method:
    """Build the network's layout and the method without the data. May raise UserError."""
    num_samples = torch.tensor(data.num_samples)
    num_clients = len(num_samples) - config.data.num_unseen(len(num_samples))
    context = Context(
        config.model.name,
        config.model.options,
        data.sample,
        data.num_classes,
        num_samples[:num_clients],
        train=config.train,
        seed=config.run.seed,
        num_samples_of_unseen=num_samples[num_clients:],
        server=config.server,
        privacy=config.privacy,
        clients=config.clients,
    )
    kind = METHODS[config.method.name]
    with seeded_generators(config.run.seed, "method"):
        method = kind(context, config.method.options)
    if not hasattr(method, "layout"):
        raise TypeError(f"{kind.__name__}.__init__ did not call super().__init__(context, params)")
    return method


def build(config: Config, world: Communicator) -> Experiment:
    """Build this rank's part of a run. Collective. May raise UserError on any rank."""
    device = configure_process(config.run, world)
    arrays, parts = load_data(config)
    data = describe(config.data, arrays, parts)
    data = replace(data, digest=digest_of(arrays), partition_digest=digest_of_parts(parts))
    method = method_of(config, data)
    check_chain(method, world.num_workers)
    if world.is_server and (reason := too_large(method)):
        raise UserError(reason)
    check_settings_of_data(config, arrays, method)
    return assemble(config, world, device, method, data, arrays, parts, method.context.num_clients)


def configure_process(run: RunConfig, world: Communicator) -> torch.device:
    """Apply the settings of this process, and return this rank's device. Collective; may raise UserError."""
    if run.threads > (cores := len(os.sched_getaffinity(0))):
        LOG.warning(f"run.threads={run.threads} on {cores} cores is slow; lower it")
    torch.set_num_threads(run.threads)
    set_cuda_arithmetic(run.tf32)
    world.limit_pieces(run.max_elements)
    device = world.device(run.device)
    if device.type == "cuda":
        # what an earlier run of this process has kept would count as used
        gc.collect()
        torch.cuda.empty_cache()
    # ranks may share a GPU
    world.barrier()
    return device


def assemble(
    config: Config,
    world: Communicator,
    device: torch.device,
    method: Method,
    data: DataRecord,
    arrays: Arrays,
    parts: list[ClientIndices],
    num_clients: int,
) -> Experiment:
    """Put this rank's part of a run together. May raise UserError on any rank.

    The first `num_clients` of the parts belong to clients in training, the others to unseen clients.
    """
    unit = shard_unit_of(method.sharded)
    clients = world.shard(num_clients, unit=unit)
    own_unseen = world.shard(len(parts) - num_clients, unit=unit)
    unseen = range(num_clients + own_unseen.start, num_clients + own_unseen.stop)
    shift = shift_of(config.data, config.data_seed, len(parts))
    noise = LabelNoise.from_config(config.data, config.data_seed, len(parts), data.num_classes)
    shard = Shard.build(arrays, parts, clients, data.mean, data.std, device, shift, noise)
    unseen_shard = Shard.build(arrays, parts, unseen, data.mean, data.std, device, shift, noise)
    network = copy.deepcopy(method.network).to(device)
    adapter = MethodAdapter(method)
    state = adapter.initial_clients(clients)
    if method.sharded is not None:
        method.sharded.attach(world, state[method.sharded.state], num_clients)
    state_bytes = sum(rows.nbytes for rows in for_device(method, state).values())
    kept_on = state_device(config.run.state, device, world.workers_on_device, state_bytes)
    beside = 0 if kept_on.type == "cpu" else state_bytes
    training, evaluator, scorer, engine_name = engines_of(
        config.run, method, network, device, world.workers_on_device, len(clients), beside
    )
    worker_context = WorkerContext(
        shard=shard,
        clients=clients,
        engine=training,
        evaluator=evaluator,
        train=config.train,
        seed=config.run.seed,
        device=device,
        state=state,
        scorer=scorer,
        augmentation=augmentation_of(config.train, data, device),
        private=private_gradients(method, network),
        unequal=config.clients,
    )
    unseen_context = worker_context.of_unseen(unseen_shard, unseen, adapter.initial_clients(unseen))
    train = [part.train for part in parts]
    evaluated = [getattr(part, config.run.eval_split) for part in parts]
    samples_by_class = None
    if world.is_server:
        samples_by_class = (
            count_classes(arrays.y, train, arrays.num_classes),
            count_classes(arrays.y, evaluated, arrays.num_classes),
            texts_of_clients(config, arrays, parts),
        )
    return Experiment(
        run=config.run,
        comm=config.comm,
        method=method,
        worker_context=worker_context,
        unseen=unseen_context,
        data=data,
        num_clients=num_clients,
        num_train=np.array(list(map(len, train))),
        num_evaluated=np.array(list(map(len, evaluated))),
        samples_by_class=samples_by_class,
        engine_name=engine_name,
        state_device=kept_on,
    )


def digest_of_parts(parts: Sequence[ClientIndices]) -> int:
    """Return a checksum of how samples are divided among clients and their parts."""
    digest = 0
    for part in parts:
        for samples in (part.train, part.val, part.test):
            digest = zlib.crc32(np.append(samples, -1).astype(np.int64).tobytes(), digest)
    return digest


def engines_of(
    run: RunConfig,
    method: Method,
    network: nn.Module,
    device: torch.device,
    sharing: int,
    num_clients: int,
    state_bytes: int,
) -> tuple[Engine, LoopEngine, BatchedScorer | None, str]:
    """Return what trains, evaluates and scores the `num_clients` clients of a rank, with a network on its
    device, and its `Experiment.engine_name`.

    On a GPU, the memory that is then free decides on the settings; `sharing` and `state_bytes` as in
    `clients_at_once`. May raise UserError.
    """
    train = method.context.train
    smoothing = train.label_smoothing or 0.0
    batched = is_batched(run.engine, device, method.context.model_name)
    check_slow_precision(train.precision, batched or device.type != "cpu")
    evaluator = LoopEngine(network, method.layout, train.precision, smoothing)
    if not batched:
        return evaluator, evaluator, None, "loop"
    at_once = clients_at_once(run.clients_at_once, method, device, sharing, num_clients, state_bytes)
    # on a GPU the choice affects the last bits, so config.yaml records it
    name = "batched" if device.type == "cpu" else f"batched by {at_once}"
    training = BatchedEngine(network, method.layout, at_once, smoothing)
    return training, evaluator, BatchedScorer(network, method.layout), name


def augmentation_of(train: TrainConfig, data: DataRecord, device: torch.device) -> Augmentation | None:
    """Return the changes of `train.augment` to images of a run's data. May raise UserError."""
    if train.augment is None:
        return None
    if data.sample.kind != "images" or min(data.sample.shape[1:]) < 2:
        raise UserError(
            f"train.augment=[{','.join(train.augment)}] changes images of 2x2 or larger, and the data are "
            f"{data.sample}; set train.augment=none"
        )
    mean, std = torch.tensor([data.mean, data.std])
    return Augmentation(train.augment, (-mean / std).to(device))


def private_gradients(method: Method, network: nn.Module) -> PrivateGradients | None:
    """Return what makes the gradients of `privacy.unit=sample`; None without it. May raise UserError."""
    privacy, model = method.context.privacy, method.context.model_name
    if privacy.unit != "sample":
        return None
    if not MODELS[model].has_batched_engine:
        raise UserError(
            f"privacy.unit=sample needs the gradient of each sample, and model.name={model} "
            "cannot give it; use another model, or privacy.unit=client"
        )
    assert privacy.clip is not None
    assert privacy.noise is not None
    smoothing = method.context.train.label_smoothing or 0.0
    return PrivateGradients(network, method.layout, privacy.clip, privacy.noise, smoothing)


def is_batched(engine: str, device: torch.device, model: str) -> bool:
    """Whether a run with this `run.engine` and model trains with the batched engine on a device.

    Raises UserError if it should and the model cannot.
    """
    can = MODELS[model].has_batched_engine
    if engine == "batched" and not can:
        raise UserError(
            f"run.engine=batched: model.name={model} trains client by client; set run.engine=loop or auto"
        )
    return engine == "batched" or (engine == "auto" and device.type == "cuda" and can)
