"""`run_matrix.py` with blocks of few clients, so that tiny shards hold several; started under mpirun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from run_matrix import run_all

from hpcfl.communication import sharded

BLOCK_CLIENTS, MEMBERS_AT_ONCE = 4, 3

if __name__ == "__main__":
    sharded.BLOCK_CLIENTS, sharded.MEMBERS_AT_ONCE = BLOCK_CLIENTS, MEMBERS_AT_ONCE
    run_all(json.loads(Path(sys.argv[1]).read_text()))
