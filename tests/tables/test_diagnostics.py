"""What diagnostics.csv contains of the history of a method: means by layer and by common classes."""

from __future__ import annotations

import numpy as np
import pytest

from hpcfl.tables.diagnostics_csv import _summary

COMMON = np.array([[2, 1, 0], [1, 2, 1], [0, 1, 2]])
"""Classes that three clients have in common; each has two."""


def test_weights_between_clients_are_grouped_by_their_classes() -> None:
    # one layer; each client's weights of itself and of the others
    weights = np.array([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.0, 0.6, 0.4]])[:, None]
    lines = list(_summary(("client", "layer", "client"), weights, COMMON))
    groups = ["itself", "1 classes in common", "0 classes in common"]
    assert [line[:2] for line in lines] == [(0, group) for group in groups]
    # (0.3 + 0.1 + 0.1 + 0.6) / 4 and (0.2 + 0.0) / 2
    assert [value for *_, value in lines] == pytest.approx([1.7 / 3, 1.1 / 4, 0.1])
    without_layers = list(_summary(("client", "client"), weights[:, 0], COMMON))
    assert without_layers == [(None, *line[1:]) for line in lines]


def test_shares_of_branches_have_an_overlap() -> None:
    shares = np.array([[1.0, 0.0], [0.75, 0.25], [0.0, 1.0]])
    lines = list(_summary(("client", "layer", "branch"), shares[:, None], COMMON))
    # the largest shares; then, clients 0 and 1 have 0.75 in common, 1 and 2 have 0.25, 0 and 2 nothing
    assert [value for *_, value in lines] == pytest.approx([2.75 / 3, 0.5, 0.0])
    without_layers = list(_summary(("client", "component"), shares, COMMON))
    assert without_layers == [(None, *line[1:]) for line in lines]


def test_pairs_are_counted_as_in_the_same_group_or_not() -> None:
    # clients 0 and 1 share group 2, client 2 has none
    lines = list(_summary(("client",), np.array([2, 2, -1]), COMMON))
    assert [clients for _, clients, _ in lines] == ["itself", "1 classes in common", "0 classes in common"]
    assert [value for *_, value in lines] == pytest.approx([2 / 3, 0.5, 0.0])
    assert list(_summary(("client", "path"), np.ones((3, 4)), COMMON)) == []


def test_a_quantity_of_single_clients_is_averaged_over_all() -> None:
    by_layer = np.array([[1, 0], [2, 3]])
    assert list(_summary(("client", "layer"), by_layer, COMMON)) == [(0, "all", 1.5), (1, "all", 1.5)]
    assert list(_summary(("client",), np.array([0.25, 0.75]), COMMON)) == [(None, "all", 0.5)]
