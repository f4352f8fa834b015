"""Arrays made small enough for a page: fewer evaluations, and bytes in place of floats.

Shapes: E evaluations, N clients.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcfl.methods.diagnostics import Diagnostic

MAX_LINES = 20
"""Clients with a line each, of which the page gets the numbers themselves."""
STEPS = 254
"""Colours of a picture, without that of nan."""
UNKNOWN = 255
"""The byte of nan, and of names below 0."""
MAX_CLIENTS = 1000
"""Clients of a picture."""
MAX_EVALUATIONS = 250
"""Evaluations that a picture steps through."""

Json = dict[str, Any]


def spread_out(count: int, most: int) -> np.ndarray:
    """Return at most `most` of the numbers below `count`, evenly, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, max(most, 1))).round().astype(np.int64))


def numbers(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """Return floats as JSON takes them: with this many significant digits, and null if not finite."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]


def base64_of(values: np.ndarray) -> str:
    """Return the bytes of an array as text."""
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


@dataclass(frozen=True)
class Recorded:
    """A picture with its values."""

    diagnostic: Diagnostic
    values: np.ndarray
    """[E, *axes]."""
    rounds: np.ndarray
    """The round of each evaluation [E]."""
    is_newest: bool = False
    """Whether it is only the newest value, because the history has none."""


def packed_pictures(pictures: Sequence[Recorded], max_bytes: int) -> list[Json]:
    """Return pictures for the page, in at most this many bytes before base64. If there are more, evaluations
    are thinned first, then clients.
    """
    packed: dict[int, Json] = {}
    # pictures that need less leave the rest to the others
    for left, index in enumerate(sorted(range(len(pictures)), key=lambda n: pictures[n].values.size)):
        share = max_bytes // (len(pictures) - left)
        packed[index] = _packed(pictures[index], share)
        max_bytes -= math.prod([len(packed[index]["rounds"]), *packed[index]["shape"]])
    return [packed[index] for index in range(len(pictures))]


def _packed(recorded: Recorded, max_bytes: int) -> Json:
    diagnostic, values = recorded.diagnostic, recorded.values
    axes = diagnostic.axes
    notes = ["only the last evaluation: earlier ones are not stored for so many clients"] * recorded.is_newest
    clients, client_axes = values.shape[1], axes.count("client")
    shown, others = min(clients, MAX_CLIENTS), math.prod(values.shape[1:]) // clients**client_axes
    while shown > 1 and others * shown**client_axes > max_bytes:
        shown //= 2
    if shown < clients:
        values = values[(slice(None), *(slice(shown if axis == "client" else None) for axis in axes))]
        notes.append(f"clients 0 to {shown - 1} of {clients}")
    most = max_bytes // max(1, math.prod(values.shape[1:]))
    kept = spread_out(len(values), min(most, MAX_EVALUATIONS))
    if len(kept) < len(values):
        # the last one, if there is room for only one
        kept = kept if len(kept) > 1 else np.array([len(values) - 1])
        notes.append(f"{len(kept)} of {len(values)} evaluations")
    values = values[kept].astype(np.float64)
    codes, low, high = _coded(diagnostic, values)
    is_line = len(axes) == 1 and not diagnostic.is_name and shown <= MAX_LINES and len(kept) > 1
    decoded, is_known = low + codes / STEPS * (high - low), np.isfinite(values)
    # whole numbers such as 0 and 1 are decoded exactly
    is_exact = np.allclose(decoded[is_known], values[is_known], rtol=0, atol=1e-6 * (high - low))
    if not diagnostic.is_name and not is_exact and not is_line:
        notes.append(f"values in {STEPS} steps of {(high - low) / STEPS:.2g}")
    return {
        "title": diagnostic.title,
        "caption": diagnostic.caption,
        "quantity": diagnostic.name,
        "axes": axes,
        "shape": values.shape[1:],
        "rounds": recorded.rounds[kept].tolist(),
        "low": low,
        "high": high,
        "isName": diagnostic.is_name,
        **({"lines": [numbers(line) for line in values.T]} if is_line else {"codes": base64_of(codes)}),
        "note": "; ".join(notes),
    }


def _coded(diagnostic: Diagnostic, values: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Return values as bytes, and the values of the lowest and the highest byte."""
    known = values[np.isfinite(values)]
    if diagnostic.is_name:
        codes = np.where(np.isfinite(values) & (values >= 0), np.clip(values, 0, STEPS), UNKNOWN)
        return codes.astype(np.uint8), 0.0, float(max(known.max(initial=0), 0))
    # values beyond a declared bound must stay visible
    low = float(known.min(initial=math.inf if diagnostic.low is None else diagnostic.low))
    high = float(known.max(initial=-math.inf if diagnostic.high is None else diagnostic.high))
    low, high = (low, high) if math.isfinite(low) and math.isfinite(high) else (0.0, 1.0)
    scaled = (values - low) / ((high - low) or 1.0) * STEPS
    codes = np.where(np.isfinite(values), scaled.round(), UNKNOWN)
    return codes.astype(np.uint8), low, high
