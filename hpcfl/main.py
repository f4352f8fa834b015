"""Run a simulation of personalised federated learning.

mpirun -n 9 hpcfl run                                pFedLA on the bundled digits
mpirun -n 9 hpcfl run CONFIG.yaml key.sub=value ...  any run; without mpirun: serially
hpcfl list [keys]                                    methods, data, partitions, models, keys
hpcfl plan CONFIG.yaml ...                           time, memory and disk of a run, before it
mpirun -n 9 hpcfl doctor                             is this machine fit for runs?
hpcfl report | export | predict | compare RUN ...    HTML page, models, predictions, differences
mpirun -n 9 hpcfl table TABLE.yaml                   a comparison of many runs, and its table
hpcfl claims                                         the papers' claims, judged by the results
hpcfl data fetch | watch | bench | completion        downloads, running runs, speed, tab key

Each command has --help. `python -m hpcfl` is the same as `hpcfl`. The word `run` may be left out.

Rerun the same command to resume. Exit codes: 0 finished; 2 bad configuration or input; 3 stopped
because numbers became nan or infinite (run.on_divergence); 71 a rank is out of memory; 74 the run
folder cannot be written: fix it and rerun; 75 stopped early with a checkpoint: rerun to resume;
128 + N ended at once by a second stop signal, number N; other codes: unexpected faults.
"""

from __future__ import annotations

import io
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hpcfl.commands import COLLECTIVE_COMMANDS, COMMANDS, command
from hpcfl.commands.arguments import command_line, is_bare_key, is_file, run_parser, split_settings
from hpcfl.commands.run import run, started_world
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.config.keys import Config
from hpcfl.config.own_code import mistake_in_own_code
from hpcfl.errors import (
    BROKEN_PIPE,
    FAULT,
    FINISHED,
    INTERRUPTED,
    STOPPED,
    StorageError,
    UserError,
    for_terminal,
)
from hpcfl.formatting import did_you_mean
from hpcfl.registries import load_config
from hpcfl.simulation.stopping import StopFlag
from hpcfl.terminal import drop_buffered, print_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command or a simulation and return the exit code. Collective under mpirun.

    The process is to end then: after runs, its stop signals are ignored.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    prints_errors = True
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a character that the terminal's encoding lacks is shown as an escape, as on standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with started_world() as world:
            prints_errors = world.is_server
            is_named = run_collectively(world, lambda: _names_a_command(arguments))
            name, *words = arguments if is_named else ["run", *arguments]
            if name == "run":
                return _run(words, world)
            takes_part = world.is_server or name in COLLECTIVE_COMMANDS
            return run_collectively(world, lambda: _command(name, words, world) if takes_part else FINISHED)
    except (UserError, StorageError) as error:
        if prints_errors:
            print_line(f"hpcfl: error: {for_terminal(error)}", sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if (line := mistake_in_own_code(error)) is None:
            raise
        print_line(f"hpcfl: error: {for_terminal(line)}", sys.stderr)
        return FAULT


def _names_a_command(arguments: Sequence[str]) -> bool:
    """Return whether the first word is a command, not a file, a key or an option; UserError if it is none."""
    word = arguments[0] if arguments else "--"
    known = ("run", *COMMANDS)
    if word in known:
        return True
    if word.startswith("-") or "=" in word or is_file(word) or is_bare_key(word):
        return False
    otherwise = f"; a configuration file ends in .yaml; commands: {', '.join(known)}"
    raise UserError(f"unknown command {word!r}{did_you_mean(word, known, otherwise)}")


def _command(name: str, words: Sequence[str], world: Communicator) -> int:
    try:
        stopped = command(name)(words, world)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_buffered(sys.stdout)
        if world.size > 1:
            # the others do not know
            world.abort(BROKEN_PIPE)
        return BROKEN_PIPE
    return STOPPED if stopped else FINISHED


def _run(arguments: Sequence[str], world: Communicator) -> int:
    stop = StopFlag()
    try:
        options, config = run_collectively(world, lambda: _configure(arguments))
        folder = options.out or Path("runs") / config.run_name()
        # watch shows it as the command that resumes the run
        command = command_line([word for word in arguments if word != "--fresh"], world.size)
        outcome = run(config, folder, world, stop, command, fresh=options.fresh, quiet=options.quiet)
    finally:
        stop.ignore()
    return STOPPED if outcome == "stopped" else FINISHED


def _configure(arguments: Sequence[str]) -> tuple[Namespace, Config]:
    options = run_parser(__doc__).parse_intermixed_args(list(arguments))
    return options, load_config(*split_settings(options.settings))


def program() -> int:
    """Do what was typed after `python -m`, as the command `hpcfl` does."""
    # an own file there could import a file beside it, whose text is not compared
    if sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
    return main()


if __name__ == "__main__":
    sys.exit(program())
