"""`hpcfl watch`: the progress of runs, from another shell or machine."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpcfl.commands.arguments import Parser
from hpcfl.communication.communicator import Communicator
from hpcfl.config.keys import flatten
from hpcfl.errors import printable
from hpcfl.formatting import aligned, clock, curve, readable_bytes, readable_seconds, sparkline, times
from hpcfl.results.run import ENDED, Run, Status, run_folders
from hpcfl.terminal import console, logged_progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PAUSE_S = 2.0
"""Between two states on a terminal."""
CURVE_WIDTH, SMALL_CURVE_WIDTH = 40, 8
LOG_LINES = 5
SHORTEST_NAME = 8
"""Characters of a run's name that are always shown."""
RECENT_EVALUATIONS = 10
"""Number of evaluations from which the seconds of a round are computed."""


def watch_runs(arguments: Sequence[str], world: Communicator) -> None:
    """Show the progress of runs: one run in full, several with one line each. It only reads their folders.

    Of a folder of runs, such as a table's, all runs are shown.
    On a terminal it continues until all have ended or Ctrl-C; elsewhere it prints one state.
    """
    options = parser().parse_args(arguments)
    runs = _found(options.runs)
    screen = console()
    if options.once or not screen.is_terminal:
        screen.print(_shown(runs, screen), soft_wrap=True)
        return
    from rich.live import Live

    with suppress(KeyboardInterrupt), Live(_shown(runs, screen), console=screen) as live:
        while not all(run.status.state in ENDED for _, run in runs):
            time.sleep(PAUSE_S)
            runs = _found(options.runs)
            live.update(_shown(runs, screen), refresh=True)


def parser() -> Parser:
    parser = Parser("hpcfl watch", watch_runs.__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of runs")
    parser.add_argument("--once", action="store_true", help="show one state and end")
    return parser


def _found(folders: Sequence[Path]) -> list[tuple[str, Run]]:
    """Return the runs in these folders, each with its name; of several folders, the name begins with that."""

    def name(folder: Path, path: Path) -> str:
        if path == folder:
            return folder.name
        return str(path.relative_to(folder if len(folders) == 1 else folder.parent))

    return [(name(folder, path), Run(path)) for folder in folders for path in run_folders(folder)]


def _shown(runs: Sequence[tuple[str, Run]], screen: Console) -> Text:
    from rich.text import Text

    if len(runs) > 1:
        return Text(_lines(runs, screen.encoding, screen.width if screen.is_terminal else sys.maxsize))
    figures = _figures(runs[0][1], screen.encoding)
    return Text("\n".join(f"{name:<12}{value}" for name, value in figures))


def _figures(run: Run, encoding: str) -> Iterator[tuple[str, str]]:
    """Yield the figures of a run, each with its name."""
    status = run.status
    yield "run", str(run.path)
    yield "what", _configuration(run)
    yield "state", _state(run, status)
    done, left = _progress(run, status)
    yield "rounds", f"{done}/{run.rounds}"
    if run.metrics:
        last, best = run.last, run.best
        yield "accuracy", f"{last['accuracy_mean']:.2%} (round {run.done})"
        yield "best", f"{best['accuracy_mean']:.2%} (round {best['round']:.0f})"
        yield "spread", f"{last['accuracy_std']:.2%} over clients"
        if last.get("diverged"):
            yield "diverged", f"{times(last['diverged'])} a client's numbers were nan or infinite"
        if last.get("lost"):
            yield "lost", f"{times(last['lost'])} a client was lost in a round"
        yield "curve", curve(run.metrics["accuracy_mean"].tolist(), CURVE_WIDTH, encoding)
        yield "bytes", f"{readable_bytes(last['bytes_down'])} down, {readable_bytes(last['bytes_up'])} up"
        yield (
            "speed",
            f"{last['client_steps_per_s']:.0f} client steps/s, {readable_seconds(_round_s(run))} a round",
        )
    else:
        yield "accuracy", "no evaluation yet"
    if status.state not in ENDED:
        yield "time left", left
    elif status.state != "finished" and not _has_diverged(run, status):
        yield "resume with", printable(str(run.environment.get("command", "the same command")))
    for number, line in enumerate(run.log[-LOG_LINES:]):
        yield "" if number else "log", line


def _lines(runs: Sequence[tuple[str, Run]], encoding: str, width: int) -> str:
    """Return one line per run, and a header."""
    rows = [["run", "state", "rounds", "accuracy", "best", "curve", "left"]]
    for name, run in runs:
        status, means = run.status, run.metrics["accuracy_mean"].tolist() if run.metrics else []
        done, left = _progress(run, status)
        known = (f"{means[-1]:.2%}", f"{max(means):.2%}") if means else ("-", "-")
        drawn = sparkline(means, SMALL_CURVE_WIDTH, encoding)
        state = "diverged" if _has_diverged(run, status) else status.state
        rows.append([name, state, f"{done}/{run.rounds}", *known, drawn, left])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # names of runs are shortened if the terminal is narrow
    left_over = max(SHORTEST_NAME, width - sum(widths[1:]) - 2 * len(widths[1:]))
    return "\n".join(aligned([[row[0][:left_over], *row[1:]] for row in rows]))


def _configuration(run: Run) -> str:
    keys = flatten(run.record)
    names = ("method.name", "data.source", "data.clients", "data.partition.name", "model.name", "run.seed")
    method, source, clients, partition, model, seed = (printable(str(keys.get(name))) for name in names)
    clients = "all its" if clients == "None" else clients
    return f"{method} on {source}, {clients} clients, {partition} partition, {model}, seed {seed}"


def _has_diverged(run: Run, status: Status) -> bool:
    """Return whether the last line of log.txt is the error of nan or infinite numbers: a rerun repeats it."""
    return status.state == "stopped" and any(re.match(r"\S+ \S+ error: ", line) for line in run.log[-1:])


def _state(run: Run, status: Status) -> str:
    ago = f"last change {clock(max(0, time.time() - status.changed_s))} ago"
    if _has_diverged(run, status):
        return f"diverged, see the log; {ago}"
    owner = status.owner or "a process"
    return {
        "finished": "finished" if run.done == run.rounds else "finished early, by train.patience",
        "running": f"running, {owner}; {ago}",
        "stopped": f"stopped; {ago}",
        "killed": f"killed or failed, {owner} is gone; {ago}",
        "unknown": f"locked by {owner}; this machine cannot see whether it still runs; {ago}",
    }[status.state]


def _round_s(run: Run) -> float:
    """Return the seconds of a round in the last evaluations; there must be one."""
    rounds, wall_s = ([0.0, *run.metrics[name].tolist()] for name in ("round", "wall_s"))
    before = max(0, len(rounds) - 1 - RECENT_EVALUATIONS)
    return (wall_s[-1] - wall_s[before]) / max(1, rounds[-1] - rounds[before])


def _progress(run: Run, status: Status) -> tuple[int, str]:
    """Return the rounds that are done, and the time left, which is empty if the run has ended.

    They are those of the last evaluation, or of log.txt if it has more rounds: evaluations may be rare.
    """
    if status.state in ENDED:
        return run.done, ""
    logged = logged_progress(run.log)
    if logged is not None and logged[0] >= run.done:
        return logged
    return run.done, clock(_round_s(run) * (run.rounds - run.done)) if run.metrics else "unknown"
