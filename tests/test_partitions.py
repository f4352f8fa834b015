"""Who gets which samples: worked-out deals and sizes, T27 and T28, and every refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hpcfl.data.partitions import PARTITIONS, ClientIndices, balanced_deal, class_table, partition
from hpcfl.errors import UserError

TEN_CLASSES = np.repeat(np.arange(10), 600)[np.random.default_rng(0).permutation(6000)]


def deal(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    y: np.ndarray = TEN_CLASSES,
    num_classes: int = 10,
    clients: int = 10,
    per_client: int | None = None,
    test_fraction: float = 0.3,
    val_fraction: float = 0.0,
    seed: int = 1,
) -> list[ClientIndices]:
    return partition(
        name,
        y,
        num_classes,
        num_clients=clients,
        per_client=per_client,
        test_fraction=test_fraction,
        val_fraction=val_fraction,
        seed=seed,
        options=options or {},
    )


def all_indices(parts: list[ClientIndices]) -> np.ndarray:
    return np.concatenate([np.concatenate([part.train, part.val, part.test]) for part in parts])


def by_class(indices: np.ndarray) -> list[int]:
    return np.bincount(TEN_CLASSES[indices], minlength=10).tolist()


def same(one: list[ClientIndices], other: list[ClientIndices]) -> bool:
    return all(
        np.array_equal(getattr(a, split), getattr(b, split))
        for a, b in zip(one, other, strict=True)
        for split in ("train", "val", "test")
    )


@pytest.mark.parametrize(
    ("clients", "classes", "per_client"),
    [(10, 10, 4), (100, 10, 4), (10, 10, 9), (7, 10, 10), (13, 7, 5), (3, 100, 12), (5, 3, 1)],
)
@pytest.mark.parametrize("seed", range(5))
def test_deal_is_balanced_and_gives_no_client_a_class_twice(
    clients: int, classes: int, per_client: int, seed: int
) -> None:
    owned = balanced_deal(clients, classes, per_client, seed)
    assert owned.shape == (clients, classes)
    assert owned.sum(axis=1).tolist() == [per_client] * clients
    least, rest = divmod(clients * per_client, classes)
    assert sorted(owned.sum(axis=0)) == [least] * (classes - rest) + [least + 1] * rest


def test_two_clients_with_half_of_the_classes_each_share_none() -> None:
    owned = balanced_deal(2, 10, 5, seed=3)
    assert (owned[0] ^ owned[1]).all()


@pytest.mark.parametrize("name", PARTITIONS)
def test_no_sample_is_used_twice_and_every_split_is_part_of_the_pool(name: str) -> None:
    used = all_indices(deal(name, val_fraction=0.2))
    assert len(set(used.tolist())) == len(used)
    assert used.dtype == np.int64
    assert used.min() >= 0
    assert used.max() < len(TEN_CLASSES)


@pytest.mark.parametrize("name", PARTITIONS)
def test_same_seed_same_partition_and_another_seed_another(name: str) -> None:
    assert same(deal(name, val_fraction=0.1), deal(name, val_fraction=0.1))
    assert not same(deal(name, seed=1), deal(name, seed=2))


@pytest.mark.parametrize("name", PARTITIONS)
def test_train_and_test_have_the_same_class_proportions(name: str) -> None:
    for part in deal(name):
        train, test = np.array(by_class(part.train)), np.array(by_class(part.test))
        np.testing.assert_array_equal(train, np.floor((train + test) * 0.7 + 0.5 + 1e-9))


@pytest.mark.parametrize("name", ["dirichlet", "iid"])
def test_all_samples_are_dealt_when_the_sizes_allow_it(name: str) -> None:
    assert sorted(all_indices(deal(name))) == list(range(6000))


def test_classes_takes_the_largest_equal_amount_by_default() -> None:
    parts = deal("classes", clients=10)
    table = class_table(TEN_CLASSES, parts, 10)
    assert sorted(table.ravel()) == [0] * 60 + [150] * 40
    assert [(len(part.train), len(part.val), len(part.test)) for part in parts] == [(420, 0, 180)] * 10
    assert table.sum(axis=0).tolist() == [600] * 10


def test_classes_counts_the_demand_for_the_smallest_class() -> None:
    y = np.repeat([0, 1, 2], [10, 40, 40])
    parts = deal("classes", {"classes_per_client": 2}, y=y, num_classes=3, clients=3)
    assert sorted(class_table(y, parts, 3).ravel()) == [0] * 3 + [5] * 6


def test_classes_with_a_client_size() -> None:
    parts = deal("classes", {"classes_per_client": 2}, clients=5, per_client=40, val_fraction=0.25)
    # 20 a class: 14 kept, of which round(3.5) = 4 for validation, and 6 for the test.
    assert [(len(part.train), len(part.val), len(part.test)) for part in parts] == [(20, 8, 12)] * 5


def test_dominant_sizes_of_pfedla() -> None:
    y = np.repeat(np.arange(10), 7000)
    parts = deal("dominant", y=y, clients=100, per_client=600)
    table = class_table(y, parts, 10)
    assert [sorted(row) for row in table] == [[30] * 8 + [180] * 2] * 100
    assert (table == 180).sum(axis=0).tolist() == [20] * 10
    assert {(len(part.train), len(part.test)) for part in parts} == {(420, 180)}


def test_dominant_takes_the_largest_amount_by_default() -> None:
    # 10 clients, 2 of 10 classes dominant: a class serves 2 clients with 6q and 8 with q, 20q <= 600.
    table = class_table(TEN_CLASSES, deal("dominant"), 10)
    assert [sorted(row) for row in table] == [[30] * 8 + [180] * 2] * 10


def test_dominant_rounds_the_dominant_amount_half_up() -> None:
    # q = 7: round(10.5) = 11, and 2 * 11 + 8 * 7 = 78.
    table = class_table(TEN_CLASSES, deal("dominant", {"ratio": 1.5}, clients=2, per_client=78), 10)
    assert [sorted(row) for row in table] == [[7] * 8 + [11] * 2] * 2


def test_dirichlet_gives_every_client_its_least_number_of_samples() -> None:
    sizes = class_table(TEN_CLASSES, deal("dirichlet", {"beta": 0.1, "min_samples": 100}), 10).sum(axis=1)
    assert sizes.min() >= 100
    assert sizes.sum() == 6000


def test_dirichlet_beta_sets_how_uneven_the_classes_are() -> None:
    def largest_share(beta: float) -> float:
        table = class_table(TEN_CLASSES, deal("dirichlet", {"beta": beta}), 10)
        return float((table.max(axis=1) / table.sum(axis=1)).mean())

    assert largest_share(1000.0) < 0.13
    assert largest_share(0.1) > 0.3


def test_dirichlet_gives_nothing_more_to_a_client_above_the_mean() -> None:
    # Class 0 alone puts its winner above the mean of 400, so class 1 goes to the other client.
    y = np.repeat([0, 1], [600, 200])
    table = class_table(y, deal("dirichlet", {"beta": 1.0}, y=y, num_classes=2, clients=2), 2)
    winner = int(table[:, 0].argmax())
    assert table[winner, 0] >= 400
    assert table[winner, 1] == 0
    assert table[1 - winner, 1] == 200


def test_dirichlet_and_iid_accept_a_class_without_samples() -> None:
    y = np.repeat([0, 1, 3], 200)
    for name in ("dirichlet", "iid"):
        table = class_table(y, deal(name, y=y, num_classes=5, clients=3), 5)
        assert table.sum(axis=0).tolist() == [200, 200, 0, 200, 0]


def test_iid_sizes() -> None:
    largest = class_table(TEN_CLASSES, deal("iid", clients=7), 10).sum(axis=1)
    assert largest.tolist() == [857] * 7
    asked = class_table(TEN_CLASSES, deal("iid", clients=7, per_client=200), 10)
    assert asked.sum(axis=1).tolist() == [200] * 7
    assert asked.min() >= 5


def test_split_rounds_halves_up_whatever_the_floating_point_noise() -> None:
    # (1 - 0.9) * 5 is 0.49999999999999994 in floating point.
    parts = deal("classes", {"classes_per_client": 2}, clients=5, per_client=10, test_fraction=0.9)
    assert [(len(part.train), len(part.test)) for part in parts] == [(2, 8)] * 5


def test_validation_is_the_end_of_the_training_part() -> None:
    whole = deal("classes", {"classes_per_client": 1}, per_client=100)
    cut = deal("classes", {"classes_per_client": 1}, per_client=100, val_fraction=0.1)
    for before, after in zip(whole, cut, strict=True):
        assert before.train.tolist() == after.train.tolist() + after.val.tolist()
        assert before.test.tolist() == after.test.tolist()
        assert len(after.val) == 7


def test_class_table_counts_all_three_parts() -> None:
    y = np.array([0, 0, 1, 2, 2, 2])
    one = ClientIndices(train=np.array([0, 2]), val=np.array([1]), test=np.array([3]))
    two = ClientIndices(train=np.array([4]), val=np.array([], dtype=np.int64), test=np.array([5]))
    assert class_table(y, [one, two], 4).tolist() == [[2, 1, 1, 0], [0, 0, 2, 0]]


REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("random", {}, {}, "data.partition.name=random: unknown; allowed: classes, dominant, dirichlet, iid"),
    ("classes", {"classes_per_client": 11}, {}, "data.partition.classes_per_client=11: .* allowed: 1..10"),
    ("classes", {"classes_per_client": 0}, {}, "data.partition.classes_per_client=0: .*"),
    ("classes", {"beta": 0.5}, {}, "data.partition.beta=0.5: .*options: classes_per_client"),
    ("classes", {}, {"per_client": 604}, "data.per_client=604: the data allows at most 600"),
    ("classes", {}, {"per_client": 42}, "data.per_client=42: .*classes_per_client=4, at most 600"),
    (
        "classes",
        {},
        {"clients": 6001},
        "data.clients=6001: class [0-9] has 600 samples .* at least 240[01]",
    ),
    ("classes", {}, {"per_client": 4}, "client 0 would have no test samples of its 4 .*data.per_client"),
    ("classes", {}, {"test_fraction": 1.0}, "client 0 would have no training samples of its 600"),
    ("classes", {}, {"val_fraction": 0.001}, "client 0 would have no validation samples of its 600"),
    ("dominant", {"dominant_classes": 10}, {}, "data.partition.dominant_classes=10: .* allowed: 1..9"),
    ("dominant", {"ratio": 0.5}, {}, "data.partition.ratio=0.5: .*"),
    ("dominant", {}, {"per_client": 620}, "data.per_client=620: the data allows at most 600"),
    ("dominant", {}, {"per_client": 599}, "data.per_client=599: .*nearest: 580 and 600"),
    ("dominant", {}, {"per_client": 7}, "data.per_client=7: .*nearest: 20"),
    ("dominant", {}, {"clients": 500}, "data.clients=500: class 0 has 600 samples .* at least 1000"),
    ("dirichlet", {}, {"per_client": 100}, "data.per_client=100: .*data.per_client=null"),
    ("dirichlet", {"beta": 0}, {}, "data.partition.beta=0: .*"),
    ("dirichlet", {"min_samples": 601}, {}, "data.partition.min_samples=601: .* allow at most 600"),
    ("dirichlet", {"min_samples": 600}, {}, "data.partition.beta=0.5: none of 200 draws .*raise"),
    ("dirichlet", {}, {"test_fraction": 0.001}, "client 0 would have no test samples .*min_samples"),
    ("iid", {}, {"clients": 6001}, "data.clients=6001: the data has 6000 samples"),
    ("iid", {}, {"per_client": 601}, "data.per_client=601: the data allows at most 600"),
    ("iid", {"beta": 1}, {}, "data.partition.beta=1: .*options: none"),
]


@pytest.mark.parametrize(("name", "options", "arguments", "message"), REFUSALS)
def test_refusals_name_key_value_and_what_is_allowed(
    name: str, options: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"^{message}") as caught:
        deal(name, options, **arguments)
    assert "\n" not in str(caught.value)
