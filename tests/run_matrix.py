"""Run several configurations one after the other in one world: started by tests, under mpirun.

The argument is a JSON file that maps run folders to settings. Collective.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hpcfl.startup import quick_imports

with quick_imports():
    from bits import run_here


def run_all(runs: dict[str, list[str]]) -> None:
    """Run all configurations; leave with the exit code of the first that does not finish."""
    for folder, settings in runs.items():
        if code := run_here(Path(folder), settings):
            sys.exit(code)


if __name__ == "__main__":
    run_all(json.loads(Path(sys.argv[1]).read_text()))
