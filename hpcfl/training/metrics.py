"""Metrics of one client's predictions, by scikit-learn's definitions.

    balanced_accuracy  mean recall of the client's classes (balanced_accuracy_score)
    macro_f1           mean F1 of the classes that the client has or that are predicted (f1_score, macro)
    auc                mean area under the ROC curve of the client's classes, each against the rest
                       (roc_auc_score, multi_class="ovr", which needs all classes); nan with one class
    calibration_error  expected calibration error: BINS bins of equal width of the largest probability p, and
                       sum over bins of |samples predicted correctly - sum of p| / n

Shapes: n samples, K classes. Written in NumPy: importing scikit-learn costs every rank a second.
"""

from __future__ import annotations

import numpy as np

CLIENT_METRICS = ("balanced_accuracy", "macro_f1", "auc", "calibration_error")
BINS = 15
"""As in Guo et al., On Calibration of Modern Neural Networks (ICML 2017); a bin includes its upper end."""


def confusion(probabilities: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return how often each class (rows) is predicted as each class (columns), int64 [K, K].

    Takes class probabilities [n, K] and classes [n]; of equal probabilities the first counts. Samples whose
    probabilities are nan are left out: no class is predicted.
    """
    classes, is_known = probabilities.shape[1], ~np.isnan(probabilities).any(axis=1)
    cells = (y * classes + probabilities.argmax(axis=1))[is_known]
    return np.bincount(cells, minlength=classes**2).reshape(classes, classes)


def metrics_of(probabilities: np.ndarray, y: np.ndarray) -> tuple[float, ...]:
    """Return CLIENT_METRICS of class probabilities float64 [n, K] and classes [n], at least one.

    They are nan if a probability is.
    """
    if np.isnan(probabilities).any():
        return (np.nan,) * len(CLIENT_METRICS)
    counts = confusion(probabilities, y)
    correct, own, predicted = counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0)
    held, known = np.flatnonzero(own), own + predicted > 0
    recall = correct[held] / own[held]
    f1 = 2 * correct[known] / (own + predicted)[known]
    areas = [_area(probabilities[:, label], y == label) for label in held] if len(held) > 1 else [np.nan]
    top, is_right = probabilities.max(axis=1), probabilities.argmax(axis=1) == y
    bins = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], top)
    gaps = np.bincount(bins, weights=is_right - top)
    return float(recall.mean()), float(f1.mean()), float(np.mean(areas)), float(np.abs(gaps).sum() / len(y))


def _area(scores: np.ndarray, is_positive: np.ndarray) -> float:
    """Return the share of pairs of a positive and a negative that scores [n] order correctly; ties: half."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positive = int(is_positive.sum())
    above = ranks[is_positive].sum() - positive * (positive + 1) / 2
    return float(above / (positive * (len(scores) - positive)))
