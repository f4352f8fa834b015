"""`hpcfl bench`: what the product costs, as ratios with goals, and the seconds of a start."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from hpcfl.benchmarks import runs, steps
from hpcfl.benchmarks.ratios import Ratio, as_tables, write_json
from hpcfl.commands.arguments import Parser, whole_number
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.errors import UserError


def run_bench(arguments: Sequence[str], world: Communicator) -> None:
    """Measure the speed of hpcfl, and print ratios with their goals.

    Parts:
    start    a rank, from its beginning to its first round
    steps    of training, compared with bare PyTorch
    engines  the batched engine compared with the loop engine (--device)
    rounds   share of a pFedLA round that is not training; checkpoints (all ranks, --device)
    methods  a round of each method, compared with FedAvg's (--device)
    For example: mpirun -n 3 hpcfl bench --parts rounds
    """
    options = parser().parse_args(arguments)
    parts = _parts(options)
    # a GPU of any rank will do here; a run then says which rank has none
    if options.device == "cuda" and not world.maximum(torch.cuda.device_count()):
        raise UserError("--device cuda: there is no GPU; go to a node that has one, or drop --device")
    found: list[Ratio] = []
    torch.set_num_threads(1)
    for part in parts:
        print(f"measuring: {part}", flush=True)
        ratios = list(PARTS[part](world, options))
        world.barrier()
        print(as_tables(ratios), flush=True)
        found.extend(ratios)
        if options.json is not None:
            run_collectively(
                world, lambda: write_json(options.json, found, world.size) if world.is_server else None
            )


def _parts(options: Namespace) -> list[str]:
    """Return the parts that are asked for, in the order of PARTS: a start is measured before all else."""
    asked = list(PARTS) if options.parts is None else options.parts.split(",")
    for part in asked:
        if part not in PARTS:
            raise UserError(f"--parts has {part!r}; allowed: {', '.join(PARTS)}")
    return [part for part in PARTS if part in asked]


def parser() -> Parser:
    parser = Parser("hpcfl bench", run_bench.__doc__)
    parser.add_argument("--parts", help="some of the parts (default: all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where clients train")
    parser.add_argument("--repeats", type=whole_number, default=9, help="turns of each step (default: 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the ratios to a file")
    return parser


Part = Callable[[Communicator, Namespace], Iterator[Ratio]]


def _on_server(measure: Callable[[Namespace], Iterator[Ratio]]) -> Part:
    """Return a part that one process measures while the others wait."""
    return lambda world, options: measure(options) if world.is_server else iter(())


PARTS: dict[str, Part] = {
    "start": lambda world, _: runs.start(world),
    "steps": _on_server(lambda options: steps.training_steps(options.repeats)),
    "engines": _on_server(lambda options: steps.engines(torch.device(options.device), options.repeats)),
    "rounds": lambda world, options: runs.rounds(world, max(2, options.repeats // 4), options.device),
    "methods": lambda world, options: runs.methods(world, options.device),
}
"""By name; each takes the ranks and the command's options. All are collective."""
