"""`hpcfl doctor`: whether this machine, its MPI and its file system are fit for a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hpcfl.checks.messages import check_messages
from hpcfl.checks.probes import check_data, check_folder
from hpcfl.checks.ranks import check_ranks, check_versions
from hpcfl.commands.arguments import SETTINGS_HELP, Parser, add_own_code, split_settings
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.errors import UserError
from hpcfl.registries import load_config
from hpcfl.storage.trackers import check_tracker


def check_everything(arguments: Sequence[str], world: Communicator) -> None:
    """Check what runs need here, alone or as the ranks of a run; leaves nothing behind.

    Looks at versions, MPI, cores and GPUs of each rank, messages and their speed, and the run
    folder's file system; with keys, at their data too. Warns of what makes runs slower or less
    safe. Ends with OK and exit code 0, or with all that is to fix, what to type, and code 2.

    For example: mpirun -n 9 hpcfl doctor CONFIG.yaml --out /scratch/me/runs
    """
    options = run_collectively(world, lambda: parser().parse_intermixed_args(list(arguments)))
    config = run_collectively(world, lambda: load_config(*split_settings(options.settings)))
    run_collectively(world, lambda: check_tracker(config.run.tracker if world.is_server else None))
    checks: list[Callable[[], None]] = [
        lambda: check_versions(world),
        lambda: check_ranks(world, config.run),
        lambda: check_messages(world),
        lambda: check_folder(world, options.out),
    ]
    if options.settings:
        checks.append(lambda: check_data(world, config))
    errors: list[str] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            errors.append(f"({len(errors) + 1}) {error}")
    if errors:
        raise UserError(f"to fix: {' '.join(errors)}")
    print("OK", flush=True)


def parser() -> Parser:
    parser = Parser("hpcfl doctor", check_everything.__doc__)
    parser.add_argument("settings", nargs="*", metavar=SETTINGS_HELP)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("runs"), help="where runs will be (default: runs)"
    )
    add_own_code(parser)
    return parser
