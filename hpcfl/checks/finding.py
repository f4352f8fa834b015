"""What checks find, and how ranks tell each other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcfl.communication.communicator import Communicator

ERRORS = "to fix"
"""How the last line begins where something must be mended."""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be, with what to type next."""

    text: str
    is_error: bool = True
    """False: a run would do, but slower, or less safely than it could."""


@dataclass
class Checked:
    """What a check has to say on rank 0; nothing elsewhere."""

    lines: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def error(self, text: str) -> None:
        self.findings.append(Finding(text))

    def warning(self, text: str) -> None:
        self.findings.append(Finding(text, is_error=False))


def gathered(world: Communicator, told: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each rank tells, in rank order, on rank 0; nothing elsewhere. Collective."""
    entries = world.gather_bytes(json.dumps(told).encode())
    return [json.loads(entry) for entry in entries or []]


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as 0-3,6."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def last_line(findings: Sequence[Finding]) -> str:
    """Say in one line what all checks found: OK, or what to fix, or what to look at."""
    chosen = [f for f in findings if f.is_error] or list(findings)
    if not chosen:
        return "OK"
    texts = [finding.text for finding in chosen]
    told = texts[0] if len(texts) == 1 else " ".join(f"({n}) {text}" for n, text in enumerate(texts, 1))
    return f"{ERRORS if chosen[0].is_error else 'OK with warnings'}: {told}"
