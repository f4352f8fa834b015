"""Start or resume one run in its folder; also used for each cell of a table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path

from hpcfl.checks.nodes import (
    check_same_data,
    check_same_partition,
    check_same_settings,
    check_same_versions,
    numeric_versions,
)
from hpcfl.communication.communicator import Communicator, abort_on_exception, open_world, run_collectively
from hpcfl.config.keys import Config, PrivacyConfig
from hpcfl.errors import StorageError, UserError
from hpcfl.formatting import readable_bytes, times
from hpcfl.methods import METHODS
from hpcfl.setup.device_memory import report_out_of_memory
from hpcfl.setup.environment import environment_of
from hpcfl.setup.experiment import build
from hpcfl.simulation.divergence import named
from hpcfl.simulation.round_loop import Outcome, Simulation
from hpcfl.simulation.stopping import StopFlag
from hpcfl.storage.ledger import ACCURACY_VAL, EPSILON, Ledger
from hpcfl.storage.runfolder import RunFolder
from hpcfl.storage.slurm import write_job_note
from hpcfl.storage.trackers import check_tracker
from hpcfl.terminal import LOG, TERMINAL, Progress, WarningHandler, handled_by, silenced


@contextmanager
def started_world(prints_warnings: bool = True) -> Iterator[Communicator]:
    """Yield the ranks: only rank 0 prints, and a rank that fails ends all. Collective, also at the end."""
    world = open_world()
    with abort_on_exception(world), ExitStack() as at_exit:
        if not world.is_server:
            at_exit.enter_context(silenced())
            at_exit.enter_context(redirect_stdout(at_exit.enter_context(Path(os.devnull).open("w"))))
        elif prints_warnings:
            at_exit.enter_context(handled_by(TERMINAL))
        yield world


def run(
    config: Config,
    path: Path,
    world: Communicator,
    stop: StopFlag,
    command: str,
    *,
    fresh: bool = False,
    quiet: bool = False,
    is_cell: bool = False,
) -> Outcome:
    """Start a run in the folder `path`, or resume it. Collective; may raise UserError.

    `stop` ends the run at a round boundary; `command` is what was typed; `fresh` and `quiet` are the options
    of the command line. Of a run that `is_cell` of a table, only the progress of its rounds is printed, and
    `fresh` starts it over only if it cannot be resumed.
    """
    with ExitStack() as at_exit:
        at_exit.enter_context(_no_exit())
        TERMINAL.forget()
        logged = WarningHandler()
        at_exit.enter_context(handled_by(logged))
        at_exit.enter_context(report_out_of_memory(world))
        watched = at_exit.enter_context(ExitStack())
        watched.enter_context(world.heartbeat_timeout(config.run.timeout))
        check_same_versions(world, numeric_versions())
        check_same_settings(world, config)
        if world.is_server:
            # all ranks have installed their signal handlers now: before, a signal would have killed them
            write_job_note("ready", "a signal stops the run")
        run_collectively(world, lambda: check_tracker(config.run.tracker if world.is_server else None))
        traits = METHODS[config.method.name].traits
        folder = RunFolder(path, config, traits.uses_total_rounds) if world.is_server else None
        run_collectively(world, lambda: folder.check(fresh) if folder else None)
        experiment = run_collectively(world, lambda: build(config, world))
        check_same_data(world, experiment.data.digest)
        check_same_partition(world, experiment.data.partition_digest)
        ranks = world.all_gather(f"{world.host} {experiment.worker_context.device} {experiment.engine_name}")

        def open_folder() -> None:
            if folder is not None:
                data, layout = experiment.data, experiment.method.layout
                environment = environment_of(data.digest, ranks, command)
                over = fresh and not (is_cell and folder.can_resume(layout, data))
                folder.open(over, layout, at_exit, environment, data)

        run_collectively(world, open_folder)
        cohort = config.train.cohort_size(experiment.num_clients)
        if world.is_server and world.num_workers > cohort:
            LOG.warning(f"{world.num_workers} workers train {cohort} clients a round: start fewer ranks")
        progress = Progress(folder.log if folder else None, quiet)
        at_exit.callback(progress.close)
        if folder is not None:
            log = folder.log
            logged.show_by(lambda text: log(f"warning: {text}"))
            for text in folder.notes:
                (log if is_cell else progress.say)(text)
        simulation = Simulation(experiment, world, stop, progress, folder)
        outcome = simulation.run()
        # no heartbeats while the server writes the page: no rank waits for it
        watched.close()
        progress.close()
        if folder is None or is_cell:
            return outcome
        if outcome == "stopped":
            without = " without --fresh" if fresh else ""
            progress.say(
                f"stopped early, with a checkpoint of round {folder.store.last_round} in {path}; rerun the "
                f"same command{without} to resume"
            )
            return outcome
        report = _write_report(path) if config.run.report else None
        if outcome == "already finished":
            last = f"{simulation.ledger.last('round'):.0f}"
            progress.say(f"this run is finished, no round follows round {last}; --fresh starts over")
        for name, figure in _figures(simulation.ledger, config.privacy).items():
            progress.say(f"{name:<26}{figure}")
        # paths may be long, and have lines of their own
        progress.say(f"  in {path}")
        if report is not None:
            progress.say(f"open in a browser\n  {report}")
        return outcome


@contextmanager
def _no_exit() -> Iterator[None]:
    """Make a `sys.exit` of own code an error: other ranks would wait, and code 0 would mean success."""
    try:
        yield
    except SystemExit as exit:
        raise RuntimeError(f"own code ends the process by sys.exit({exit.code!r}); raise an error") from exit


def _write_report(folder: Path) -> Path | None:
    """Write the page of a finished run; if that fails, warn and return None: the run is complete without
    it."""
    # imported here: it is slow, and only one rank needs it, at the end
    from hpcfl.report.page import REPORT_NAME, write_report
    from hpcfl.results.run import load_run

    try:
        write_report([load_run(folder)], folder / REPORT_NAME)
    except (UserError, StorageError, OSError) as error:
        LOG.warning(f"no report: {error}")
        return None
    return folder / REPORT_NAME


def _figures(ledger: Ledger, privacy: PrivacyConfig) -> dict[str, str]:
    """Return what a run prints at its end: accuracy, bytes and files, each by its name."""
    last = {name: ledger.last(name) for name in ledger.columns}
    figures = {
        f"mean accuracy, round {last['round']:.0f}": f"{last['accuracy_mean']:.2%}",
        "spread over clients": f"{last['accuracy_std']:.2%}",
        "weighted by samples": f"{last['accuracy_weighted']:.2%}",
    }
    if ACCURACY_VAL in last:
        known = ledger.column(ACCURACY_VAL)
        chosen = known.index(max(known))
        at, accuracy = (ledger.column(name)[chosen] for name in ("round", "accuracy_mean"))
        figures["best on validation"] = f"round {at:.0f}, whose mean accuracy is {accuracy:.2%}"
    if "accuracy_unseen" in last:
        spread = f"{last['accuracy_unseen_std']:.2%}"
        figures["unseen clients"] = f"{last['accuracy_unseen']:.2%} (spread {spread})"
    if ledger.diverged.any():
        clients = named(ledger.diverged.nonzero()[0].tolist())
        figures["diverged"] = f"{times(ledger.diverged.sum())} ({clients}; run.on_divergence)"
    if EPSILON in last:
        spent = f"epsilon {last[EPSILON]:.3g}, delta {privacy.delta_in_use:g}"
        figures[f"privacy of a {privacy.unit}"] = spent
    best, best_round = ledger.best()
    figures["best round"] = f"{best:.2%} (round {best_round})"
    ways = ("down", "up")
    figures["bytes down, up"] = ", ".join(readable_bytes(last[f"bytes_{way}"]) for way in ways)
    others = [last[f"buffer_bytes_{way}"] + last[f"index_bytes_{way}"] for way in ways]
    if any(others):
        figures["statistics, indices"] = ", ".join(map(readable_bytes, others))
    figures["speed"] = f"{last['client_steps_per_s']:.0f} client steps/s"
    figures["results"] = "metrics.csv, clients.csv, bytes.csv, checkpoint.h5"
    return figures
