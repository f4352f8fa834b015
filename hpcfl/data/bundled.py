"""Sources that need no download: files of scikit-learn, and the help texts of Python."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from hpcfl.data.arrays import Arrays

OF_DIGITS = (0.3053,), (0.3760,)
"""Mean and deviation of the digits."""
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""The tokens of `topics`: a line's end and printable ASCII; any other character is a question mark."""
NUM_CHARACTERS = len(CHARACTERS)
WINDOW, STEP = 32, 8
"""Characters of a sample, and from a sample's start to the next one's."""
FEWEST_CHARACTERS = 2000
"""Shorter help texts are left out."""
TEST_SHARE = 0.3


def digits() -> Arrays:
    table = _table("digits.csv.gz", 0)
    x = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.uint8)
    return Arrays(x, table[:, -1].astype(np.int64), 10, 16.0, *OF_DIGITS)


def features(name: str, num_classes: int) -> Arrays:
    table = _table(name, 1)
    return Arrays(table[:, :-1].astype(np.float32), table[:, -1].astype(np.int64), num_classes, 1.0, (), ())


@functools.cache
def _table(name: str, header_lines: int) -> np.ndarray:
    """Read a file of scikit-learn's data sets: importing scikit-learn in every rank costs seconds."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "datasets" / "data" / name
    return np.loadtxt(file, delimiter=",", skiprows=header_lines)


def topics_by_client() -> Arrays:
    """Cut each help text into windows and the characters after them; the end of a text is for testing.

    The clients are the texts that are long enough, in the order of their names.
    No character of a training window, or after it, is in a test window.
    """
    numbers = np.full(0x110000, CHARACTERS.index("?"))
    numbers[[ord(character) for character in CHARACTERS]] = np.arange(NUM_CHARACTERS)
    x, y, owner, is_test = [], [], [], []
    texts = [topics[name] for name in sorted(topics) if len(topics[name]) >= FEWEST_CHARACTERS]
    for client, text in enumerate(texts):
        tokens = numbers[[ord(character) for character in text]]
        cut = round((1 - TEST_SHARE) * len(tokens))
        for piece, tests in ((tokens[:cut], False), (tokens[cut:], True)):
            windows = np.lib.stride_tricks.sliding_window_view(piece, WINDOW + 1)[::STEP]
            x.append(windows[:, :-1])
            y.append(windows[:, -1])
            owner.append(np.full(len(windows), client))
            is_test.append(np.full(len(windows), tests))
    whole = [np.concatenate(parts) for parts in (x, y, owner, is_test)]
    return Arrays(whole[0], whole[1], NUM_CHARACTERS, 1.0, (), (), whole[2], whole[3], NUM_CHARACTERS)
