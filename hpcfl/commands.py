"""The commands beside running: `list`, `plan`, `data fetch`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from hpcfl.bench import bench
from hpcfl.config import Config, load_config
from hpcfl.data.partitions import PARTITIONS, class_table
from hpcfl.data.sources import SOURCES, fetch
from hpcfl.errors import UserError
from hpcfl.experiment import load_data, make_method
from hpcfl.methods import METHODS
from hpcfl.methods.base import Method
from hpcfl.models import MODELS


def list_everything(arguments: Sequence[str]) -> None:
    """Print what there is: one line each, kind, name and description."""
    argparse.ArgumentParser("hpcfl list", description=list_everything.__doc__).parse_args(arguments)
    kinds = {
        "method": {name: method.summary for name, method in METHODS.items()},
        "source": {name: source.description for name, source in SOURCES.items()},
        "partition": {name: partition.description for name, partition in PARTITIONS.items()},
        "model": {name: model.description for name, model in MODELS.items()},
    }
    for kind, entries in kinds.items():
        for name, description in entries.items():
            print(f"{kind} {name}: {description}")


def plan(arguments: Sequence[str]) -> None:
    """Show what a run would do without running it: clients by classes, the network, memory and traffic."""
    parser = argparse.ArgumentParser("hpcfl plan", description=plan.__doc__)
    parser.add_argument("settings", nargs="*", metavar="CONFIG.yaml | key.sub=value")
    settings = parser.parse_args(arguments).settings
    files = [Path(setting) for setting in settings if "=" not in setting]
    if len(files) > 1:
        raise UserError(f"more than one configuration file: {', '.join(map(str, files))}")
    config = load_config(files[0] if files else None, [setting for setting in settings if "=" in setting])
    arrays, parts = load_data(config)
    method = make_method(config, arrays, parts)
    console = Console(highlight=False)
    table = Table(
        "client", *map(str, range(arrays.num_classes)), "train", "val", "test", box=None, pad_edge=False
    )
    counts = class_table(arrays.y, parts, arrays.num_classes)
    for client, (row, part) in enumerate(zip(counts, parts, strict=True)):
        cells = [client, *row, len(part.train), len(part.val), len(part.test)]
        table.add_row(*("." if cell == 0 else str(cell) for cell in cells))
    console.print(f"{config.partition} partition of {config.data.source}: samples of each class")
    console.print(table)
    for line in _describe(config, method, [len(part.train) for part in parts]):
        console.print(line, markup=False, soft_wrap=True)


def data(arguments: Sequence[str]) -> None:
    """Download a data set, on a machine with a network; runs never download."""
    parser = argparse.ArgumentParser("hpcfl data", description=data.__doc__)
    parser.add_argument("action", choices=["fetch"])
    parser.add_argument("name", help="a source of `hpcfl list`")
    parser.add_argument(
        "--root", default="data", help="folder to put it in; a run's data.root (default: data)"
    )
    parser.add_argument("--split", default="mnist", help="EMNIST's split, to check its name (default: mnist)")
    options = parser.parse_args(arguments)
    print(f"{options.name} is in {fetch(options.name, options.root, options.split)}")


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "list": list_everything,
    "plan": plan,
    "data": data,
    "bench": bench,
}


def _describe(config: Config, method: Method, num_train: Sequence[int]) -> list[str]:
    layers = ", ".join(f"{layer.name} {layer.size:,}" for layer in method.layers)
    train = config.train
    cohort = max(1, int(np.floor(train.participation * len(num_train) + 0.5)))
    steps = [max(1, -(-count // train.batch_size)) * train.local_epochs for count in num_train]
    work = np.mean(steps) * cohort * train.rounds
    lines = [
        f"model {config.model}: {method.layout.size:,} trainable numbers ({layers})",
        f"{train.rounds} rounds of {cohort} of {len(num_train)} clients, {train.local_epochs} local epochs: "
        f"about {work:,.0f} client steps",
    ]
    return lines + [f"server memory, {part}: {count:,} bytes" for part, count in method.memory().items()]
