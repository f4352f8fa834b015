"""The commands beside running: `list`, `plan`, `data fetch`; `bench` and `table` have files of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hpcfl.arguments import SETTINGS_HELP, Parser, split_settings
from hpcfl.bench import bench
from hpcfl.config import Config, load_config
from hpcfl.data.partitions import PARTITIONS, class_table
from hpcfl.data.sources import SOURCES, fetch
from hpcfl.experiment import load_data, make_method
from hpcfl.methods import METHODS
from hpcfl.methods.base import Method
from hpcfl.models import MODELS
from hpcfl.tables.command import table
from hpcfl.training import minibatches


def list_everything(arguments: Sequence[str]) -> None:
    """Print what there is, one line each: its kind and its name."""
    parser = Parser("hpcfl list", list_everything.__doc__)
    parser.add_argument("--describe", action="store_true", help="say what each is")
    describes = parser.parse_args(arguments).describe
    kinds = {
        "method": {name: method.summary for name, method in METHODS.items()},
        "source": {name: source.description for name, source in SOURCES.items()},
        "partition": {name: partition.description for name, partition in PARTITIONS.items()},
        "model": {name: model.description for name, model in MODELS.items()},
    }
    for kind, entries in kinds.items():
        for name, description in entries.items():
            print(f"{kind} {name}: {description}" if describes else f"{kind} {name}")


def plan(arguments: Sequence[str]) -> None:
    """Show what a run would do without running it: clients by classes, the network, steps, memory."""
    parser = Parser("hpcfl plan", plan.__doc__)
    parser.add_argument("settings", nargs="*", metavar=SETTINGS_HELP)
    config = load_config(*split_settings(parser.parse_args(arguments).settings))
    arrays, parts = load_data(config)
    method = make_method(config, arrays, parts)
    print(f"{config.partition} partition of {config.data.source}: samples of each class")
    splits = np.array([[len(part.train), len(part.val), len(part.test)] for part in parts])
    counts = np.hstack([class_table(arrays.y, parts, arrays.num_classes), splits])
    header = ["client", *map(str, range(arrays.num_classes)), "train", "val", "test"]
    rows = [
        [str(client), *(str(count or ".") for count in row)] for client, row in enumerate(counts.tolist())
    ]
    total = ["all", *map(str, counts.sum(axis=0))]
    widths = [max(map(len, column)) for column in zip(header, *rows, total, strict=True)]
    for cells in (header, *rows, total):
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    print("\n".join(_describe(config, method, splits[:, 0])))


def data(arguments: Sequence[str]) -> None:
    """Download a data set, on a machine with a network; runs never download."""
    parser = Parser("hpcfl data", data.__doc__)
    parser.add_argument("action", choices=["fetch"])
    parser.add_argument("name", help="a source of `hpcfl list`")
    parser.add_argument(
        "--root", default="data", help="folder to put it in; a run's data.root (default: data)"
    )
    parser.add_argument("--split", default="mnist", help="EMNIST's split, to check its name (default: mnist)")
    options = parser.parse_args(arguments)
    print(f"{options.name} is in {fetch(options.name, options.root, options.split)}")


COMMANDS: dict[str, Callable[[Sequence[str]], bool | None]] = {
    "list": list_everything,
    "plan": plan,
    "data": data,
    "bench": bench,
    "table": table,
}
"""A command returns whether a request to stop ended it early."""

COLLECTIVE_COMMANDS = ("bench", "table")
"""Commands that all ranks run; the others are rank 0's."""


def _describe(config: Config, method: Method, num_train: np.ndarray) -> list[str]:
    layers = ", ".join(f"{layer.name} {layer.size:,}" for layer in method.layers)
    train = config.train
    cohort = train.cohort_size(len(num_train))
    gradients = [
        len(minibatches(count, train.batch_size, train.last_batch)) * method.epochs_a_round
        for count in num_train.tolist()
    ]
    work = np.mean(gradients) * cohort * train.rounds
    lines = [
        f"model {config.model}: {method.layout.size:,} trainable numbers ({layers})",
        f"{train.rounds} rounds of {cohort} of {len(num_train)} clients, {train.local_epochs} local epochs: "
        f"about {work:,.0f} gradients of mini-batches",
    ]
    return lines + [f"server memory, {part}: {count:,} bytes" for part, count in method.memory().items()]
