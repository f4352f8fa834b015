"""The small table a run ends with."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from rich.table import Table

from hpcfl.config import Config
from hpcfl.ledger import Ledger
from hpcfl.progress import Progress


def print_summary(outcome: str, ledger: Ledger, config: Config, folder: Path, progress: Progress) -> None:
    """Say how the run ended, what it gave and cost, where things are, and what to type next."""
    if outcome == "stopped":
        progress.say(f"stopped early with a checkpoint in {folder}; run the same command again to continue")
        return
    if outcome == "already finished":
        progress.say(
            f"{folder} is finished: train.rounds={config.train.rounds} are done; --fresh starts over"
        )
    best, best_round = ledger.best()
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in {
        f"mean accuracy, round {ledger.last('round'):.0f}": f"{ledger.last('accuracy_mean'):.2%}",
        "spread over clients": f"{ledger.last('accuracy_std'):.2%}",
        "weighted by samples": f"{ledger.last('accuracy_weighted'):.2%}",
        "best round": f"{best:.2%} (round {best_round})",
        "bytes down, up": f"{_bytes(ledger.last('bytes_down'))}, {_bytes(ledger.last('bytes_up'))}",
        "speed": f"{ledger.last('client_steps_per_s'):.0f} client steps/s",
        "results": f"{folder}/metrics.csv, clients.csv, bytes.csv, checkpoint.h5",
        "next": _next_command(config),
    }.items():
        table.add_row(name, value)
    progress.show(table)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _next_command(config: Config) -> str:
    """Suggest the comparison that is most worth making next."""
    other = "local" if config.method == "fedavg" else "fedavg"
    given = [word for word in sys.argv[1:] if not word.startswith(("method.", "--"))]
    return f"python -m hpcfl.main {shlex.join([*given, f'method.name={other}'])}"
