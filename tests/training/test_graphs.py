"""Recorded steps are plain steps. A recorder that does the step itself stands in for a GPU's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from harness import make_network, make_place, spread
from torch import Tensor

from hpcfl.training.clients import Clients, Workplace
from hpcfl.training.engines import BatchedEngine
from hpcfl.training.graphs import GraphedSGD, Step
from hpcfl.training.settings import TrainConfig

SIZES = (13, 11, 8, 3, 2)
"""Mini-batches of four groups, some of which come again with other members."""


class Recorder:
    """Does a step three times, as a warm-up, and returns the step; counts recordings and replays."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def __call__(self, step: Step) -> Step:
        self.counts["recordings"] += 1
        for _ in range(3):
            step()

        def replay() -> None:
            self.counts["replays"] += 1
            step()

        return replay


def places(sizes: tuple[int, ...], recorder: Recorder, **keys: float) -> tuple[Workplace, Workplace]:
    """Return the same place without and with recorded steps."""
    train = TrainConfig.model_validate({"batch_size": 4, "local_epochs": 3, "lr": 0.1} | keys)
    plain = make_place(make_network(batchnorm=True), sizes, train, clients_at_once=len(sizes))
    assert isinstance(plain.engine, BatchedEngine)
    return plain, replace(plain, graphs=GraphedSGD(plain.engine, train, recorder))


def trained(place: Workplace, theta: Tensor, buffers: Tensor, round: int = 0, **keys: object) -> list[Tensor]:
    clients = Clients(place, place.clients, round)
    clients.buffers = buffers.clone()
    first = clients.sgd(theta, **keys)  # type: ignore[arg-type]
    second = clients.sgd(first.theta, epochs=1, purpose="more")
    return [first.theta, first.steps, second.theta, clients.buffers, clients.steps, clients.loss_sum]


@pytest.mark.parametrize("keys", [{}, {"momentum": 0.9, "weight_decay": 0.01, "lr_decay": 0.5}])
@pytest.mark.parametrize("sizes", [SIZES, (8, 8, 8)])
def test_recorded_steps_are_plain_steps(sizes: tuple[int, ...], keys: dict[str, float]) -> None:
    recorder = Recorder()
    plain, recorded = places(sizes, recorder, **keys)
    theta, buffers = spread(make_network(batchnorm=True), len(sizes))
    for round in (0, 1):
        ours, theirs = (trained(place, theta, buffers, round) for place in (recorded, plain))
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
        # what was returned stays when the memory is used again
        kept = [tensor.clone() for tensor in ours]
        trained(recorded, theta + 1, buffers, round)
        assert all(torch.equal(one, other) for one, other in zip(ours, kept, strict=True))


def test_there_is_one_recording_for_each_shape_of_step() -> None:
    recorder = Recorder()
    _, recorded = places((8, 8, 8), recorder)
    theta, buffers = spread(make_network(batchnorm=True), 3)
    trained(recorded, theta, buffers)
    assert recorder.counts == Counter(recordings=1, replays=8)
    trained(recorded, theta, buffers, trained=slice(0, 100))
    assert recorder.counts["recordings"] == 2
    trained(recorded, theta, buffers, lr=0.01)
    # another step size, and back
    assert recorder.counts["recordings"] == 4


def test_a_gradient_of_a_methods_own_is_not_recorded() -> None:
    recorder = Recorder()
    plain, recorded = places((8, 8), recorder)
    theta, buffers = spread(make_network(batchnorm=True), 2)
    ends = []
    for place in (plain, recorded):
        clients = Clients(place, range(2), 0)
        clients.buffers = buffers.clone()
        ends.append(clients.sgd(theta, extra_gradient=lambda weights, _: weights).theta)
        ends.append(clients.sgd(theta, gradient=clients.plain_gradient).theta)
    assert torch.equal(ends[0], ends[2])
    assert torch.equal(ends[1], ends[3])
    assert recorder.counts.total() == 0


def test_what_cannot_be_recorded_is_done_plainly() -> None:
    def refuse(step: Step) -> Step:
        step()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    plain, recorded = places((8, 8), Recorder())
    assert isinstance(plain.engine, BatchedEngine)
    recorded = replace(recorded, graphs=GraphedSGD(plain.engine, plain.train, refuse))
    theta, buffers = spread(make_network(batchnorm=True), 2)
    with pytest.warns(
        UserWarning, match=r"not recorded here \(operation not permitted when stream is capturing\)"
    ):
        ours = trained(recorded, theta, buffers)
    for one, other in zip(ours, trained(plain, theta, buffers), strict=True):
        assert torch.equal(one, other)

    def full(step: Step) -> Step:
        raise torch.OutOfMemoryError("CUDA out of memory")

    recorded = replace(recorded, graphs=GraphedSGD(plain.engine, plain.train, full))
    with pytest.raises(torch.OutOfMemoryError):
        trained(recorded, theta, buffers)
