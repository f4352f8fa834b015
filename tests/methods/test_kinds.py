"""Methods train on features, series and tokens, with both engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bits import differing, run_here
from harness import SMALL, Run
from kinds import FEW_ROUNDS, MODELS_OF, made, words_of
from processes import Mpirun

import hpcfl
from hpcfl.errors import UserError


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("fedmn", "features"),
        *((method, "series") for method in ("fedmn", "gpfl", "knn_per", "per_fedavg")),
    ],
)
@pytest.mark.usefixtures("double")
def test_both_engines_train_on_each_kind(method: str, kind: str, tmp_path: Path) -> None:
    """Methods that build a network of their own, read features or differentiate twice.

    Tokens with every method are in simulation/test_clients.py, images in test_methods.py.
    """
    keys = [*words_of(kind, tmp_path), *FEW_ROUNDS.get(method, []), f"method.name={method}"]
    keys += ["data.unseen_clients=0.25", "data.per_client=20", "train.rounds=2"]
    loop, batched = (Run(*keys, f"run.engine={engine}").evaluated() for engine in ("loop", "batched"))
    assert loop.keys() == batched.keys()
    assert loop["theta"].isfinite().all()
    for name in loop:
        torch.testing.assert_close(batched[name], loop[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", MODELS_OF)
def test_fedavg_learns_each_kind_and_its_models_predict(kind: str, tmp_path: Path) -> None:
    keys = [*SMALL, *words_of(kind, tmp_path), "method.name=fedavg", "run.report=false"]
    keys += ["train.rounds=10", "train.local_epochs=2", "train.lr=0.1", "train.momentum=0.5"]
    run = hpcfl.run(*keys, out=tmp_path / "run", quiet=True)
    assert run is not None
    assert run.metrics["accuracy_mean"][-1] > 0.7
    arrays = made(kind)
    assert (run.predict("global", arrays["x"]).argmax(axis=1) == arrays["y"]).mean() > 0.7
    with pytest.raises(UserError, match=r"samples: x has shape \[240.*; allowed: \[n, "):
        run.predict("global", arrays["x"][..., :-1])


@pytest.mark.parametrize("kind", ["features", "tokens"])
def test_the_bits_do_not_depend_on_the_ranks(kind: str, tmp_path: Path, mpirun: Mpirun) -> None:
    """Clients of unequal size, so that a client's samples begin elsewhere in the memory of each rank."""
    keys = [*SMALL, *words_of(kind, tmp_path), "data.partition.name=dirichlet", "data.clients=6"]
    keys += ["data.per_client=null", "method.name=pfedla", "train.participation=0.5", "run.report=false"]
    serial, parallel = tmp_path / "serial", tmp_path / "parallel"
    assert run_here(serial, keys) == 0
    mpirun(3, "-m", "hpcfl.main", *keys, "--out", str(parallel))
    assert differing(serial, parallel) == []
