"""Messages arrive as they were sent, for any number of ranks and any size of blocks.

Shapes: N = 5 clients, P = 9 trainable numbers in L = 3 layers of 3, 2 and 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from uploads import GivenUpload

from hpcfl.communication.aggregation import cluster_means, layer_means, mean_of, weighted_mean, weighted_means
from hpcfl.communication.channel import Channel
from hpcfl.communication.communicator import Communicator, open_world
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.traffic import count_bytes
from hpcfl.communication.upload import Upload
from hpcfl.parameters import Layer, Tensors

LAYERS = (Layer("a", 0, 3, 0, 0), Layer("b", 3, 5, 0, 2), Layer("c", 5, 9, 2, 2))
SIZES = torch.tensor([3, 2, 4])
N, P, L = 5, 9, 3
COHORTS = [(0, 1, 2, 3, 4), (1, 4), (2,)]
CUTS = [(COHORTS[0], 2 * P), (COHORTS[1], 40), (COHORTS[2], 2**20)]
"""Cohorts, and the most numbers that a block may have: from the largest row to all."""


class CountingWorld(Communicator):
    """A world that counts the numbers it is given to move, by type."""

    def __init__(self, max_elements: int) -> None:
        super().__init__(open_world()._comm)
        self.limit_pieces(max_elements)
        self.moved: Counter[str] = Counter()
        self.largest = 0

    def _count(self, kind: str, counts: Sequence[int], dtype: torch.dtype) -> None:
        self.moved[f"{kind} {str(dtype).removeprefix('torch.')}"] += sum(counts)
        self.largest = max(self.largest, sum(counts))

    def broadcast(self, tensor: Tensor) -> None:
        self._count("broadcast", [tensor.numel()], tensor.dtype)
        super().broadcast(tensor)

    def scatter(self, send: Tensor | None, counts: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._count("scatter", counts, dtype)
        return super().scatter(send, counts, dtype)

    def gather(self, send: Tensor, counts: Sequence[int]) -> Tensor | None:
        self._count("gather", counts, send.dtype)
        return super().gather(send, counts)


def cohort_of(clients: tuple[int, ...]) -> Cohort:
    return Cohort(3, clients, torch.tensor([10 * client + 1 for client in clients]))


def rows(cohort: Cohort, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows [S, *shape] that identify client and position: 1000 * client + 1, 2, 3, ..."""
    numbers = torch.arange(1, 1 + int(np.prod(shape))).view(shape)
    return torch.stack([1000 * client + numbers for client in cohort.clients]).to(dtype)


def chosen(cohort: Cohort) -> Tensor:
    """Return which layers of each client travel [S, L]: client i without layer i modulo 4."""
    return torch.tensor([[layer != client % 4 for layer in range(L)] for client in cohort.clients])


def masked(tensor: Tensor, keep: Tensor) -> Tensor:
    """Set layers that did not travel to zero: tensor [S, ..., P], keep [L] or [S, L]."""
    columns = keep.repeat_interleave(SIZES, dim=-1)
    while 1 < columns.dim() < tensor.dim():
        columns = columns.unsqueeze(1)
    return torch.where(columns, tensor, torch.zeros((), dtype=tensor.dtype))


def masked_message(message: Message) -> Message:
    """Return a message whose layers that do not travel are zero."""

    def of(tensors: Tensors) -> Tensors:
        return tensors | {n: masked(tensors[n], k) for n, k in message.layer_mask.items() if n in tensors}

    return replace(message, shared=of(message.shared), per_client=of(message.per_client))


def full_message(cohort: Cohort) -> Message:
    """Return a message with a tensor of every kind."""
    return Message(
        shared={
            "plain": torch.arange(P, dtype=torch.float32),
            "part": torch.arange(P, dtype=torch.float32) + 1,
            "ids": torch.tensor([2**40, -3]),
            "double": torch.tensor([[0.1], [1e300]], dtype=torch.float64),
        },
        per_client={
            "theta": rows(cohort, P),
            "some": rows(cohort, P),
            "branches": rows(cohort, 2, P),
            "decisions": rows(cohort, 3, dtype=torch.int64),
            "precise": rows(cohort, 2, dtype=torch.float64) + 0.1,
            "figure": rows(cohort),
        },
        layer_mask={
            "part": torch.tensor([True, False, True]),
            "some": chosen(cohort),
            "branches": torch.tensor([False, True, True]),
        },
        num_clients=len(cohort),
    )


Place = Callable[[Cohort, Communicator], Cohort]


def at_home(cohort: Cohort, world: Communicator) -> Cohort:
    return cohort


def away_from_home(cohort: Cohort, world: Communicator) -> Cohort:
    """Return the cohort with workers in an order unlike that of the shards."""
    workers = tuple(7 * position**2 % world.num_workers for position in range(len(cohort)))
    return replace(cohort, workers=workers)


def own_part(cohort: Cohort, world: Communicator) -> list[int]:
    """Return the positions of this rank's clients, counted one by one."""
    shard = world.shard(N)
    homes = [client in shard for client in cohort.clients]
    is_own = homes if cohort.workers is None else [w == world.worker_index for w in cohort.workers]
    return [position for position, own in enumerate(is_own) if own and world.is_worker]


def rows_of(message: Message, own: list[int]) -> Message:
    """Return the message of some of its clients."""
    return message.select(own) if own else Message(num_clients=0)


@pytest.mark.mpi
@pytest.mark.parametrize(("clients", "max_elements"), CUTS)
@pytest.mark.parametrize("place", [at_home, away_from_home])
def test_a_download_gives_each_rank_its_rows_and_an_upload_the_server_all_in_client_order(
    clients: tuple[int, ...], max_elements: int, place: Place
) -> None:
    world, cohort = CountingWorld(max_elements), cohort_of(clients)
    cohort = place(cohort, world)
    sent = full_message(cohort)
    channel = Channel(world, LAYERS, N)
    own = own_part(cohort, world)
    received = channel.down(full_message(cohort) if world.is_server else None, cohort)
    assert received.num_clients == len(own)
    assert channel.own(cohort) == own
    assert list(received.shared) == list(sent.shared)
    assert list(received.per_client) == list(sent.per_client)
    for name, tensor in masked_message(sent).shared.items():
        assert received.shared[name].dtype == tensor.dtype
        assert torch.equal(received.shared[name], tensor)
        assert received[name].shape == (received.num_clients, *tensor.shape)
    for name, tensor in masked_message(sent).per_client.items():
        assert received.per_client[name].dtype == tensor.dtype
        assert torch.equal(received.per_client[name], tensor[own])
    assert {name: keep.tolist() for name, keep in received.layer_mask.items()} == {
        "part": [True, False, True],
        "some": sent.layer_mask["some"][own].tolist(),
        "branches": [False, True, True],
    }

    masks = {name: sent.layer_mask[name] for name in ("some", "branches")}
    whole = replace(sent, shared={}, layer_mask=masks)
    blocks = list(channel.up(rows_of(whole, own), cohort))
    assert world.largest <= max_elements
    if not world.is_server:
        assert blocks == []
        return
    positions = [position for part, _ in blocks for position in range(len(cohort))[part]]
    assert positions == list(range(len(cohort)))
    numbers_a_client = sum(tensor[0].numel() for tensor in whole.per_client.values())
    most = max(1, max_elements // numbers_a_client)
    assert all(block.num_clients == part.stop - part.start <= most for part, block in blocks)
    for name, tensor in whole.per_client.items():
        arrived = torch.cat([block.per_client[name] for _, block in blocks])
        assert arrived.dtype == tensor.dtype
        expected = masked_message(whole).per_client[name]
        assert torch.equal(arrived, expected)
    assert torch.equal(torch.cat([block.layer_mask["some"] for _, block in blocks]), whole.layer_mask["some"])
    assert all(block.layer_mask["branches"].tolist() == [False, True, True] for _, block in blocks)


@pytest.mark.mpi
def test_only_kept_layers_are_sent() -> None:
    world, cohort = CountingWorld(2**20), cohort_of(COHORTS[0])
    keep = {"some": chosen(cohort), "body": torch.tensor([True, True, False])}
    whole = Message({}, {"some": rows(cohort, P), "body": rows(cohort, 2, P)}, keep, len(cohort))
    kept = int((keep["some"] * SIZES).sum()) + len(cohort) * 2 * 5
    channel = Channel(world, LAYERS, N)
    channel.down(whole if world.is_server else None, cohort)
    assert world.moved["scatter float32"] == kept < 3 * P * len(cohort)
    assert world.moved["broadcast float32"] == 0
    own = own_part(cohort, world)
    channel.up(rows_of(whole, own), cohort).collect()
    # the pure server states the type of its empty part, so every rank counts alike
    assert world.moved["gather float32"] == kept
    shared = Message({"part": torch.arange(P).float()}, {}, {"part": torch.tensor([True, False, True])})
    shared.num_clients = len(cohort)
    channel.down(shared if world.is_server else None, cohort)
    assert world.moved["broadcast float32"] == 3 + 4


@pytest.mark.mpi
def test_a_half_read_upload_can_be_drained() -> None:
    world, cohort = CountingWorld(P), cohort_of(COHORTS[0])
    own = own_part(cohort, world)
    channel = Channel(world, LAYERS, N)
    upload = channel.up(rows_of(Message(per_client={"theta": rows(cohort, P)}), own), cohort)
    if world.is_server:
        assert next(iter(upload))[0] == slice(0, 1)
    upload.drain()
    upload.drain()
    assert world.maximum(world.rank) == world.size - 1
    assert world.moved["gather float32"] == N * P


@pytest.mark.mpi
def test_each_tensor_of_an_upload_is_read_once_in_any_order() -> None:
    world, cohort = CountingWorld(2**20), cohort_of(COHORTS[0])
    own = own_part(cohort, world)
    tensors = {name: rows(cohort, P) + place for place, name in enumerate("abcd")}
    whole = Message(per_client=tensors, num_clients=len(cohort))
    upload = Channel(world, LAYERS, N).up(rows_of(whole, own), cohort)
    if world.is_server:
        assert torch.equal(upload.collect("b")["b"], whole.per_client["b"])
        weighted_means(upload, {"c": cohort.num_samples})
        with pytest.raises(ValueError, match="b: not in this upload, or read before"):
            upload.collect("a", "b")
        assert list(upload.collect()) == ["a", "d"]
        assert list(upload.collect()) == []
    upload.drain()
    assert world.maximum(world.rank) == world.size - 1


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("clients", "place"),
    [
        (COHORTS[0], at_home),
        (COHORTS[0], away_from_home),
        (COHORTS[1], at_home),
        (COHORTS[2], away_from_home),
    ],
)
def test_means_over_ranks_have_the_bits_of_one_rank(clients: tuple[int, ...], place: Place) -> None:
    """And no client's row reaches the server."""
    world = CountingWorld(50)
    cohort = place(cohort_of(clients), world)
    own = own_part(cohort, world)
    scale = 10.0 ** torch.arange(-9, 0).repeat(2, 1)
    keep = {"body": torch.tensor([True, True, False]), "some": chosen(cohort)}
    tensors = {"theta": rows(cohort, 2, P) * scale, "body": rows(cohort, P), "some": rows(cohort, P)}
    whole = Message({}, tensors, keep, len(cohort))
    weights = {"theta": 1.0 + torch.arange(len(cohort)), "body": cohort.num_samples}
    layered = torch.rand(len(cohort), L, generator=torch.Generator().manual_seed(1)) * keep["some"]
    upload = Channel(world, LAYERS, N).up(rows_of(whole, own), cohort)
    if not world.is_server:
        upload.drain()
        return

    def means_of(upload: Upload) -> dict[str, Tensor]:
        old = {"some": torch.full((P,), 5.0)}
        return weighted_means(upload, weights) | layer_means(upload, {"some": layered}, LAYERS, old)

    means = means_of(upload)
    upload.drain()
    assert world.moved["gather float32"] == 0
    expected = means_of(GivenUpload([(slice(0, len(cohort)), masked_message(whole))]))
    for name, mean in means.items():
        assert torch.equal(mean, expected[name]), name


def upload_of(tensor: Tensor, *cuts: int) -> Upload:
    blocks = [slice(start, stop) for start, stop in zip((0, *cuts), (*cuts, len(tensor)), strict=True)]
    return GivenUpload([(block, Message(per_client={"theta": tensor[block]})) for block in blocks])


def test_blocks_are_joined_and_their_weighted_mean_equals_that_by_hand() -> None:
    rows = torch.tensor([[8.0, 0.0], [0.0, 16.0], [4.0, -2.0]])
    assert weighted_mean(upload_of(rows, 2), "theta", torch.tensor([1, 3, 4])).tolist() == [3.0, 5.0]
    assert torch.equal(upload_of(rows, 1, 2).collect()["theta"], rows)
    # whole numbers are rounded
    assert weighted_mean(upload_of(torch.full((3, 2), 7)), "theta", torch.ones(3)).tolist() == [7, 7]


WEIGHTS = torch.tensor([3, 1, 4, 1, 5, 9, 2])


def test_a_weighted_mean_does_not_depend_on_order_or_blocks_and_is_the_nearest_float32() -> None:
    tensor = torch.randn(7, 1001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # from 1e-6 to 1e2, so that the smallest have 27 bits less than the largest
    tensor = (tensor * 10 ** torch.linspace(-6, 2, 1001)).float()
    means = [weighted_mean(upload_of(tensor, *cuts), "theta", WEIGHTS) for cuts in ((), (1,), (3, 5))]
    order = torch.tensor([6, 2, 0, 3, 1, 5, 4])
    means.append(weighted_mean(upload_of(tensor[order]), "theta", WEIGHTS[order]))
    assert all(torch.equal(value, means[0]) for value in means)
    exact = (WEIGHTS.double() @ tensor.double() / 25).float()
    # float64 itself rounds now and then to the other neighbour
    torch.testing.assert_close(means[0], exact, rtol=2**-23, atol=1e-15)
    assert (means[0] == exact).float().mean() > 0.99


@pytest.mark.parametrize(
    ("largest", "weights"),
    [
        *((largest, WEIGHTS) for largest in (1e-45, 1e-38, 3.4e38)),
        *((1.0, torch.ones(count)) for count in (5, 8, 10, 1000)),
    ],
)
def test_the_mean_of_many_equal_numbers_of_any_size_is_the_number(largest: float, weights: Tensor) -> None:
    numbers = torch.tensor([largest, -largest, 0.0, 0.3 * largest]).repeat(len(weights), 1)
    mean = weighted_mean(upload_of(numbers), "theta", weights)
    torch.testing.assert_close(mean, numbers[0], rtol=2**-23, atol=0)


def test_nan_and_infinity_stay_in_their_column() -> None:
    rows = torch.tensor([[1.0, torch.nan, 3.0, torch.inf], [3.0, 2.0, 1.0, -torch.inf]])
    mean = weighted_mean(upload_of(rows), "theta", torch.ones(2))
    torch.testing.assert_close(mean, torch.tensor([2.0, torch.nan, 2.0, torch.nan]), equal_nan=True)


def test_a_client_of_weight_zero_changes_nothing_however_large_its_numbers_are() -> None:
    rows = torch.tensor([[1.0, 2.0, 0.1], [1e30, torch.inf, torch.nan]])
    assert torch.equal(weighted_mean(upload_of(rows), "theta", torch.tensor([2, 0])), rows[0])
    old = {"theta": torch.zeros(2, 3)}
    rows[1] = 1e30
    means = cluster_means(upload_of(rows), ["theta"], torch.ones(2), torch.tensor([0, 1]), old)["theta"]
    assert torch.equal(means, rows)
    rows, weights = rows[:, :1].repeat(1, P), torch.tensor([[1, 1, 1], [0, 1e-30, 0]])
    mean = layer_mean(rows, weights, torch.zeros(P))
    assert mean.tolist() == [1.0] * 3 + [2.0] * 2 + [1.0] * 4


def test_a_large_number_reduces_the_precision_of_its_own_block_only() -> None:
    rows = torch.full((2, 100_000), 1e-12)
    rows[0, 70_000] = 1e6
    mean = weighted_mean(upload_of(rows), "theta", torch.ones(2))
    torch.testing.assert_close(mean[:60_000], rows[1, :60_000], rtol=2**-23, atol=0)
    assert mean[70_000] == 5e5


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nan_weights_give_nan(wrong: float) -> None:
    mean = weighted_mean(upload_of(torch.ones(3, 2)), "theta", torch.tensor([1.0, wrong, 1.0]))
    assert mean.isnan().all()
    assert weighted_mean(upload_of(torch.ones(2, 2)), "theta", torch.zeros(2)).isnan().all()
    weights = torch.ones(2, L)
    weights[1, 0] = wrong
    of_layers = layer_mean(torch.ones(2, P), weights, torch.zeros(P))
    assert of_layers[:3].isnan().all()
    assert (of_layers[3:] == 1).all()


def layer_mean(tensor: Tensor, weights: Tensor, old: Tensor, total: Tensor | None = None) -> Tensor:
    return layer_means(upload_of(tensor), {"theta": weights}, LAYERS, {"theta": old}, total)["theta"]


def test_a_layer_mean_equals_that_by_hand() -> None:
    # the second client alone has layer b, and nobody has layer c
    weights = torch.tensor([[1, 0, 0], [3, 2, 0]])
    old = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, 1e-30, -0.0, 9.0])
    rows = [[8.0, 4.0, 0.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0], [0.0, 8.0, 4.0, 5.0, 6.0, 7.0, 7.0, 7.0, 7.0]]
    mean = layer_mean(torch.tensor(rows), weights, old)
    assert mean.tolist() == [2.0, 7.0, 3.0, 5.0, 6.0, *old[5:].tolist()]
    assert mean[5:].numpy().tobytes() == old[5:].numpy().tobytes()


def test_a_layer_mean_has_weights_for_each_branch() -> None:
    weights = torch.tensor([[[1, 1, 1], [0, 1, 0]], [[1, 3, 0], [2, 0, 0]]])
    rows = torch.tensor([[[1.0] * P, [2.0] * P], [[3.0] * P, [5.0] * P]])
    mean = layer_mean(rows, weights, torch.full((2, P), -1.0))
    first, second = [2.0] * 3 + [2.5] * 2 + [1.0] * 4, [5.0] * 3 + [2.0] * 2 + [-1.0] * 4
    assert mean.tolist() == [first, second]


def test_a_layer_mean_may_be_divided_by_another_total() -> None:
    old, rows = torch.full((P,), -1.0), torch.tensor([[2.0] * P, [6.0] * P])
    mean = layer_mean(rows, torch.tensor([[1, 2, 0], [1, 0, 0]]), old, torch.tensor([4, 4, 4]))
    assert mean.tolist() == [2.0] * 3 + [1.0] * 2 + [0.0] * 4


def test_numbers_of_weight_zero_are_left_out_of_a_layer_mean_even_if_they_are_nan() -> None:
    old = torch.tensor([torch.nan] * 5 + [torch.inf] * 4)
    mean = layer_mean(torch.tensor([[1.0] * 5 + [torch.nan] * 4]), torch.tensor([[1, 1, 0]]), old)
    assert mean.tolist() == [1.0] * 5 + [torch.inf] * 4


def test_means_of_clusters_equal_those_by_hand_and_one_cluster_has_the_weighted_mean_to_the_bit() -> None:
    rows = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([3, 1, 4, 1, 5])
    old = {"theta": torch.full((4, 30), 7.0)}
    means = cluster_means(upload_of(rows, 2), ["theta"], weights, torch.tensor([2, 0, 2, 2, 0]), old)["theta"]
    torch.testing.assert_close(means[2], (3 * rows[0] + 4 * rows[2] + rows[3]) / 8)
    torch.testing.assert_close(means[0], (rows[1] + 5 * rows[4]) / 6)
    assert (means[[1, 3]] == 7).all()
    one = cluster_means(upload_of(rows), ["theta"], weights, torch.zeros(5, dtype=torch.int64), old)["theta"]
    assert torch.equal(one[0], weighted_mean(upload_of(rows), "theta", weights))


def test_a_mean_of_rows_equals_that_by_hand() -> None:
    assert mean_of([torch.tensor([8.0]), torch.tensor([4.0]), torch.tensor([3.0])]).tolist() == [5.0]


def test_bytes_are_counted_by_client_and_layer() -> None:
    traffic = count_bytes(Message(shared={"theta": torch.zeros(P)}, num_clients=3), LAYERS)
    assert traffic.layers.tolist() == [[12, 8, 16]] * 3
    assert traffic.buffers.tolist() == traffic.indices.tolist() == [0, 0, 0]
    # layers left out are not counted; a choice of each client's own is sent
    keep = torch.tensor([[True, False, True], [False, False, True]])
    message = Message(per_client={"theta": torch.zeros(2, 2, P)}, layer_mask={"theta": keep}, num_clients=2)
    traffic = count_bytes(message, LAYERS)
    assert traffic.layers.tolist() == [[24, 0, 32], [0, 0, 32]]
    assert traffic.indices.tolist() == [8, 16]
    message.layer_mask = {"theta": torch.tensor([False, True, True])}
    traffic = count_bytes(message, LAYERS)
    assert traffic.layers.tolist() == [[0, 16, 32]] * 2
    assert traffic.indices.tolist() == [0, 0]
