"""Run a simulation: parse, build, run, exit code.

mpirun -n 9 python -m hpcfl.main                                   pFedLA on the bundled digits
mpirun -n 9 python -m hpcfl.main CONFIG.yaml key.sub=value ...     any run; without mpirun: serially
hpcfl list | plan | data fetch | bench                             other commands; each has --help

Running the same command again resumes. Exit codes: 0 finished; 2 bad configuration or input; 75 stopped
early with a checkpoint, run again to continue; anything else is a fault.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn, TypeVar

from hpcfl.commands import COMMANDS
from hpcfl.config import Config, load_config
from hpcfl.errors import UserError
from hpcfl.experiment import build
from hpcfl.process import StopFlag
from hpcfl.progress import Progress
from hpcfl.runfolder import RunFolder
from hpcfl.simulation import Simulation
from hpcfl.summary import print_summary
from hpcfl.world import World, abort_on_exception, agree, open_world

FINISHED, BAD_INPUT, STOPPED = 0, 2, 75

T = TypeVar("T")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see python -m hpcfl.main --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command or a simulation and return the exit code. Collective under mpirun."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    world = None
    try:
        if arguments and arguments[0] in COMMANDS:
            COMMANDS[arguments[0]](arguments[1:])
            return FINISHED
        world = open_world()
        with abort_on_exception(world), ExitStack() as at_exit:
            return _run(arguments, world, at_exit)
    except UserError as error:
        if world is None or world.is_server:
            print(f"hpcfl: error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT


def _run(arguments: Sequence[str], world: World, at_exit: ExitStack) -> int:
    stop = StopFlag()
    at_exit.callback(stop.restore)
    at_exit.enter_context(warnings.catch_warnings())
    noted: list[str] = []
    warnings.showwarning = lambda message, *_args, **_kwargs: noted.append(str(message))

    def configure() -> tuple[argparse.Namespace, Config, RunFolder | None]:
        options = _parse(arguments)
        config = load_config(options.config, options.overrides)
        if not world.is_server:
            return options, config, None
        folder = RunFolder(options.out or Path("runs") / config.run_name(), config)
        folder.check(options.fresh)
        return options, config, folder

    options, config, folder = _agreed(world, configure)
    experiment = _agreed(world, lambda: build(config, world))
    place = f"{world.host} {experiment.workplace.device} {experiment.engine_name}"
    places = [entry.decode() for entry in world.gather_bytes(place.encode()) or []]
    _agreed(world, lambda: folder.open(options.fresh, places, at_exit) if folder else None)
    progress = Progress(folder.log if folder else None, options.quiet)
    at_exit.callback(progress.close)
    for text in [*noted, *(folder.warnings if folder else ())]:
        progress.warn(text)
    simulation = Simulation(experiment, world, stop, progress, folder)
    outcome = simulation.run()
    progress.close()
    if folder is not None:
        print_summary(outcome, simulation.ledger, config, folder.path, progress)
    return STOPPED if outcome == "stopped" else FINISHED


def _agreed(world: World, step: Callable[[], T]) -> T:
    """Take a step on every rank; a UserError on any of them is raised on all. Collective."""
    mistake = None
    try:
        result = step()
    except UserError as error:
        mistake = str(error)
    common = agree(world, mistake)
    if common is not None:
        raise UserError(common)
    return result


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser("hpcfl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="CONFIG.yaml | key.sub=value")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: runs/<name>)")
    parser.add_argument("--fresh", action="store_true", help="move the old run folder aside and start over")
    parser.add_argument("--quiet", action="store_true", help="print nothing but warnings and errors")
    options = parser.parse_intermixed_args(list(arguments))
    files = [setting for setting in options.settings if "=" not in setting]
    if len(files) > 1:
        raise UserError(
            f"more than one configuration file: {', '.join(files)}; give one, and key=value for the rest"
        )
    options.config = Path(files[0]) if files else None
    options.overrides = [setting for setting in options.settings if "=" in setting]
    return options


if __name__ == "__main__":
    sys.exit(main())
