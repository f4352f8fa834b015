"""Seeded damage to bytes and to trees of values, and what becomes of those who read it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import resource
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from processes import forked

from hpcfl.errors import BAD_INPUT, MAX_CHARACTERS, UserError, for_terminal

Read = Callable[[random.Random], object]
"""Makes a case and reads it; raises UserError where it is refused."""

MAX_S = 20
"""Of a case, some hundred times what one takes."""
MAX_BYTES = 3 * 2**30
"""More address space than the process had when it was forked."""

NUMBERS = (0, 1, 7, 127, 255, 256, 2**15, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 0.5, 1e308, float("inf"), float("nan"), 2**31, 2**63 - 1, -(2**63), 10**30),
    *("", " ", "..", "/", "../../x", "/etc/passwd", "a" * 3000, "\x1b]0;x\x07", "a\nb", "\x00", "\u2028"),
    *("</script><script>alert(1)</script>", "{{ 7 * 7 }}", "%n%s", "null", "1e3", "nan", "\\input{x}", "|"),
    *([], {}, [[]], [None], [0] * 300, [1, [2, [3]]], {"name": "x"}, {1: 2}, {"a": [{"b": None}]}),
)


def damaged_bytes(whole: bytes, draw: random.Random) -> bytes:
    """Return bytes with some damage: flipped, cut, put in, moved, repeated."""
    data = bytearray(whole)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at, other = draw.randrange(len(data) + 1), draw.randrange(len(whole) + 1)
        length = draw.choice((1, 2, 4, 8, 100))
        kind = draw.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at : at + length] = draw.randbytes(length)
        elif kind == 2:
            size = draw.choice((1, 2, 4, 8))
            data[at : at + size] = (draw.choice(NUMBERS) % 2 ** (8 * size)).to_bytes(size, "little")
        elif kind == 3:
            data[at : at + length] = whole[other : other + length]
        elif kind == 4:
            data[at:at] = data[at : at + length] * draw.choice((1, 50))
        elif kind == 5:
            del data[at : at + length if draw.random() < 0.8 else len(data)]
    return bytes(data)


def damaged_tree(tree: Any, draw: random.Random, values: Sequence[Any] = VALUES) -> Any:
    """Return a copy of nested dicts and lists in which some entries are others, gone, or moved."""
    made = deepcopy(tree)
    for _ in range(draw.choice((1, 1, 2, 5))):
        places = list(_places(made))
        if not places:
            return made
        holder, key = draw.choice(places)
        kind = draw.randrange(5)
        if kind <= 1:
            holder[key] = deepcopy(draw.choice(values))
        elif kind == 2:
            del holder[key]
        elif kind == 3:
            other, there = draw.choice(places)
            holder[key] = deepcopy(other[there])
        elif isinstance(holder, dict):
            holder[draw.choice((f"{key}x", "name", "path", 7, "", None, "a.b"))] = holder.pop(key)
        else:
            holder.insert(0, deepcopy(holder[key]))
    return made


def _places(tree: Any) -> Any:
    """Yield (holder, key) of nested dicts and lists; of a long list the first ten entries."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree[:10])
    for key, value in list(entries):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


def assert_refused_or_read(read: Read, seeds: Sequence[int]) -> None:
    """Fail with the first seed whose file is neither refused nor read, or if under ten are refused or read.

    The cases run in a forked process. One that crashes or does not end is named by its seed, and one that
    asks for more memory than a small machine has fails.
    """
    with tempfile.TemporaryFile("w+") as ends, tempfile.TemporaryFile("w+") as errors:
        with open(os.devnull, "w") as nothing:
            files = {1: nothing.fileno(), 2: errors.fileno()}
            child = forked(lambda: _try_all(read, seeds, ends), files)
        _, status = os.waitpid(child, 0)
        ends.seek(0), errors.seek(0)
        outcomes, printed = ends.read().split(), errors.read()[-3000:]
    if status:
        pytest.fail(f"seed {seeds[len(outcomes)]}: ended with {os.waitstatus_to_exitcode(status)}\n{printed}")
    counts = Counter(outcomes)
    assert min(counts["read"], counts["refused"]) >= 10, counts


def _try_all(read: Read, seeds: Sequence[int], ends: Any) -> None:
    warnings.simplefilter("ignore")
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # a handler of pytest would keep the alarm from ending the process
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for seed in seeds:
        signal.alarm(MAX_S)
        end = "read"
        try:
            read(random.Random(seed))
        except UserError as error:
            message, end = for_terminal(error), "refused"
            assert len(message.splitlines()) == 1, message
            assert len(message) < MAX_CHARACTERS + 10, message
            assert "\x1b" not in message
        signal.alarm(0)
        print(end, file=ends, flush=True)


def code_or_refusal(command: Callable[[], int], *allowed: int) -> int:
    """Return a command's exit code, one of those allowed; raise UserError with its line for BAD_INPUT."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        code = command()
    if code == BAD_INPUT:
        *_, line = printed.getvalue().splitlines()
        assert line.startswith("hpcfl: error: ")
        assert line.isprintable()
        raise UserError(line)
    assert code in allowed, printed.getvalue()
    return code


def sign(path: Path) -> None:
    """Put the SHA-256 that a run would write before what follows a checkpoint's first 512 bytes."""
    content = path.read_bytes()[512:]
    line = f"hpcfl checkpoint sha256 {hashlib.sha256(content).hexdigest()}\n".encode()
    path.write_bytes(line.ljust(512, b"\0") + content)
