"""Local training: both engines agree; the state of clients."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from harness import SMALL, make_network, make_worker, spread
from torch import Tensor
from torch.nn.functional import cross_entropy

from hpcfl.communication.communicator import Communicator
from hpcfl.config.keys import LastBatch, Precision, TrainConfig
from hpcfl.errors import UserError
from hpcfl.parameters import ParameterLayout, Tensors
from hpcfl.randomness import torch_stream
from hpcfl.registries import load_config
from hpcfl.setup import validate
from hpcfl.setup.experiment import build
from hpcfl.training.batches import Batch, minibatches, same_size_groups
from hpcfl.training.client_group import ClientGroup, WorkerContext
from hpcfl.training.engines import LoopEngine
from hpcfl.training.forward import Forward
from hpcfl.training.losses import class_probabilities, cross_entropy_loss, sample_losses

KINDS: tuple[LastBatch, ...] = ("even", "drop", "keep")
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")

# mini-batches of 4: 13 are four, 11 three, 8 two, 3 and 2 are one
SIZES = (13, 11, 8, 3, 2)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def settings(**keys: object) -> TrainConfig:
    return TrainConfig.model_validate({"batch_size": 4, "local_epochs": 3, "lr": 0.1} | keys)


def general_loss(forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
    """Use features, the head, sample indices and a second tensor; every part has a gradient."""
    features = forward.features(tensors["theta"], batch.x)
    logits = forward.head(tensors["theta"], features)
    weights = 1 + 0.1 * batch.index
    fit = (cross_entropy(logits, batch.y, reduction="none") * weights).mean()
    return fit + tensors["scale"] * features.square().mean() + (tensors["scale"] - 2).square()


def everyone(place: WorkerContext, round: int = 0, buffers: Tensor | None = None) -> ClientGroup:
    clients = ClientGroup(place, list(place.clients), round)
    if buffers is not None:
        clients.replace_buffers(buffers.clone())
    return clients


def one_by_one(
    place: WorkerContext, theta: Tensor, buffers: Tensor, **keys: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Train each client by itself; return theta, running statistics and steps of all."""
    ends = []
    for client in place.clients:
        alone = ClientGroup(place, [client], 0)
        alone.replace_buffers(buffers[client : client + 1].clone())
        trained = alone.sgd(theta[client : client + 1], **keys)  # type: ignore[arg-type]
        ends.append((trained.theta, alone.buffers, trained.steps))
    return tuple(torch.cat(parts) for parts in zip(*ends, strict=True))  # type: ignore[return-value]


# Mini-batches


def cut(num_samples: int, batch_size: int, last_batch: LastBatch) -> list[int]:
    """Return the sizes of an epoch's mini-batches, which follow each other without a gap."""
    spans = minibatches(num_samples, batch_size, last_batch)
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans)][: len(spans)]
    return [stop - start for start, stop in spans]


def test_an_epoch_is_cut_evenly_or_its_last_mini_batch_is_dropped_or_kept() -> None:
    # a last mini-batch of 4 would be a step as long as the 13 before it
    assert cut(420, 32, "even") == [30] * 14
    assert cut(420, 32, "drop") == [32] * 13
    assert cut(420, 32, "keep") == [32] * 13 + [4]
    assert [cut(10, 4, kind) for kind in KINDS] == [[4, 3, 3], [4, 4], [4, 4, 2]]
    assert [cut(8, 4, kind) for kind in KINDS] == [[4, 4]] * 3
    assert [cut(3, 4, kind) for kind in KINDS] == [[3]] * 3
    assert [cut(1, 4, kind) for kind in KINDS] == [[1]] * 3
    assert [cut(0, 4, kind) for kind in KINDS] == [[]] * 3
    assert minibatches(10, 4) == minibatches(10, 4, "even")


def test_a_mini_batch_has_one_sample_only_if_the_client_has_one() -> None:
    assert [cut(9, 4, kind) for kind in KINDS] == [[3, 3, 3], [4, 4], [4, 5]]
    assert [cut(5, 4, kind) for kind in KINDS] == [[3, 2], [4], [5]]
    assert [cut(5, 2, kind) for kind in KINDS] == [[3, 2], [2, 2], [2, 3]]
    assert [cut(3, 2, kind) for kind in KINDS] == [[3], [2], [3]]
    for kind in KINDS:
        for size in range(2, 40):
            for batch_size in range(2, 12):
                sizes = cut(size, batch_size, kind)
                assert min(sizes) >= 2
                assert max(sizes) <= batch_size + 1
                assert sum(sizes) == (
                    size if kind != "drop" else max(size // batch_size * batch_size, min(size, batch_size))
                )
                if kind == "even":
                    assert max(sizes) - min(sizes) <= 1
                    assert batch_size == 2 or len(sizes) == math.ceil(size / batch_size)


def test_clients_whose_batch_has_the_same_size_are_grouped_largest_first() -> None:
    assert list(same_size_groups([4, 2, 0, 4, 1])) == [[0, 3], [1], [4]]
    assert list(same_size_groups([0, 0])) == []


def rows_of(batch: Batch) -> list[int]:
    """Return which of five clients a batch is for."""
    return list(range(5)) if isinstance(batch.members, slice) else batch.members.tolist()


OF_SIZES = {
    "even": [[4, 3, 3, 3], [4, 4, 3], [4, 4], [3], [2]],
    "drop": [[4, 4, 4], [4, 4], [4, 4], [3], [2]],
    "keep": [[4, 4, 5], [4, 4, 3], [4, 4], [3], [2]],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batched", [False, True])
def test_batches_permute_each_client_by_its_own_stream(batched: bool, kind: LastBatch) -> None:
    train = settings().model_copy(update={"last_batch": kind})
    place = make_worker(make_network(), SIZES, train, clients_at_once=5 if batched else None)
    seen: dict[int, list[Tensor]] = {client: [] for client in place.clients}
    for batch in ClientGroup(place, range(5), round=2).batches("batches", epochs=2):
        for position, client in enumerate(rows_of(batch)):
            x, y = place.shard.samples("train", client)
            assert torch.equal(batch.x[position], x[batch.index[position]])
            assert torch.equal(batch.y[position], y[batch.index[position]])
            seen[client].append(batch.index[position])
    sizes = [[len(index) for index in seen[client]] for client in place.clients]
    assert sizes == [of_epoch * 2 for of_epoch in OF_SIZES[kind]]
    for client, size in enumerate(SIZES):
        stream = torch_stream(place.seed, "batches", 2, client)
        used = sum(OF_SIZES[kind][client])
        epochs = [torch.randperm(size, generator=stream)[:used] for _ in range(2)]
        assert torch.equal(torch.cat(seen[client]), torch.cat(epochs))


@pytest.mark.parametrize("batched", [False, True])
def test_a_number_of_steps_takes_as_many_passes_over_the_samples_as_needed(
    batched: bool,
) -> None:
    place = make_worker(make_network(), SIZES, settings(), clients_at_once=5 if batched else None)

    def seen(**keys: int) -> list[list[list[int]]]:
        found: list[list[list[int]]] = [[] for _ in SIZES]
        for batch in ClientGroup(place, range(5), round=1).batches("some", **keys):
            for position, client in enumerate(rows_of(batch)):
                found[client].append(batch.index[position].tolist())
        return found

    # four, three, two, one and one mini-batch a pass
    passes = seen(epochs=4)
    assert [len(of_client) for of_client in passes] == [16, 12, 8, 4, 4]
    for steps in (0, 1, 3, 4):
        assert seen(steps=steps) == [of_client[:steps] for of_client in passes]
    alone = [batch.index[0].tolist() for batch in ClientGroup(place, [3], round=1).batches("some", steps=4)]
    assert alone == passes[3]


def test_batches_go_through_given_samples_only() -> None:
    place = make_worker(make_network(), SIZES, settings())
    samples = [torch.tensor(numbers) for numbers in ([0, 2, 12, 7, 4, 11], [10], [7, 1], [2, 0, 1], [1])]
    seen: list[list[int]] = [[] for _ in SIZES]
    sizes = []
    for batch in ClientGroup(place, range(5), round=0).batches("some", epochs=2, samples=samples):
        sizes.append((batch.index.shape[1], rows_of(batch)))
        for position, client in enumerate(rows_of(batch)):
            x, y = place.shard.samples("train", client)
            assert torch.equal(batch.x[position], x[batch.index[position]])
            assert torch.equal(batch.y[position], y[batch.index[position]])
            seen[client] += batch.index[position].tolist()
    # first mini-batches of 3, 1, 2, 3 and 1; only the first client has a second one
    assert sizes == 2 * [(3, [0, 3]), (2, [2]), (1, [1, 4]), (3, [0])]
    for found, chosen in zip(seen, samples, strict=True):
        assert sorted(found[: len(chosen)]) == sorted(found[len(chosen) :]) == sorted(chosen.tolist())
    stream = torch_stream(place.seed, "some", 0, 0)
    assert seen[0][:6] == samples[0][torch.randperm(6, generator=stream)].tolist()
    assert seen[0][6:] == samples[0][torch.randperm(6, generator=stream)].tolist()


@pytest.mark.parametrize(
    ("share", "fewest", "sizes"),
    [
        (0.5, (1, 1), [7, 6, 4, 2, 1]),
        (0.99, (1, 2), [11, 9, 6, 1, 1]),
        (0.01, (2, 0), [2, 2, 2, 2, 2]),
        (1.0, (1, 0), list(SIZES)),
    ],
)
def test_clients_divide_their_samples_by_their_own_streams(
    share: float, fewest: tuple[int, int], sizes: list[int]
) -> None:
    place = make_worker(make_network(), SIZES, settings())
    first, rest = ClientGroup(place, range(5), round=3).divided("purpose", share, fewest=fewest)
    assert [len(samples) for samples in first] == sizes
    for part, other, size in zip(first, rest, SIZES, strict=True):
        assert sorted([*part.tolist(), *other.tolist()]) == list(range(size))
    # the same in every round and group, unless the round is given
    again = ClientGroup(place, [2, 0], round=5).divided("purpose", share, fewest=fewest)[0]
    assert torch.equal(again[0], first[2])
    assert torch.equal(again[1], first[0])
    later, elsewhere = (
        ClientGroup(place, [0], round=3).divided(purpose, share, fewest=fewest, round=number)
        for purpose, number in (("purpose", 3), ("other", 0))
    )
    for other in (later, elsewhere):
        assert not torch.equal(torch.cat([other[0][0], other[1][0]]), torch.cat([first[0], rest[0]]))


def test_a_table_of_samples_is_indexed_by_client_and_sample() -> None:
    table = torch.arange(3 * 13 * 2).view(3, 13, 2)
    index = torch.tensor([[12, 0, 5], [3, 3, 1]])
    some = Batch(torch.tensor([2, 0]), torch.empty(2, 3), torch.empty(2, 3), index)
    assert torch.equal(some.pick(table), torch.stack([table[2, index[0]], table[0, index[1]]]))
    everyone = Batch(slice(None), torch.empty(2, 3), torch.empty(2, 3), index)
    assert everyone.pick(table[:2, :, 0]).tolist() == [[24, 0, 10], [32, 32, 28]]


def test_rows_of_a_pass_over_the_training_set_match_the_mini_batches() -> None:
    network = make_network(batchnorm=True)
    place = make_worker(network, SIZES, settings(), clients_at_once=5)
    theta, buffers = spread(network, 5)
    buffers = buffers + torch.rand(buffers.shape)
    clients, kept = everyone(place), buffers.clone()
    model = {"theta": theta, "buffers": buffers}
    table = clients.over_training_set(model, sample_losses)
    assert table.shape == (5, 13)
    layout, reference = ParameterLayout(network), copy.deepcopy(network).eval()
    for client, size in enumerate(SIZES):
        x, y = place.shard.samples("train", client)
        state = layout.views(theta[client]) | layout.buffer_views(buffers[client])
        reference.load_state_dict(state, strict=False)
        expected = cross_entropy(reference(x), y, reduction="none").detach()
        torch.testing.assert_close(table[client, :size], expected, rtol=1e-5, atol=1e-6)
        assert table[client, size:].count_nonzero() == 0
    assert torch.equal(buffers, kept)
    for batch in clients.batches(epochs=1):
        for position, client in enumerate(rows_of(batch)):
            assert torch.equal(batch.pick(table)[position], table[client, batch.index[position]])
    samples = [torch.tensor(numbers) for numbers in ([12, 3, 3], [0], [7, 1], [2], [1, 0])]
    some = clients.over_training_set(model, sample_losses, samples)
    assert some.shape == (5, 3)
    for client, chosen in enumerate(samples):
        torch.testing.assert_close(some[client, : len(chosen)], table[client, chosen], rtol=1e-5, atol=1e-6)
        assert some[client, len(chosen) :].count_nonzero() == 0


@pytest.mark.parametrize("batched", [False, True])
def test_running_statistics_are_restored_after_discarded_updates(batched: bool) -> None:
    network = make_network(batchnorm=True)
    place = make_worker(network, [8, 7], settings(), clients_at_once=2 if batched else None)
    theta, buffers = spread(network, 2)
    ids = [0, 1] if batched else [0]
    clients = ClientGroup(place, ids, 0)
    clients.replace_buffers(buffers[ids].clone())
    batches = list(clients.batches(epochs=1))
    with clients.discarding_buffer_updates():
        for batch in batches:
            clients.plain_gradient(theta[ids][batch.members], batch)
        assert not torch.equal(clients.buffers, buffers[ids])
    assert torch.equal(clients.buffers, buffers[ids])
    clients.plain_gradient(theta[ids], batches[0])
    assert not torch.equal(clients.buffers, buffers[ids])


# The engines agree


ALL_AT_ONCE = {
    "optimiser": "adamw",
    "epsilon": 1e-3,
    "clip": 0.5,
    "warmup_rounds": 2,
    "label_smoothing": 0.1,
    "augment": ["crop", "flip"],
}
"""Local training beyond SGD; its numbers are compared with torch's in the tests of methods."""


@pytest.mark.parametrize(
    ("batchnorm", "keys"), [(False, {"momentum": 0.9}), (True, {"momentum": 0.9}), (True, ALL_AT_ONCE)]
)
def test_engines_agree_in_float64_after_a_local_round(batchnorm: bool, keys: dict[str, object]) -> None:
    network = make_network(batchnorm=batchnorm).double()
    train = settings(weight_decay=0.01, **keys)
    theta, buffers = spread(network, 5)
    loop = one_by_one(make_worker(network, SIZES, train), theta, buffers)
    together = everyone(make_worker(network, SIZES, train, clients_at_once=5), buffers=buffers)
    batched = together.sgd(theta)
    torch.testing.assert_close(batched.theta, loop[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(together.buffers, loop[1], rtol=0, atol=1e-9)
    assert (batched.theta - theta).abs().amax(dim=1).min() > 0.01
    if batchnorm:
        assert (together.buffers - buffers).abs().amax(dim=1).min() > 0.01
    assert batched.steps.tolist() == loop[2].tolist() == [12, 9, 6, 3, 3]


def test_engines_agree_in_float64_on_a_torchvision_network() -> None:
    # smaller images or batches make BatchNorm divide by next to nothing, and rounding grows in every layer
    network = make_network("mobilenetv2", side=32).double()
    theta, buffers = spread(network, 2)
    train = settings(local_epochs=1, batch_size=8, lr=1e-3)
    loop, batched = (make_worker(network, (16, 8), train, clients_at_once=c, side=32) for c in (None, 2))
    alone = one_by_one(loop, theta, buffers)
    together = everyone(batched, buffers=buffers)
    trained = together.sgd(theta)
    torch.testing.assert_close(trained.theta, alone[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(together.buffers, alone[1], rtol=0, atol=1e-9)
    assert (trained.theta - theta).abs().amax(dim=1).min() > 0.01
    assert (together.buffers - buffers).abs().amax(dim=1).min() > 0.01
    assert trained.steps.tolist() == alone[2].tolist() == [2, 1]


def test_engines_agree_in_float64_on_a_general_loss_over_a_local_round() -> None:
    network = make_network(batchnorm=True).double()
    start, buffers = spread(network, 5)

    def train(place: WorkerContext, ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        clients = ClientGroup(place, ids, 0)
        clients.replace_buffers(buffers[ids].clone())
        tensors = {"theta": start[ids].clone(), "scale": torch.linspace(0.5, 1.5, 5).double()[ids]}
        for batch in clients.batches(epochs=2):
            chosen = {name: tensor[batch.members] for name, tensor in tensors.items()}
            gradients, _ = clients.gradient(general_loss, chosen, batch)
            for name, gradient in gradients.items():
                tensors[name][batch.members] -= 0.1 * gradient
        return tensors["theta"], tensors["scale"], clients.buffers

    loop = make_worker(network, SIZES, settings())
    ends = [train(loop, [client]) for client in loop.clients]
    alone = tuple(torch.cat(parts) for parts in zip(*ends, strict=True))
    together = train(make_worker(network, SIZES, settings(), clients_at_once=5), [0, 1, 2, 3, 4])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-9)
    assert (together[1] - torch.linspace(0.5, 1.5, 5)).abs().min() > 0.1


@pytest.mark.parametrize("batched", [False, True])
def test_a_tensor_that_the_loss_does_not_use_has_gradient_zero(batched: bool) -> None:
    network = make_network()
    place = make_worker(network, [4], settings(), clients_at_once=1 if batched else None)
    clients = everyone(place, buffers=torch.empty(1, 0))
    batch = next(clients.batches())
    theta, _ = spread(network, 1)

    def loss(forward: Forward, tensors: Tensors, one: Batch) -> Tensor:
        return cross_entropy_loss(forward, tensors, one)

    gradients, _ = clients.gradient(loss, {"theta": theta, "unused": torch.ones(1, 3)}, batch)
    assert gradients["unused"].tolist() == [[0.0, 0.0, 0.0]]
    assert gradients["theta"].count_nonzero() > 1000


@pytest.mark.parametrize("batched", [False, True])
def test_computing_a_gradient_does_not_change_the_one_before(batched: bool) -> None:
    network = make_network()
    place = make_worker(network, [8], settings(), clients_at_once=1 if batched else None)
    clients = everyone(place, buffers=torch.empty(1, 0))
    theta, _ = spread(network, 1)
    found = [clients.gradient(cross_entropy_loss, {"theta": theta}, b)[0] for b in clients.batches(epochs=1)]
    first = clients.gradient(cross_entropy_loss, {"theta": theta}, next(clients.batches(epochs=1)))[0]
    assert torch.equal(found[0]["theta"], first["theta"])
    assert not torch.equal(found[0]["theta"], found[1]["theta"])


# The loop engine


@pytest.mark.parametrize("general", [False, True])
def test_bfloat16_rounds_products_and_nothing_else(general: bool) -> None:
    network = make_network("lenet", side=28, batchnorm=True)
    layout = ParameterLayout(network)
    theta, buffers = spread(network, 1)
    loss = (lambda *arguments: cross_entropy_loss(*arguments)) if general else cross_entropy_loss
    x, y = torch.randn(1, 32, 1, 28, 28), torch.randint(10, (1, 32))
    batch = Batch(slice(None), x, y, torch.arange(32).view(1, 32))
    found = {}
    for precision in PRECISIONS:
        engine, statistics = LoopEngine(network, layout, precision), buffers.clone()
        gradients, value = engine.gradient(loss, {"theta": theta}, statistics, batch)
        scores = engine.outputs(theta[0], buffers[0], class_probabilities, x[0])
        found[precision] = (gradients["theta"].clone(), value, statistics, scores)
    assert all(tensor.dtype == torch.float32 for tensor in found["bfloat16"])
    for exact, rounded in list(zip(*found.values(), strict=True))[:3]:
        assert 0 < (exact - rounded).norm() < 0.2 * exact.norm()
    assert torch.equal(found["float32"][3], found["bfloat16"][3])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], "train.precision=bfloat16: this processor has neither AVX-512 BF16 nor AMX"),
        (["run.engine=batched"], "train.precision=bfloat16 is for the loop engine on a CPU"),
    ],
)
def test_bfloat16_is_refused_where_it_does_not_pay(
    keys: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "has_bfloat16", lambda: False)
    with pytest.raises(UserError, match=expected):
        build(load_config(None, [*SMALL, "train.precision=bfloat16", *keys]), Communicator())


def test_probabilities_are_the_evaluation_modes_softmax_in_pieces() -> None:
    network = make_network(batchnorm=True)
    layout = ParameterLayout(network)
    engine = LoopEngine(network, layout)
    theta, _ = spread(network, 1)
    buffers = torch.rand(1, layout.buffer_size) + 0.5
    reference = copy.deepcopy(network).eval()
    reference.load_state_dict(layout.views(theta[0]) | layout.buffer_views(buffers[0]), strict=False)
    x, kept = torch.randn(1100, 1, 8, 8), buffers.clone()
    found = engine.outputs(theta[0], buffers[0], class_probabilities, x)
    torch.testing.assert_close(found, reference(x).softmax(dim=1).detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(buffers, kept)
    # training mode is back
    y = torch.zeros(1, 6, dtype=torch.int64)
    batch = Batch(slice(None), x[:6].unsqueeze(0), y, torch.arange(6).view(1, 6))
    engine.gradient(cross_entropy_loss, {"theta": theta}, buffers, batch)
    assert not torch.equal(buffers, kept)


# Options of clients.sgd


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("part", ["body", "head"])
def test_a_trained_slice_freezes_the_rest(batched: bool, part: str) -> None:
    network = make_network(batchnorm=True)
    layout = ParameterLayout(network)
    place = make_worker(network, [8], settings(momentum=0.9), clients_at_once=1 if batched else None)
    theta, buffers = spread(network, 1)
    chosen = getattr(layout, part)
    trained = everyone(place, buffers=buffers).sgd(theta, trained=chosen).theta
    moved = (trained != theta)[0]
    assert moved[chosen].float().mean() > 0.5
    moved[chosen] = False
    assert not moved.any()


def test_an_extra_gradient_is_added_to_the_losss() -> None:
    network = make_network()
    place = make_worker(network, [4, 4], settings(local_epochs=1), clients_at_once=2)
    theta, _ = spread(network, 2)
    plain = everyone(place, buffers=torch.empty(2, 0)).sgd(theta).theta
    pull = torch.tensor([[1.0], [2.0]]).expand_as(theta)
    clients = everyone(place, buffers=torch.empty(2, 0))
    pulled = clients.sgd(theta, extra_gradient=lambda _, rows: pull[rows]).theta
    torch.testing.assert_close(plain - pulled, 0.1 * pull, rtol=0, atol=1e-6)
    # it sees the current weights of the rows it is for
    place = make_worker(network, [7, 4], settings(local_epochs=1), clients_at_once=2)
    seen: list[tuple[Tensor, slice | Tensor]] = []

    def observe(weights: Tensor, rows: slice | Tensor) -> Tensor:
        seen.append((weights.clone(), rows))
        return torch.zeros_like(weights)

    everyone(place, buffers=torch.empty(2, 0)).sgd(theta, extra_gradient=observe)
    assert torch.equal(seen[0][0], theta)
    assert isinstance(seen[1][1], Tensor)
    assert seen[1][1].tolist() == [0]
    assert not torch.equal(seen[1][0], theta[:1])


@pytest.mark.parametrize("batched", [False, True])
def test_training_does_not_change_its_input_and_counts_steps_and_losses(batched: bool) -> None:
    network = make_network()
    place = make_worker(network, [8, 3], settings(), clients_at_once=2 if batched else None)
    theta, _ = spread(network, 2)
    kept = theta.clone()
    ids = [0, 1] if batched else [0]
    clients = ClientGroup(place, ids, 0)
    clients.sgd(theta[ids])
    assert torch.equal(theta, kept)
    assert clients.steps.tolist() == [6, 3][: len(ids)]
    clients.sgd(theta[ids], epochs=1)
    assert clients.steps.tolist() == [8, 4][: len(ids)]
    assert (clients.loss_sum / clients.steps - torch.log(torch.tensor(10.0))).abs().max() < 1.0


def test_the_step_size_decays_by_round() -> None:
    network = make_network().double()
    train = settings(lr=0.1, lr_decay=0.5, local_epochs=1, batch_size=8)
    place = make_worker(network, [8], train)
    theta, _ = spread(network, 1)
    decayed = ClientGroup(place, [0], 3).sgd(theta).theta - theta
    whole = ClientGroup(place, [0], 3).sgd(theta, lr=0.1).theta - theta
    torch.testing.assert_close(decayed, whole / 8, rtol=1e-9, atol=1e-12)


# State


def test_writes_to_state_stay_in_the_group_until_commit() -> None:
    state = {"theta": torch.zeros(4, 2), "seen": torch.zeros(4, dtype=torch.int64)}
    place = make_worker(make_network(), [2, 2, 2, 2], settings(), state=state)
    clients = ClientGroup(place, [1, 3], 0)
    assert "theta" in clients
    assert "other" not in clients
    ClientGroup(place, [0, 1, 2, 3], 0)["theta"].fill_(5.0)
    clients["theta"] = torch.ones(2, 2)
    clients["seen"] += 1
    assert clients["theta"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert state["theta"].count_nonzero() == state["seen"].count_nonzero() == 0
    clients.commit()
    assert state["theta"].tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert state["seen"].tolist() == [0, 1, 0, 1]
