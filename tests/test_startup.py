"""What a start does not import, so that nine ranks on two cores are ready in seconds."""

from __future__ import annotations

import sys

from processes import run_tree

HEAVY = ("torch", "numpy", "yaml", "pydantic", "pandas")
"""Libraries that `import hpcfl` does not import."""
LATER = ("matplotlib", "rich", "scipy", "sklearn", "torchvision", "torch._dynamo")
"""Libraries that take a tenth of a second and more, and are imported where they are used."""


def test_a_start_imports_only_what_every_rank_needs() -> None:
    look = f"""
import sys
import hpcfl
print(*[name for name in {HEAVY} if name in sys.modules])
import hpcfl.main
print(*[name for name in {LATER} if name in sys.modules])
"""
    assert run_tree([sys.executable, "-c", look]).stdout.split() == []
