"""`train.patience`: a run ends when its accuracy on validation samples has not risen for some evaluations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bits import run_here, tiny_settings

from hpcfl.main import main
from hpcfl.results.run import load_run
from hpcfl.storage.ledger import is_over
from hpcfl.tables.accuracies import _figures


@pytest.mark.quick
@pytest.mark.parametrize(
    ("accuracies", "patience", "stops"),
    [
        ([], 1, False),
        ([0.5, 0.6, 0.6], 1, True),
        ([0.5, 0.6, 0.6], 2, False),
        ([0.5, 0.6, 0.6, 0.55], 2, True),
        ([0.5, 0.6, 0.5, 0.7], 2, False),
        ([0.5, 0.4, 0.3], None, False),
    ],
)
def test_a_run_ends_after_the_given_number_of_evaluations_without_improvement(
    accuracies: list[float], patience: int | None, stops: bool
) -> None:
    assert is_over(7, 9, accuracies, patience) == stops
    assert is_over(9, 9, accuracies, patience)


@pytest.fixture
def keys(digits: Path) -> list[str]:
    """Settings whose accuracy stops rising long before the last of 40 rounds."""
    of_run = ["method.name=fedper", "data.val_fraction=0.3", "data.clients=5"]
    of_run += ["train.rounds=40", "train.patience=2", "run.eval_every=2", "run.checkpoint_every=3"]
    return [*tiny_settings(digits), *of_run]


def test_a_run_ended_by_patience_has_all_files_and_is_not_trained_again(
    keys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks and a stop: test_bits.py."""
    one = tmp_path / "one"
    assert run_here(one, keys) == 0
    run = load_run(one)
    assert run.is_finished
    of_val = run.metrics["accuracy_val"]
    assert is_over(run.done, 40, of_val.tolist(), 2)
    assert not is_over(run.done, 40, of_val[:-1].tolist(), 2)
    assert run.done == 2 * len(of_val) < 40
    assert run.model(0)
    assert f" round {run.done}/40 " in (one / "log.txt").read_text()
    assert main(["watch", str(one)]) == 0
    assert "finished early, by train.patience" in capsys.readouterr().out
    figures = _figures(run, run.config.train)
    assert figures["rounds_done"] == run.done
    assert figures["bytes_down"] == run.metrics["bytes_down"][-1] / (run.done * 5)
    # a run of that many rounds without patience
    plain = tmp_path / "plain"
    assert run_here(plain, [*keys, "train.patience=null", f"train.rounds={run.done}"]) == 0
    expected = load_run(plain)
    np.testing.assert_array_equal(run.clients["accuracy"], expected.clients["accuracy"])
    # the file's own model is that of validation samples
    validated = tmp_path / "validated"
    assert run_here(validated, [*keys, "run.eval_split=val", f"train.rounds={run.done}"]) == 0
    np.testing.assert_array_equal(load_run(validated).metrics["accuracy_mean"], of_val)
    files = {path: path.read_bytes() for path in one.iterdir() if path.suffix in (".csv", ".yaml", ".h5")}
    capsys.readouterr()
    assert run_here(one, keys) == 0
    assert {path: path.read_bytes() for path in files} == files


def test_a_run_that_ended_off_schedule_and_gets_more_rounds_records_them(
    keys: list[str], tmp_path: Path
) -> None:
    """Accuracies stay the same, and the evaluation after round 5 ends the patience."""
    for rounds in (5, 8):
        still = [*keys, "train.lr=1e-9", "run.checkpoint_every=1", f"train.rounds={rounds}"]
        still += ["run.metrics=true"] if rounds == 5 else []
        assert run_here(tmp_path / "run", still) == 0
        # not that of the shorter run
        assert (tmp_path / "run" / "confusion.csv").exists() == (rounds == 5)
        run = load_run(tmp_path / "run")
        assert (run.rounds, run.is_finished) == (rounds, True)
    assert run.metrics["round"].tolist() == [2, 4, 6]
