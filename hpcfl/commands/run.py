"""One run from a configuration to its folder: the path that a run and a cell of a table take."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path

from hpcfl.checks.alike import check_unlike_nodes
from hpcfl.commands.arguments import RunOptions
from hpcfl.commands.summary import next_command, print_summary
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.config import Config
from hpcfl.errors import UserError
from hpcfl.setup.device_memory import report_out_of_memory
from hpcfl.setup.experiment import build
from hpcfl.simulation.round_loop import Outcome, Simulation
from hpcfl.simulation.stopping import StopFlag
from hpcfl.storage.runfolder import RunFolder
from hpcfl.storage.slurm import tell_script
from hpcfl.storage.trackers import check_tracker
from hpcfl.terminal import Progress


def run(
    config: Config,
    options: RunOptions,
    world: Communicator,
    stop: StopFlag,
    command: str,
    is_cell: bool = False,
) -> Outcome:
    """Start a run in its folder, or resume it. Collective; may raise UserError.

    Args:
        config: what is run.
        options: folder, --fresh and --quiet; its file and overrides serve only for the suggested command.
        world: the ranks.
        stop: ends the run at a round boundary.
        command: what was typed.
        is_cell: the run is one of many: print only how its rounds go.
    """
    with ExitStack() as at_exit:
        at_exit.enter_context(warnings.catch_warnings())
        at_exit.enter_context(report_out_of_memory(config, world))
        watched = at_exit.enter_context(ExitStack())
        watched.enter_context(world.heartbeat_timeout(config.run.timeout))
        noted: list[str] = []
        warnings.showwarning = lambda message, *_args, **_kwargs: noted.append(str(message))
        check_unlike_nodes(world)
        _check_other_code(config, world)
        if world.is_server:
            # all ranks have come here, with their handlers: a signal would have killed them before
            tell_script("ready", "a signal stops the run")
        run_collectively(world, lambda: check_tracker(config.run.tracker if world.is_server else None))
        path = options.out or Path("runs") / config.run_name()
        folder = RunFolder(path, config) if world.is_server else None
        run_collectively(world, lambda: folder.check(options.fresh) if folder else None)
        experiment = run_collectively(world, lambda: build(config, world))
        here = f"{world.host} {experiment.workplace.device} {experiment.engine_name}"
        ranks = [entry.decode() for entry in world.gather_bytes(here.encode()) or []]
        layout = experiment.method.layout
        run_collectively(
            world, lambda: folder.open(options.fresh, layout, ranks, at_exit, command) if folder else None
        )
        progress = Progress(folder.log if folder else None, options.quiet)
        at_exit.callback(progress.close)
        warnings.showwarning = lambda message, *_args, **_kwargs: progress.warn(str(message))
        for text in noted:
            progress.warn(text)
        for text in folder.notes if folder else ():
            (folder.log if folder and is_cell else progress.say)(text)
        simulation = Simulation(experiment, world, stop, progress, folder)
        outcome = simulation.run()
        # the server may write a page for long, and nobody waits for it
        watched.close()
        progress.close()
        if folder is not None and not is_cell:
            suggestion = next_command(options, config, world.size)
            report = (
                _write_report(folder.path, progress) if config.run.report and outcome != "stopped" else None
            )
            print_summary(
                outcome, simulation.ledger, config, folder.path, report, suggestion, world, progress
            )
        return outcome


def _write_report(folder: Path, progress: Progress) -> Path | None:
    """Write the page of a finished run; None, with a warning, where it cannot be: the run is good without."""
    # imported here: it takes time, and only one rank needs it, at the end
    from hpcfl.report.page import REPORT_NAME, write_report
    from hpcfl.results.run import load_run

    try:
        write_report([load_run(folder)], folder / REPORT_NAME)
    except (UserError, OSError) as error:
        progress.warn(f"no report: {error}")
        return None
    return folder / REPORT_NAME


def _check_other_code(config: Config, world: Communicator) -> None:
    """Raise UserError where ranks have read different files of the user's own. Collective."""
    files = config.own_files
    found = world.gather_bytes(" ".join(files.values()).encode())

    def check() -> None:
        if found is not None and len(set(found)) > 1:
            raise UserError(
                f"{' or '.join(files)} is not the same file on all ranks; copy it to every "
                "node, or put it on a file system that all share"
            )

    run_collectively(world, check)
