"""`hpcfl plan`: what a run would do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hpcfl.commands.arguments import SETTINGS_HELP, Parser, split_settings
from hpcfl.communication.world import World
from hpcfl.config import Config, load_config
from hpcfl.data.partitions import class_table
from hpcfl.methods.base import Method
from hpcfl.simulation.driver import Driver
from hpcfl.simulation.experiment import load_data, make_method
from hpcfl.simulation.refusals import too_large
from hpcfl.training.batches import minibatches
from hpcfl.training.settings import TrainConfig


def show_plan(arguments: Sequence[str], world: World) -> None:
    """Show what a run would do without running it: clients by classes, the network, steps, memory."""
    parser = Parser("hpcfl plan", show_plan.__doc__)
    parser.add_argument("settings", nargs="*", metavar=SETTINGS_HELP)
    config = load_config(*split_settings(parser.parse_args(arguments).settings))
    arrays, parts = load_data(config)
    method = make_method(config, arrays, parts)
    print(f"{config.partition} partition of {config.data.source}: samples of each class")
    splits = np.array([[len(part.train), len(part.val), len(part.test)] for part in parts])
    counts = np.hstack([class_table(arrays.y, parts, arrays.num_classes), splits])
    header = ["client", *map(str, range(arrays.num_classes)), "train", "val", "test"]
    num_clients = method.context.num_clients
    names = [f"{'unseen ' if client >= num_clients else ''}{client}" for client in range(len(parts))]
    rows = [
        [name, *(str(count or ".") for count in row)]
        for name, row in zip(names, counts.tolist(), strict=True)
    ]
    total = ["all", *map(str, counts.sum(axis=0))]
    widths = [max(map(len, column)) for column in zip(header, *rows, total, strict=True)]
    for cells in (header, *rows, total):
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    print("\n".join(_describe(config, method)))


def _describe(config: Config, method: Method) -> list[str]:
    layers = ", ".join(f"{layer.name} {layer.size:,}" for layer in method.layers)
    train, num_train = config.train, method.context.num_samples
    cohort = train.cohort_size(len(num_train))
    gradients = np.mean(_steps_of_epoch(num_train, train)) * method.epochs_a_round
    work = gradients * cohort * train.rounds
    lines = [
        f"model {config.model}: {method.layout.size:,} trainable numbers ({layers})",
        f"{train.rounds} rounds of {cohort} of {len(num_train)} clients, {train.local_epochs} local epochs: "
        f"about {work:,.0f} gradients of mini-batches",
    ]
    unseen = method.context.num_samples_of_unseen
    if len(unseen):
        epochs, times = train.of_unseen().local_epochs, math.ceil(train.rounds / config.run.eval_every)
        lines.append(
            f"{len(unseen)} unseen clients adapt for {epochs} epochs at each of {times} evaluations: "
            f"{sum(_steps_of_epoch(unseen, train)) * epochs * times:,} mini-batches beside those"
        )
    lines += [f"server memory, {part}: {count:,} bytes" for part, count in method.server_bytes().items()]
    for name, rows in Driver(method).initial_clients([0]).items():
        whole = rows.nbytes * (len(num_train) + len(unseen))
        lines.append(f"workers' memory, {name}: {whole:,} bytes in all, {rows.nbytes:,} a client")
    return [*lines, reason] if (reason := too_large(method)) else lines


def _steps_of_epoch(num_samples: Tensor, train: TrainConfig) -> list[int]:
    """Return the mini-batches of each client in a local epoch."""
    return [len(minibatches(n, train.batch_size, train.last_batch)) for n in num_samples.tolist()]
