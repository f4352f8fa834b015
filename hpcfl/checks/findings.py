"""What checks find."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

TO_FIX = "to fix"


@dataclass
class Findings:
    """What is not as it should be, each with what to type next."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """A run works, but slower, or less safely than it could."""

    def verdict(self) -> str:
        """Return one line: OK, what to fix, or warnings."""
        texts = self.errors or self.warnings
        if not texts:
            return "OK"
        listed = texts[0] if len(texts) == 1 else " ".join(f"({n}) {text}" for n, text in enumerate(texts, 1))
        return f"{TO_FIX if self.errors else 'OK with warnings'}: {listed}"


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as 0-3,6."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
