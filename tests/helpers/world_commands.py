"""Run several commands one after the other in one world: started by tests, under mpirun.

Arguments: a JSON list of lists of words, or a file that has it; and, so that shards of few clients hold
several blocks, the BLOCK_CLIENTS and MEMBERS_AT_ONCE of hpcfl.communication.sharded. Rank r writes the exit
codes to codes<r>.json where it runs. Collective.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hpcfl.communication import sharded
from hpcfl.communication.communicator import open_world
from hpcfl.main import main


def code_of(words: list[str]) -> int | str | None:
    """Return the exit code of a command."""
    try:
        return main(words)
    except SystemExit as leaving:
        return leaving.code


if __name__ == "__main__":
    given, *blocks = sys.argv[1:]
    if blocks:
        sharded.BLOCK_CLIENTS, sharded.MEMBERS_AT_ONCE = map(int, blocks)
    text = Path(given).read_text() if given.endswith(".json") else given
    codes = [code_of(words) for words in json.loads(text)]
    Path(f"codes{open_world().rank}.json").write_text(json.dumps(codes))
