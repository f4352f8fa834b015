"""What a printed table can show of a row in a column."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcfl.formatting import percent

if TYPE_CHECKING:
    from hpcfl.tables.figures import Entry


@dataclass(frozen=True)
class Quantity:
    """A column of the printed table."""

    header: str
    show: Callable[[Entry], str]
    of_runs: bool = True
    """Whether the quantity is known only after a run has finished."""


def _accuracy(name: str) -> Callable[[Entry], str]:
    def show(entry: Entry) -> str:
        count, seeds = entry.count(name), len(entry.figures)
        some = f" ({count} of {seeds} seeds)" if 0 < count < seeds else ""
        return percent(entry.mean(name), entry.deviation(name)) + some

    return show


def _best(entry: Entry) -> str:
    rounds = sorted({int(value) for value in entry.values("best_round")})
    span = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    return f"{_accuracy('best_accuracy')(entry)} (round {span})"


def _bytes(way: str) -> Callable[[Entry], str]:
    def show(entry: Entry) -> str:
        numbers, others = (round(entry.mean(f"{kind}bytes_{way}") or 0) for kind in ("", "other_"))
        return f"{numbers:,}" + (f" + {others:,}" if others else "")

    return show


def _round_s(entry: Entry) -> float:
    """Return seconds of the whole run by its rounds, on as many processes as ran it."""
    return (entry.mean("wall_s") or 0) / entry.config.train.rounds


def _published(entry: Entry) -> str:
    return "" if entry.published is None else f"{entry.published:.2f}"


def _published_bytes(entry: Entry) -> str:
    known = entry.row.published_bytes.get(entry.column)
    return "" if known is None else f"{known:,.0f}"


QUANTITIES = {
    "accuracy": Quantity("accuracy, %", _accuracy("accuracy_mean")),
    "published": Quantity("published, %", _published, of_runs=False),
    "scored": Quantity("scored", lambda entry: entry.scored, of_runs=False),
    "best": Quantity("best, %", _best),
    "weighted": Quantity("weighted by samples, %", _accuracy("accuracy_weighted")),
    "after_download": Quantity("after download, %", _accuracy("accuracy_after_download")),
    "after_training": Quantity("after training, %", _accuracy("accuracy_after_training")),
    "spread": Quantity("spread over clients, %", _accuracy("spread_over_clients")),
    "worst_tenth": Quantity("worst tenth of clients, %", _accuracy("worst_tenth_accuracy")),
    "unseen": Quantity("unseen clients, %", _accuracy("accuracy_unseen")),
    "coverage": Quantity("clients reached, %", lambda entry: f"{100 * (entry.mean('coverage') or 0):.0f}"),
    "seeds": Quantity("seeds", lambda entry: str(len(entry.figures)), of_runs=False),
    "bytes_down": Quantity("bytes down", _bytes("down")),
    "bytes_up": Quantity("bytes up", _bytes("up")),
    "published_bytes": Quantity("published bytes down and up", _published_bytes, of_runs=False),
    "finetune_epochs": Quantity(
        "fine-tuning epochs", lambda entry: str(entry.config.train.finetune_epochs), of_runs=False
    ),
    "steps_per_s": Quantity("client steps/s", lambda entry: f"{entry.mean('client_steps_per_s') or 0:.0f}"),
    "round_s": Quantity("seconds a round", lambda entry: f"{_round_s(entry):.2f}"),
    "rounds": Quantity("rounds", lambda entry: str(entry.config.train.rounds), of_runs=False),
    "tuned": Quantity("tuned on validation samples", lambda entry: entry.row.tuned or "", of_runs=False),
}
"""Quantities by the names that `show` of a table file lists."""

DEFAULT_SHOW = (
    "accuracy",
    "published",
    "scored",
    "after_download",
    "after_training",
    "worst_tenth",
    "seeds",
    "bytes_down",
    "bytes_up",
    "finetune_epochs",
    "steps_per_s",
    "rounds",
    "tuned",
)

ONLY_WHERE_THEY_DIFFER = ("finetune_epochs", "rounds")
"""Quantities of the default that are left out of a table where all rows have the same."""
