"""Whole runs on a marked device: every tensor on its side, and no wait of host and device between two steps.

See marked_device.py. Tests with a GPU are those of test_gpu.py.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from bits import MEETS_ALL_SOON, VARIANTS, contents, method_settings, run_here, tiny_settings, write_digits
from harness import Run, make_network, make_place, spread
from marked_device import CPU, DEVICE, Marked, MixedDevicesError, marked_device
from torch import Tensor, nn
from torch.func import grad, vmap

from hpcfl.communication.messages import Message
from hpcfl.communication.world import World
from hpcfl.main import FINISHED, STOPPED
from hpcfl.methods import METHODS
from hpcfl.methods.fedavg import FedAvg
from hpcfl.parameters import ParameterLayout, Tensors
from hpcfl.simulation.loop import Simulation
from hpcfl.training.batches import Batch
from hpcfl.training.clients import Clients, Workplace
from hpcfl.training.engines import BatchedEngine, LoopEngine
from hpcfl.training.settings import TrainConfig

OPERATORS_OF_A_STEP = 105
"""Most operators, views left out, of one step of the batched engine on two convolutions with BatchNorm, with
momentum; it is 102 with torch 2.13."""

VIEWS = frozenset(
    (
        *(
            "_reshape_alias",
            "_unsafe_view",
            "alias",
            "as_strided",
            "detach",
            "expand",
            "permute",
            "select",
            "slice",
        ),
        *("split_with_sizes", "squeeze", "split", "t", "transpose", "unbind", "unsqueeze", "view"),
    )
)
"""Operators that start no kernel."""


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Marked]:
    """Give all workers the marked device."""
    monkeypatch.setattr(World, "device", lambda *_: DEVICE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**33, 2**34))
    with marked_device() as marked:
        yield marked


# What the device finds


def test_tensors_are_where_they_were_put(marked: Marked) -> None:
    there = torch.ones(3, 4).to(DEVICE)
    assert there.device == (there + 1).device == there[0].device == DEVICE
    assert there.is_cuda
    assert torch.zeros(2).device == torch.zeros_like(there, device="cpu").device == there.cpu().device == CPU
    for made in (torch.zeros_like(there), there.new_ones(2), torch.arange(3, device=there.device)):
        assert made.device == DEVICE
    module = copy.deepcopy(nn.BatchNorm2d(4).to(DEVICE))
    assert module.weight.device == module.get_buffer("running_mean").device == DEVICE
    leaf = there.clone().requires_grad_()
    (leaf * leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.device == DEVICE
    assert vmap(grad(lambda row: (row * row).sum()))(there).device == DEVICE


def test_tensors_of_two_devices_do_not_mix(marked: Marked) -> None:
    here, there = torch.ones(4), torch.ones(3, 4, device=DEVICE)
    for mix in (
        lambda: there + here,
        lambda: here * there.sum(),
        lambda: torch.stack([there[0], here]),
        lambda: there.index_put_((torch.tensor(0, device=DEVICE),), here),
        lambda: here[torch.tensor([0], device=DEVICE)],
        lambda: torch.randn(3, generator=torch.Generator(), device=DEVICE),
        lambda: vmap(grad(lambda row: (row * torch.ones(4)).sum()))(there),
        lambda: vmap(lambda row: row + here)(there),
    ):
        with pytest.raises(MixedDevicesError):
            mix()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    # CUDA takes numbers, and CPU tensors without axes
    assert (there * 2 + torch.tensor(0.5)).tolist() == [[2.5] * 4] * 3


def test_waits_and_transfers_are_counted(marked: Marked) -> None:
    there = torch.arange(3.0).to(DEVICE)
    assert marked.transfers == Counter({"to device": 1})
    there[[0, 2]].cpu()
    torch.tensor([1.0], device=DEVICE).copy_(torch.zeros(1))
    assert marked.transfers == Counter({"to device": 4, "to host": 1})
    assert marked.waits.total() == 0
    there[there > 0]
    there.nonzero()
    torch.equal(there, there)
    there.tolist()
    assert [float(there.sum()), int(there.sum()), bool(there.sum())] == [3.0, 3, True]
    assert marked.waits == Counter(
        {"index": 1, "nonzero": 1, "equal": 1, "tolist": 1, "_local_scalar_dense": 3}
    )
    there[there > 0] = 0.0
    there[torch.arange(2, device=DEVICE)] = torch.ones(2, device=DEVICE)
    there.where(there > 0, 0.0).to(DEVICE)
    assert marked.waits.total() == 7
    assert marked.stops == 12


class Forgetful(FedAvg):
    """FedAvg that makes a tensor where torch makes it by itself."""

    name = "forgetful"
    place: ClassVar[str] = ""

    def train(self, clients: Clients, down: Message) -> Message:
        def pull(theta: Tensor, members: slice | Tensor) -> Tensor:
            return torch.zeros(theta.shape) if self.place == "step" else torch.zeros_like(theta)

        theta = clients.sgd(down["theta"], extra_gradient=pull).theta
        return Message(rows={"theta": theta + torch.zeros(1, 1) if self.place == "end" else theta})


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_mistake_in_a_method_is_found(marked: Marked, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    for place in ("step", "end"):
        monkeypatch.setattr(Forgetful, "place", place)
        with pytest.raises(MixedDevicesError):
            Run("method.name=fedavg", "train.rounds=1", f"run.engine={engine}", kind=Forgetful)
    monkeypatch.setattr(Forgetful, "place", "")
    Run("method.name=fedavg", "train.rounds=1", f"run.engine={engine}", kind=Forgetful)


@pytest.mark.parametrize("engine", [LoopEngine, BatchedEngine])
def test_a_mistake_in_an_engine_is_found(
    marked: Marked, monkeypatch: pytest.MonkeyPatch, engine: type[LoopEngine | BatchedEngine]
) -> None:
    gradient = engine.gradient

    def forgetful(self: Any, loss: Any, tensors: Tensors, *others: Any) -> Any:
        gradients, losses = gradient(self, loss, tensors, *others)
        return gradients, losses + torch.zeros(len(losses))

    monkeypatch.setattr(engine, "gradient", forgetful)
    with pytest.raises(MixedDevicesError):
        Run("train.rounds=1", f"run.engine={'loop' if engine is LoopEngine else 'batched'}")


# Whole runs


@pytest.fixture
def stops_between_steps(marked: Marked, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how often the host waited between the first and the last mini-batch of each pass."""
    found: list[int] = []
    order, ordering = Clients.batches, [0]

    def watched(self: Clients, *arguments: Any, **keys: Any) -> Iterator[Batch]:
        before = marked.stops
        batches = order(self, *arguments, **keys)
        first = next(batches, None)
        # a method may put passes in order side by side, as Per-FedAvg does
        ordering[0] += marked.stops - before
        if first is not None:
            before = marked.stops - ordering[0]
            yield first
            yield from batches
            found.append(marked.stops - ordering[0] - before)

    monkeypatch.setattr(Clients, "batches", watched)
    return found


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    digits = tmp_path_factory.mktemp("digits") / "digits.npz"
    write_digits(digits)
    few = ["data.clients=4", "data.subset_per_class=8", "run.clients_at_once=2", "train.rounds=2"]
    return [*tiny_settings(digits), *MEETS_ALL_SOON, *few, "train.participation=0.6", "run.eval_every=2"]


@pytest.mark.filterwarnings("ignore:.*never split")
@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("case", [*METHODS, *VARIANTS])
def test_a_run_keeps_its_tensors_apart_and_does_not_wait_between_steps(
    settings: list[str],
    stops_between_steps: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    case: str,
    engine: str,
) -> None:
    """Download, request, training, aggregation, checkpoint, resume, fine-tuning and evaluation."""
    keys = [*settings, *method_settings(case), "train.finetune_epochs=1", f"run.engine={engine}"]
    with monkeypatch.context() as first:
        first.setattr(Simulation, "_must_stop", lambda _: True)
        assert run_here(tmp_path / "run", keys) == STOPPED
    assert run_here(tmp_path / "run", keys) == FINISHED
    assert len(stops_between_steps) >= 4
    assert set(stops_between_steps) == {0}


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_run_there_has_the_bits_of_a_run_here(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str
) -> None:
    keys = [*settings, "method.name=ditto", f"run.engine={engine}", "model.batchnorm=false"]
    assert run_here(tmp_path / "here", keys) == FINISHED
    monkeypatch.setattr(World, "device", lambda *_: DEVICE)
    with marked_device() as marked:
        assert run_here(tmp_path / "there", keys) == FINISHED
    assert marked.operators.total() > 1000
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


# What a local round costs


def place_of(sizes: list[int], **keys: float) -> tuple[Workplace, Tensor, Tensor]:
    """Return a batched place on the marked device, and models and running statistics for its clients."""
    network = make_network(batchnorm=True).to(DEVICE)
    train = TrainConfig.model_validate({"batch_size": 4, "local_epochs": 2} | keys)
    place = make_place(network, sizes, train, clients_at_once=len(sizes), device=DEVICE)
    theta, buffers = spread(make_network(batchnorm=True), len(sizes))
    return place, theta.to(DEVICE), buffers.to(DEVICE)


@pytest.mark.parametrize("sizes", [[8, 8, 8], [13, 8, 3]])
def test_the_order_of_a_local_round_is_its_only_transfer(marked: Marked, sizes: list[int]) -> None:
    place, theta, buffers = place_of(sizes)
    clients = Clients(place, range(3), 0)
    clients.buffers = buffers
    marked.transfers.clear()
    trained = clients.sgd(theta)
    assert marked.transfers == Counter({"to device": 1})
    assert marked.waits.total() == 0
    assert trained.steps.device == CPU
    assert trained.theta.device == clients.loss_sum.device == DEVICE


def test_a_step_has_few_operators(marked: Marked) -> None:
    place, theta, buffers = place_of([8, 8, 8], momentum=0.9)
    counts = []
    for epochs in (1, 2):
        clients = Clients(place, range(3), 0)
        clients.buffers = buffers
        marked.operators.clear()
        clients.sgd(theta, epochs=epochs)
        counts.append(sum(n for name, n in marked.operators.items() if name not in VIEWS))
    steps = 2
    assert (counts[1] - counts[0]) / steps <= OPERATORS_OF_A_STEP
    assert ParameterLayout(make_network(batchnorm=True)).size == theta.shape[1]
