"""Whole runs on a marked device: every tensor on its device, and no wait between two steps.

See marked_device.py. Tests with a GPU are those of test_gpu.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from bits import (
    DIFFERENT,
    KINDS,
    MEETS_ALL_SOON,
    VARIANTS,
    contents,
    method_settings,
    run_here,
    run_until_time_is_up,
    tiny_settings,
)
from harness import Run, make_network, make_worker, spread
from marked_device import CPU, DEVICE, Marked, MixedDevicesError, marked_device
from torch import Tensor

from hpcfl.communication.channel import Channel
from hpcfl.communication.codecs import UNSENT
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.config.keys import TrainConfig
from hpcfl.errors import FINISHED, STOPPED
from hpcfl.methods import METHODS, Method
from hpcfl.methods.base import State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.models import MODELS
from hpcfl.models.networks import ConvNet
from hpcfl.simulation.divergence import diverged_members, losses_and_extremes
from hpcfl.simulation.evaluation import Evaluator
from hpcfl.simulation.federation import Federation
from hpcfl.simulation.round_loop import Simulation
from hpcfl.storage.ledger import Evaluation
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup, WorkerContext

OPERATORS_OF_A_STEP = 105
"""Most operators, views left out, of one step of the batched engine on two convolutions with BatchNorm, with
momentum; it is 102 with torch 2.13."""

VIEWS = (
    *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "expand", "permute", "select"),
    *("slice", "split_with_sizes", "squeeze", "split", "t", "transpose", "unbind", "unsqueeze", "view"),
)
"""Operators that start no kernel."""


@pytest.fixture
def workers_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all workers take the marked device, once it is there."""
    monkeypatch.setattr(Communicator, "device", lambda *_: DEVICE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**33, 2**34))


@pytest.fixture
def marked(workers_there: None) -> Iterator[Marked]:
    """Give all workers the marked device."""
    with marked_device() as marked:
        yield marked


# What the device finds


class Forgetful(FedAvg):
    """FedAvg that makes a tensor where torch makes it by itself."""

    name = "forgetful"
    place: ClassVar[str] = ""

    def train(self, clients: ClientGroup, down: Message) -> Message:
        def pull(theta: Tensor, members: slice | Tensor) -> Tensor:
            return torch.zeros(theta.shape) if self.place == "step" else torch.zeros_like(theta)

        theta = clients.sgd(down["theta"], extra_gradient=pull).theta
        return Message(per_client={"theta": theta + torch.zeros(1, 1) if self.place == "end" else theta})


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_device_mistake_in_a_method_is_found(
    marked: Marked, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    for place in ("step", "end"):
        monkeypatch.setattr(Forgetful, "place", place)
        with pytest.raises(MixedDevicesError):
            Run("method.name=fedavg", "train.rounds=1", f"run.engine={engine}", kind=Forgetful)
    monkeypatch.setattr(Forgetful, "place", "")
    Run("method.name=fedavg", "train.rounds=1", f"run.engine={engine}", kind=Forgetful)


# Whole runs


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_weights_that_may_begin_anywhere_in_memory_do_not_meet_cudnn_s_batchnorm(
    marked: Marked, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Outside vmap the weights of a model are views of its flat vector."""
    by_cudnn = []
    batch_norm = torch.batch_norm

    def watched(x: Tensor, *arguments: Any) -> Tensor:
        if marked.holds(x) and not torch._C._functorch.is_functorch_wrapped_tensor(x):
            by_cudnn.append(arguments[-1])
        return batch_norm(x, *arguments)

    monkeypatch.setattr(torch, "batch_norm", watched)
    Run("method.name=fedavg", "train.rounds=1", "model.batchnorm=true", f"run.engine={engine}")
    assert set(by_cudnn) == {False}
    assert torch.backends.cudnn.enabled


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("unit", ["client", "sample"])
@pytest.mark.usefixtures("marked")
def test_with_privacy_and_unequal_work_every_tensor_is_on_its_device(unit: str, engine: str) -> None:
    private = [f"privacy.unit={unit}", "privacy.clip=1", "privacy.noise=1", "model.name=mlp"]
    unequal = ["clients.local_epochs=[1,2]", "clients.batch_size=[4,8]"]
    Run("method.name=fedper", "train.rounds=1", *private, *unequal, f"run.engine={engine}")


@pytest.fixture
def stops_between_steps(marked: Marked, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how often the host waited between first and last mini-batch, for each pass of several."""
    found: list[int] = []
    order, ordering = ClientGroup.batches, [0]

    def watched(self: ClientGroup, *arguments: Any, **keys: Any) -> Iterator[Batch]:
        before = marked.stops
        batches = order(self, *arguments, **keys)
        first = next(batches, None)
        # a method may put passes in order side by side, as Per-FedAvg does
        ordering[0] += marked.stops - before
        if first is not None:
            before = marked.stops - ordering[0]
            yield first
            steps = 1
            for steps, batch in enumerate(batches, 2):  # noqa: B007
                yield batch
            if steps > 1:
                found.append(marked.stops - ordering[0] - before)

    monkeypatch.setattr(ClientGroup, "batches", watched)
    return found


def real_numbers(message: Message) -> int:
    """Return how many numbers of float32 a message has."""
    tensors = [*message.shared.values(), *message.per_client.values()]
    return sum(tensor.numel() for tensor in tensors if tensor.dtype == torch.float32)


class Crossed(NamedTuple):
    """How many numbers of float32 went either way in a round or an evaluation beside those of its messages.

    Losses and scores are float64; places of samples and clients are int64.
    """

    to_device: int
    to_host: int


@pytest.fixture
def crossings(marked: Marked, monkeypatch: pytest.MonkeyPatch) -> list[Crossed]:
    """Return what crosses in each round, and evaluation of the clients in training, to come."""
    found: list[Crossed] = []
    ways = ("to device", "to host")
    in_messages = Counter[str]()
    down, up, send_requests = Channel.down, Channel.up, Federation.send_requests

    def counted_down(*arguments: Any) -> Message:
        received = down(*arguments)
        in_messages["to device"] += real_numbers(received)
        return received

    def counted_up(self: Channel, message: Message, *others: Any, **keys: Any) -> Upload:
        in_messages["to host"] += real_numbers(message)
        return up(self, message, *others, **keys)

    def counted_requests(self: Federation, requests: Message, cohort: Cohort) -> Upload:
        # clients are given what they asked together with the answer
        in_messages["to device"] += real_numbers(requests)
        return send_requests(self, requests, cohort)

    @contextmanager
    def watched() -> Iterator[None]:
        in_messages.clear()
        before = [marked.numbers[way, torch.float32] for way in ways]
        yield
        after = [marked.numbers[way, torch.float32] - in_messages[way] for way in ways]
        found.append(Crossed(*(late - early for early, late in zip(before, after, strict=True))))

    round_of, models_of = Simulation._round, Evaluator.models

    def watched_round(*arguments: Any) -> Any:
        with watched():
            return round_of(*arguments)

    def watched_models(
        self: Evaluator, server: State, cohort: Cohort, scores: Evaluation | None = None
    ) -> Iterator[Message]:
        # unseen clients begin with state of their own
        are_scored = scores is not None and not self._federation.is_unseen(cohort)
        with watched() if are_scored else nullcontext():
            yield from models_of(self, server, cohort, scores)

    monkeypatch.setattr(Channel, "down", counted_down)
    monkeypatch.setattr(Channel, "up", counted_up)
    monkeypatch.setattr(Federation, "send_requests", counted_requests)
    monkeypatch.setattr(Simulation, "_round", watched_round)
    monkeypatch.setattr(Evaluator, "models", watched_models)
    return found


SMALL = ConvNet("conv 4 3x3", channels=(4,), kernel=3, padding=1, hidden=())
"""A network of few operators: each takes a hundred times as long here."""
SIZE, HEAD = 418, 370
"""Its trainable numbers with BatchNorm, and those of its head."""


@pytest.fixture
def settings(digits: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(MODELS, "small", SMALL)
    few = ["data.clients=5", "data.subset_per_class=6", "run.clients_at_once=2", "train.rounds=2"]
    return [*tiny_settings(digits), *MEETS_ALL_SOON, *few, "model.name=small", "train.participation=0.5"]


OWN_NUMBERS = {"fedafk": HEAD, "fedbabu": HEAD, "feddyn": 1, "fedfomo": 1, "pfedgraph": SIZE, "scaffold": 1}
"""What a method itself brings to the device, once or several times: fixed heads, a share or strength, the
initial model, numbers of steps.
FedMN's router draws on the CPU whatever the device."""


LOOPED = ("fedavg", "fedem", "fedmn")
"""Methods that differ in what they ask of an engine; on a GPU, the batched one is the default."""


@pytest.mark.warns
@pytest.mark.parametrize(
    ("case", "engine"),
    [*((case, "batched") for case in (*DIFFERENT, *VARIANTS)), *((case, "loop") for case in LOOPED)],
)
def test_a_run_does_not_mix_devices_and_does_not_wait_between_steps(
    settings: list[str],
    stops_between_steps: list[int],
    crossings: list[Crossed],
    tmp_path: Path,
    case: str,
    engine: str,
) -> None:
    """Download, request, training, aggregation, checkpoint, fine-tuning, unseen clients and evaluation."""
    keys = [*settings, *method_settings(case), f"run.engine={engine}"]
    keys += ["data.unseen_clients=0.25", "run.eval_every=2"]
    if case in KINDS or METHODS[case.partition("-")[0]].finetune != Method.finetune:
        keys += ["train.finetune_epochs=1"]
    # two mini-batches of the one client that this engine trains at once
    keys += ["train.batch_size=4"] if engine == "loop" else []
    assert run_here(tmp_path / "run", keys) == FINISHED
    assert len(stops_between_steps) >= 2
    assert set(stops_between_steps) == {0}
    # two rounds and an evaluation
    assert len(crossings) == 3
    if case != "fedmn":
        own = OWN_NUMBERS.get(case, 0)
        assert {crossed.to_host for crossed in crossings} == {0}
        assert {crossed.to_device for crossed in crossings} <= {own * times for times in range(13)}


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("state", ["device", "host"])
def test_state_on_the_host_is_transferred_in_every_round(
    crossings: list[Crossed], state: str, engine: str
) -> None:
    """Three rounds of two of four clients; each reads its model and writes it, an evaluation reads all."""
    keys = ["method.name=local", "train.participation=0.5", "run.eval_every=2", f"run.engine={engine}"]
    run = Run(*keys, "run.clients_at_once=2", f"run.state={state}")
    model = run.method.layout.size if state == "host" else 0
    in_rounds, in_evaluation = Crossed(2 * model, 2 * model), Crossed(4 * model, 0)
    assert crossings == [in_rounds, in_rounds, in_evaluation, in_rounds, in_evaluation]
    assert run.clients["theta"].device == (CPU if state == "host" else DEVICE)


STOPPED_CASES = {
    "fedphp": ["method.name=fedphp"],
    "heurpfedla-topk": ["method.name=heurpfedla", "comm.codec=topk"],
    "heurpfedla-sharded": ["method.name=heurpfedla", "method.server=sharded", "comm.codec=topk"],
}
"""State of a method, whole numbers in it, what a codec keeps, and models that the server's products read."""


@pytest.mark.usefixtures("workers_there")
@pytest.mark.parametrize("case", STOPPED_CASES)
def test_a_run_resumed_on_the_device_has_the_bits_of_a_run_on_the_cpu(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    """The run keeps its state on the host before it is stopped, and on the device after it is resumed."""
    keys = [*settings, *STOPPED_CASES[case], "run.engine=batched", "model.batchnorm=false"]
    with monkeypatch.context() as on_cpu:
        on_cpu.setattr(Communicator, "device", lambda *_: CPU)
        assert run_here(tmp_path / "here", keys) == FINISHED
    with marked_device() as marked:
        assert run_until_time_is_up(tmp_path / "there", [*keys, "run.state=host"]) == STOPPED
        assert run_here(tmp_path / "there", [*keys, "run.state=device"]) == FINISHED
    assert marked.operators.total() > 1000
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_only_what_messages_and_products_need_stays_on_the_host(marked: Marked) -> None:
    keys = ("method.name=heurpfedla", "method.server=sharded", "model.batchnorm=true", "comm.codec=topk")
    state = Run(*keys, "train.rounds=1").clients
    assert {name for name, rows in state.items() if rows.device == DEVICE} == {"own", BUFFERS}
    assert {name for name, rows in state.items() if rows.device == CPU} == {"theta", f"{UNSENT}theta"}


# What a local round costs


def place_of(sizes: list[int], **keys: float) -> tuple[WorkerContext, Tensor, Tensor]:
    """Return a batched place on the marked device, and models and running statistics for its clients."""
    network = make_network(batchnorm=True).to(DEVICE)
    train = TrainConfig.model_validate({"batch_size": 4, "local_epochs": 2} | keys)
    place = make_worker(network, sizes, train, clients_at_once=len(sizes), device=DEVICE)
    theta, buffers = spread(make_network(batchnorm=True), len(sizes))
    return place, theta.to(DEVICE), buffers.to(DEVICE)


@pytest.mark.parametrize("sizes", [[8, 8, 8], [13, 8, 3]])
def test_a_local_round_begins_and_ends_with_one_transfer(marked: Marked, sizes: list[int]) -> None:
    """The order of samples goes to the device; losses and flags of divergence are returned together."""
    place, theta, buffers = place_of(sizes)
    clients = ClientGroup(place, range(3), 0)
    clients.buffers = buffers
    marked.transfers.clear()
    trained = clients.sgd(theta)
    assert marked.transfers == Counter({"to device": 1})
    assert marked.waits.total() == 0
    assert trained.steps.device == CPU
    assert trained.theta.device == clients.loss_sum.device == DEVICE
    up = Message(per_client={"theta": trained.theta, BUFFERS: clients.buffers})
    marked.transfers.clear()
    figures = losses_and_extremes(clients, up).cpu()
    assert diverged_members(clients, up, figures) == {}
    assert marked.transfers == Counter({"to host": 1})
    assert marked.waits.total() == 0


def test_a_step_has_few_operators(marked: Marked) -> None:
    place, theta, buffers = place_of([8, 8, 8], momentum=0.9)
    counts = []
    for epochs in (1, 2):
        clients = ClientGroup(place, range(3), 0)
        clients.buffers = buffers
        marked.operators.clear()
        clients.sgd(theta, epochs=epochs)
        counts.append(sum(n for name, n in marked.operators.items() if name not in VIEWS))
    steps = 2
    assert (counts[1] - counts[0]) / steps <= OPERATORS_OF_A_STEP
