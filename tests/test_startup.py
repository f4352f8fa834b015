"""What a start leaves out, so that nine ranks on two cores are ready in seconds."""

from __future__ import annotations

import subprocess
import sys

from processes import clean_environment

LATER = ("matplotlib", "rich", "scipy", "sklearn", "torchvision", "torch._dynamo")
"""Libraries that take a tenth of a second and more, and are imported where they are used."""


def test_a_start_imports_what_every_rank_needs() -> None:
    look = f"""
import sys
import hpcfl.main
print(*[name for name in {LATER} if name in sys.modules])
"""
    found = subprocess.run(
        [sys.executable, "-c", look], env=clean_environment(), capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == []
