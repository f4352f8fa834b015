"""Realistic clients: sampled by size or loss, lost in a round, slow, with unequal work (`clients.*`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import (
    DIFFERENT,
    differing,
    leave_out,
    method_settings,
    run_here,
    tiny_settings,
)
from by_hand import work
from harness import UNEQUAL, Run, make_network, make_worker
from kinds import FEW_ROUNDS, words_of

from hpcfl.communication.messages import Cohort
from hpcfl.communication.traffic import Traffic
from hpcfl.config.keys import ClientsConfig, TrainConfig
from hpcfl.errors import FINISHED
from hpcfl.methods import Context
from hpcfl.models import MODELS
from hpcfl.randomness import torch_stream
from hpcfl.registries import load_config
from hpcfl.results.run import load_run
from hpcfl.samples import SampleType
from hpcfl.simulation.clock import Clock
from hpcfl.simulation.sampling import Sampler, drawn_by_size, is_dropped, of_highest_loss
from hpcfl.storage.ledger import Ledger
from hpcfl.tables.accuracies import _figures
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.local_work import Work

DROPS_ALL = "clients.drop_rate=0.999999"


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    return tiny_settings(digits)


def members_that_train(run: Run, number: int) -> list[int]:
    """Return the members of a cohort that are not dropped."""
    settings, seed = run.config.clients, run.config.run.seed
    return [
        client
        for client in run.simulation.cohort(number).clients
        if not is_dropped(settings, seed, number, client)
    ]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Return what each round enters in the ledger, by name."""
    rounds: list[dict[str, object]] = []
    record = Ledger.record_round

    def keeping(self: Ledger, cohort: Cohort, traffic: Sequence[Traffic], **figures: Any) -> None:
        rounds.append({"cohort": cohort, "traffic": traffic, **figures})
        record(self, cohort, traffic, **figures)

    monkeypatch.setattr(Ledger, "record_round", keeping)
    return rounds


# Sampling


def sampler(sizes: torch.Tensor, participation: float, sampling: str) -> Sampler:
    network = MODELS["mlp"].options.model_validate({"hidden": [2]})
    train = TrainConfig(participation=participation)
    clients = ClientsConfig.model_validate({"sampling": sampling})
    sample = SampleType((1, 8, 8))
    return Sampler(Context("mlp", network, sample, 10, sizes, train=train, seed=5, clients=clients))


def test_sampling_by_size_has_the_probabilities_of_draws_without_replacement() -> None:
    sizes, rounds = torch.tensor([10, 20, 30, 40]), 4000
    p = (sizes / sizes.sum()).tolist()
    draws = [drawn_by_size(sizes, 2, 5, number) for number in range(rounds)]
    first = np.bincount([draw[0] for draw in draws], minlength=4) / rounds
    either = np.bincount(np.ravel(draws), minlength=4) / rounds
    by_hand = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(4) if j != i) for i in range(4)]
    # three deviations of a share of 4000 draws are at most 0.024
    np.testing.assert_allclose(first, p, atol=0.024)
    np.testing.assert_allclose(either, by_hand, atol=0.024)
    assert all(len(set(draw)) == 2 for draw in draws)
    assert sampler(sizes, 0.5, "size").clients(7) == sorted(draws[7])


def test_power_of_choice_has_twice_as_many_candidates_as_it_takes() -> None:
    sizes, losses = torch.arange(1, 21), np.linspace(1, 2, 20)
    for number in range(5):
        expected = of_highest_loss(drawn_by_size(sizes, 8, 5, number), losses, 4)
        found = sampler(sizes, 0.2, "power_of_choice").clients_of_highest_loss(number, losses)
        assert found == expected


def test_the_candidates_of_highest_loss_are_chosen() -> None:
    losses = np.array([0.5, 2.0, np.nan, 1.0, 3.0, np.nan])
    assert of_highest_loss([0, 1, 3], losses, 2) == [1, 3]
    # unknown losses come first, then the order of the draw decides
    assert of_highest_loss([4, 5, 2, 1], losses, 2) == [2, 5]
    assert of_highest_loss([5, 4, 2, 1], losses, 1) == [5]
    assert of_highest_loss([0, 4, 5], losses, 2) == [4, 5]


def test_power_of_choice_uses_the_losses_of_earlier_rounds(
    monkeypatch: pytest.MonkeyPatch, recorded: list[dict[str, object]]
) -> None:
    known: list[np.ndarray] = []
    choose = Sampler.clients_of_highest_loss

    def keeping(self: Sampler, number: int, losses: np.ndarray) -> list[int]:
        known.append(losses.copy())
        return choose(self, number, losses)

    monkeypatch.setattr(Sampler, "clients_of_highest_loss", keeping)
    keys = ["data.clients=6", "train.participation=0.34", "train.rounds=6", "clients.candidates=3"]
    run = Run("method.name=fedavg", "clients.sampling=power_of_choice", *keys)
    sizes = run.method.context.num_samples
    assert len(recorded) == len(known) == 6
    assert np.isnan(known[0]).all()
    for number, losses in enumerate(known):
        cohort, mean = recorded[number]["cohort"], recorded[number]["train_loss"]
        assert isinstance(cohort, Cohort)
        assert list(cohort.clients) == of_highest_loss(drawn_by_size(sizes, 3, 0, number), losses, 2)
        later = known[number + 1] if number < 5 else run.simulation.ledger.client_losses
        assert later[list(cohort.clients)].mean() == pytest.approx(mean)
        others = [client for client in range(6) if client not in cohort.clients]
        np.testing.assert_array_equal(later[others], losses[others])


def test_coverage_counts_the_cohorts_that_were_drawn(tmp_path: Path, settings: list[str]) -> None:
    keys = [*settings, "method.name=fedavg", "train.participation=0.3"]
    for sampling in ("uniform", "size", "power_of_choice"):
        folder = tmp_path / sampling
        assert run_here(folder, [*keys, f"clients.sampling={sampling}"]) == FINISHED
        run = load_run(folder)
        assert run.metrics["coverage"][-1] == (run.clients["bytes_down"] > 0).mean()


# Lost members


def test_members_are_dropped_at_the_rate_of_the_key() -> None:
    found = [is_dropped(ClientsConfig(drop_rate=0.3), 1, n, c) for n in range(200) for c in range(20)]
    assert np.mean(found) == pytest.approx(0.3, abs=0.022)
    assert not any(is_dropped(ClientsConfig(), 1, n, 0) for n in range(200))


def test_tables_count_the_bytes_of_a_member_that_takes_part_and_is_not_lost(
    tmp_path: Path, settings: list[str]
) -> None:
    keys = ["clients.drop_rate=0.6", "train.rounds=3", "train.participation=0.3", "model.batchnorm=false"]
    assert run_here(tmp_path, [*settings, "method.name=fedavg", *keys]) == FINISHED
    run = load_run(tmp_path)
    assert 0 < run.last["lost"] < 6
    figures = _figures(run, run.config.train)
    assert figures["bytes_down"] == figures["bytes_up"]
    # a round of which all members are lost has no steps
    assert figures["client_steps_per_s"] > 0


def test_a_run_that_loses_everybody_has_a_row_in_its_table(tmp_path: Path, settings: list[str]) -> None:
    keys = ["method.name=fedavg", "clients.step_s=1", "clients.deadline_s=0.001", "train.rounds=1"]
    assert run_here(tmp_path, [*settings, *keys]) == FINISHED
    run = load_run(tmp_path)
    figures = _figures(run, run.config.train)
    assert (figures["bytes_up"], figures["bytes_down"] > 0) == (0, True)


@pytest.mark.usefixtures("double")
def test_the_mean_is_over_the_members_that_remain() -> None:
    keys = ["method.name=fedavg", "clients.drop_rate=0.5", *UNEQUAL]
    one, two = (Run(*keys, f"train.rounds={rounds}") for rounds in (1, 2))
    there = members_that_train(two, 1)
    assert 0 < len(there) < 4
    rows = torch.stack([work(one, client, 1)[0]["theta"][0] for client in there])
    samples = two.method.context.num_samples[there].double()
    torch.testing.assert_close(two.server["theta"], (samples / samples.sum()) @ rows)
    size = 8 * two.method.layout.size
    down, up = two.bytes_by_client.T
    assert down.tolist() == [2 * size] * 4
    sent = [c for number in (0, 1) for c in members_that_train(two, number)]
    assert up.tolist() == [size * sent.count(client) for client in range(4)]
    assert two.simulation.ledger.lost.tolist() == [2 - sent.count(client) for client in range(4)]


LOSING = {name: method_settings(name) for name in ("scaffold", "heurpfedla", "fedavg-topk")}
LOSING["pfedla-sharded"] = [*method_settings("pfedla"), "method.server=sharded"]
LOSING["fedmn-chain"] = [*method_settings("fedmn"), "method.order=chain"]


# products of a whole cohort have other last bits than those of a smaller one, so without pFedLA
@pytest.mark.parametrize("case", ["scaffold", "fedavg-topk", "fedmn-chain"])
def test_a_lost_member_is_as_if_it_had_not_been_sampled(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    keys = [*settings, *LOSING[case], "train.rounds=2"]
    assert run_here(tmp_path / "lost", [*keys, "clients.drop_rate=0.5"]) == FINISHED
    half = ClientsConfig(drop_rate=0.5)
    leave_out(monkeypatch, lambda number, client: is_dropped(half, 0, number, client))
    assert run_here(tmp_path / "absent", keys) == FINISHED
    assert differing(tmp_path / "lost", tmp_path / "absent", "server", "clients") == []
    assert 0 < load_run(tmp_path / "lost").metrics["lost"][-1] < 14


@pytest.mark.parametrize("case", LOSING)
def test_a_cohort_of_only_lost_clients_changes_nothing(
    settings: list[str], tmp_path: Path, case: str
) -> None:
    keys = [*settings, *LOSING[case], DROPS_ALL]
    for rounds in (1, 2):
        assert run_here(tmp_path / str(rounds), [*keys, f"train.rounds={rounds}"]) == FINISHED
    assert differing(tmp_path / "1", tmp_path / "2", "server", "clients", "personalised") == []
    run = load_run(tmp_path / "2")
    assert run.metrics["lost"].tolist() == [7, 14]
    assert run.clients["lost"].tolist() == [2] * 7
    assert run.metrics["bytes_up"][-1] == run.metrics["client_steps_per_s"][-1] == 0
    assert run.metrics["bytes_down"][-1] > 0
    last = [run.metrics[name][-1] for name in ("train_loss_mean", "accuracy_after_training")]
    assert all(map(math.isnan, last))


# The simulated clock


def factor_by_hand(run: Run, sigma: float, client: int) -> float:
    """Return a client's factor on the time of a mini-batch, as the clock draws it."""
    stream = torch_stream(run.config.run.seed, "slowness", 0, client)
    return math.exp(sigma * torch.randn((), dtype=torch.float64, generator=stream).item())


TWO = ("method.name=fedavg", "data.clients=2", "clients.step_s=0.5", "clients.slowness=0.7")


def test_the_simulated_clock_follows_the_slower_of_two_clients() -> None:
    run = Run(*TWO, "clients.bytes_per_s=1e4", "train.local_epochs=3")
    # 28 samples are 3 mini-batches of at most 10; a model goes down and up in float32
    message_s = 2 * 4 * run.method.layout.size / 1e4
    factors = [factor_by_hand(run, 0.7, client) for client in range(2)]
    assert factors[0] != factors[1]
    assert run.simulation.ledger.simulated_s == pytest.approx(3 * (3 * 3 * 0.5 * max(factors) + message_s))
    without = Run(*TWO[:3])
    assert without.simulation.ledger.simulated_s == 3 * 3 * 0.5


def test_a_late_client_is_lost_after_its_training(recorded: list[dict[str, object]]) -> None:
    run = Run(*TWO, "method.name=local", "clients.deadline_s=3", "train.rounds=1")
    times = [3 * 0.5 * factor_by_hand(run, 0.7, client) for client in range(2)]
    assert min(times) < 3 < max(times)
    late = int(np.argmax(times))
    ledger = run.simulation.ledger
    assert ledger.lost.tolist() == [int(client == late) for client in range(2)]
    assert ledger.simulated_s == 3
    # it has trained, and none of that stays
    assert sum(recorded[0]["steps"].values()) == 6  # type: ignore[attr-defined]
    start = run.method.client_state([0, 1])["theta"]
    assert [torch.equal(*pair) for pair in zip(run.clients["theta"], start, strict=True)] == [
        client == late for client in range(2)
    ]
    assert np.isnan(ledger.client_losses).tolist() == [client == late for client in range(2)]


def test_a_round_lasts_as_long_as_its_slowest_member_or_the_deadline() -> None:
    def lasts(counted: list[float], has_lost: bool, deadline_s: float | None) -> float:
        clock = Clock(ClientsConfig(step_s=1.0, deadline_s=deadline_s), 0)
        return clock.round_s(torch.tensor(counted, dtype=torch.float64), has_lost)

    assert lasts([1.0, 3.0], False, 5.0) == 3.0
    assert lasts([1.0], True, 5.0) == 5.0
    assert lasts([1.0, 2.0], True, None) == 2.0
    assert lasts([], True, None) == 0.0


@pytest.mark.parametrize(
    "case", ["fedavg", "fedmn", "heurpfedla", "local", "pfedmb", "fedavg-int8", "heurpfedla-topk"]
)
def test_the_bytes_of_the_simulated_clock_are_those_of_the_ledger(
    settings: list[str], recorded: list[dict[str, object]], tmp_path: Path, case: str
) -> None:
    """With a step of no time, a round lasts as long as most bytes; none has more than the deadline allows."""
    keys = [*settings, *method_settings(case), "train.rounds=2", "clients.step_s=0", "clients.bytes_per_s=8"]
    assert run_here(tmp_path / "run", [*keys, "clients.deadline_s=1e9"]) == FINISHED
    for figures in recorded:
        down, up = figures["traffic"]  # type: ignore[misc]
        assert figures["simulated_s"] == (down.total + up.total).max() / 8
        assert figures["lost"] == []


# Unequal work


def test_epochs_and_batch_sizes_are_drawn_from_their_ranges() -> None:
    work = Work(TrainConfig(local_epochs=9), 3, ClientsConfig(local_epochs=[2, 5], batch_size=[8, 16, 32]))
    epochs = np.array([[work.local_epochs(n, c) for n in range(100)] for c in range(20)])
    counts = np.bincount(epochs.ravel(), minlength=6) / epochs.size
    np.testing.assert_allclose(counts, [0, 0, 0.25, 0.25, 0.25, 0.25], atol=0.03)
    # of a client, and of a round, they differ
    assert (np.ptp(epochs, axis=0) > 0).all()
    assert (np.ptp(epochs, axis=1) > 0).all()
    sizes = [work.batch_size(client) for client in range(900)]
    np.testing.assert_allclose([sizes.count(size) / 900 for size in (8, 16, 32)], [1 / 3] * 3, atol=0.05)
    assert Work(TrainConfig(local_epochs=9, batch_size=4)).local_epochs(1, 1) == 9


def test_each_client_runs_its_own_number_of_steps() -> None:
    unequal = ClientsConfig(local_epochs=[1, 4], batch_size=[3, 6])
    place = replace(make_worker(make_network(), [10, 7, 13, 4], TrainConfig()), unequal=unequal)
    clients = ClientGroup(place, range(4), 6)
    seen: list[list[int]] = [[] for _ in range(4)]
    for batch in clients.batches():
        members = range(4) if isinstance(batch.members, slice) else batch.members.tolist()
        clients.record(batch, torch.zeros(()))
        for member, index in zip(members, batch.index.tolist(), strict=True):
            seen[member] += index
            assert len(index) <= place.work.batch_size(member)
    epochs = [place.work.local_epochs(6, client) for client in range(4)]
    assert len(set(epochs)) > 1
    for client, size in enumerate([10, 7, 13, 4]):
        assert sorted(seen[client]) == sorted([*range(size)] * epochs[client])
    # what a method's own key sets stays
    assert sum(batch.y.numel() for batch in clients.batches(epochs=2)) == 2 * (10 + 7 + 13 + 4)


def test_unseen_clients_keep_their_epochs() -> None:
    run = Run("method.name=fedavg", "data.unseen_clients=0.25", "clients.local_epochs=[3,4]")
    assert run.unseen.work.local_epochs(3, 3) == 1
    assert run.worker.work.local_epochs(3, 2) in (3, 4)


@pytest.mark.warns
@pytest.mark.parametrize("method", DIFFERENT)
@pytest.mark.usefixtures("double")
def test_every_method_with_lost_members_and_unequal_work_on_both_engines(method: str, tmp_path: Path) -> None:
    """On series of tokens; test_methods.py compares engines on images."""
    keys = [*method_settings(method), *words_of("tokens", tmp_path), *UNEQUAL, *FEW_ROUNDS.get(method, [])]
    keys += ["data.clients=6", "data.unseen_clients=0.4", "train.rounds=2", "run.seed=1"]
    keys += ["clients.drop_rate=0.5", "clients.local_epochs=[1,2]", "clients.batch_size=[4,8]"]
    keys += ["data.label_noise=0.2", "clients.step_s=1", "clients.bytes_per_s=1e5"]
    loop, batched = (Run(*keys, f"run.engine={engine}") for engine in ("loop", "batched"))
    assert 0 < loop.simulation.ledger.lost.sum() < 8
    of_engines = [
        run.evaluated() | {f"new {name}": rows for name, rows in run.adapted().items()}
        for run in (loop, batched)
    ]
    assert of_engines[0]["theta"].isfinite().all()
    torch.testing.assert_close(*of_engines, rtol=0, atol=1e-9)


OFF = (
    *("train.optimiser=sgd", "train.warmup_rounds=0", "train.label_smoothing=0", "train.augment=none"),
    *("train.augment=[]", "train.unseen_epochs=null", "data.unseen_clients=0", "data.unseen_clients=null"),
    *("data.label_noise=0", "clients.sampling=uniform", "clients.drop_rate=0"),
)


@pytest.mark.parametrize("word", OFF)
def test_a_key_that_is_off_changes_no_configuration(word: str) -> None:
    assert load_config(None, [word]).yaml() == load_config(None, []).yaml()
