"""Every method, partition and network gives what it gave when golden.json was written."""

from __future__ import annotations

import json
from pathlib import Path

import golden
import pytest

KNOWN = json.loads(golden.FILE.read_text())

LOSS_TOLERANCE = 2e-3
"""Relative, of three rounds on another processor."""
ACCURACY_TOLERANCE = 0.05
"""Seven clients have three test samples or more, so that one sample is at most a twenty-first of the mean."""


def test_everything_is_known() -> None:
    assert list(KNOWN["methods"]) == golden.CASES
    assert list(KNOWN["partitions"]) == list(golden.PARTITIONS)
    assert list(KNOWN["networks"]) == list(golden.MODELS)


@pytest.mark.parametrize("case", golden.CASES)
def test_three_rounds(case: str, tmp_path: Path) -> None:
    golden.run_case(case, tmp_path / "run")
    found, known = golden.numbers_of(tmp_path / "run"), KNOWN["methods"][case]
    assert {name: found[name] for name in golden.COUNTS} == {name: known[name] for name in golden.COUNTS}
    assert found["loss_mean"] == pytest.approx(known["loss_mean"], rel=LOSS_TOLERANCE)
    assert found["train_loss_mean"] == pytest.approx(known["train_loss_mean"], rel=LOSS_TOLERANCE)
    assert found["accuracy_mean"] == pytest.approx(known["accuracy_mean"], abs=ACCURACY_TOLERANCE)


@pytest.mark.parametrize("name", golden.PARTITIONS)
def test_who_gets_what(name: str) -> None:
    assert golden.class_counts(name) == KNOWN["partitions"][name]


@pytest.mark.parametrize("name", golden.MODELS)
def test_first_logits(name: str) -> None:
    assert golden.first_logits(name) == pytest.approx(KNOWN["networks"][name], rel=1e-3, abs=1e-4)
