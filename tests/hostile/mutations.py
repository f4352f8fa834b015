"""Seeded damage to bytes and to trees of values, and what becomes of those who read it.

Cases run in forked processes, many in each: a crash names its seed and costs one process, an alarm cuts off a
loop without end, and what asks for more memory than a small machine has is told so.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from processes import forked

from hpcfl.errors import BAD_INPUT, MAX_CHARACTERS, UserError, for_terminal

Read = Callable[[int], object]
"""Makes the case of a seed and reads it; raises UserError where it is refused."""

MAX_S = 20
"""Of a case, some hundred times what one takes."""
MAX_BYTES = 3 * 2**30
"""More address space than the process had when it was forked."""

MAX_ENTRIES = 10
"""Of a list, that are changed."""

NUMBERS = (
    0,
    1,
    2,
    7,
    127,
    128,
    255,
    256,
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**64 - 1,
)


def damaged_bytes(whole: bytes, draw: random.Random, start: int = 0) -> bytes:
    """Return bytes with some damage from `start` on: flipped, cut, put in, moved, repeated."""
    data = bytearray(whole)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at = draw.randrange(start, max(len(data), start + 1))
        length = draw.choice((1, 1, 2, 4, 8, draw.randrange(1, 200)))
        kind = draw.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at : at + length] = draw.randbytes(length)
        elif kind == 2:
            number = draw.choice((*NUMBERS, len(whole), draw.randrange(len(whole) + 1)))
            size = draw.choice((1, 2, 4, 8))
            data[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, draw.choice(("little", "big")))
        elif kind == 3:
            other = draw.randrange(start, len(whole))
            data[at : at + length] = whole[other : other + length]
        elif kind == 4:
            del data[at : at + length]
        elif kind == 5:
            data[at:at] = data[at : at + length] * draw.choice((1, 2, 50))
        elif kind == 6 and draw.random() < 0.3:
            del data[at:]
    return bytes(data)


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan")),
    *(2**31, 2**63 - 1, -(2**63), 10**12, "", " ", ".", "..", "/", "../../x", "/etc/passwd", "a" * 3000),
    *("\x1b]0;x\x07", "a\nb", "\x00", "\u2028", "</script><script>alert(1)</script>", "{{ 7 * 7 }}", "%n%s"),
    *("null", "~", "1e3", "0x10", "nan", "$x$", "\\input{x}", "|", [], {}, [[]], {"": {}}, [None], [0] * 300),
    *([1, [2, [3]]], {"name": "x"}, {1: 2}, {"a": [{"b": None}]}, b"\xff\xfe"),
)


def damaged_tree(tree: Any, draw: random.Random, values: Sequence[Any] = VALUES) -> Any:
    """Return a copy of nested dicts and lists in which some entries are others, gone, or moved."""
    made = _copy(tree)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        places = list(_places(made))
        if not places:
            return made
        holder, key = draw.choice(places)
        kind = draw.randrange(6)
        if kind <= 2:
            holder[key] = _copy(draw.choice(values))
        elif kind == 3:
            del holder[key]
        elif kind == 4:
            other, there = draw.choice(places)
            holder[key] = _copy(other[there])
        elif isinstance(holder, dict):
            name = draw.choice((str(key) + "x", "name", "path", 7, "", f"{key}", None, "a.b"))
            holder[name] = holder.pop(key)
        else:
            holder.insert(0, _copy(holder[key]))
    return made


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(entry) for key, entry in value.items()}
    return [_copy(entry) for entry in value] if isinstance(value, list) else value


def _places(tree: Any) -> Any:
    """Yield (holder, key) of nested dicts and lists; of a long list the first entries."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(entries)[: MAX_ENTRIES if isinstance(tree, list) else None]:
        yield tree, key
        yield from _places(value)


@dataclass
class Outcome:
    """What became of many cases."""

    counts: Counter[str] = field(default_factory=Counter)
    """`read` and `refused`."""
    refusals: Counter[str] = field(default_factory=Counter)
    """What was said, a case each."""
    failures: dict[int, str] = field(default_factory=dict)
    """By seed: a traceback, an end by a signal, a refusal that is not printed as one short line."""


SEEDS, MORE_SEEDS = range(500), range(500, 5500)
"""Of each format: those of every test run, and those of a long one."""

sweep = pytest.mark.parametrize(
    "seeds", [SEEDS, pytest.param(MORE_SEEDS, marks=pytest.mark.soak)], ids=["few", "many"]
)
"""Runs a test with the one and the others."""


def assert_refused_or_read(read: Read, seeds: Sequence[int], least: int = 10) -> Outcome:
    """Fail with the seeds of cases that end otherwise, or where hardly any case is refused, or read."""
    outcome = survey(read, seeds)
    assert not outcome.failures, "\n\n".join(
        f"seed {seed}: {said}" for seed, said in list(outcome.failures.items())[:3]
    )
    assert outcome.counts.total() == len(seeds)
    assert min(outcome.counts["read"], outcome.counts["refused"]) >= least, outcome.counts
    return outcome


def survey(read: Read, seeds: Sequence[int]) -> Outcome:
    """Try cases, in order, in processes of their own; a process that dies is followed by the next."""
    outcome = Outcome()
    rest = list(seeds)
    while rest:
        told, status = _in_child(read, rest)
        for seed, kind, text in told:
            if kind == "failed":
                outcome.failures[seed] = text
            else:
                outcome.counts[kind] += 1
                if kind == "refused":
                    outcome.refusals[text] += 1
        rest = rest[len(told) :]
        if rest:
            what = "no end" if status == signal.SIGALRM else f"signal {status}"
            outcome.failures[rest.pop(0)] = what
    return outcome


def code_or_refusal(command: Callable[[], int], *allowed: int) -> int:
    """Return a command's exit code, one of those allowed; raise UserError with its line for BAD_INPUT."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = command()
    if code == BAD_INPUT:
        *_, line = said.getvalue().splitlines()
        assert line.startswith("hpcfl: error: ")
        assert line.isprintable()
        raise UserError(line)
    assert code in allowed, said.getvalue()
    return code


def _in_child(read: Read, seeds: Sequence[int]) -> tuple[list[tuple[int, str, str]], int]:
    """Return what a forked process tells of the cases that it got through, and the signal that ended it."""
    reader, writer = os.pipe()

    def program() -> None:
        os.close(reader)
        _try_all(read, seeds, writer)

    child = forked(program)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        lines = stream.read().split(b"\x00\n")
    _, status = os.waitpid(child, 0)
    told = [line.decode().split("\x01", 2) for line in lines[:-1]]
    return [(int(seed), kind, text) for seed, kind, text in told], os.WTERMSIG(status)


def _try_all(read: Read, seeds: Sequence[int], writer: int) -> None:
    warnings.simplefilter("ignore")
    silence = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(silence, descriptor)
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MAX_BYTES, now + MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # what a test's own handlers would keep from ending the process
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for seed in seeds:
        signal.alarm(MAX_S)
        kind, text = _try(read, seed)
        signal.alarm(0)
        text = text.replace("\x00", "?").replace("\x01", "?")
        os.write(writer, f"{seed}\x01{kind}\x01{text}\x00\n".encode(errors="replace"))
    sys.stdout.flush()


def _try(read: Read, seed: int) -> tuple[str, str]:
    try:
        read(seed)
    except UserError as error:
        said = for_terminal(error)
        is_line = len(said.splitlines()) == 1 and "\x1b" not in said and len(said) < MAX_CHARACTERS + 10
        return ("refused" if is_line else "failed"), str(error)
    except BaseException:
        return "failed", traceback.format_exc()[-3000:]
    return "read", ""
