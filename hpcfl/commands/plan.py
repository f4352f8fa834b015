"""`hpcfl plan`: what a run would do, and its time, memory, disk and traffic."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpcfl.commands.arguments import SETTINGS_HELP, Parser, add_own_code, split_settings, whole_number
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.communication.interconnect import ASSUMED_BYTES_A_S, ASSUMED_LATENCY_S, Interconnect, measured
from hpcfl.config.keys import Config, RunConfig, TrainConfig
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
NODES = (1, 2, 4, 8, 16, 32, 64)


def show_plan(arguments: Sequence[str], world: Communicator) -> None:
    """Show what a run would do, and its time, memory and disk, without running it.

    It prints the clients' samples by class, the network and its memory. After a dry run of some seconds
    it prints the time on 1 to 64 nodes and what limits it, memory, disk, bytes of messages, and an
    #SBATCH header. The dry run does a few rounds, an evaluation and a checkpoint with a few clients, on
    `run.threads` cores or the GPU of this machine; the rest is extrapolated in proportion. Under mpirun
    it also measures the network between rank 0 and the others; it prints its assumptions. For example,
    on the nodes of a job: mpirun -n 9 hpcfl plan CONFIG.yaml
    """
    options = run_collectively(world, lambda: parser().parse_intermixed_args(list(arguments)))
    is_measured = world.size > 1 and not options.no_timing
    interconnect = measured(world) if is_measured else None
    if not world.is_server:
        return
    config = load_config(*split_settings(options.settings))
    check_tracker(config.run.tracker)
    if interconnect is None:
        interconnect = Interconnect(max(1, len(os.sched_getaffinity(0)) // config.run.threads))
    interconnect = replace(interconnect, ranks_per_node=options.ranks_per_node or interconnect.ranks_per_node)
    with report_out_of_memory(world):
        _print_plan(config, options.ranks or _usual_ranks(world), interconnect, options)


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
    parser.add_argument("--ranks-per-node", help="ranks on a node (default: as here, or one a core)", **whole)
    limit_help = "time limit of a job (default: what the run takes)"
    parser.add_argument("--time", type=seconds_of, metavar="HH:MM:SS", help=limit_help)
    parser.add_argument("--no-timing", action="store_true", help="skip the dry run, and all that needs it")
    add_own_code(parser)
    return parser


def _print_plan(config: Config, ranks: int, interconnect: Interconnect, options: Namespace) -> None:
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
    if options.no_timing:
        return
    if reason := lacks_memory(method, of_server):
        raise UserError(f"no times and no memory: {reason}; type the same on a larger one")
    if options.ranks is None:
        # more workers than clients of a round have nothing to do
        cohort = config.train.cohort_size(method.context.num_clients)
        ranks = min(ranks, 2 if method.sequential is not None else 1 + cohort)
    found = dry_run(config, arrays, parts)
    if found.has_diverged:
        LOG.warning(
            "numbers became nan or infinite in the dry run, which continued with them; the run has "
            f"run.on_divergence={config.run.on_divergence}, and its times may differ: lower train.lr (it is "
            f"{config.train.lr:g})"
        )
    planner = Planner(config.run, method, parts, found, interconnect)
    estimate = planner.on(ranks)
    on_gpu, name = "cuda" in (config.run.device, found.device), f"{method.name}-{config.data.source}"
    # the nodes of a job are not those where the plan is made, unless it was measured on several
    knows_nodes = options.ranks_per_node is not None or interconnect.link_bytes_a_s is not None
    of_job = estimate if knows_nodes else replace(estimate, nodes=1)
    header = SlurmHeader(name, config.run.threads, of_job, on_gpu, options.time)
    lines = [
        _measured(config.run, method.context.train, found, estimate),
        _network(interconnect),
        *_times(method, planner, estimate),
        _memory(estimate),
        _disk(planner),
        *_bytes(planner, found.chooses_layers, config),
        "",
        *_job(header),
    ]
    print("\n".join(lines))


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


def _measured(run: RunConfig, train: TrainConfig, found: DryRun, estimate: Estimate) -> str:
    """Return the times measured on this machine."""
    on_cpu, threads = found.device == "cpu", run.threads
    where = ("one core" if threads == 1 else f"{threads} cores") if on_cpu else "a GPU"
    unit = "mini-batch" if train.finetune_epochs else "sample"
    share = found.cpu_s / found.wall_s
    is_busy = on_cpu and share < 0.5
    busy = (
        f" (busy for {100 * (1 - share):.0f} % of it with other programs: the times are too long)" * is_busy
    )
    return (
        f"measured for {readable_seconds(found.wall_s)} on {where}{busy} of this machine"
        f"{missing_gpu(run, found)}: "
        f"{readable_seconds(found.batch_s)} a round for each mini-batch of a client, "
        f"{readable_seconds(found.score_s)} a {unit} in an evaluation, "
        f"{readable_seconds(estimate.server_s)} a round on the server"
    )


def _network(interconnect: Interconnect) -> str:
    """Return the measured and assumed properties of the network."""
    rates = {"between nodes": interconnect.link_bytes_a_s, "within one": interconnect.node_bytes_a_s}
    found = [f"{readable_bytes(rate)}/s {where}" for where, rate in rates.items() if rate is not None]
    assumed = [
        f"{readable_bytes(ASSUMED_BYTES_A_S)}/s {where}" for where, rate in rates.items() if rate is None
    ]
    (assumed if interconnect.latency_s is None else found).append(
        f"{readable_seconds(interconnect.latency_s or ASSUMED_LATENCY_S)} for a short message"
    )
    measured = f"measured of rank 0's network: {', '.join(found)}; " if found else ""
    assumed += ["a core like this one for each rank", f"{interconnect.ranks_per_node} ranks on each node"]
    return (
        f"{measured}assumed: {', '.join(assumed)}, a disk of 100 MB/s, {START_S:.0f} s until the first round"
    )


def _times(method: Method, planner: Planner, found: Estimate) -> Iterator[str]:
    """Yield the table of times, for the requested ranks, and for others where they differ."""
    per_node = planner.interconnect.ranks_per_node
    most = 2 if method.sequential is not None else max(NODES) * per_node
    estimates = {ranks: planner.on(ranks) for ranks in (nodes * per_node for nodes in NODES) if ranks <= most}
    header = "nodes, ranks, in all, round, training, server, network, evaluation, limited by"
    rows = [header.split(", ")]
    for _, of in sorted((estimates | {found.ranks: found}).items()):
        parts = (of.round_s, of.train_s, of.server_s, of.network_s, of.evaluation_s)
        row = [
            str(of.nodes),
            str(of.ranks),
            clock(START_S + of.total_s),
            *map(readable_seconds, parts),
            of.limit,
        ]
        if of.ranks == found.ranks or row[2:] != rows[-1][2:]:
            rows.append(row)
    yield ""
    yield (
        "time, estimated (nodes that change nothing are left out); a round is training on the busiest "
        "worker, rank 0's work, and its network:"
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
