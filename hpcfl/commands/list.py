"""`hpcfl list`: what there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcfl.commands.arguments import Parser
from hpcfl.communication.codecs import CODECS
from hpcfl.communication.world import World
from hpcfl.data.partitions import PARTITIONS, add_own_partition
from hpcfl.data.sources import SOURCES, add_own_source
from hpcfl.methods import METHODS, add_own_method
from hpcfl.models import MODELS, add_own_model

OWN_FILES: dict[str, tuple[str, Callable[[str], tuple[str, str]]]] = {
    "method": ("method.path", add_own_method),
    "source": ("data.reader", add_own_source),
    "partition": ("data.partition.path", add_own_partition),
    "model": ("model.path", add_own_model),
}
"""By kind: the key that names a user's own file, and the function that adds what this file defines."""


def list_everything(arguments: Sequence[str], world: World) -> None:
    """Print what there is, one line each: its kind and its name."""
    parser = Parser("hpcfl list", list_everything.__doc__)
    parser.add_argument("--describe", action="store_true", help="say what each is")
    for kind, (key, _) in OWN_FILES.items():
        parser.add_argument(f"--{kind}", metavar="FILE.py", help=f"your own {kind} too (see {key})")
    options = parser.parse_args(arguments)
    describes = options.describe
    for kind, (_, add_own) in OWN_FILES.items():
        if (path := getattr(options, kind)) is not None:
            add_own(path)
    kinds: dict[str, dict[str, str]] = {
        "method": {name: method.summary for name, method in METHODS.items()},
        "source": {name: source.description for name, source in SOURCES.items()},
        "partition": {name: partition.description for name, partition in PARTITIONS.items()},
        "model": {name: model.description for name, model in MODELS.items()},
        "codec": {name: codec.description for name, codec in CODECS.items()},
    }
    for kind, entries in kinds.items():
        for name, description in entries.items():
            print(f"{kind} {name}: {description}" if describes else f"{kind} {name}")
