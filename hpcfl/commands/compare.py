"""`hpcfl compare`: compare finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcfl.commands.arguments import Parser, add_own_code
from hpcfl.communication.communicator import Communicator
from hpcfl.results.comparison import compare
from hpcfl.results.run import finished_runs


def compare_runs(arguments: Sequence[str], world: Communicator) -> None:
    """Show the differences in accuracy between runs, client by client, and which of their keys differ.

    Each method is scored at its own moment; differences have 95 % confidence intervals over clients
    and over seeds: conclude on methods from the latter. The runs must have the same clients with the
    same samples. Runs of one configuration with several seeds, such as A-s0 B-s0 A-s1 B-s1, are
    combined. Of a folder of runs, all finished runs are compared.
    """
    folders = parser().parse_args(arguments).runs
    print(compare(*(run for folder in folders for run in finished_runs(folder))))


def parser() -> Parser:
    parser = Parser("hpcfl compare", compare_runs.__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, or of runs")
    add_own_code(parser)
    return parser
