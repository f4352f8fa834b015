"""Differential privacy: both algorithms by hand, epsilon against published values, and what is refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import differing, method_settings, read_csv, run_here, run_killed_in_round, tiny_settings
from by_hand import gradient
from harness import SMALL, UNEQUAL, Run
from processes import run_in_one_world
from torch import Tensor
from torch.nn.functional import cross_entropy

import hpcfl
from hpcfl.communication.messages import Cohort, Message
from hpcfl.config.keys import PrivacyConfig
from hpcfl.data.arrays import Arrays
from hpcfl.data.sources import SOURCES, Source
from hpcfl.errors import FINISHED, UserError
from hpcfl.main import main
from hpcfl.methods import METHODS
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.base import State, TwoPhaseMethod
from hpcfl.methods.fedavg import FedAvg
from hpcfl.parameters import Layer
from hpcfl.privacy import PrivateUploads, drawn_clients, epsilon_after, epsilon_of_samples
from hpcfl.randomness import torch_stream
from hpcfl.results.run import load_run
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.private_gradients import SAMPLES_AT_ONCE, PrivateGradients

OF_CLIENTS = ["privacy.unit=client", "privacy.clip=0.3", "privacy.noise=0.7"]
OF_SAMPLES = ["privacy.unit=sample", "privacy.clip=0.5", "privacy.noise=0.7"]
UNITS = {"client": OF_CLIENTS, "sample": OF_SAMPLES}
WINE = ["data.source=wine", "data.per_client=null", "model.name=mlp"]
PLAIN = ["model.name=mlp", "train.buffers=null"]


def renyi(share: float, noise: float, order: int) -> float:
    """Return the Renyi divergence of the sampled Gaussian mechanism (Mironov et al. 2019, section 3.3)."""
    terms = (
        math.comb(order, k) * (1 - share) ** (order - k) * share**k * math.exp(k * (k - 1) / (2 * noise**2))
        for k in range(order + 1)
    )
    return math.log(sum(terms)) / (order - 1)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("share", "noise", "times", "delta", "published"),
    [
        # Abadi et al. 2016, section 3.2; McMahan et al. 2018, table 1
        (0.01, 4.0, 10_000, 1e-5, 1.26),
        (5000 / 763_430, 1.0, 5000, 1e-9, 4.634),
    ],
)
def test_epsilon_equals_the_published_one_by_the_old_bound_and_is_smaller_by_the_new_one(
    share: float, noise: float, times: int, delta: float, published: float
) -> None:
    orders = range(2, 33)
    theirs = min(times * renyi(share, noise, a) + math.log(1 / delta) / (a - 1) for a in orders)
    assert theirs == pytest.approx(published, rel=0.01)
    todays = min(
        times * renyi(share, noise, a) + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1)
        for a in orders
    )
    privacy = PrivacyConfig(unit="client", clip=1, noise=noise, delta=delta)
    found = epsilon_after(privacy, share, times)
    assert found == pytest.approx(todays, rel=1e-9)
    assert epsilon_of_samples(privacy, [share], [times]) == found


@pytest.mark.quick
def test_epsilon_is_that_of_the_worst_client() -> None:
    privacy = PrivacyConfig(unit="sample", clip=1, noise=1.0)
    few, many = epsilon_of_samples(privacy, [0.5], [10]), epsilon_of_samples(privacy, [0.1], [1000])
    assert epsilon_of_samples(privacy, [0.5, 0.1, 0.5, 0.1], [10, 1000, 3, 0]) == max(few, many) == many
    # here the one with fewer steps is worse
    few, many = epsilon_of_samples(privacy, [0.5], [100]), epsilon_of_samples(privacy, [0.1], [150])
    assert epsilon_of_samples(privacy, [0.1, 0.5], [150, 100]) == max(few, many) == few
    assert epsilon_of_samples(privacy, [0.5], [0]) == 0


@pytest.mark.quick
def test_each_client_is_drawn_with_the_probability_of_participation() -> None:
    drawn = [drawn_clients(40, 0.3, seed=1, round=number) for number in range(2000)]
    counts = torch.zeros(40)
    for clients in drawn:
        assert clients == sorted(set(clients))
        counts[clients] += 1
    # 4.5 standard errors of a share
    assert (counts / 2000 - 0.3).abs().max() < 4.5 * math.sqrt(0.3 * 0.7 / 2000)
    sizes = torch.tensor([float(len(clients)) for clients in drawn])
    assert sizes.var() == pytest.approx(40 * 0.3 * 0.7, rel=0.15)
    assert drawn_clients(3, 1.0, seed=1, round=0) == [0, 1, 2]


@pytest.mark.quick
def test_no_client_moves_the_mean_by_more_than_its_share() -> None:
    layers = [Layer("a", 0, 2, 0, 0), Layer("b", 2, 3, 0, 0)]
    uploads = PrivateUploads(PrivacyConfig(unit="client", clip=2, noise=1), ["theta"], layers, 4, 0.5, 0)
    w = torch.tensor([1.0, 2.0, 3.0])
    rows = w + torch.tensor([[3.0, 4.0, 100.0], [0.3, 0.4, 7.0], [0.0, 0.0, 1.0]])
    up = Message(per_client={"theta": rows}, layer_mask={"theta": torch.tensor([True, False])}, num_clients=3)
    sent = uploads.clipped(Message(shared={"theta": w}, num_clients=3), up)
    # of (3, 4) two fifths remain; the layer that stays does not count
    moved = (sent["theta"] - w)[:, :2]
    torch.testing.assert_close(moved, torch.tensor([[1.2, 1.6], [0.3, 0.4], [0.0, 0.0]]))
    # two tensors of a client are clipped together: (3, 4, 12) has the length 13
    both = PrivateUploads(PrivacyConfig(unit="client", clip=2, noise=1), ["theta", "more"], layers, 4, 0.5, 0)
    up_of_both = up | Message(per_client={"more": torch.tensor([[12.0], [0.0], [0.0]])}, num_clients=3)
    down = Message(shared={"theta": w, "more": torch.zeros(1)}, num_clients=3)
    sent = both.clipped(down, up_of_both)
    torch.testing.assert_close((sent["theta"] - w)[0, :2], torch.tensor([6.0, 8.0]) / 13)
    torch.testing.assert_close(sent["more"][0], torch.tensor([24.0]) / 13)
    counted = up | Message(per_client={"counts": torch.ones(3, 2)}, num_clients=3)
    with pytest.raises(TypeError, match=r"clients send counts, which privacy\.unit=client does not protect"):
        uploads.clipped(Message(shared={"theta": w}, num_clients=3), counted)


def noise_of_round(number: int, w: Tensor) -> Tensor:
    stream = torch_stream(0, "private mean/theta", number)
    return 0.7 * 0.3 * torch.randn(w.shape, generator=stream, dtype=w.dtype)


@pytest.mark.usefixtures("double")
def test_two_rounds_of_dp_fedavg_equal_its_algorithm() -> None:
    keys = [*UNEQUAL, *PLAIN, *OF_CLIENTS, "train.rounds=2", "train.participation=0.5"]
    run = Run(*keys, "train.lr=0.2", "method.name=fedavg")
    w = run.method.context.initial_parameters()
    for number in range(2):
        total = noise_of_round(number, w)
        for client in drawn_clients(4, 0.5, 0, number):
            group = ClientGroup(run.worker, [client], number)
            update = group.sgd(w.unsqueeze(0)).theta[0] - w
            assert update.norm() > 0.3
            total += update * min(1.0, float(0.3 / update.norm()))
        w = w + total / (4 * 0.5)
    torch.testing.assert_close(run.server["theta"], w, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("double")
def test_a_round_without_clients_adds_only_noise_to_the_layers_that_are_sent() -> None:
    share = 0.01
    assert all(not drawn_clients(4, share, 0, number) for number in range(3))
    run = Run(*PLAIN, *OF_CLIENTS, f"train.participation={share}", "method.name=fedbabu")
    start = run.method.context.initial_parameters()
    w = start + sum(noise_of_round(number, start) for number in range(3)) / (4 * share)
    head = run.method.layout.head
    w[head] = start[head]
    torch.testing.assert_close(run.server["theta"], w, rtol=0, atol=1e-9)
    assert run.bytes_by_client.sum() == 0


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_round_of_dp_sgd_equals_its_algorithm(engine: str) -> None:
    keys = [*UNEQUAL, *PLAIN, *OF_SAMPLES, "train.rounds=1", f"run.engine={engine}"]
    keys += ["train.batch_size=2", "train.local_epochs=2"]
    run = Run(*keys, "method.name=local", "train.momentum=0")
    sizes = set()
    for client in range(4):
        theta = run.method.context.initial_parameters()
        group = ClientGroup(run.worker, [client], 0)
        x, y = group.samples("train", 0)
        share = run.worker.work.sampling_rate(client, len(y))
        purposes = ("batches", "private gradient/batches")
        order, noise = (torch_stream(0, purpose, 0, client) for purpose in purposes)
        for _ in range(2 * round(1 / share)):
            chosen = (torch.rand(len(y), generator=order, dtype=torch.float64) < share).nonzero().squeeze(1)
            sizes.add(len(chosen))
            total = torch.randn(theta.shape, generator=noise, dtype=theta.dtype) * 0.7 * 0.5
            for sample in chosen.tolist():
                slope = gradient(run, theta, x[[sample]], y[[sample]])
                total += slope * min(1.0, float(0.5 / slope.norm()))
            theta = theta - 0.05 * total / (len(y) * share)
        torch.testing.assert_close(run.clients["theta"][client], theta, rtol=0, atol=1e-12)
    assert {0, 1, 2, 3} <= sizes


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_samples_of_a_large_mini_batch_count_and_an_empty_one_adds_only_noise(smoothing: float) -> None:
    run = Run(*PLAIN, *OF_SAMPLES, "method.name=local", "train.rounds=1")
    theta, network = run.method.context.initial_parameters(), run.method.network
    x, y = torch.randn(2 * SAMPLES_AT_ONCE + 3, 1, 8, 8), torch.arange(2 * SAMPLES_AT_ONCE + 3) % 10
    expected = torch.zeros_like(theta)
    for sample in range(len(y)):
        loss = cross_entropy(
            network(x[sample : sample + 1]), y[sample : sample + 1], label_smoothing=smoothing
        )
        slope = torch.cat([part.flatten() for part in torch.autograd.grad(loss, [*network.parameters()])])
        expected += slope * min(1.0, float(0.5 / slope.norm()))
    gradients = PrivateGradients(network, run.method.layout, 0.5, 0.7, smoothing)
    for count in (len(y), 0):
        batch = Batch(slice(None), x[None, :count], y[None, :count], torch.arange(count)[None])
        found, _ = gradients.gradient(theta[None], batch, [7.0], [torch.Generator().manual_seed(3)])
        noise = torch.randn(theta.shape, generator=torch.Generator().manual_seed(3), dtype=theta.dtype)
        total = noise * 0.7 * 0.5 + (expected if count else 0)
        torch.testing.assert_close(found[0], total / 7, rtol=0, atol=1e-12)


@pytest.mark.warns
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_private_or_refuses_privacy(
    method: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is averaged is sent (client), and no client trains with an unprotected gradient (sample)."""
    keys = [*method_settings(method), *PLAIN, *UNITS[unit], "train.rounds=2", "train.finetune_epochs=0"]
    keys += ["data.per_client=12", "train.batch_size=8"]
    if unit not in METHODS[method].privacy_units:
        with pytest.raises(UserError, match=rf"privacy.unit={unit} does not go with method.name={method}, "):
            Run(*keys)
        return
    sent: set[str] = set()
    leave, train = MethodAdapter.sent, MethodAdapter.train

    def spied(self: MethodAdapter, down: Message, up: Message) -> Message:
        sent.update(up.per_client)
        return leave(self, down, up)

    def protected(self: MethodAdapter, clients: ClientGroup, down: Message) -> Message:
        with monkeypatch.context() as patch:
            if unit == "sample":
                # what an unprotected gradient needs
                patch.setattr(ClientGroup, "_buffers_of", None)
            return train(self, clients, down)

    monkeypatch.setattr(MethodAdapter, "sent", spied)
    monkeypatch.setattr(MethodAdapter, "train", protected)
    run = Run(*keys)
    assert all(tensor.double().isfinite().all() for tensor in run.server.values())
    if unit == "client":
        assert sent <= {*run.method.traits.averages}
        assert sent


@pytest.mark.quick
def test_a_subclass_of_a_private_method_must_declare_privacy_again() -> None:
    assert FedAvg.privacy_units == ("client", "sample")
    assert type("Other", (FedAvg,), {"name": "other"}).privacy_units == ()  # type: ignore[attr-defined]


def test_the_bits_depend_neither_on_the_ranks_nor_on_a_kill(
    digits: Path, tmp_path: Path, mpirun_command: list[str]
) -> None:
    common = [*tiny_settings(digits), "model.batchnorm=false", "method.name=fedper"]
    common += ["train.participation=0.5", "run.checkpoint_every=1"]
    keys = {unit: [*common, *of_unit] for unit, of_unit in UNITS.items()}
    run_in_one_world(mpirun_command, 3, {tmp_path / f"{unit}-three": words for unit, words in keys.items()})
    for unit, words in keys.items():
        one, killed, three = (tmp_path / f"{unit}-{name}" for name in ("one", "killed", "three"))
        assert run_here(one, words) == 0
        run_killed_in_round(1, killed, words)
        assert run_here(killed, words) == 0
        assert differing(one, killed) == differing(one, three) == []
        epsilons = load_run(one).metrics["epsilon"]
        assert list(epsilons) == list(load_run(three).metrics["epsilon"])
        assert (epsilons[1:] > epsilons[:-1]).all()
        if unit == "client":
            privacy = PrivacyConfig(unit="client", clip=0.3, noise=0.7)
            assert epsilons[-1] == epsilon_after(privacy, 0.5, 3)


TABLE = """
title: Cohorts of random sizes
seeds: [0, 1]
settings: {train: {participation: 0.1, rounds: 6}, data: {clients: 10}}
rows: [{method: {name: fedavg}}]
"""


def test_a_table_counts_the_clients_that_were_drawn(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "table.yaml").write_text(TABLE)
    words = [word for word in tiny_settings(digits) if "clients" not in word and "participation" not in word]
    words += ["model.batchnorm=false", *OF_CLIENTS]
    assert main(["table", str(tmp_path / "table.yaml"), *words, "--out", str(tmp_path / "out")]) == FINISHED
    (line,) = read_csv(tmp_path / "out" / "table.csv")
    model = load_run(tmp_path / "out" / "fedavg-s0").models.saved(0)["theta"]
    drawn = [sum(len(drawn_clients(10, 0.1, seed, number)) for number in range(6)) for seed in (0, 1)]
    assert drawn != [6, 6]
    assert (line["bytes_down"], line["bytes_up"]) == (str(4 * len(model)),) * 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["privacy.noise=1"], "privacy.noise=1.0 needs privacy.unit=client or sample; set that, or "),
        (["privacy.unit=client", "privacy.noise=1"], "privacy.unit=client needs privacy.clip; set that"),
        (["privacy.unit=sample", "privacy.clip=1"], "privacy.unit=sample needs privacy.noise; set tha"),
        ([*OF_CLIENTS, "privacy.noise=0"], "privacy.noise=0 is invalid; allowed: null or a number > 0"),
        ([*OF_CLIENTS, "comm.codec=int8"], "privacy.unit=client needs comm.codec=none; set that, or "),
        ([*OF_CLIENTS, "run.on_divergence=skip"], "privacy.unit=client needs run.on_divergence=stop"),
        ([*OF_CLIENTS, "clients.drop_rate=0.1"], "privacy.unit=client needs clients that are not lost"),
        ([*OF_SAMPLES, "clients.sampling=size"], "privacy.unit=sample needs clients.sampling=uniform"),
        (
            [*OF_CLIENTS, "train.patience=2", "data.val_fraction=0.2"],
            "privacy.unit=client needs train.patience=null",
        ),
        ([*OF_CLIENTS, "data.normalise=standard"], "needs a data.normalise other than standard"),
        ([*OF_CLIENTS, "model.batchnorm=true"], "privacy.unit=client needs train.buffers=local: running "),
        (
            [*OF_SAMPLES, "model.batchnorm=true"],
            "privacy.unit=sample needs a model without running statistics ",
        ),
        ([*OF_CLIENTS, *WINE], "privacy.unit=client would not hide the means and deviations"),
    ],
)
def test_mistakes_are_refused_with_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as found:
        Run(*words, "method.name=fedavg")
    assert message in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.quick
def test_images_without_public_constants_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: str) -> Arrays:
        return Arrays(np.zeros((400, 1, 8, 8), np.float32), np.arange(400) % 4, 4, 1.0, (), ())

    monkeypatch.setitem(SOURCES, "mine", Source("mine", read=read))
    with pytest.raises(UserError, match=r"would not hide the means and deviations"):
        Run(*PLAIN, *OF_CLIENTS, "data.source=mine", "method.name=fedavg")


class Shares(FedAvg):
    """FedAvg whose server also keeps the mean of the clients' class counts."""

    name = "shares"
    privacy_units = ("client",)
    traits = FedAvg.traits.replace(averages=("theta", "shares"))

    def server_state(self) -> State:
        return super().server_state() | {"prior": torch.zeros(self.context.num_classes)}

    def download(self, server: State, cohort: Cohort) -> Message:
        return super().download(server, cohort) | Message(shared={"shares": server["prior"]})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        counts = clients.class_counts(self.context.num_classes)
        return super().train(clients, down) | Message(per_client={"shares": counts})


def test_what_gets_no_noise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"clients send shares, which would get no noise with privacy\.unit"):
        hpcfl.run(*SMALL, *PLAIN, *OF_CLIENTS, method=Shares, out=tmp_path / "run")
    with pytest.raises(TypeError, match=r"Asks\.privacy_units names client, and requests get no noise"):
        type("Asks", (TwoPhaseMethod,), {"name": "asks", "privacy_units": ("client",)})


@pytest.mark.quick
def test_without_the_package_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r'install it with: pip install -e "\.\[privacy\]"'):
        Run(*SMALL, *PLAIN, *OF_CLIENTS, "method.name=fedavg")
