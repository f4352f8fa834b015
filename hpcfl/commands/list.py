"""`hpcfl list`: what there is."""

from __future__ import annotations

from collections.abc import Sequence

from hpcfl.commands.arguments import Parser
from hpcfl.communication.world import World
from hpcfl.data.partitions import PARTITIONS
from hpcfl.data.sources import SOURCES
from hpcfl.methods import METHODS, add_own_method
from hpcfl.models import MODELS


def list_everything(arguments: Sequence[str], world: World) -> None:
    """Print what there is, one line each: its kind and its name."""
    parser = Parser("hpcfl list", list_everything.__doc__)
    parser.add_argument("--describe", action="store_true", help="say what each is")
    parser.add_argument("--method", metavar="FILE.py", help="your own method too (see method.path)")
    options = parser.parse_args(arguments)
    describes = options.describe
    if options.method is not None:
        add_own_method(options.method)
    kinds = {
        "method": {name: method.summary for name, method in METHODS.items()},
        "source": {name: source.description for name, source in SOURCES.items()},
        "partition": {name: partition.description for name, partition in PARTITIONS.items()},
        "model": {name: model.description for name, model in MODELS.items()},
    }
    for kind, entries in kinds.items():
        for name, description in entries.items():
            print(f"{kind} {name}: {description}" if describes else f"{kind} {name}")
