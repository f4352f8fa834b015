"""Rows of all clients distributed over the workers: sums by hand, and the bits of one rank that has them all.

Tests marked mpi run under any number of ranks: see test_under_mpirun.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
    yield world
    world.barrier()


def models() -> Tensor:
    return random(N, SIZE, seed=1)


def rows_of(world: Communicator, whole: Tensor) -> ShardedRows:
    own = world.shard(N, unit=4)
    rows = ShardedRows("theta", LAYERS)
    rows.attach(world, whole[own.start : own.stop].clone(), N)
    return rows


def called(world: Communicator, rows: ShardedRows, hook: Callable[[], Any]) -> Any:
    """Call on rank 0 while the others serve."""
    if not world.is_server:
        rows.serve()
        return None
    found = hook()
    rows.end()
    return found


def by_layer(whole: Tensor) -> Sequence[Tensor]:
    return [whole[:, layer.start : layer.stop].double() for layer in LAYERS]


@pytest.mark.mpi
@pytest.mark.parametrize("count", [1, 7])
def test_mixtures_and_products_of_layers_have_the_bits_of_one_rank(
    shared_world: Communicator, count: int
) -> None:
    weights, vectors = random(count, len(LAYERS), N).softmax(dim=-1), random(count, SIZE, seed=2)
    rows, alone = rows_of(shared_world, models()), rows_of(Communicator(), models())
    found = called(shared_world, rows, lambda: (rows.mix(weights), rows.products(vectors)))
    if found is None:
        return
    mixed, products = found
    pairs = list(zip(by_layer(vectors), by_layer(models()), strict=True))
    expected = torch.cat([weights[:, n].double() @ model for n, (_, model) in enumerate(pairs)], dim=1)
    assert torch.allclose(mixed.double(), expected, rtol=1e-5, atol=1e-6)
    expected = torch.stack([vector @ model.T for vector, model in pairs], dim=1)
    assert torch.allclose(products.double(), expected, rtol=1e-5, atol=2e-4)
    assert torch.equal(mixed, alone.mix(weights))
    assert torch.equal(products, alone.products(vectors))


@pytest.mark.mpi
def test_stored_rows_are_the_mixed_ones(shared_world: Communicator) -> None:
    rows, new = rows_of(shared_world, models()), random(len(COHORT), SIZE, seed=3)
    one_hot = torch.eye(N).unsqueeze(1).expand(N, len(LAYERS), N)

    def put_and_read() -> Tensor:
        rows.put(COHORT, new)
        return rows.mix(one_hot)

    found = called(shared_world, rows, put_and_read)
    expected = models()
    expected[COHORT] = new
    assert not shared_world.is_server or torch.equal(found, expected)
