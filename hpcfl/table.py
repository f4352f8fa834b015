"""`hpcfl table`: runs the cells of a table file, and makes their table."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from hpcfl.arguments import Parser, RunOptions, command_line, split_settings
from hpcfl.data.partitions import ClientIndices
from hpcfl.data.sources import Arrays
from hpcfl.errors import UserError
from hpcfl.experiment import load_data, make_method
from hpcfl.process import StopFlag
from hpcfl.run import run
from hpcfl.runfolder import RunFolder
from hpcfl.tablefile import Cell, Table
from hpcfl.world import World, agreed, open_world

A_CELL_NEEDS_S = 30
"""No cell is started when SLURM's end time is nearer than this."""

COLUMNS = (
    "label",
    "method",
    "accuracy_mean",
    "accuracy_std_over_seeds",
    "seeds",
    "missing_seeds",
    "rounds",
    "eval_split",
    "bytes_down",
    "bytes_up",
    "other_bytes_down",
    "other_bytes_up",
    "client_steps_per_s",
    "wall_s",
    "tuned",
)
"""Columns of table.csv; bytes are those of a client in a round, the other ones of running statistics and
indices."""


def table(arguments: Sequence[str]) -> bool:
    """Run the cells of a table file that are not finished, and print the table.

    Each row and seed is a run in DIR/<label>-s<seed>; the table is in DIR/table.md and DIR/table.csv.
    Running the same command again goes on. key.sub=value counts for every cell.
    """
    parser = Parser("hpcfl table", table.__doc__)
    parser.add_argument("settings", nargs="*", metavar="TABLE.yaml | key.sub=value")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of it all (default: runs/<TABLE>)")
    parser.add_argument("--part", metavar="K/N", help="run only every N-th cell, from the K-th on")
    parser.add_argument("--fresh", action="store_true", help="start cells over whose settings have changed")
    parser.add_argument("--quiet", action="store_true", help="print nothing but warnings and errors")
    options = parser.parse_intermixed_args(list(arguments))
    path, overrides = split_settings(options.settings)
    if path is None:
        raise UserError("give a table file, such as configs/tables/baselines.yaml; see hpcfl table --help")
    part, num_parts = _part(options.part)
    world = open_world()
    say = _speech(options.quiet)
    with ExitStack() as at_exit:
        stop = StopFlag()
        at_exit.callback(stop.restore)
        whole = agreed(world, lambda: Table(path, overrides, options.out))
        own = range(part - 1, len(whole.cells), num_parts)
        pending = agreed(world, lambda: _pending(whole, own, options.fresh) if world.is_server else [])
        pending = json.loads(world.broadcast_bytes(json.dumps(pending).encode()))

        say(f"{len(own) - len(pending)} of {len(own)} cells are finished, in {whole.folder}")
        command = command_line(["table", *arguments], world.size)
        stopped = _run_cells(whole, pending, world, stop, command, options.quiet)
        text, missing = agreed(world, lambda: write(whole) if world.is_server else ("", 0))
        say(f"\n{text}\nin {whole.folder}: table.md, table.csv")
        if missing:
            say(f"{missing} of {len(whole.cells)} cells are missing")
        if stopped:
            say(f"stopped early with a checkpoint; go on with\n  {command}")
        elif missing:
            rest = command_line(["table", *_without_part(arguments)], world.size)
            say(f"unless other parts are at them, go on with\n  {rest}")
        return stopped


def _run_cells(
    whole: Table,
    pending: Sequence[tuple[int, bool]],
    world: World,
    stop: StopFlag,
    command: str,
    quiet: bool,
) -> bool:
    """Run cells, each a number and whether it starts over; return whether they stopped early. Collective."""
    began_s = time.monotonic()
    for done, (number, fresh) in enumerate(pending):
        cell = whole.cells[number]
        left = ""
        if done:
            if _must_stop(world, stop):
                return True
            left_s = (time.monotonic() - began_s) / done * (len(pending) - done)
            left = f"  time left {timedelta(seconds=round(left_s))}"
        _speech(quiet)(
            f"cell {number + 1}/{len(whole.cells)}: {cell.label} seed {cell.config.run.seed}{left}"
        )
        options = RunOptions(None, (), cell.folder, fresh, quiet)
        try:
            outcome = run(cell.config, options, world, stop, command, is_cell=True)
        except UserError as error:
            raise UserError(f"{cell.place}: {error}") from error
        if outcome == "stopped":
            return True
        agreed(world, lambda: write(whole) if world.is_server else None)
    return False


def _speech(quiet: bool) -> Callable[[str], None]:
    """Return what prints a line at once, or nothing."""
    return (lambda _: None) if quiet else (lambda text: print(text, flush=True))


def _must_stop(world: World, stop: StopFlag) -> bool:
    """Agree whether no further cell is started. Collective."""
    wanted = stop.requested or (world.is_server and stop.time_is_short(A_CELL_NEEDS_S))
    return world.maximum(int(wanted)) == 1


def _pending(whole: Table, own: range, fresh: bool) -> list[tuple[int, bool]]:
    """Return the numbers of the cells to run, and whether each starts over; UserError for what cannot be."""
    pending = []
    for number, cell in enumerate(whole.cells):
        if is_finished(cell):
            continue
        folder = RunFolder(cell.folder, cell.config)
        starts_over = False
        try:
            folder.check(fresh=False)
        except UserError as error:
            if not fresh:
                raise UserError(f"{cell.place}: {error}") from error
            folder.check(fresh=True)
            starts_over = True
        if number in own:
            pending.append((number, starts_over))
    _refuse_impossible([whole.cells[number] for number, _ in pending])
    return pending


def _refuse_impossible(cells: Sequence[Cell]) -> None:
    """Make the method of each row once: the last row's mistake would else be told after hours."""
    data: Any = None
    dealt: tuple[Arrays, list[ClientIndices]]
    first_of_row: dict[int, Cell] = {}
    for cell in cells:
        first_of_row.setdefault(cell.row, cell)
    for cell in first_of_row.values():
        try:
            of_cell = (cell.config.tree()["data"], cell.config.data_seed)
            if of_cell != data:
                data, dealt = of_cell, load_data(cell.config)
            make_method(cell.config, *dealt)
        except UserError as error:
            raise UserError(f"{cell.place}: {error}") from error


def is_finished(cell: Cell) -> bool:
    """Whether a cell's folder holds its run, of these settings, to the last round."""
    # clients.csv is written last, and taken away when a run goes on
    if not all((cell.folder / name).is_file() for name in ("config.yaml", "clients.csv")):
        return False
    try:
        RunFolder(cell.folder, cell.config).check(fresh=False)
    except UserError:
        return False
    metrics = _read_csv(cell.folder / "metrics.csv")
    return bool(metrics) and int(metrics[-1]["round"]) == cell.config.train.rounds


def write(whole: Table) -> tuple[str, int]:
    """Write table.md and table.csv from the folders of the finished cells.

    Returns the former, and how many cells are missing. Raises UserError where it cannot write.
    """
    figures: list[list[dict[str, float]]] = [[] for _ in whole.labels]
    for cell in whole.cells:
        if is_finished(cell):
            figures[cell.row].append(_figures(cell))
    rows = [_row(whole, number, known) for number, known in enumerate(figures)]
    lines = io.StringIO()
    writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    markdown = f"# {whole.title}\n\n{_setting(whole)}\n\n{_markdown(rows)}"
    try:
        whole.folder.mkdir(parents=True, exist_ok=True)
        _replace(whole.folder / "table.csv", lines.getvalue())
        _replace(whole.folder / "table.md", markdown)
    except OSError as error:
        raise UserError(
            f"cannot write the table in {whole.folder}: {error.strerror}; name another with --out DIR"
        ) from error
    return markdown, sum(row["missing_seeds"] for row in rows)


def _row(whole: Table, number: int, figures: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return a row of table.csv from the figures of each finished seed."""
    config = whole.cells[number].config
    accuracies = [known["accuracy_mean"] for known in figures]
    names = figures[0] if figures else ()
    means = {name: statistics.fmean(known[name] for known in figures) for name in names}
    return {
        "label": whole.labels[number],
        "method": config.method,
        "accuracy_std_over_seeds": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "seeds": len(figures),
        "missing_seeds": len(whole.seeds) - len(figures),
        "rounds": config.train.rounds,
        "eval_split": config.run.eval_split,
        "tuned": whole.tuned[number],
    } | {name: round(mean) if "bytes" in name else mean for name, mean in means.items()}


def _setting(whole: Table) -> str:
    """Say in a line what all figures have in common."""
    configs = [cell.config for cell in whole.cells]
    return (
        f"Seeds {', '.join(map(str, whole.seeds))}; "
        f"rounds {_values(config.train.rounds for config in configs)}; "
        f"clients {_values(config.data.clients or 'as the data has them' for config in configs)}; "
        f"accuracy on the {_values(config.run.eval_split for config in configs)} split after the last "
        "round, mean over clients, mean ± standard deviation over seeds; "
        "bytes a client and round, of trainable numbers + of running statistics and indices; "
        "client steps are updates of weights by a mini-batch, whatever each costs."
    )


def _figures(cell: Cell) -> dict[str, float]:
    """Return what a finished cell gave and cost, from its folder, by names of COLUMNS."""
    metrics = _read_csv(cell.folder / "metrics.csv")
    last = {name: float(value) for name, value in metrics[-1].items()}
    num_clients = len(_read_csv(cell.folder / "clients.csv"))
    train = cell.config.train
    turns = train.rounds * train.cohort_size(num_clients)
    figures = {
        "accuracy_mean": last["accuracy_mean"],
        # about as many steps between any two evaluations
        "client_steps_per_s": statistics.harmonic_mean([float(row["client_steps_per_s"]) for row in metrics]),
        "wall_s": last["wall_s"],
    }
    for way in ("down", "up"):
        others = last[f"buffer_bytes_{way}"] + last[f"index_bytes_{way}"]
        figures |= {f"bytes_{way}": last[f"bytes_{way}"] / turns, f"other_bytes_{way}": others / turns}
    return figures


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows of table.csv as a table for readers."""
    header = ["method", "accuracy", "seeds", "bytes down", "bytes up", "client steps/s"]
    lines = []
    for row in rows:
        line = [row["label"], "missing", "0", "", "", ""]
        if row["seeds"]:
            spread = row["accuracy_std_over_seeds"]
            line[1:] = [
                f"{100 * row['accuracy_mean']:.1f}{'' if spread is None else f' ± {100 * spread:.1f}'} %",
                str(row["seeds"]),
                *(_bytes(row[f"bytes_{way}"], row[f"other_bytes_{way}"]) for way in ("down", "up")),
                f"{row['client_steps_per_s']:.0f}",
            ]
        lines.append(line)
    more = {}
    if len({row["rounds"] for row in rows}) > 1:
        more["rounds"] = "rounds"
    if any(row["tuned"] for row in rows):
        more["tuned"] = "tuned on validation samples"
    header += more.values()
    for line, row in zip(lines, rows, strict=True):
        line += [str(row[name] or "") for name in more]
    return "".join(
        f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n"
        for line in (header, ["---"] * len(header), *lines)
    )


def _part(text: str | None) -> tuple[int, int]:
    """Read K/N; without it there is one part."""
    if text is None:
        return 1, 1
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--part {text} is not possible; give K/N with K from 1 to N, such as --part 1/3")
    return int(found[1]), int(found[2])


def _without_part(arguments: Sequence[str]) -> list[str]:
    words = [word for word in arguments if not word.startswith("--part=")]
    if "--part" in words:
        at = words.index("--part")
        del words[at : at + 2]
    return words


def _read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def _replace(path: Path, text: str) -> None:
    """Write a file so that no reader ever sees half of it."""
    unfinished = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def _bytes(numbers: int, others: int) -> str:
    return f"{numbers:,}" + (f" + {others:,}" if others else "")


def _values(values: Iterable[object]) -> str:
    return " or ".join(dict.fromkeys(map(str, values)))
