"""`hpcfl table`: runs the cells of a table file, and makes their table."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import time
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hpcfl.commands.arguments import Parser, RunOptions, add_own_code, command_line, split_settings
from hpcfl.commands.run import run
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.errors import ForcedStop, StorageError, UserError
from hpcfl.formatting import as_text, clock
from hpcfl.simulation.round_loop import Outcome
from hpcfl.simulation.stopping import StopFlag
from hpcfl.storage.runfolder import RunFolder
from hpcfl.storage.slurm import tell_script
from hpcfl.tables.cells import Cell, Choice, Shrinking, Table
from hpcfl.tables.dealing import methods_of
from hpcfl.tables.hours import plan
from hpcfl.tables.paper_figures import check_parts_not_there
from hpcfl.tables.schema import QUANTITIES
from hpcfl.tables.write_results import FromHistories, in_turn, write, write_from_histories, write_results
from hpcfl.terminal import print_warning

A_CELL_NEEDS_S = 30
"""No cell is started when SLURM's end time is nearer than this."""

MAX_NAMED = 12
"""Of the cells that are missing, so many are named."""


def run_table(arguments: Sequence[str], world: Communicator) -> bool:
    """Run the cells of a table file that are not finished, and print the table.

    A cell is a row's run in a column with a seed, in DIR/<column>/<row>-s<seed>; DIR has table.md,
    .tex, .csv, diagnostics.csv, figure.png. The same command resumes. key.sub=value is for all cells,
    but the file of the data (data.source, data.path and so on) only for those of each --column.
    TABLE.yaml has a title, seeds, rows, and as needed: settings (of all cells), config (a file under
    them, or under a column's), columns or sweep, compare (pairs), show (quantities), source (of
    published numbers), size (a line on top), extends (a file to change, by labels), figure (drawn).
      columns:
        - {label: many, data: {clients: 100}}
        - {sweep: {key: train.lr, values: [0.1, 0.2]}}
      rows:
        - {method: {name: pfedla}, published: {many: 61.4}, tuned: train.lr of 0.1 and 0.2}
        - {label: alone, method: {name: local}, without: [lr = 0.2]}
      compare: [[pfedla, alone], {rows: [pfedla, alone], columns: [many], at: after_training}]
    A row's settings lie over its column's; `tuned`: on validation samples; `at`: after_download or
    after_training; `weighted: true` beside it: clients count with their samples; `figure`: heat_maps,
    curves, bars or points, as in configs/tables/*_figure*.yaml.
    """
    quantities = textwrap.fill(f"show: {', '.join(QUANTITIES)}", 98, subsequent_indent="  ")
    parser = Parser("hpcfl table", f"{inspect.cleandoc(run_table.__doc__ or '')}\n{quantities}")
    parser.usage = "hpcfl table TABLE.yaml [key.sub=value ...] [options]"
    parser.add_argument("settings", nargs="*", help=SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of it all (default: runs/<TABLE>)")
    for name in ("column", "row"):
        named = f"run only this {name}, by its label or a part; repeatable"
        parser.add_argument(f"--{name}", action="append", default=[], metavar="LABEL", help=named)
    parser.add_argument("--part", metavar="K/N", help="run only every N-th cell, from the K-th on")
    parser.add_argument("--rounds", metavar="R", help="shrink: no cell has more rounds")
    parser.add_argument("--seeds", metavar="0,1", help="shrink: only these of the table's seeds")
    parser.add_argument(
        "--plan", action="store_true", help="only list cells and hours, by a dry run of each row"
    )
    parser.add_argument(
        "--write-results",
        action="store_true",
        help="also write CSV and PNG in results/ beside TABLE.yaml",
    )
    parser.add_argument("--fresh", action="store_true", help="start cells over whose settings have changed")
    parser.add_argument("--quiet", action="store_true", help="print nothing but warnings and errors")
    add_own_code(parser)
    options = parser.parse_intermixed_args(list(arguments))
    path, overrides = split_settings(options.settings)
    if path is None:
        raise UserError("give a table file, such as configs/tables/baselines.yaml; see hpcfl table --help")
    part, num_parts = _part(options.part)
    shrinking = _shrinking(options.rounds, options.seeds)
    choice = Choice(tuple(options.column), tuple(options.row))
    say = _speech(options.quiet)
    with ExitStack() as at_exit:
        stop = StopFlag()
        at_exit.callback(stop.restore)
        whole = run_collectively(world, lambda: Table(path, overrides, options.out, shrinking, choice))
        if options.plan:
            print(run_collectively(world, lambda: as_text(plan(whole)) if world.is_server else ""))
            return False
        own = whole.chosen[part - 1 :: num_parts]
        pending = run_collectively(
            world, lambda: _pending(whole, own, options.fresh, world) if world.is_server else []
        )
        pending = json.loads(world.broadcast_bytes(json.dumps(pending).encode()))

        skipped = [number for number in own if _is_skipped(whole, number)]
        finished = len(own) - len(pending) - len(skipped)
        say(f"{finished} of {len(own)} cells are finished, in {whole.folder}")
        for label, reason in whole.not_run.items():
            say(f"{label}: not run: {reason}")
        command = command_line(["table", *arguments], world.size)
        stopped, failed = _run_cells(whole, pending, world, stop, command, options.quiet)
        text, told, missing = run_collectively(
            world, lambda: _write_all(whole) if world.is_server else ("", None, [])
        )
        say(f"\n{text}\nin {whole.folder}: table.md, table.tex and CSV files")
        if told is not None:
            _say_drawn(say, told)
        if options.write_results:
            written = run_collectively(world, lambda: write_results(whole, told) if told is not None else [])
            say(f"results: {', '.join(map(str, written))}")
        if missing:
            _say_missing(say, whole, missing)
        if stopped:
            say(f"stopped early with a checkpoint; resume with\n  {command}")
        elif missing:
            rest = command_line(["table", *_without_part(arguments)], world.size)
            say(f"if no other part is running them, resume with\n  {rest}")
        if failed and not stopped:
            raise _all_of(failed)
        return stopped


def _all_of(errors: Sequence[UserError]) -> UserError:
    """Return one error that says what several do, of their kind if they have one in common."""
    if len(errors) == 1:
        return errors[0]
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else UserError
    return kind(f"{len(errors)} cells failed: {'; '.join(map(str, errors))}")


def _run_cells(
    whole: Table,
    pending: Sequence[tuple[int, bool]],
    world: Communicator,
    stop: StopFlag,
    command: str,
    quiet: bool,
) -> tuple[bool, list[UserError]]:
    """Run cells, each a number and whether it starts over. Collective.

    Returns whether they stopped early, and what went wrong with cells that could not be run.
    """
    began_s = time.monotonic()
    failed: list[UserError] = []
    for done, (number, fresh) in enumerate(pending):
        cell = whole.cells[number]
        left = ""
        if done:
            if _must_stop(world, stop):
                return True, failed
            left_s = (time.monotonic() - began_s) / done * (len(pending) - done)
            left = f"  time left {clock(left_s)}"
        place = f"{whole.chosen.index(number) + 1}/{len(whole.chosen)}"
        _speech(quiet)(f"cell {place}: {whole.name(cell)} seed {cell.seed}{left}")
        options = RunOptions(None, (), cell.folder, fresh, quiet)
        try:
            with _noted(cell, world):
                outcome: Outcome | None = run(cell.config, options, world, stop, command, is_cell=True)
        except UserError as error:
            outcome = None
            failed.append(type(error)(f"{cell.place}: {error}"))
            if world.is_server and done + 1 < len(pending):
                print_warning(f"{failed[-1]}; continuing with the other cells")
        if outcome == "stopped":
            return True, failed
        if outcome is not None:
            run_collectively(world, lambda: _write(whole) if world.is_server else None)
    if world.is_server:
        tell_script("cell", "")
    return False, failed


def _note(cell: Cell) -> Path:
    """Return the file that is there while a cell runs, and outlives a fault that ends the process."""
    return cell.folder.with_name(f".{cell.folder.name}.running")


@contextmanager
def _noted(cell: Cell, world: Communicator) -> Iterator[None]:
    """Have the note there while a cell runs, and after a fault that may be the cell's own."""
    if not world.is_server:
        yield
        return
    # a folder that cannot be written is told by the run itself
    with suppress(OSError):
        cell.folder.parent.mkdir(parents=True, exist_ok=True)
        _note(cell).touch()
    tell_script("cell", str(cell.folder))
    try:
        yield
    except (UserError, StorageError, ForcedStop, KeyboardInterrupt):
        _forget(cell)
        raise
    _forget(cell)


def _forget(cell: Cell) -> None:
    with suppress(OSError):
        _note(cell).unlink()


def _write(whole: Table) -> str:
    """Write the table, while no other part does, and return it as text: the last part to end has seen all."""
    with in_turn(whole.folder):
        return write(whole)[0]


def _write_all(whole: Table) -> tuple[str, FromHistories, list[Cell]]:
    """Write the table and what is made of checkpoints, and return both and the chosen cells missing."""
    with in_turn(whole.folder):
        text, _ = write(whole)
        chosen = (whole.cells[number] for number in whole.chosen)
        return text, write_from_histories(whole), [cell for cell in chosen if cell.finished_run is None]


def _say_missing(say: Callable[[str], None], whole: Table, missing: Sequence[Cell]) -> None:
    say(f"{len(missing)} of {len(whole.chosen)} cells are missing")
    for cell in missing[:MAX_NAMED]:
        say(f"  {whole.name(cell)} seed {cell.seed}, in {cell.folder}")
    if len(missing) > MAX_NAMED:
        say(f"  and {len(missing) - MAX_NAMED} more")


def _say_drawn(say: Callable[[str], None], told: FromHistories) -> None:
    if told.pictures:
        say(f"drawn: {', '.join(told.pictures)}")
    for name in told.undrawn:
        say(f"{name} is not drawn: nothing that it shows is finished")


def _speech(quiet: bool) -> Callable[[str], None]:
    """Return what prints a line at once, or nothing."""
    return (lambda _: None) if quiet else (lambda text: print(text, flush=True))


def _must_stop(world: Communicator, stop: StopFlag) -> bool:
    """Agree whether no further cell is started. Collective."""
    wanted = stop.requested or (world.is_server and stop.time_is_short(A_CELL_NEEDS_S))
    return world.maximum(int(wanted)) == 1


def _pending(whole: Table, own: Sequence[int], fresh: bool, world: Communicator) -> list[tuple[int, bool]]:
    """Return the numbers of the cells to run, and whether each starts over; UserError for what cannot be.

    Cells of columns whose data cannot be read are left out (`Table.not_run`).
    """
    pending = []
    for number, cell in enumerate(whole.cells):
        if cell.finished_run:
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
    # what ended the process last time may do so again, and is tried when the others are done
    pending.sort(key=lambda entry: _note(whole.cells[entry[0]]).exists())
    unfinished = {(whole.cells[number].row, whole.cells[number].column) for number, _ in pending}
    firsts = [cell for cell in whole.firsts() if (cell.row, cell.column) in unfinished]
    # each method is made once before the first cell runs: a mistake in the last is told now, not after hours
    for cell, method, *_ in methods_of(whole, firsts, world.num_workers):
        check_parts_not_there(whole, cell, method)
    return [entry for entry in pending if not _is_skipped(whole, entry[0])]


def _is_skipped(whole: Table, number: int) -> bool:
    """Whether a cell is not finished, and not run as its column's data cannot be read."""
    cell = whole.cells[number]
    return whole.columns[cell.column] in whole.not_run and cell.finished_run is None


def _part(text: str | None) -> tuple[int, int]:
    """Read K/N; without it there is one part."""
    if text is None:
        return 1, 1
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--part {text} is invalid; give K/N with K from 1 to N, such as --part 1/3")
    return int(found[1]), int(found[2])


def _shrinking(rounds: str | None, seeds: str | None) -> Shrinking:
    if rounds is not None and not re.fullmatch(r"[1-9]\d*", rounds):
        raise UserError(f"--rounds {rounds} is invalid; give an integer from 1 on")
    if seeds is not None and not re.fullmatch(r"\d+(,\d+)*", seeds):
        raise UserError(f"--seeds {seeds} is invalid; give whole numbers such as --seeds 0,1")
    return Shrinking(
        None if rounds is None else int(rounds), None if seeds is None else tuple(map(int, seeds.split(",")))
    )


def _without_part(arguments: Sequence[str]) -> list[str]:
    words = [word for word in arguments if not word.startswith("--part=")]
    if "--part" in words:
        at = words.index("--part")
        del words[at : at + 2]
    return words
