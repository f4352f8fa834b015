"""What a run prints at its end: accuracy, bytes and files."""

from __future__ import annotations

from collections.abc import Iterator

from hpcfl.config.keys import PrivacyConfig
from hpcfl.formatting import readable_bytes, times
from hpcfl.simulation.divergence import named
from hpcfl.simulation.round_loop import Outcome
from hpcfl.storage.ledger import ACCURACY_VAL, EPSILON, Ledger


def summary(outcome: Outcome, ledger: Ledger, privacy: PrivacyConfig) -> Iterator[str]:
    """Yield lines on a run that has no round left: how it ended, and its figures."""
    if outcome == "already finished":
        last = f"{ledger.last('round'):.0f}"
        yield f"this run is finished, no round follows round {last}; --fresh starts over"
    best, best_round = ledger.best()
    more = {}
    if ACCURACY_VAL in ledger.columns:
        known = ledger.column(ACCURACY_VAL)
        chosen = known.index(max(known))
        at, accuracy = (ledger.column(name)[chosen] for name in ("round", "accuracy_mean"))
        more["best on validation"] = f"round {at:.0f}, whose mean accuracy is {accuracy:.2%}"
    if "accuracy_unseen" in ledger.columns:
        spread = f"{ledger.last('accuracy_unseen_std'):.2%}"
        more["unseen clients"] = f"{ledger.last('accuracy_unseen'):.2%} (spread {spread})"
    if ledger.diverged.any():
        clients = named(ledger.diverged.nonzero()[0].tolist())
        more["diverged"] = f"{times(ledger.diverged.sum())} ({clients}; run.on_divergence)"
    if privacy.unit is not None:
        spent = f"epsilon {ledger.last(EPSILON):.3g}, delta {privacy.delta_in_use:g}"
        more[f"privacy of a {privacy.unit}"] = spent
    down, up = (readable_bytes(ledger.last(f"bytes_{way}")) for way in ("down", "up"))
    others = [
        ledger.last(f"buffer_bytes_{way}") + ledger.last(f"index_bytes_{way}") for way in ("down", "up")
    ]
    for name, value in {
        f"mean accuracy, round {ledger.last('round'):.0f}": f"{ledger.last('accuracy_mean'):.2%}",
        "spread over clients": f"{ledger.last('accuracy_std'):.2%}",
        "weighted by samples": f"{ledger.last('accuracy_weighted'):.2%}",
        **more,
        "best round": f"{best:.2%} (round {best_round})",
        "bytes down, up": f"{down}, {up}",
        **({"statistics, indices": ", ".join(map(readable_bytes, others))} if any(others) else {}),
        "speed": f"{ledger.last('client_steps_per_s'):.0f} client steps/s",
        "results": "metrics.csv, clients.csv, bytes.csv, checkpoint.h5",
    }.items():
        yield f"{name:<26}{value}"
