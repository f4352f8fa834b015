"""What a start leaves out, so that nine ranks on two cores are ready in seconds."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
from processes import clean_environment

from hpcfl.startup import quick_imports

LATER = ("matplotlib", "rich", "scipy", "sklearn", "torchvision", "torch._dynamo")
"""Libraries that take a tenth of a second and more, and are imported where they are used."""


def test_a_start_imports_what_every_rank_needs_and_freezes_it() -> None:
    look = f"""
import gc, sys
import hpcfl.main
assert gc.isenabled()
assert gc.get_freeze_count() > 50_000
print(*[name for name in {LATER} if name in sys.modules])
"""
    found = subprocess.run(
        [sys.executable, "-c", look], env=clean_environment(), capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == []


def test_garbage_is_looked_for_again_after_the_imports() -> None:
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), quick_imports():
        raise ImportError
    assert gc.isenabled()
