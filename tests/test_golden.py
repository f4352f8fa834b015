"""Partitions and networks give the numbers recorded in golden.json.

methods/test_three_rounds.py has the methods.
"""

from __future__ import annotations

import json

import golden
import pytest

KNOWN = json.loads(golden.FILE.read_text())


def test_every_method_partition_and_network_has_golden_numbers() -> None:
    assert list(KNOWN["methods"]) == golden.CASES
    assert list(KNOWN["partitions"]) == list(golden.PARTITIONS)
    assert list(KNOWN["networks"]) == list(golden.MODELS)


@pytest.mark.parametrize("name", golden.PARTITIONS)
def test_a_partition_assigns_the_golden_numbers_of_samples(name: str) -> None:
    assert golden.class_counts(name) == KNOWN["partitions"][name]


@pytest.mark.parametrize("name", golden.MODELS)
def test_a_new_network_has_the_golden_logits(name: str) -> None:
    assert golden.first_logits(name) == pytest.approx(KNOWN["networks"][name], rel=1e-3, abs=1e-4)
