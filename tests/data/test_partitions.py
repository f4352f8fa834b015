"""Which client gets which samples: partitions and sizes by hand, and every refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hpcfl.data.partition_classes import balanced_classes
from hpcfl.data.partition_draws import CIFAR100_COARSE, _weights
from hpcfl.data.partition_request import Request, Split, least_samples
from hpcfl.data.partitions import (
    PARTITIONS,
    ClientIndices,
    class_sizes,
    class_table,
    partition,
    partition_given,
)
from hpcfl.errors import UserError

TEN_CLASSES = np.repeat(np.arange(10), 600)[np.random.default_rng(0).permutation(6000)]

TEN_OWNERS = np.random.default_rng(1).integers(0, 10, 6000)

NEEDED_OPTIONS = {"pachinko": {"coarse_classes": 5}}
"""What a partition cannot do without on ten classes."""

NOT_STRATIFIED = ["pathological", "dirichlet_pfllib", "mixture", "pachinko", "given"]
STRATIFIED = [name for name in PARTITIONS if name not in NOT_STRATIFIED]


def assign(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    y: np.ndarray = TEN_CLASSES,
    num_classes: int = 10,
    clients: int | None = 10,
    per_client: int | None = None,
    test_fraction: float = 0.3,
    val_fraction: float = 0.0,
    seed: int = 1,
    owner: np.ndarray = TEN_OWNERS,
    is_test: np.ndarray | None = None,
) -> list[ClientIndices]:
    options = NEEDED_OPTIONS.get(name, {}) if options is None else options
    split = test_fraction, val_fraction, seed
    if name == "given":
        return partition_given(name, owner, is_test, clients, per_client, Split(*split))
    assert clients is not None
    request = Request(*split, class_sizes(y, num_classes), clients, per_client)
    return partition(name, PARTITIONS[name].options.model_validate(options), y, request)


def table_of(name: str, options: Mapping[str, Any] | None = None, **arguments: Any) -> np.ndarray:
    y, num_classes = arguments.get("y", TEN_CLASSES), arguments.get("num_classes", 10)
    return class_table(y, assign(name, options, **arguments), num_classes)


def all_indices(parts: list[ClientIndices]) -> np.ndarray:
    return np.concatenate([np.concatenate([part.train, part.val, part.test]) for part in parts])


def sizes(parts: list[ClientIndices]) -> list[tuple[int, int, int]]:
    return [(len(part.train), len(part.val), len(part.test)) for part in parts]


def by_class(indices: np.ndarray) -> list[int]:
    return np.bincount(TEN_CLASSES[indices], minlength=10).tolist()


def lists(parts: list[ClientIndices]) -> list[list[list[int]]]:
    return [[part.train.tolist(), part.val.tolist(), part.test.tolist()] for part in parts]


def test_classes_are_assigned_evenly_and_once() -> None:
    cases = [(2, 10, 5), (100, 10, 4), (10, 10, 9), (7, 10, 10), (13, 7, 5), (3, 100, 12), (5, 3, 1)]
    for clients, classes, per_client in cases:
        owned = balanced_classes(clients, classes, per_client, seed=1)
        assert owned.shape == (clients, classes)
        assert owned.sum(axis=1).tolist() == [per_client] * clients
        least, rest = divmod(clients * per_client, classes)
        assert sorted(owned.sum(axis=0)) == [least] * (classes - rest) + [least + 1] * rest


@pytest.mark.parametrize("name", PARTITIONS)
def test_no_sample_is_assigned_twice_and_the_partition_depends_only_on_the_seed(name: str) -> None:
    parts = assign(name, val_fraction=0.2)
    used = all_indices(parts)
    assert len(set(used.tolist())) == len(used)
    assert used.dtype == np.int64
    assert used.min() >= 0
    assert used.max() < len(TEN_CLASSES)
    # the same seed gives the same partition, another one another
    assert lists(parts) == lists(assign(name, val_fraction=0.2))
    assert lists(parts) != lists(assign(name, val_fraction=0.2, seed=2))


@pytest.mark.parametrize("name", STRATIFIED)
def test_train_validation_and_test_have_the_same_class_proportions(name: str) -> None:
    for part in assign(name, val_fraction=0.2):
        train, val, test = (np.array(by_class(of)) for of in (part.train, part.val, part.test))
        np.testing.assert_array_equal(train + val, np.floor((train + val + test) * 0.7 + 0.5 + 1e-9))
        np.testing.assert_array_equal(val, np.floor((train + val) * 0.2 + 0.5 + 1e-9))


@pytest.mark.parametrize("name", NOT_STRATIFIED)
def test_the_split_of_pfllib_and_fedem_is_exact_by_client_and_not_by_class(name: str) -> None:
    parts = assign(name, val_fraction=0.2)
    for part in parts:
        total = len(part.train) + len(part.val) + len(part.test)
        kept = int(np.floor(0.7 * total + 0.5 + 1e-9))
        assert len(part.test) == total - kept
        assert len(part.val) == int(np.floor(0.2 * kept + 0.5 + 1e-9))
    train = np.array([by_class(np.concatenate([part.train, part.val])) for part in parts])
    whole = train + np.array([by_class(part.test) for part in parts])
    assert np.abs(train - 0.7 * whole).max() > 2
    # not stratified is still fair: each class within five deviations of its expected number
    assert (np.abs(train - 0.7 * whole) <= 5 * np.sqrt(0.21 * whole) + 1).all()


@pytest.mark.parametrize(
    "name", ["dirichlet", "iid", "pathological", "dirichlet_pfllib", "mixture", "pairs", "pachinko", "given"]
)
def test_all_samples_are_assigned_if_the_sizes_allow_it(name: str) -> None:
    assert sorted(all_indices(assign(name))) == list(range(6000))


def test_classes_takes_the_largest_equal_amount_by_default() -> None:
    table = table_of("classes")
    assert sorted(table.ravel()) == [0] * 60 + [150] * 40
    assert sizes(assign("classes")) == [(420, 0, 180)] * 10
    assert table.sum(axis=0).tolist() == [600] * 10


def test_classes_counts_the_demand_for_the_smallest_class(caplog: pytest.LogCaptureFixture) -> None:
    y = np.repeat([0, 1, 2], [10, 40, 40])
    table = table_of("classes", {"classes_per_client": 2}, y=y, num_classes=3, clients=3)
    assert sorted(table.ravel()) == [0] * 3 + [5] * 6
    assert "30 of 90 samples are used" in caplog.text
    assert "class 0 has 10" in caplog.text
    caplog.clear()
    # the amount was asked for, or no class is scarce
    table_of("classes", {"classes_per_client": 2}, y=y, num_classes=3, clients=3, per_client=4)
    table_of("dominant")
    table_of("neighbours", clients=8)
    assert caplog.text == ""


def test_classes_accepts_a_size_of_clients_and_rounds_halves_up() -> None:
    of_two = {"classes_per_client": 2}
    # 20 a class: 14 kept, of which round(3.5) = 4 for validation, and 6 for the test.
    asked = assign("classes", of_two, clients=5, per_client=40, val_fraction=0.25)
    assert sizes(asked) == [(20, 8, 12)] * 5
    # (1 - 0.9) * 5 is 0.49999999999999994 in floating point.
    assert sizes(assign("classes", of_two, clients=5, per_client=10, test_fraction=0.9)) == [(2, 0, 8)] * 5


def test_dominant_has_the_sizes_of_pfedla() -> None:
    y = np.repeat(np.arange(10), 7000)
    parts = assign("dominant", y=y, clients=100, per_client=600)
    table = class_table(y, parts, 10)
    assert [sorted(row) for row in table] == [[30] * 8 + [180] * 2] * 100
    assert (table == 180).sum(axis=0).tolist() == [20] * 10
    assert set(sizes(parts)) == {(420, 0, 180)}
    # q = 7: round(10.5) = 11, and 2 * 11 + 8 * 7 = 78.
    table = table_of("dominant", {"ratio": 1.5}, clients=2, per_client=78)
    assert [sorted(row) for row in table] == [[7] * 8 + [11] * 2] * 2


def test_dirichlet_beta_sets_how_uneven_the_classes_are() -> None:
    def largest_share(beta: float) -> float:
        table = table_of("dirichlet", {"beta": beta})
        return float((table.max(axis=1) / table.sum(axis=1)).mean())

    assert largest_share(1000.0) < 0.13
    assert largest_share(0.1) > 0.3


def test_dirichlet_gives_nothing_more_to_a_client_above_the_mean() -> None:
    # Class 0 alone puts its winner above the mean of 400, so class 1 goes to the other client.
    y = np.repeat([0, 1], [600, 200])
    table = table_of("dirichlet", {"beta": 1.0}, y=y, num_classes=2, clients=2)
    winner = int(table[:, 0].argmax())
    assert table[winner, 0] >= 400
    assert table[winner, 1] == 0
    assert table[1 - winner, 1] == 200


def test_dirichlet_and_iid_accept_a_class_without_samples() -> None:
    y = np.repeat([0, 1, 3], 200)
    for name in ("dirichlet", "dirichlet_pfllib", "mixture", "iid"):
        table = table_of(name, y=y, num_classes=5, clients=3)
        assert table.sum(axis=0).tolist() == [200, 200, 0, 200, 0]


def test_iid_clients_have_the_expected_sizes() -> None:
    assert table_of("iid", clients=7).sum(axis=1).tolist() == [857] * 7
    asked = table_of("iid", clients=7, per_client=200)
    assert asked.sum(axis=1).tolist() == [200] * 7
    assert asked.min() >= 5


def test_validation_is_the_end_of_the_training_part() -> None:
    whole = assign("classes", {"classes_per_client": 1}, per_client=100)
    cut = assign("classes", {"classes_per_client": 1}, per_client=100, val_fraction=0.1)
    for before, after in zip(whole, cut, strict=True):
        assert before.train.tolist() == after.train.tolist() + after.val.tolist()
        assert before.test.tolist() == after.test.tolist()
        assert len(after.val) == 7


def test_neighbours_differ_in_one_class_from_one_client_to_the_next() -> None:
    table = table_of("neighbours", clients=8)
    owned = (table > 0).astype(int)
    shared = owned @ owned.T
    # a ring of 10 classes: windows of 4 that are d places apart share 4 - d, and the eighth meets the first
    assert np.diag(shared, 1).tolist() == [3] * 7
    assert np.diag(shared, 2).tolist() == [2] * 6
    assert np.diag(shared, 4).tolist() == [0] * 4
    assert shared[0, 7] == 1
    # four clients share the classes in most demand
    assert set(table[table > 0]) == {150}
    assert not np.array_equal(table, table_of("neighbours", clients=8, seed=2))

    owned = table_of("neighbours", {"changed_classes": 2}, clients=5, per_client=40) > 0
    assert owned.sum(axis=1).tolist() == [4] * 5
    assert (owned[:-1] & owned[1:]).sum(axis=1).tolist() == [2] * 4


@pytest.mark.parametrize("seed", range(5))
def test_target_gives_some_clients_classes_of_the_target_client(seed: int) -> None:
    owned = table_of("target", clients=8, per_client=40, seed=seed) > 0
    assert owned.sum(axis=1).tolist() == [4] * 8
    assert (owned & owned[0]).sum(axis=1).tolist() == [4, 4, 3, 0, 0, 0, 0, 0]
    free = table_of("target", {"others_from": "all"}, clients=60, per_client=20, seed=seed) > 0
    assert (free & free[0]).sum(axis=1)[:3].tolist() == [4, 4, 3]
    assert len({tuple(row) for row in free[3:]}) > 30
    assert free[3:].any(axis=0).all()


def test_random_classes_divides_a_class_equally_among_those_who_drew_it() -> None:
    y = np.repeat(np.arange(10), np.arange(600, 700, 10))
    table = table_of("random_classes", y=y, clients=15)
    owned = table > 0
    assert owned.sum(axis=1).tolist() == [2] * 15
    for label, owners in enumerate(owned.sum(axis=0)):
        shares = table[owned[:, label], label].tolist()
        assert shares == [(600 + 10 * label) // max(owners, 1)] * owners
    # 30 draws of 10 classes: the numbers of owners are not even
    assert len(set(owned.sum(axis=0))) > 2
    tables = [table_of("random_classes", clients=10, seed=seed) for seed in range(40)]
    assert 20 < sum((table.sum(axis=0) == 0).any() for table in tables) < 40


def test_pairs_are_those_of_pfedmb() -> None:
    table = table_of("pairs")
    for pair in range(5):
        expected = [300 if label in (2 * pair, 2 * pair + 1) else 0 for label in range(10)]
        assert table[2 * pair].tolist() == table[2 * pair + 1].tolist() == expected
    first, second = [10] * 5 + [0] * 5, [0] * 5 + [10] * 5
    assert table_of("pairs", clients=4, per_client=50).tolist() == [first, first, second, second]
    assert (table_of("pairs", clients=20) > 0).sum(axis=0).tolist() == [2] * 10


def test_pathological_groups_have_identical_label_sets() -> None:
    y = np.repeat(np.arange(10), 6000)
    table = table_of("pathological", y=y, clients=20, test_fraction=0.25)
    for client, row in enumerate(table):
        first = 2 * (client // 4)
        assert np.flatnonzero(row).tolist() == [first, first + 1]
    assert table.sum(axis=0).tolist() == [6000] * 10
    # 1500 a client on average: three draw from 150..1499, the fourth has the rest
    drawn = table[np.arange(20) % 4 < 3]
    assert drawn[drawn > 0].min() >= 150
    assert drawn.max() <= 1499
    assert len(set(drawn[drawn > 0])) > 25
    sizes = table.sum(axis=1)
    assert sizes.max() > 3 * sizes.min()


def test_pathological_balanced_gives_the_rest_to_the_last() -> None:
    y = np.repeat(np.arange(4), [10, 11, 30, 32])
    table = table_of("pathological", {"balanced": True}, y=y, num_classes=4, clients=6)
    # ceil(6 / 4 * 2) = 3 clients a class
    assert table[:3].tolist() == [[3, 3, 0, 0], [3, 3, 0, 0], [4, 5, 0, 0]]
    assert table[3:].tolist() == [[0, 0, 10, 10], [0, 0, 10, 10], [0, 0, 10, 12]]


def test_the_smallest_client_is_that_of_pfllib() -> None:
    for total, clients, test_fraction, batch_size, least in (
        (60_000, 20, 0.25, 10, 40),
        (6000, 100, 0.25, 10, 30),
        (6000, 10, 0.1, 7, 70),
    ):
        request = Request(test_fraction, 0.0, 0, np.array([total // 2] * 2), clients, None)
        assert least_samples(request, batch_size) == least


def test_dirichlet_pfllib_is_moons_draw_with_another_smallest_client() -> None:
    for rule, smallest in ((None, 33), (60, 60)):
        theirs = table_of("dirichlet_pfllib", {"min_samples": rule}, seed=4)
        ours = table_of("dirichlet", {"beta": 0.1, "min_samples": smallest}, seed=4)
        np.testing.assert_array_equal(theirs, ours)
        assert theirs.sum(axis=1).min() >= smallest
    # half of the mean client, where that is less than a batch of test samples
    table = table_of("dirichlet_pfllib", {"batch_size": 1000, "beta": 1.0})
    assert table.sum(axis=1).min() >= 300
    np.testing.assert_array_equal(table, table_of("dirichlet", {"beta": 1.0, "min_samples": 300}))


def test_mixture_labels_are_iid_inside_a_group() -> None:
    y = np.repeat(np.arange(10), 6000)
    table = table_of("mixture", y=y, clients=20)
    assert table.sum(axis=0).tolist() == [6000] * 10
    assert table.sum(axis=1).min() >= 10
    # classes of a group go hand in hand, those of different groups do not
    share = table / 6000
    alike = np.abs(share[:, :, None] - share[:, None, :]).max(axis=0) < 0.03
    groups = {tuple(np.flatnonzero(row).tolist()) for row in alike}
    assert sorted(map(len, groups)) == [3, 3, 4]
    assert sorted(label for group in groups for label in group) == list(range(10))
    for group in groups:
        counts = table[:, list(group)]
        expected = counts.mean(axis=1, keepdims=True)
        assert (np.abs(counts - expected) <= 5 * np.sqrt(expected) + 1).all()


def test_mixture_draws_until_every_client_has_enough() -> None:
    least = [table_of("mixture", {"min_samples": 100}, seed=seed).sum(axis=1).min() for seed in range(10)]
    usual = [table_of("mixture", {"min_samples": 1}, seed=seed).sum(axis=1).min() for seed in range(10)]
    assert min(least) >= 100 > min(usual)


def test_coarse_classes_are_those_of_cifar100() -> None:
    assert np.bincount(CIFAR100_COARSE).tolist() == [5] * 20
    # apple, mushroom, orange, pear, pepper; beaver, dolphin, otter, seal, whale; baby, boy, girl, man, woman
    members = {4: [0, 51, 53, 57, 83], 0: [4, 30, 55, 72, 95], 14: [2, 11, 35, 46, 98]}
    for coarse, fine in members.items():
        assert np.flatnonzero(coarse == CIFAR100_COARSE).tolist() == fine


def test_pachinko_of_fedem_uses_every_image_of_cifar100() -> None:
    y = np.repeat(np.arange(100), 600)
    table = table_of("pachinko", {}, y=y, num_classes=100, clients=100)
    assert table.sum(axis=1).tolist() == [600] * 100
    assert table.sum(axis=0).tolist() == [600] * 100
    by_coarse = np.array([table[:, coarse == CIFAR100_COARSE].sum(axis=1) for coarse in range(20)]).T
    # beta 0.4 over coarse classes: a few have most; beta 10 over fine ones: none of the five has nearly all
    largest = np.sort(by_coarse[:50], axis=1)[:, -5:].sum(axis=1) / 600
    assert 0.6 < largest.mean() < 0.9
    much = np.argwhere(by_coarse[:20] >= 100)
    fine_shares = [table[i, c == CIFAR100_COARSE].max() / by_coarse[i, c] for i, c in much]
    assert 0.2 < np.mean(fine_shares) < 0.4


@pytest.mark.parametrize("seed", range(3))
def test_a_class_that_pachinko_has_used_up_is_not_drawn_again(seed: int) -> None:
    sizes = np.array([12, 30, 8, 25, 20, 5, 20])
    y = np.repeat(np.arange(7), sizes)
    table = table_of("pachinko", {"coarse_classes": 3}, y=y, num_classes=7, clients=6, seed=seed)
    assert table.sum(axis=0).tolist() == sizes.tolist()
    gone = np.cumsum(table, axis=0) == sizes
    # before the last client
    assert gone[:-1].any()
    assert (table[1:][gone[:-1]] == 0).all()


def test_the_share_of_a_class_that_is_used_up_goes_to_others_of_its_coarse_class() -> None:
    coarse, fine, coarse_of = np.array([0.25, 0.75]), np.array([0.5, 0.5, 0.2, 0.8]), np.array([0, 0, 1, 1])
    for left, expected in (
        ([1, 1, 1, 1], [0.125, 0.125, 0.15, 0.6]),
        ([0, 1, 1, 1], [0, 0.25, 0.15, 0.6]),
        # no class of the first coarse one is left
        ([0, 0, 1, 1], [0, 0, 0.15, 0.6]),
    ):
        np.testing.assert_allclose(_weights(coarse, fine, coarse_of, np.array(left)), expected)


def test_given_takes_the_clients_and_the_split_of_the_source() -> None:
    owner = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2])
    is_test = np.array([0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0], dtype=bool)
    y = np.zeros(13, dtype=np.int64)
    known = {"y": y, "num_classes": 1, "owner": owner, "is_test": is_test}
    parts = assign("given", clients=None, **known)
    assert [sorted(part.train) for part in parts] == [[0, 2, 3], [6], [7, 8, 9, 10, 12]]
    assert [sorted(part.test) for part in parts] == [[1], [4, 5], [11]]
    assert lists(parts) == lists(assign("given", clients=3, **known))
    cut = assign("given", clients=None, val_fraction=0.4, **{**known, "owner": owner // 2})
    assert sizes(cut) == [(2, 2, 3), (3, 2, 1)]


def test_given_draws_some_of_the_clients_and_leaves_them_as_they_are() -> None:
    everybody = assign("given", clients=None)
    some = assign("given", clients=4)
    ids = [TEN_OWNERS[part.train[0]] for part in some]
    assert ids == sorted(set(ids))
    assert len(ids) == 4
    assert lists(some) == lists([everybody[i] for i in ids])
    drawn = [assign("given", clients=4, seed=seed) for seed in range(5)]
    assert len({tuple(TEN_OWNERS[part.train[0]] for part in parts) for parts in drawn}) > 1


ONE_CLASS = {"y": np.zeros(100_000, dtype=np.int64), "num_classes": 1, "clients": 2}
MANY_CHANGED = {"classes_per_client": 8, "changed_classes": 3}
FEW_SIMILAR = {"classes_per_client": 6, "similar_classes": 1, "others_from": "all"}
CLASSES = "data.partition.classes_per_client"
BETA = "data.partition.beta=0.5: none of 2000 draws .*min_samples=50000 samples; raise"

WITH_A_GAP = {"y": TEN_CLASSES[TEN_CLASSES != 3]}
GAP = r"data.clients=10: class 3 has 0 samples; labels must be 0\.\.K-1 without gaps, .*return_inverse=True"
REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("classes", {"classes_per_client": 11}, {}, f"{CLASSES}=11: .* allowed: 1..10"),
    ("classes", {}, {"per_client": 604}, "data.per_client=604: the data allows at most 600"),
    ("classes", {}, {"clients": 6001}, "data.clients=6001: class [0-9] has 600 samples .* at least 240[01]"),
    ("classes", {}, {"per_client": 4}, "client 0 would have no test samples of its 4 .*data.per_client"),
    ("classes", {}, {"test_fraction": 1.0}, "client 0 would have no training samples of its 600"),
    ("classes", {}, {"val_fraction": 0.001}, "client 0 would have no validation samples of its 600"),
    ("dominant", {"dominant_classes": 10}, {}, "data.partition.dominant_classes=10: .* allowed: 1..9"),
    ("dominant", {}, {"per_client": 599}, "data.per_client=599: .*nearest: 580 and 600"),
    ("dominant", {}, {"clients": 500}, "data.clients=500: class 0 has 600 samples .* at least 1000"),
    ("dominant", {}, WITH_A_GAP, GAP),
    ("pathological", {}, WITH_A_GAP, GAP),
    ("dirichlet", {}, {"per_client": 100}, "data.per_client=100: .*data.per_client=null"),
    ("dirichlet", {"min_samples": 601}, {}, "data.partition.min_samples=601: .* allow at most 600"),
    ("dirichlet", {"min_samples": 50_000}, ONE_CLASS, BETA),
    ("neighbours", {"classes_per_client": 10}, {}, f"{CLASSES}=10: .* allowed: 1..9"),
    ("neighbours", MANY_CHANGED, {}, "data.partition.changed_classes=3: .*client=8; allowed: 1..2"),
    ("target", {"classes_per_client": 6}, {}, f"{CLASSES}=6: .* allowed: 1..5"),
    ("target", {"similar_classes": 5}, {}, "data.partition.similar_classes=5: .*allowed: 0..4"),
    ("target", FEW_SIMILAR, {}, "data.partition.similar_classes=1: .*client=6; allowed: 2..6"),
    ("target", {}, {"clients": 2}, "data.clients=2: .*3 or more"),
    ("pairs", {}, {"clients": 7}, "data.clients=7: pairs cannot divide 10 classes; allowed: 2, 4, 10, 20"),
    ("pairs", {}, {"per_client": 31}, "data.per_client=31: .* of the 2 classes of a pair, at most 600"),
    ("pathological", {}, {"clients": 4000}, "data.clients=4000: class 0 has 600 samples for 800 clients"),
    ("pathological", {"balanced": True}, {"clients": 4000}, "data.clients=4000: .* 800 .* of at least 1"),
    ("mixture", {"components": 11}, {}, "data.partition.components=11: .*allowed: 1..10, or -1"),
    ("pachinko", {}, {}, "data.partition.coarse_classes=null .*has 10 classes; allowed: 1..10"),
    ("pachinko", {"coarse_classes": 5}, {"per_client": 601}, "data.per_client=601: .* at most 600"),
    ("given", {}, {"clients": 11}, "data.clients=11: the source has 10 clients; allowed: 1..10"),
    ("given", {}, {"per_client": 20}, "data.per_client=20: .*data.per_client=null"),
    ("given", {}, {"is_test": TEN_OWNERS != 3}, "client 0 of the source would have no training samples"),
    ("given", {}, {"owner": None}, "data.partition.name=given: this data.source has no clients .*; allowed:"),
    ("iid", {}, {"clients": 6001}, "data.clients=6001: the data has 6000 samples"),
    ("iid", {}, {"per_client": 601}, "data.per_client=601: the data allows at most 600"),
]


@pytest.mark.parametrize(("name", "options", "arguments", "message"), REFUSALS)
def test_refusals_name_key_value_and_what_is_allowed(
    name: str, options: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"^{message}") as caught:
        assign(name, options, **arguments)
    assert "\n" not in str(caught.value)
