"""Partitions and networks give what they gave when golden.json was written.

methods/test_three_rounds.py has the methods.
"""

from __future__ import annotations

import json

import golden
import pytest

KNOWN = json.loads(golden.FILE.read_text())


def test_everything_is_known() -> None:
    assert list(KNOWN["methods"]) == golden.CASES
    assert list(KNOWN["partitions"]) == list(golden.PARTITIONS)
    assert list(KNOWN["networks"]) == list(golden.MODELS)


@pytest.mark.parametrize("name", golden.PARTITIONS)
def test_who_gets_what(name: str) -> None:
    assert golden.class_counts(name) == KNOWN["partitions"][name]


@pytest.mark.parametrize("name", golden.MODELS)
def test_first_logits(name: str) -> None:
    assert golden.first_logits(name) == pytest.approx(KNOWN["networks"][name], rel=1e-3, abs=1e-4)
