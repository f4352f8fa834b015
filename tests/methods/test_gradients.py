"""Gradients that a method says it takes, against those that its clients are seen to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from bits import VARIANTS, method_settings
from harness import Run

from hpcfl.methods import METHODS
from hpcfl.simulation.driver import Driver
from hpcfl.training.engines import LoopEngine

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
    "pfedmb-weights": ["method.finetune=weights"],
}
"""Settings that change the number, or that make it exact."""

BEFORE = {"fedala": 2}
"""Gradients by which a model that is fine-tuned comes to be: a pass over half of the samples."""


@pytest.mark.parametrize("case", sorted({*METHODS, *VARIANTS, *MORE}))
def test_gradients_are_those_that_are_taken(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, epochs, cohort = 4, 2, 3
    counts: dict[str, list[int]] = {"work": [], "evaluated": []}
    gradient = LoopEngine.gradient

    def counting(self: LoopEngine, *arguments: Any) -> Any:
        if working:
            counts[working[-1]][-1] += 1
        return gradient(self, *arguments)

    working: list[str] = []

    def watch(name: str) -> None:
        hook = getattr(Driver, name)

        def watched(self: Driver, *arguments: Any) -> Any:
            counts[name].append(0)
            working.append(name)
            done = hook(self, *arguments)
            working.pop()
            return done

        monkeypatch.setattr(Driver, name, watched)

    monkeypatch.setattr(LoopEngine, "gradient", counting)
    watch("work")
    watch("evaluated")
    settings: Sequence[str] = [*method_settings(case), *MORE.get(case, []), "train.finetune_epochs=2"]
    run = Run(*settings, "data.clients=3", f"train.local_epochs={epochs}", "train.rounds=4")
    finetuning = 2 * batches * run.method.finetuning_gradients(run.config.params) + BEFORE.get(case, 0)
    # one evaluation, whose models go to the last checkpoint
    assert counts["evaluated"] == [finetuning] * cohort
    # of the last round: what a method does only at first is not what a round takes
    taken = counts["work"][-cohort:]
    expected = run.method.epochs_a_round * batches
    assert taken == [expected] * cohort
    assert run.method.epochs_a_round == type(run.method).gradient_epochs(run.config.params, run.config.train)
