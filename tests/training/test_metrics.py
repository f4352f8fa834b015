"""Metrics of a client's predictions equal scikit-learn's, even if a client lacks classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hpcfl.training.metrics import BINS, CLIENT_METRICS, confusion, metrics_of


def drawn(held: Sequence[int], samples: int, classes: int, digits: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Return random probabilities [n, K], rounded to so many digits, and classes [n], all of `held`."""
    rng = np.random.default_rng(samples)
    y = np.concatenate([held, rng.choice(held, samples - len(held))])
    likely = rng.dirichlet(np.ones(classes), samples) + 0.3 * np.eye(classes)[y]
    return (likely / 1.3).round(digits), y


CASES = {
    "all classes": drawn(range(5), 60, 5),
    "two classes in all": drawn(range(2), 40, 2),
    "some classes": drawn((1, 4, 6), 30, 8),
    "ties": drawn(range(4), 50, 4, digits=1),
    "ties of some classes": drawn((0, 3), 25, 4, digits=1),
    "one class": drawn((2,), 20, 4),
    "one sample": drawn((3,), 1, 4),
    "a class never predicted": (np.array([[0.8, 0.2], [0.9, 0.1], [0.6, 0.4]]), np.array([0, 1, 0])),
}


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_metrics_equal_scikit_learn_s(case: str) -> None:
    # here, as every process of the tests would need a second and more for this
    from sklearn import metrics
    from sklearn.calibration import calibration_curve

    probabilities, y = CASES[case]
    predicted, top, classes = (
        *(probabilities.argmax(axis=1), probabilities.max(axis=1)),
        probabilities.shape[1],
    )
    found = dict(zip(CLIENT_METRICS, metrics_of(probabilities, y), strict=True))
    expected = metrics.confusion_matrix(y, predicted, labels=range(classes))
    np.testing.assert_array_equal(confusion(probabilities, y), expected)
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(y, predicted))
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(y, predicted, average="macro"))
    held = np.unique(y)
    areas = [metrics.roc_auc_score(y == k, probabilities[:, k]) for k in held] if len(held) > 1 else [np.nan]
    assert found["auc"] == pytest.approx(np.mean(areas), nan_ok=True)
    of_bins, confidence = calibration_curve(predicted == y, top, n_bins=BINS, strategy="uniform")
    bins = np.ceil(top * BINS).clip(1) - 1
    shares = np.unique(bins, return_counts=True)[1] / len(y)
    assert found["calibration_error"] == pytest.approx(shares @ np.abs(of_bins - confidence))


def test_a_calibration_error_by_hand() -> None:
    # in bins of 1/15: 0.8 and 0.79 share (0.733, 0.8], one of the two is right; 0.9 is right, 0.6 is wrong
    probabilities = np.array([[0.8, 0.2], [0.79, 0.21], [0.1, 0.9], [0.6, 0.4]])
    found = metrics_of(probabilities, np.array([0, 1, 1, 1]))[CLIENT_METRICS.index("calibration_error")]
    assert found == pytest.approx((abs(1 - 0.8 - 0.79) + abs(1 - 0.9) + abs(0 - 0.6)) / 4)


def test_metrics_need_probabilities() -> None:
    probabilities, y = np.array([[0.8, 0.2], [np.nan, np.nan], [0.1, 0.9]]), np.array([0, 0, 1])
    assert np.isnan(metrics_of(probabilities, y)).all()
    assert confusion(probabilities, y).tolist() == [[1, 0], [0, 1]]
