"""Gradients that a method says it takes, against those that its clients are seen to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from bits import VARIANTS, method_settings
from conftest import in_mpi_world
from harness import Run

from hpcfl.methods import METHODS
from hpcfl.methods.base import Method
from hpcfl.training import LoopEngine

pytestmark = pytest.mark.skipif(in_mpi_world(), reason="runs by itself")

MORE = {
    "ditto-twice": ["method.personal_epochs=3"],
    "fedbn": ["model.batchnorm=true"],
    "fedfomo": ["method.models=2", "method.held_out=0.5"],
    "fedafk-interleaved": ["method.schedule=interleaved"],
    "fedafk-sequential": ["method.schedule=sequential"],
    "fedafk-unmixed": ["method.mixing=false", "method.head_epochs=2"],
    "fedala": ["method.share=0.5", "method.most_passes=1"],
    "fedrep-two": ["method.head_epochs=2", "method.body_epochs=3"],
    "pfedmb-fixed": ["method.alpha_lr=0"],
}
"""Settings that change the number, or that make it exact."""


@pytest.mark.parametrize("case", sorted({*METHODS, *VARIANTS, *MORE}))
def test_gradients_are_those_that_are_taken(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, epochs, cohort = 4, 2, 3
    counts: list[int] = []
    gradient, work = LoopEngine.gradient, Method.work

    def counting(self: LoopEngine, *arguments: Any) -> Any:
        if working:
            counts[-1] += 1
        return gradient(self, *arguments)

    working: list[bool] = []

    def watched(self: Method, *arguments: Any) -> Any:
        counts.append(0)
        working.append(True)
        done = work(self, *arguments)
        working.pop()
        return done

    monkeypatch.setattr(LoopEngine, "gradient", counting)
    monkeypatch.setattr(Method, "work", watched)
    settings: Sequence[str] = [*method_settings(case), *MORE.get(case, [])]
    run = Run(*settings, "data.clients=3", f"train.local_epochs={epochs}", "train.rounds=4")
    # of the last round: what a method does only at first is not what a round takes
    taken = counts[-cohort:]
    expected = run.method.epochs_a_round * batches
    assert taken == [expected] * cohort
    assert run.method.epochs_a_round == type(run.method).gradient_epochs(run.config.params, run.config.train)
