"""`hpcfl export`: a run's models for use without hpcfl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcfl.commands.arguments import Parser, add_own_code, client_of
from hpcfl.communication.communicator import Communicator
from hpcfl.results.export import ALL
from hpcfl.results.models import GLOBAL
from hpcfl.results.run import load_run


def export_models(arguments: Sequence[str], world: Communicator) -> None:
    """Export models of a run for use without hpcfl: weights, whole models, and a JSON description.

    A folder gets each model as client3.pt (a PyTorch state dict), client3.safetensors, client3.json and
    client3.pt2, a whole model from samples to probabilities, which needs only PyTorch (torch.export.load).
    FILE.pt, FILE.safetensors or FILE.pt2 is one of these.
    """
    options = parser().parse_args(arguments)
    client = client_of(options.client, GLOBAL, ALL)
    for path in load_run(options.run).export(client, options.out):
        print(path)


def parser() -> Parser:
    parser = Parser("hpcfl export", export_models.__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, such as runs/NAME")
    parser.add_argument(
        "--client", required=True, help="a client's number, all, or global (the server's model)"
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder, FILE.pt, .safetensors or .pt2")
    add_own_code(parser)
    return parser
