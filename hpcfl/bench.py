"""Placeholder until measured."""

from collections.abc import Sequence


def bench(arguments: Sequence[str]) -> None: ...
