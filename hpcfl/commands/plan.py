"""`hpcfl plan`: what a run would do, and its time, memory, disk and traffic."""

from __future__ import annotations

import logging
import math
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcfl.commands.arguments import SETTINGS_HELP, Parser, add_own_code, split_settings, whole_number
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.config.keys import Config, RunConfig
from hpcfl.data.arrays import Arrays
from hpcfl.data.partitions import ClientIndices, class_table
from hpcfl.errors import UserError
from hpcfl.formatting import aligned, clock, readable_bytes, readable_seconds
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.base import Method
from hpcfl.planning.dry_run import DryRun, dry_run, lacks_memory, missing_gpu
from hpcfl.planning.estimate import START_S, Estimate, Planner, evaluations
from hpcfl.planning.slurm_header import SlurmHeader, limit_of, seconds_of
from hpcfl.registries import load_config
from hpcfl.setup.device_memory import report_out_of_memory
from hpcfl.setup.experiment import load_data, make_method, texts_of_clients
from hpcfl.setup.validate import check_chain, check_settings_of_data, state_bytes, too_large
from hpcfl.storage.trackers import check_tracker

LOG = logging.getLogger(__name__)

USUAL_RANKS = 9
"""Number of ranks in jobs/train.sbatch."""


def show_plan(arguments: Sequence[str], world: Communicator) -> None:
    """Show what a run would do, and its time, memory and disk, without running it.

    It prints the clients' samples by class, the model and its memory. After a dry run of some
    seconds it prints the time by number of ranks, memory, disk, bytes of messages, and an #SBATCH
    header. The dry run does a few rounds, an evaluation and a checkpoint with a few clients, on
    `run.threads` cores or the GPU of this machine; the rest is extrapolated in proportion.
    For example: hpcfl plan CONFIG.yaml --ranks 34 --ranks-per-node 17
    """
    options = run_collectively(world, lambda: parser().parse_intermixed_args(list(arguments)))
    if not world.is_server:
        return
    config = load_config(*split_settings(options.settings))
    check_tracker(config.run.tracker)
    with report_out_of_memory(world):
        _print_plan(config, options.ranks or _usual_ranks(world), options)


def parser() -> Parser:
    """Return what reads the words of `hpcfl plan`."""
    parser = Parser("hpcfl plan", show_plan.__doc__)
    parser.add_argument("settings", nargs="*", metavar=SETTINGS_HELP)
    whole: dict[str, Any] = {"type": whole_number, "metavar": "R"}
    parser.add_argument(
        "--ranks",
        help="ranks of the run (default: those here, or 9, if they all have work)",
        **whole,
    )
    parser.add_argument("--ranks-per-node", help="ranks on a node of the job (default: all)", **whole)
    limit_help = "time limit of a job (default: what the run takes)"
    parser.add_argument("--time", type=seconds_of, metavar="HH:MM:SS", help=limit_help)
    parser.add_argument("--no-timing", action="store_true", help="skip the dry run, and all that needs it")
    add_own_code(parser)
    return parser


def _print_plan(config: Config, ranks: int, options: Namespace) -> None:
    arrays, parts = load_data(config)
    method = make_method(config, arrays, parts)
    title = f"{config.partition.name} partition of {config.data.source}: samples of each class"
    table = _table(config, arrays, parts, method.context.num_clients)
    of_server = state_bytes(method)
    print("\n".join([title, *table, *_describe(method, of_server, config.run.eval_every)]), flush=True)
    check_settings_of_data(config, arrays, method)
    check_chain(method, 1 if options.ranks is None else ranks - 1)
    if reason := too_large(method):
        raise UserError(reason)
    most = _most_ranks(method)
    if options.ranks is not None and ranks > most:
        LOG.warning(f"--ranks {ranks}: only {most} have work, rank 0 and {most - 1} workers")
    if options.no_timing:
        return
    if reason := lacks_memory(method, of_server):
        raise UserError(f"no times and no memory: {reason}; type the same on a larger one")
    if options.ranks is None:
        ranks = min(ranks, most)
    found = dry_run(config, arrays, parts)
    if found.has_diverged:
        LOG.warning(
            "numbers became nan or infinite in the dry run, which continued with them; the run has "
            f"run.on_divergence={config.run.on_divergence}, and its times may differ: lower train.lr (it is "
            f"{config.train.lr:g})"
        )
    planner = Planner(config.run, method, parts, found)
    estimate = planner.on(ranks)
    on_gpu, name = "cuda" in (config.run.device, found.device), f"{method.name}-{config.data.source}"
    nodes = math.ceil(ranks / (options.ranks_per_node or ranks))
    header = SlurmHeader(name, config.run.threads, estimate, nodes, on_gpu, options.time)
    lines = [
        _measured(config.run, found),
        *_times(most, planner, estimate),
        _memory(estimate),
        _disk(planner),
        *_bytes(planner, found.chooses_layers, config),
        "",
        *_job(header),
    ]
    print("\n".join(lines))


def _most_ranks(method: Method) -> int:
    """Return the largest number of ranks that all have work: a worker for each client of a round."""
    context = method.context
    return 2 if method.sequential is not None else 1 + context.train.cohort_size(context.num_clients)


def _usual_ranks(world: Communicator) -> int:
    """Return the number of ranks from mpirun or from SLURM, else the usual number."""
    if world.size > 1:
        return world.size
    tasks = os.environ.get("SLURM_NTASKS", "")
    return int(tasks) if tasks.isdecimal() and int(tasks) else USUAL_RANKS


def _table(config: Config, arrays: Arrays, parts: Sequence[ClientIndices], num_clients: int) -> list[str]:
    """Return lines with each client's samples by class; the first `num_clients` take part in training."""
    splits = np.array([[len(part.train), len(part.val), len(part.test)] for part in parts])
    counts = np.hstack([class_table(arrays.y, parts, arrays.num_classes), splits])
    texts = texts_of_clients(config, arrays, parts)
    header = ["client", *texts, *map(str, range(arrays.num_classes)), "train", "val", "test"]
    names = [f"{'unseen ' if client >= num_clients else ''}{client}" for client in range(len(parts))]
    rows = [
        [name, *(of[client] for of in texts.values()), *(str(count or ".") for count in row)]
        for client, (name, row) in enumerate(zip(names, counts.tolist(), strict=True))
    ]
    return aligned([header, *rows, ["all", *[""] * len(texts), *map(str, counts.sum(axis=0))]])


def _describe(method: Method, of_server: Mapping[str, int], eval_every: int) -> Iterator[str]:
    """Yield lines about the model, the rounds, and the memory of server and clients at the start; `of_server`
    are the bytes of the server's state by part."""
    layers = ", ".join(f"{layer.name} {layer.size:,}" for layer in method.layers)
    context, train, num_clients = method.context, method.context.train, method.context.num_clients
    num_unseen, times = len(context.num_samples_of_unseen), evaluations(train.rounds, eval_every)
    yield f"model {context.model_name}: {method.layout.size:,} trainable numbers ({layers})"
    drawn = context.clients.local_epochs
    epochs = str(train.local_epochs) if drawn is None else "{} to {}".format(*drawn)
    yield (
        f"{train.rounds} rounds of {train.cohort_size(num_clients)} of {num_clients} clients, "
        f"{epochs} local epochs, {times} evaluations"
    )
    if train.finetune_epochs:
        yield f"fine-tuning for {train.finetune_epochs} epochs before each evaluation"
    if num_unseen:
        adapting = train.of_unseen().local_epochs
        yield f"{num_unseen} unseen clients adapt for {adapting} epochs at each evaluation"
    for part, count in of_server.items():
        yield f"server memory, {part}: {count:,} bytes"
    for name, rows in MethodAdapter(method).initial_clients([0]).items():
        whole = rows.nbytes * (num_clients + num_unseen)
        yield f"workers' memory, {name}: {whole:,} bytes in all, {rows.nbytes:,} a client"


def _measured(run: RunConfig, found: DryRun) -> str:
    """Return what the dry run took, and where."""
    on_cpu, threads = found.device == "cpu", run.threads
    where = ("one core" if threads == 1 else f"{threads} cores") if on_cpu else "a GPU"
    share = found.cpu_s / found.wall_s
    is_busy = on_cpu and share < 0.5
    busy = (
        f" (busy for {100 * (1 - share):.0f} % of it with other programs: the times are too long)" * is_busy
    )
    return (
        f"dry run of {readable_seconds(found.wall_s)} on {where}{busy} of this machine"
        f"{missing_gpu(run, found)}: {readable_seconds(found.batch_s)} a round for each mini-batch of a "
        "client, all local epochs together"
    )


def _times(most_ranks: int, planner: Planner, asked: Estimate) -> Iterator[str]:
    """Yield the table of times, for the requested ranks and for 1, 2, 4, ... workers, if they have work."""
    workers = [2**power for power in range((most_ranks - 1).bit_length())]
    estimates = {ranks: planner.on(ranks) for ranks in (*(1 + count for count in workers), most_ranks)}
    rows = [["ranks", "in all", "round", "training", "server", "evaluation"]]
    for ranks, found in sorted((estimates | {asked.ranks: asked}).items()):
        seconds = (found.round_s, found.train_s, found.server_s, found.evaluation_s)
        rows.append([str(ranks), clock(START_S + found.total_s), *map(readable_seconds, seconds)])
    yield ""
    yield (
        "time, estimated with a core like this one for each rank, a disk of 100 MB/s, and "
        f"{START_S:.0f} s until the first round; messages between ranks are not counted:"
    )
    yield from aligned(rows)
    yield ""


def _memory(found: Estimate) -> str:
    server, worker = readable_bytes(found.server_memory), readable_bytes(found.worker_memory)
    return "memory, estimated: " + (f"rank 0 {server}, a worker {worker}" if found.ranks > 1 else server)


def _disk(planner: Planner) -> str:
    checkpoint, last = planner.checkpoints()
    return (
        f"disk: a checkpoint {readable_bytes(checkpoint)}, the last one {readable_bytes(last)}; the run "
        f"folder at most {readable_bytes(2 * checkpoint + last)} without tables and page: the newest, the "
        "previous and the unfinished checkpoint"
    )


def _bytes(planner: Planner, chooses_layers: bool, config: Config) -> Iterator[str]:
    """Yield the bytes of messages as metrics.csv counts them."""
    a_round, whole = planner.traffic()
    draws_size = config.privacy.unit == "client" and config.train.participation < 1
    about = "about " if chooses_layers or draws_size else ""
    chosen = "; which layers clients choose shows in a run only, and may double the bytes" * chooses_layers
    if config.clients.loses_members:
        about = "without lost clients "
    yield (
        f"network: {about}{a_round['bytes_down']:,.0f} bytes down and {a_round['bytes_up']:,.0f} up a round, "
        f"{whole['bytes_down']:,.0f} and {whole['bytes_up']:,.0f} in all, as metrics.csv counts them"
        f"{chosen}"
    )
    for kind, called in (("buffer_", "running statistics"), ("index_", "indices")):
        down, up = (whole[f"{kind}bytes_{way}"] for way in ("down", "up"))
        if down or up:
            yield f"network, {called}: {down:,.0f} bytes down and {up:,.0f} up more in all"


def _job(header: SlurmHeader) -> Iterator[str]:
    """Yield the #SBATCH header."""
    yield "for SLURM, in place of these lines of jobs/train.sbatch:"
    yield from header.lines()
    if header.jobs > 1:
        yield (
            f"# about {header.jobs} jobs of {limit_of(header.limit_s)} one after the other: each stops "
            f"{header.signal_s} s before its end, is requeued, and resumes"
        )
