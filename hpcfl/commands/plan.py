"""`hpcfl plan`: what a run would do, and what it would take."""

from __future__ import annotations

import os
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch

from hpcfl.commands.arguments import SETTINGS_HELP, Parser, add_own_code, split_settings
from hpcfl.commands.job_header import JobHeader, limit_of, seconds_of
from hpcfl.communication.network import ASSUMED_BYTES_A_S, ASSUMED_LATENCY_S, Network, measured
from hpcfl.communication.world import World
from hpcfl.config import Config, load_config
from hpcfl.data.partitions import ClientIndices, class_table
from hpcfl.data.sources import Arrays
from hpcfl.errors import UserError
from hpcfl.machine import resident_bytes
from hpcfl.methods.base import Method
from hpcfl.simulation.device_memory import telling_where_memory_ends
from hpcfl.simulation.driver import Driver
from hpcfl.simulation.estimate import Estimate, Planner, Sizes, traffic
from hpcfl.simulation.experiment import load_data, make_method
from hpcfl.simulation.refusals import refuse_chain, refuse_single_samples, refuse_small_blocks, too_large
from hpcfl.simulation.rehearsal import Rehearsal, rehearse
from hpcfl.simulation.work import batches_of, evaluations, work_of

USUAL_RANKS = 9
"""Ranks of jobs/train.sbatch."""
NODES = (1, 2, 4, 8, 16, 32, 64)
A_PROCESS_BYTES = 300e6
"""Assumed memory of a process without data, where the system does not tell."""


def show_plan(arguments: Sequence[str], world: World) -> None:
    """Show what a run would do and take, without running it.

    First clients by classes, network, work and memory; then, after seconds of a rehearsal in this
    process, the time on 1 to 64 nodes and what limits it, memory, disk, bytes on the network, and the
    head of a SLURM script. Measured are a client's local pass, an evaluation and the server's part of
    a round, on one core or the GPU of this machine, and, under mpirun, the network between rank 0 and
    the others; what is assumed stands with it. For example, on the nodes of a job:
    mpirun -n 9 python -m hpcfl.main plan CONFIG.yaml
    """
    parser = Parser("hpcfl plan", show_plan.__doc__)
    parser.add_argument("settings", nargs="*", metavar=SETTINGS_HELP)
    parser.add_argument("--ranks", metavar="R", help="ranks of the run (default: those here, or 9)")
    parser.add_argument(
        "--ranks-per-node", metavar="R", help="(default: as here under mpirun, or a core each)"
    )
    parser.add_argument(
        "--time", metavar="HH:MM:SS", help="time limit of a job (default: what the run takes)"
    )
    parser.add_argument("--no-timing", action="store_true", help="leave out all that a rehearsal tells")
    add_own_code(parser)
    options = parser.parse_intermixed_args(list(arguments))
    ranks, per_node = _ranks(options.ranks, world), _per_node(options.ranks_per_node)
    if options.time is not None:
        seconds_of(options.time)
    is_measured = world.size > 1 and not options.no_timing
    network = measured(world) if is_measured else Network(len(os.sched_getaffinity(0)))
    if not world.is_server:
        return
    network = network if per_node is None else replace(network, ranks_per_node=per_node)
    config = load_config(*split_settings(options.settings))
    with telling_where_memory_ends(config, world):
        _tell(config, ranks, network, options)


def _tell(config: Config, ranks: int, network: Network, options: Namespace) -> None:
    program_bytes: float = resident_bytes()
    arrays, parts = load_data(config)
    data_bytes = arrays.x.nbytes + arrays.y.nbytes
    # what the source imports stays, its images do not
    program_bytes = max(program_bytes, resident_bytes() - data_bytes) or A_PROCESS_BYTES
    method = make_method(config, arrays, parts)
    print("\n".join([*_table(config, arrays, parts, method), *_describe(config, method)]), flush=True)
    if reason := too_large(method):
        print(reason)
        return
    if options.no_timing:
        return
    refuse_small_blocks(config, method)
    refuse_single_samples(config, method)
    if options.ranks is not None:
        refuse_chain(method, ranks - 1)
    elif method.sequential is not None:
        ranks = min(ranks, 2)
    rehearsal = rehearse(_here(config), arrays, parts)
    if rehearsal.has_diverged:
        warnings.warn(_diverged(config), stacklevel=1)
    scored = [len(getattr(part, config.run.eval_split)) for part in parts]
    planner = Planner(config, method, rehearsal, scored, data_bytes, program_bytes, network)
    found = planner.on(ranks)
    on_gpu = config.run.device == "cuda" or rehearsal.device == "cuda"
    header = JobHeader(config, found, on_gpu, options.time)
    lines = [
        _measured(config, rehearsal, found),
        _network(network),
        *_times(method, planner, found),
        f"memory, estimated: rank 0 {_size(found.server_memory)}, a worker {_size(found.worker_memory)}"
        if ranks > 1
        else f"memory, estimated: {_size(found.server_memory)}",
        _disk(planner.sizes),
        *_bytes(method, rehearsal),
        "",
        *_job(header),
    ]
    print("\n".join(lines))


def _ranks(asked: str | None, world: World) -> int:
    """Return the ranks that are asked for: by the option, by mpirun, by SLURM, or as many as is usual."""
    if asked is not None:
        if not asked.isdecimal() or int(asked) < 1:
            raise UserError(
                f"--ranks {asked} is not possible; give a whole number from 1 on, such as --ranks 9"
            )
        return int(asked)
    if world.size > 1:
        return world.size
    tasks = os.environ.get("SLURM_NTASKS", "")
    return int(tasks) if tasks.isdecimal() and int(tasks) else USUAL_RANKS


def _per_node(asked: str | None) -> int | None:
    """Return the ranks on each node that are asked for; None: none are."""
    if asked is not None and (not asked.isdecimal() or int(asked) < 1):
        raise UserError(
            f"--ranks-per-node {asked} is not possible; give a whole number from 1 on, such as "
            "--ranks-per-node 32"
        )
    return None if asked is None else int(asked)


def _here(config: Config) -> Config:
    """Return the configuration as this machine can rehearse it."""
    if config.run.device != "cuda" or torch.cuda.device_count():
        return config
    return replace(config, run=config.run.model_copy(update={"device": "cpu"}))


def _table(config: Config, arrays: Arrays, parts: Sequence[ClientIndices], method: Method) -> Iterator[str]:
    """Yield the lines of the clients by classes."""
    yield f"{config.partition} partition of {config.data.source}: samples of each class"
    splits = np.array([[len(part.train), len(part.val), len(part.test)] for part in parts])
    counts = np.hstack([class_table(arrays.y, parts, arrays.num_classes), splits])
    header = ["client", *map(str, range(arrays.num_classes)), "train", "val", "test"]
    num_clients = method.context.num_clients
    names = [f"{'unseen ' if client >= num_clients else ''}{client}" for client in range(len(parts))]
    rows = [
        [name, *(str(count or ".") for count in row)]
        for name, row in zip(names, counts.tolist(), strict=True)
    ]
    yield from _aligned([header, *rows, ["all", *map(str, counts.sum(axis=0))]])


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _describe(config: Config, method: Method) -> list[str]:
    layers = ", ".join(f"{layer.name} {layer.size:,}" for layer in method.layers)
    train, num_train = config.train, method.context.num_samples
    cohort, work = train.cohort_size(len(num_train)), work_of(config, method)
    lines = [
        f"model {config.model}: {method.layout.size:,} trainable numbers ({layers})",
        f"{train.rounds} rounds of {cohort} of {len(num_train)} clients, {train.local_epochs} local epochs: "
        f"about {work.training:,.0f} gradients of mini-batches",
    ]
    if work.finetuning:
        lines.append(
            f"fine-tuning for {train.finetune_epochs} epochs before each of {evaluations(config)} "
            f"evaluations: about {work.finetuning:,.0f} beside those"
        )
    unseen = method.context.num_samples_of_unseen
    if len(unseen):
        epochs, times = train.of_unseen().local_epochs, evaluations(config)
        lines.append(
            f"{len(unseen)} unseen clients adapt for {epochs} epochs at each of {times} evaluations: "
            f"{sum(batches_of(unseen, train)) * epochs * times:,} mini-batches beside those"
        )
    lines += [f"server memory, {part}: {count:,} bytes" for part, count in method.server_bytes().items()]
    for name, rows in Driver(method).initial_clients([0]).items():
        whole = rows.nbytes * (len(num_train) + len(unseen))
        lines.append(f"workers' memory, {name}: {whole:,} bytes in all, {rows.nbytes:,} a client")
    return lines


def _diverged(config: Config) -> str:
    """Say that clients diverged in a rehearsal, and what the run would do then."""
    would = {
        "stop": "stop there",
        "skip": "leave such rounds of clients out",
        "continue": "go on with such numbers",
    }
    return (
        "numbers became nan or infinite in the rehearsal, which went on with them; the run would "
        f"{would[config.run.on_divergence]} (run.on_divergence={config.run.on_divergence}), and its times "
        f"may differ: lower train.lr (it is {config.train.lr:g})"
    )


def _measured(config: Config, rehearsal: Rehearsal, found: Estimate) -> str:
    """Say what was measured on this machine."""
    on_cpu, threads = rehearsal.device == "cpu", config.run.threads
    where = ("one core" if threads == 1 else f"{threads} cores") if on_cpu else "a GPU"
    missing = ", which has no GPU, as run.device=cuda wants" if on_cpu and config.run.device == "cuda" else ""
    return (
        f"measured for {rehearsal.wall_s:.0f} s on {where} of this machine{missing}: "
        f"{_seconds(rehearsal.gradient_s)} a gradient of a mini-batch in a local pass, "
        f"{_seconds(rehearsal.score_s)} a sample in an evaluation, {_seconds(found.server_s)} a round on the "
        "server"
    )


def _network(network: Network) -> str:
    """Say what was measured of the network, and what is assumed."""
    rates = {"between nodes": network.link_bytes_a_s, "within one": network.node_bytes_a_s}
    found = [f"{_size(rate)}/s {where}" for where, rate in rates.items() if rate is not None]
    assumed = [f"{_size(ASSUMED_BYTES_A_S)}/s {where}" for where, rate in rates.items() if rate is None]
    (assumed if network.latency_s is None else found).append(
        f"{_seconds(network.latency_s or ASSUMED_LATENCY_S)} for a short message"
    )
    told = f"measured of rank 0's network: {', '.join(found)}; " if found else ""
    assumed += ["a core like this one for each rank", f"{network.ranks_per_node} ranks on each node"]
    return f"{told}assumed: {', '.join(assumed)}, a disk of 100 MB/s"


def _times(method: Method, planner: Planner, found: Estimate) -> Iterator[str]:
    """Yield the table of times, of the ranks that are asked for and of others."""
    per_node = planner.network.ranks_per_node
    most = 2 if method.sequential is not None else max(NODES) * per_node
    estimates = {ranks: planner.on(ranks) for ranks in (nodes * per_node for nodes in NODES) if ranks <= most}
    header = "nodes, ranks, in all, round, training, server, network, evaluation, limited by"
    rows = [header.split(", ")]
    for _, of in sorted((estimates | {found.ranks: found}).items()):
        parts = (of.round_s, of.train_s, of.server_s, of.network_s, of.evaluation_s)
        rows.append([str(of.nodes), str(of.ranks), _clock(of.total_s), *map(_seconds, parts), of.limit])
    yield ""
    yield "time, estimated; a round is training on the busiest worker, rank 0's work, and its network:"
    yield from _aligned(rows)
    yield ""


def _disk(found: Sizes) -> str:
    return (
        f"disk: a checkpoint {_size(found.checkpoint)}, the last one {_size(found.last_checkpoint)}; the run "
        f"folder at most {_size(found.peak)}: the newest, the previous and the unfinished checkpoint, "
        f"{_size(found.tables)} of CSV files and {_size(found.report)} of report"
    )


def _bytes(method: Method, rehearsal: Rehearsal) -> Iterator[str]:
    """Yield the bytes of messages as metrics.csv counts them, and what moves beside them."""
    a_round, whole = traffic(rehearsal)
    about = "about " if rehearsal.chooses_layers else ""
    yield (
        f"network: {about}{a_round['bytes_down']:,.0f} bytes down and {a_round['bytes_up']:,.0f} up a round, "
        f"{whole['bytes_down']:,.0f} and {whole['bytes_up']:,.0f} in all, as metrics.csv counts them"
    )
    for kind, called in (("buffer_", "running statistics"), ("index_", "indices")):
        down, up = (whole[f"{kind}bytes_{way}"] for way in ("down", "up"))
        if down or up:
            yield f"network, {called}: {down:,.0f} bytes down and {up:,.0f} up in all beside those"
    num_clients, evaluation = method.context.num_clients, rehearsal.evaluation
    down = evaluation.common + num_clients * evaluation.rows
    yield (
        f"network, not counted: at most {_size(down)} down an evaluation, "
        f"{_size(num_clients * sum(rehearsal.stored.client_rows))} up a checkpoint, "
        f"{_size(num_clients * sum(rehearsal.stored.models.rows))} more up the last one"
    )


def _job(header: JobHeader) -> Iterator[str]:
    """Yield the head of a SLURM script."""
    yield "for SLURM, in place of the head of jobs/train.sbatch:"
    yield from header.lines()
    if header.jobs > 1:
        yield (
            f"# about {header.jobs} jobs of {limit_of(header.limit_s)} one after the other: each stops "
            f"{header.signal_s} s before its end, is requeued, and goes on"
        )


def _seconds(value: float) -> str:
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def _clock(value: float) -> str:
    return str(timedelta(seconds=round(value)))


def _size(count: float) -> str:
    """Return bytes in the unit that makes a number of them below a thousand."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} bytes"
