"""`python -m hpcfl WORDS` is `python -m hpcfl.main WORDS`."""

from __future__ import annotations

import sys

from hpcfl.main import program

if __name__ == "__main__":
    sys.exit(program())
