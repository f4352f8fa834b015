"""Run several commands one after the other in one world: started by tests, under mpirun.

The argument is a JSON list of lists of words; rank r writes the exit codes to codes<r>.json where it runs.
Collective.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hpcfl.communication.communicator import open_world
from hpcfl.main import main


def code_of(words: list[str]) -> int | str | None:
    """Return the exit code of a command."""
    try:
        return main(words)
    except SystemExit as leaving:
        return leaving.code


if __name__ == "__main__":
    codes = [code_of(words) for words in json.loads(sys.argv[1])]
    Path(f"codes{open_world().rank}.json").write_text(json.dumps(codes))
