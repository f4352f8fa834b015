"""`hpcfl table`: runs the cells of a table file, and makes their table."""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from hpcfl.commands.arguments import TABLE_HELP, Parser, add_own_code, command_line, split_settings
from hpcfl.commands.run import run
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.config.own_code import mistake_in_own_code
from hpcfl.errors import DivergedError, ForcedStop, StorageError, UserError
from hpcfl.formatting import as_text, clock
from hpcfl.methods import METHODS
from hpcfl.simulation.round_loop import Outcome
from hpcfl.simulation.stopping import StopFlag
from hpcfl.storage.lock import holder
from hpcfl.storage.runfolder import RunFolder
from hpcfl.storage.slurm import write_job_note
from hpcfl.tables.cells import DIVERGED_NOTE, Cell, Table
from hpcfl.tables.file import QUANTITIES
from hpcfl.tables.plan import methods_of, plan
from hpcfl.tables.write_results import write, write_from_histories, write_results
from hpcfl.terminal import LOG, print_line

A_CELL_NEEDS_S = 30
"""No cell is started when SLURM's end time is nearer than this."""

MAX_NAMED = 12
"""At most this many missing cells are named."""


def run_table(arguments: Sequence[str], world: Communicator) -> bool:
    """Run the cells of a table file that are not finished, and print the table.

    A cell is a row's run in a column with a seed, in DIR/<column>/<row>-s<seed>; DIR has table.md,
    .tex, .csv, diagnostics.csv, figure.png. The same command resumes. key.sub=value, which no row or
    column may set, is for all cells; data.source, data.path and such are for those of a --column.
    TABLE.yaml has a title, seeds, rows, and as needed: settings (of all cells), config (a file under
    them, or under a column's), columns or sweep, compare (pairs), show (quantities), source (of
    published numbers), size (a line on top), extends (a file to change, by labels), figure (drawn).
      columns: [{label: many, data: {clients: 100}}, {sweep: {key: train.lr, values: [0.1, 0.2]}}]
      rows:
        - {method: {name: pfedla}, published: {many: 61.4}, tuned: train.lr of 0.1 and 0.2}
        - {label: alone, method: {name: local}, without: [lr = 0.2]}
      compare: [[pfedla, alone], {rows: [pfedla, alone], columns: [many], at: after_training}]
    A row's settings override its column's; `tuned`: on validation samples; `at`: after_download or
    after_training; `weighted: true` of a pair: by samples; `figure`: heat_maps, curves, bars or points.
    """
    options = run_collectively(world, lambda: parser().parse_intermixed_args(list(arguments)))
    if options.seeds and (more := [word for word in options.settings if word.isdecimal()]):
        raise UserError(
            f"seeds are joined by commas; write --seeds {','.join(map(str, options.seeds + more))}"
        )
    path, overrides = split_settings(options.settings)
    if path is None:
        raise UserError("give a table file, such as configs/tables/baselines.yaml; see hpcfl table --help")
    part, num_parts = options.part
    say = _printer(options.quiet)
    with ExitStack() as at_exit:
        stop = StopFlag()
        at_exit.callback(stop.ignore)
        table = run_collectively(
            world,
            lambda: Table(
                path,
                overrides,
                options.out,
                rounds=options.rounds,
                seeds=options.seeds,
                in_columns=options.column,
                in_rows=options.row,
            ),
        )
        if options.plan:
            print(run_collectively(world, lambda: as_text(plan(table)) if world.is_server else ""))
            return False

        def finish() -> list[Cell]:
            return run_collectively(
                world, lambda: _finish(table, say, options.write_results) if world.is_server else []
            )

        if options.no_run:
            finish()
            return False
        own = table.chosen[part - 1 :: num_parts]
        unfinished = run_collectively(
            world,
            lambda: _unfinished(table, own, options.fresh, world.num_workers) if world.is_server else [],
        )
        say(f"{len(own) - len(unfinished)} of {len(own)} cells are finished, in {table.folder}")
        for label, reason in table.not_run.items():
            say(f"{label}: not run: {reason}")
        pending = [number for number in unfinished if table.chosen[number].column not in table.not_run]
        pending = json.loads(world.broadcast_bytes(json.dumps(pending).encode()))
        command = command_line(["table", *arguments], world.size)
        stopped, failed = _run_cells(
            table, pending, world, stop, command, fresh=options.fresh, quiet=options.quiet
        )
        missing = finish()
        if stopped:
            say(f"stopped early with a checkpoint; resume with\n  {command}")
        elif missing and num_parts > 1:
            say("when all parts have ended, repeat the command without --part: it runs what is still missing")
        if failed and not stopped:
            # the others have been warned of
            raise failed[-1]
        return stopped


def parser() -> Parser:
    """Return what reads the words of `hpcfl table`."""
    quantities = textwrap.fill(f"show: {', '.join(QUANTITIES)}", 98, subsequent_indent="  ")
    parser = Parser("hpcfl table", f"{inspect.cleandoc(run_table.__doc__ or '')}\n{quantities}")
    parser.usage = "hpcfl table TABLE.yaml [key.sub=value ...] [options]"
    parser.add_argument("settings", nargs="*", metavar=TABLE_HELP)
    out_help = "folder of it all (default: runs/<TABLE>[-<R>rounds])"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out_help)
    for name in ("column", "row"):
        named = f"run only this {name}, by label or part; repeatable"
        parser.add_argument(f"--{name}", action="append", default=[], metavar="LABEL", help=named)
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="K/N", help="run only every N-th cell, from the K-th on"
    )
    parser.add_argument("--rounds", type=int, metavar="R", help="shrink: no cell has more rounds")
    parser.add_argument("--seeds", type=seeds, metavar="0,1", help="shrink: only these of the table's seeds")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="only list cells and their time, by a dry run of each row and column",
    )
    parser.add_argument(
        "--no-run", action="store_true", help="run nothing: only show the table of what is finished"
    )
    parser.add_argument(
        "--write-results",
        action="store_true",
        help="also write CSV and PNG in results/ beside TABLE.yaml",
    )
    parser.add_argument("--fresh", action="store_true", help="start cells over that cannot resume")
    parser.add_argument("--quiet", action="store_true", help="print nothing but warnings and errors")
    add_own_code(parser)
    return parser


def _run_cells(
    table: Table,
    pending: Sequence[int],
    world: Communicator,
    stop: StopFlag,
    command: str,
    *,
    fresh: bool,
    quiet: bool,
) -> tuple[bool, list[UserError]]:
    """Run cells, by their numbers among those chosen; `fresh`: start over what cannot resume. Collective.

    Returns whether they stopped early, and what went wrong with cells that could not be run.
    """
    say, began_s = _printer(quiet), time.monotonic()
    failed: list[UserError] = []
    for done, number in enumerate(pending):
        cell = table.chosen[number]
        left = ""
        if done:
            if stop.is_requested(world, A_CELL_NEEDS_S):
                return True, failed
            left_s = (time.monotonic() - began_s) / done * (len(pending) - done)
            left = f"  time left {clock(left_s)}"
        name = f"cell {number + 1}/{len(table.chosen)}: {cell.name} seed {cell.seed}"
        if _is_in_use(cell, name, world, say):
            continue
        say(f"{name}{left}")
        if world.is_server:
            _note(cell, "running")
            write_job_note("cell", str(cell.folder))
        note = None
        try:
            outcome: Outcome | None = run(
                cell.config, cell.folder, world, stop, command, fresh=fresh, quiet=quiet, is_cell=True
            )
        except (StorageError, ForcedStop, KeyboardInterrupt):
            # not the cell's fault
            _note(cell, None)
            raise
        except Exception as error:
            mistake = error if isinstance(error, UserError) else None
            if mistake is None and world.size == 1 and (line := mistake_in_own_code(error)) is not None:
                mistake = UserError(line)
            if mistake is None:
                raise
            # another command began with it while this one read the data
            if _is_in_use(cell, name, world, say):
                continue
            outcome = None
            failed.append(type(mistake)(f"{cell.place}: {mistake}"))
            note = DIVERGED_NOTE if isinstance(mistake, DivergedError) else None
            if world.is_server and done + 1 < len(pending):
                LOG.warning(f"{failed[-1]}; continuing with the other cells")
        if world.is_server:
            _note(cell, note)
        if outcome == "stopped":
            return True, failed
        if outcome is not None:
            run_collectively(world, lambda: write(table) if world.is_server else None)
    if world.is_server:
        write_job_note("cell", "")
    return False, failed


def _is_in_use(cell: Cell, name: str, world: Communicator, say: Callable[[str], None]) -> bool:
    """Return, and say, whether another process runs a cell. Collective."""
    user = ""
    # the run itself reports a folder that cannot be read
    with suppress(OSError):
        owner, is_held = holder(cell.folder) if world.is_server else ("", False)
        user = (owner or "another process") if is_held else ""
    user = world.broadcast_bytes(user.encode()).decode()
    if user:
        say(f"{name} is in use by {user}, which runs it")
    return bool(user)


def _note(cell: Cell, text: str | None) -> None:
    """Write the note that says that a cell is running or has diverged; None removes it.

    It also stays after a fault that ends the process.
    """
    # the run itself reports a folder that cannot be written
    with suppress(OSError):
        if text is None:
            cell.note.unlink(missing_ok=True)
        else:
            cell.folder.parent.mkdir(parents=True, exist_ok=True)
            cell.note.write_text(text)


def _finish(table: Table, say: Callable[[str], None], with_results: bool) -> list[Cell]:
    """Write all files, and say what was written and what is missing; return the chosen cells missing."""
    text, drawn = write(table), write_from_histories(table)
    say(f"\n{text}\nin {table.folder}: table.md, table.tex and CSV files")
    if any(drawn.values()):
        say(f"drawn: {', '.join(file for files in drawn.values() for file in files)}")
    for name in [name for name, files in drawn.items() if not files]:
        say(f"{name} is not drawn: nothing that it shows is finished")
    if with_results:
        try:
            for cell in table.cells:
                cell.read()
        except UserError as error:
            raise UserError(f"no results are written: {error}") from error
        say(f"results: {', '.join(map(str, write_results(table)))}")
    missing = [cell for cell in table.chosen if cell.finished_run is None]
    if missing:
        say(f"{len(missing)} of {len(table.chosen)} cells are missing")
    for cell in missing[:MAX_NAMED]:
        say(f"  {cell.name} seed {cell.seed}, in {cell.folder}{cell.why_missing}")
    if len(missing) > MAX_NAMED:
        say(f"  and {len(missing) - MAX_NAMED} more")
    return missing


def _printer(quiet: bool) -> Callable[[str], None]:
    """Return what prints a line at once, or nothing."""
    return (lambda _: None) if quiet else (lambda text: print_line(text, sys.stdout))


def _unfinished(table: Table, own: Sequence[Cell], fresh: bool, num_workers: int) -> list[int]:
    """Return the numbers, among the chosen cells, of the own ones to finish.

    It also finds the columns whose data cannot be read (`Table.not_run`). UserError for what cannot run.
    """
    pending = []
    for cell in table.chosen:
        finished, traits = cell.finished_run, METHODS[cell.config.method.name].traits
        folder = RunFolder(cell.folder, cell.config, traits.uses_total_rounds)
        lacks_metrics = cell.config.run.metrics and folder.store.exists
        if finished is not None and (finished.confusion or not lacks_metrics):
            continue
        try:
            if not fresh and not folder.store.exists:
                cell.read()
            folder.check(fresh)
        except UserError as error:
            raise UserError(f"{cell.place}: {error}") from error
        if cell in own:
            pending.append(cell)
    # what ended the process last time may do so again, and is tried when the others are done
    pending.sort(key=lambda cell: cell.note.exists())
    unfinished = {(cell.label, cell.column) for cell in pending}
    firsts = [cell for cell in table.firsts() if (cell.label, cell.column) in unfinished]
    # each method is made once before the first cell runs: a mistake in the last is reported now
    for _ in methods_of(table, firsts, num_workers):
        pass
    return [table.chosen.index(cell) for cell in pending]


def _part(text: str) -> tuple[int, int]:
    """Read K/N."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--part {text} is invalid; give K/N with K from 1 to N, such as --part 1/3")
    return int(found[1]), int(found[2])


def seeds(text: str) -> list[int]:
    """Read --seeds; argparse's errors have the name of this function."""
    return [int(seed) for seed in text.split(",")]
