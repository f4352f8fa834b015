"""`hpcfl bench`: what the product costs, as ratios with goals, and the seconds of a start."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from hpcfl.benchmarks import nodes, runs, scale, steps
from hpcfl.benchmarks.engines import engines
from hpcfl.benchmarks.ratios import Earlier, Ratio, as_table, read_json, write_json
from hpcfl.commands.arguments import Parser
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.errors import UserError

Part = Callable[[Communicator, Namespace], Iterator[Ratio]]


def run_bench(arguments: Sequence[str], world: Communicator) -> bool:
    """Measure what the product costs, and print ratios beside their goals.

    Parts:
    start    a rank, from its beginning to its first round
    steps    of training, beside bare PyTorch; pFedMB's branches
    server   pFedLA's step, beside stacking all models for each client
    engines  the batched engine beside the loop engine (--device)
    scale    pFedLA's server with --clients (all ranks)
    rounds   what of pFedLA's is not training; messages, checkpoints, waiting (all ranks, --device)
    methods  each beside FedAvg: a round, its training and server parts; evaluation (all ranks)
    nodes    messages, and FedAvg's and pFedLA's rounds by workers, beside `hpcfl plan` (all ranks)
    For example: mpirun -n 3 python -m hpcfl.main bench --parts rounds,methods
    """
    options = parser().parse_args(arguments)
    parts = [part for part in PARTS if part != "nodes" or world.size > 1]
    parts = parts if options.parts is None else options.parts.split(",")
    for part in parts:
        if part not in PARTS:
            raise UserError(f"--parts has {part!r}; allowed: {', '.join(PARTS)}")
    if "nodes" in parts and world.size == 1:
        raise UserError(
            "--parts nodes needs several ranks; type mpirun -n 4 python -m hpcfl.main bench --parts nodes"
        )
    if options.repeats < 1:
        raise UserError(f"--repeats {options.repeats} must be 1 or more, such as --repeats 9")
    counts = options.clients.split(",")
    if not all(count.isdecimal() and int(count) >= scale.COHORT for count in counts):
        raise UserError(
            f"--clients {options.clients} must be numbers from {scale.COHORT} on, such as --clients 100,1000"
        )
    if "start" in parts[1:]:
        raise UserError(
            "--parts has start, which is measured from a rank's beginning, behind others; put it first"
        )
    # a GPU of any rank will do here; a run then says which rank has none
    if options.device == "cuda" and not world.maximum(torch.cuda.device_count()):
        raise UserError("--device cuda: there is no GPU; go to a node that has one, or drop --device")
    before = run_collectively(
        world, lambda: _earlier(options.json, options.against) if world.is_server else None
    )
    found: list[Ratio] = []
    torch.set_num_threads(1)
    stopped = False
    for part in parts:
        print(f"measuring: {part}", flush=True)
        try:
            found += PARTS[part](world, options)
        except runs.StoppedError:
            stopped = True
            break
        world.barrier()
    print(f"\n{as_table(found, before, world.size)}", flush=True)
    if options.json is not None:
        run_collectively(
            world, lambda: write_json(options.json, found, world.size) if world.is_server else None
        )
    return stopped


def parser() -> Parser:
    """Return what reads the words of `hpcfl bench`."""
    parser = Parser("hpcfl bench", run_bench.__doc__)
    parser.add_argument("--parts", help="some of the parts (default: all; nodes under mpirun)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where clients train")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each step (default: 9)")
    parser.add_argument("--clients", default="100", help="clients of scale, such as 100,1000 (default: 100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the ratios to a file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="beside those of an earlier --json FILE")
    return parser


def _earlier(json: Path | None, against: Path | None) -> Earlier | None:
    """Read the earlier run, before minutes are spent; UserError, too, if `json` cannot be written."""
    if json is not None and not os.access(json.parent, os.W_OK):
        raise UserError(f"cannot write {json}; name a file in a folder that is there, with --json FILE")
    return None if against is None else read_json(against)


def _on_server(measure: Callable[[Namespace], Iterator[Ratio]]) -> Part:
    """Return a part that one process measures while the others wait."""
    return lambda world, options: measure(options) if world.is_server else iter(())


def _steps(repeats: int) -> Iterator[Ratio]:
    yield from steps.training_steps(repeats)
    yield from steps.branches(repeats)


PARTS: dict[str, Part] = {
    "start": lambda world, _: runs.start(world),
    "steps": _on_server(lambda options: _steps(options.repeats)),
    "server": _on_server(lambda options: steps.server_step(options.repeats)),
    "engines": _on_server(lambda options: engines(torch.device(options.device), options.repeats)),
    "scale": lambda world, options: scale.server_rounds(
        world, list(map(int, options.clients.split(","))), max(2, options.repeats // 3)
    ),
    "rounds": lambda world, options: runs.rounds(world, max(2, options.repeats // 4), options.device),
    "methods": lambda world, options: runs.methods(world, options.device),
    "nodes": lambda world, options: nodes.scaling(world, max(3, options.repeats // 2)),
}
"""By name; each takes the ranks and the command's options. All are collective."""
