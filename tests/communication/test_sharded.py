"""Rows of all clients spread over the workers: worked-out sums, and the bits of one rank that has them all.

Tests marked mpi run under any number of ranks: see test_under_mpirun.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from harness import random
from torch import Tensor

from hpcfl.communication import sharded
from hpcfl.communication.communicator import Communicator, open_world
from hpcfl.communication.sharded import ShardedRows
from hpcfl.parameters import Layer

N = 37
LAYERS = (Layer("wide", 0, 5000, 0, 0), Layer("narrow", 5000, 5037, 0, 0))
SIZE = LAYERS[-1].stop
COHORT = [0, 3, 5, 16, 20, 21, 36]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "BLOCK_CLIENTS", 4)
    monkeypatch.setattr(sharded, "MEMBERS_AT_ONCE", 3)


@pytest.fixture(params=[SIZE, 2**27])
def shared_world(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    world = Communicator(open_world()._comm, max_elements=request.param)
    world.shard_unit = 4
    yield world
    world.barrier()


def models() -> Tensor:
    return random(N, SIZE, seed=1)


def rows_of(world: Communicator, whole: Tensor) -> ShardedRows:
    own = world.shard(N)
    return ShardedRows(world, whole[own.start : own.stop].clone(), LAYERS, N)


def called(world: Communicator, rows: ShardedRows, hook: Callable[[], Tensor | bool]) -> Tensor | bool | None:
    """Call on rank 0 while the others serve."""
    if not world.is_server:
        rows.serve()
        return None
    found = hook()
    rows.end()
    return found


def alone(hook: Callable[[ShardedRows], Tensor]) -> Tensor:
    """Return what one rank that has all rows finds."""
    return hook(rows_of(Communicator(), models()))


def by_layer(whole: Tensor) -> Sequence[Tensor]:
    return [whole[:, layer.start : layer.stop].double() for layer in LAYERS]


@pytest.mark.mpi
@pytest.mark.parametrize("count", [1, 7])
def test_mixtures_are_the_weighted_sums_by_layer(shared_world: Communicator, count: int) -> None:
    weights = random(count, len(LAYERS), N).softmax(dim=-1)
    rows = rows_of(shared_world, models())
    mixed = called(shared_world, rows, lambda: rows.mix(weights))
    if mixed is None:
        return
    parts = [weights[:, number].double() @ part for number, part in enumerate(by_layer(models()))]
    expected = torch.cat(parts, dim=1)
    assert isinstance(mixed, Tensor)
    assert torch.allclose(mixed.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(mixed, alone(lambda one: one.mix(weights)))


@pytest.mark.mpi
@pytest.mark.parametrize("count", [1, 7])
def test_products_are_those_of_each_layer_with_each_client(shared_world: Communicator, count: int) -> None:
    vectors = random(count, SIZE, seed=2)
    rows = rows_of(shared_world, models())
    products = called(shared_world, rows, lambda: rows.products(vectors))
    if products is None:
        return
    pairs = zip(by_layer(vectors), by_layer(models()), strict=True)
    expected = torch.stack([vector @ model.T for vector, model in pairs], dim=1)
    assert isinstance(products, Tensor)
    assert torch.allclose(products.double(), expected, rtol=1e-5, atol=2e-4)
    assert torch.equal(products, alone(lambda one: one.products(vectors)))


@pytest.mark.mpi
def test_rows_that_are_put_are_those_that_are_mixed(shared_world: Communicator) -> None:
    rows, new = rows_of(shared_world, models()), random(len(COHORT), SIZE, seed=3)
    one_hot = torch.eye(N).unsqueeze(1).expand(N, len(LAYERS), N)

    def put_and_read() -> Tensor:
        rows.put(COHORT, new)
        return rows.mix(one_hot)

    found = called(shared_world, rows, put_and_read)
    expected = models()
    expected[COHORT] = new
    if shared_world.is_server:
        assert isinstance(found, Tensor)
        assert torch.equal(found, expected)


@pytest.mark.mpi
def test_shards_begin_with_blocks_and_hold_all_clients(shared_world: Communicator) -> None:
    shards = [shared_world.shard(N, worker) for worker in range(shared_world.num_workers)]
    assert [client for shard in shards for client in shard] == list(range(N))
    assert all(shard.start % 4 == 0 or shard.start == N for shard in shards)
    blocks = [-(-len(shard) // 4) for shard in shards]
    assert max(blocks) - min(blocks) <= 1
    homes = shared_world.homes(COHORT, N)
    assert all(client in shards[home] for client, home in zip(COHORT, homes, strict=True))
