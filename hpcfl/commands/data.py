"""`hpcfl data fetch`: download data sets."""

from __future__ import annotations

from collections.abc import Sequence

from hpcfl.commands.arguments import Parser
from hpcfl.communication.communicator import Communicator
from hpcfl.data.sources import fetch
from hpcfl.data.torchvision_datasets import NAMES


def fetch_data(arguments: Sequence[str], world: Communicator) -> None:
    """Download a data set, on a machine with a network; runs never download."""
    options = parser().parse_args(arguments)
    print(f"{options.name} is in {fetch(options.name, options.root)}")


def parser() -> Parser:
    parser = Parser("hpcfl data", fetch_data.__doc__)
    parser.add_argument("action", choices=["fetch"])
    parser.add_argument("name", help=", ".join(NAMES))
    parser.add_argument(
        "--root", default="data", help="folder to put it in; a run's data.root (default: data)"
    )
    return parser
