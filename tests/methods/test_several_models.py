"""Methods with several global models: IFCA, Clustered FL and FedEM."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from by_hand import SOME, assert_close, cohort_of, method_of, network_with, train_by_torch, work
from harness import UNEQUAL_FEW, Run
from torch import Tensor
from torch.nn.functional import cross_entropy
from uploads import upload_of

from hpcfl.communication.messages import BUFFERS, Cohort
from hpcfl.config.keys import DataConfig
from hpcfl.data.sources import read_source
from hpcfl.errors import UserError
from hpcfl.methods import Method
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.base import State
from hpcfl.methods.clustered_fl import ClusteredFL, bipartition
from hpcfl.methods.fedem import FedEM
from hpcfl.methods.ifca import IFCA as IFCAMethod
from hpcfl.models import Network
from hpcfl.training.client_group import ClientGroup

IFCA, CLUSTERED, FEDEM = (f"method.name={name}" for name in ("ifca", "clustered_fl", "fedem"))
LINEAR = ("model.name=mlp", "model.hidden=[]")
P = 1210
"""Numbers of the network of `method_of`."""


def sample_losses(run: Run, theta: Tensor, statistics: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the losses [n] of samples, in evaluation mode."""
    with torch.no_grad():
        return cross_entropy(network_with(run, theta, statistics).eval()(x), y, reduction="none")


def receive(adapter: MethodAdapter, server: State, rows: Mapping[int, State], round: int = 0) -> None:
    """Answer with what each of some clients sends, tensors by name."""
    clients = sorted(rows)
    stacked = {name: torch.stack([rows[client][name] for client in clients]) for name in rows[clients[0]]}
    adapter.aggregate(server, cohort_of(adapter.method, clients, round), upload_of(stacked))


def planted(folder: Path, rules: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Write a client for each rule, with digits whose class c is called rule[c]; return keys to use them."""
    arrays = read_source(DataConfig(source="digits"))
    x = (arrays.x / np.float32(16) - np.float32(0.3)) / np.float32(0.37)
    order = np.random.default_rng(0).permutation(len(x))
    for part, size in (("train", 30), ("test", 10)):
        (folder / part).mkdir()
        for client, rule in enumerate(rules):
            mine, order = order[:size], order[size:]
            np.savez(
                folder / part / f"{client}.npz", data={"x": x[mine], "y": np.array(rule)[arrays.y[mine]]}
            )
    given = ("data.partition.name=given", "data.clients=null", "data.per_client=null")
    return (*LINEAR, "data.source=pfllib", f"data.path={folder}", *given, "train.lr=0.1")


PLAIN = list(range(10))
MIRRORED = PLAIN[::-1]
MIRRORED_AND_SWAPPED = [6, 5, 4, 9, 8, 7, *MIRRORED[6:]]


# Different starts


STARTS = pytest.mark.parametrize(("kind", "key"), [(IFCAMethod, "clusters"), (FedEM, "components")])


@STARTS
def test_models_start_differently_and_the_first_as_the_common_one(kind: type[Method], key: str) -> None:
    two, four = (method_of(kind, **{key: count}) for count in (2, 4))
    start = four.server_state()["theta"]
    assert torch.equal(start[0], four.context.initial_parameters())
    assert torch.equal(start[:2], two.server_state()["theta"])
    assert (torch.pdist(start, p=1) / start.shape[1]).min() > 0.01


@STARTS
def test_models_with_given_weights_must_also_start_differently(
    kind: type[Method], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of weights give no head, in which the models differ."""
    context = method_of(kind).context
    context.weights_are_given = True
    kind(context, kind.Params(**{key: 2}))
    # a file that gave the head too would make all starts alike
    monkeypatch.setattr(context, "different_starts", lambda count: torch.zeros(count, 3))
    expected = rf"^method\.{key}=2 needs models that start differently, .* or use method\.{key}=1$"
    with pytest.raises(UserError, match=expected):
        kind(context, kind.Params(**{key: 2}))
    kind(context, kind.Params(**{key: 1}))


# IFCA


def chosen_by_hand(run: Run, clients: Sequence[int]) -> list[int]:
    """Return which model has the least loss over each client's training samples."""
    models = run.server["theta"]
    statistics = run.server.get(BUFFERS, torch.empty(len(models), 0))
    losses = [
        [
            sample_losses(run, *model, *run.worker.shard.samples("train", client)).sum()
            for model in zip(models, statistics, strict=True)
        ]
        for client in clients
    ]
    return torch.tensor(losses).argmin(dim=1).tolist()


def test_ifca_chooses_by_the_loss_on_training_data(tmp_path: Path) -> None:
    """Six clients of two groups, alternating."""
    run = Run(*planted(tmp_path, [PLAIN, MIRRORED] * 3), IFCA, "train.rounds=4")
    everyone, shard = range(6), run.worker.shard

    def chosen() -> list[int]:
        return torch.cat([work(run, client, 4)[0].per_client["cluster"] for client in everyone]).tolist()

    assert chosen() == chosen_by_hand(run, everyone) == [0, 1] * 3
    models = run.evaluated()["theta"][:2]
    for part, choices in (("test", [0, 1] * 3), ("train", [1, 0] * 3)):
        for client in everyone:
            _, y = shard.samples(part, client)
            y.copy_(9 - y)
        assert chosen() == choices
        assert torch.equal(run.evaluated()["theta"], models[choices])


@pytest.mark.usefixtures("double")
def test_rounds_of_ifca_equal_those_by_hand_and_each_model_has_its_own_statistics() -> None:
    run = Run(*SOME, IFCA, "method.clusters=3", "train.rounds=2")
    ended = dict(run.server)
    start = run.adapter.initial_server()
    theta, statistics = start["theta"], start[BUFFERS]
    assert statistics.shape == (3, 96)
    choices = []
    for number in range(2):
        cohort = run.simulation.cohort(number)
        run.server = {"theta": theta, BUFFERS: statistics}
        chosen = chosen_by_hand(run, cohort.clients)
        choices.append(set(chosen))
        models, moved = [], []
        for client, cluster in zip(cohort.clients, chosen, strict=True):
            alone = ClientGroup(run.worker, [client], number)
            alone.buffers = statistics[cluster : cluster + 1].clone()
            models.append(alone.sgd(theta[cluster : cluster + 1]).theta[0])
            moved.append(alone.buffers[0])
        theta, statistics = theta.clone(), statistics.clone()
        for cluster in set(chosen):
            members = [position for position, other in enumerate(chosen) if other == cluster]
            weights = cohort.num_samples[members] / cohort.num_samples[members].sum()
            theta[cluster] = torch.einsum("c,cp->p", weights, torch.stack(models)[members])
            statistics[cluster] = torch.einsum("c,cu->u", weights, torch.stack(moved)[members])
    torch.testing.assert_close((ended["theta"], ended[BUFFERS]), (theta, statistics), rtol=0, atol=1e-12)
    # in one of the rounds, nobody trains one of the models
    assert [len(of_round) for of_round in choices] == [2, 3]
    run.server = ended
    evaluated, chosen = run.evaluated(), chosen_by_hand(run, range(4))
    assert torch.equal(evaluated["theta"], ended["theta"][chosen])
    assert torch.equal(evaluated[BUFFERS], ended[BUFFERS][chosen])


def test_ifca_records_which_model_each_client_chose_last() -> None:
    run = Run(IFCA, "method.clusters=2", "train.rounds=1", *LINEAR)
    server = run.adapter.initial_server()
    assert MethodAdapter(run.method).server_diagnostics(server)["cluster"].tolist() == [-1] * 4
    theta = torch.zeros(650)
    receive(run.adapter, server, {1: {"theta": theta, "cluster": torch.tensor(1)}})
    receive(run.adapter, server, {c: {"theta": theta, "cluster": torch.tensor(0)} for c in (1, 3)}, round=1)
    assert MethodAdapter(run.method).server_diagnostics(server)["cluster"].tolist() == [-1, 0, -1, 0]


# Clustered FL


def clustered(clients: int = 8, **params: float) -> tuple[MethodAdapter, State]:
    """Return a method for clients of equal size whose thresholds are 0.4 and 1.6, and its server's start."""
    adapter = MethodAdapter(method_of(ClusteredFL, clients, **{"first_round": 2} | params))
    return adapter, adapter.initial_server()


def updates(*vectors: Sequence[float], clients: Sequence[int] | None = None) -> dict[int, State]:
    """Return an upload: an update for each client, given by its first numbers."""
    rows = {}
    for client, vector in zip(clients or range(len(vectors)), vectors, strict=True):
        theta = torch.zeros(P)
        theta[: len(vector)] = torch.tensor(vector)
        rows[client] = {"update": theta}
    return rows


RIGHT, LEFT = (2.0, 0.0, 0.1), (-2.0, 0.0, 0.1)


@pytest.mark.parametrize(
    ("vectors", "clusters"),
    [
        pytest.param([RIGHT, LEFT, RIGHT, LEFT], [0, 1, 0, 1], id="short mean of long updates"),
        pytest.param([(1.5,), (-1.5,), (1.5,), (-1.5,)], [0] * 4, id="short updates"),
        pytest.param([(1.7,), (-1.5,), (1.5,), (-1.5,)], [0, 1, 0, 1], id="one long update"),
        pytest.param([RIGHT, LEFT, RIGHT, RIGHT], [0] * 4, id="long mean"),
        pytest.param([(3.0,), (-2.2,)], [0, 0], id="two clients"),
        pytest.param([RIGHT, LEFT, (0.0, 2.0)], [0, 1, 0], id="three clients"),
        pytest.param([(torch.nan,), LEFT, RIGHT, LEFT], [0] * 4, id="a diverged client"),
    ],
)
def test_a_cluster_splits_if_its_mean_update_is_small_and_its_largest_update_large(
    vectors: list[tuple[float, ...]], clusters: list[int]
) -> None:
    adapter, server = clustered(len(vectors), eps_1=0.8)
    receive(adapter, server, updates(*vectors), round=2)
    assert server["cluster"].tolist() == clusters
    assert len(server["theta"]) == 1 + max(clusters)
    assert torch.equal(MethodAdapter(adapter.method).server_diagnostics(server)["cluster"], server["cluster"])


def test_no_split_without_eps_1_or_before_the_first_round() -> None:
    opposed = updates(RIGHT, LEFT, RIGHT, LEFT, *[(1.8, 0.0, -0.1), (-1.8, 0.0, -0.1)] * 2)
    adapter, server = clustered()
    for number in (0, 1):
        receive(adapter, server, opposed, round=number)
        assert server["cluster"].tolist() == [0] * 8
    receive(adapter, server, opposed, round=2)
    assert server["cluster"].tolist() == [0, 1] * 4
    adapter, server = clustered(eps_1=0, eps_2=0)
    exactly_zero = updates(*[(2.0,), (-2.0,)] * 4)
    receive(adapter, server, exactly_zero, round=5)
    assert torch.equal(server["theta"][0], adapter.method.context.initial_parameters())
    assert server["cluster"].tolist() == [0] * 8


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (("train.rounds=1",), "method.first_round=20 allows none; allowed here: below 1$"),
        (("data.clients=2", "method.first_round=0"), "it parts three clients or more, and there are 2$"),
        (
            ("train.participation=0.5", "train.rounds=1", "method.first_round=0"),
            "a cluster waits until all its clients have trained, and 2 never did$",
        ),
        (
            ("method.first_round=1", "method.eps_1=1e-9"),
            "its mean update was .*, not shorter than method.eps_1",
        ),
        (
            ("method.first_round=1", "method.eps_1=1e9", "method.eps_2=1e9"),
            "its longest update was .*, not longer than method.eps_2",
        ),
        (
            ("method.first_round=1", "method.eps_1=1e9", "method.eps_2=0", "method.gamma_max=1"),
            r"its parts had a cross-similarity of .*, not below 1 - 2 method.gamma_max\^2 = -1$",
        ),
    ],
)
def test_a_run_without_a_split_reports_why(
    keys: tuple[str, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = f"^method.name=clustered_fl never split, so it was FedAvg with uniform means: {why}"
    Run(*LINEAR, CLUSTERED, "data.clients=4", "train.rounds=2", *keys)
    (warning,) = caplog.messages
    assert re.match(expected, warning)


def test_history_has_the_norms_of_clients_trained_since_their_cluster_was_made() -> None:
    adapter, server = clustered(4, first_round=4)
    receive(adapter, server, updates((3.0, 0.0), (-1.0, 0.0), clients=[0, 1]), round=2)
    norms = MethodAdapter(adapter.method).server_diagnostics(server)
    assert norms["update_norm"].nan_to_num(-1).tolist() == [3, 1, -1, -1]
    assert norms["mean_update_norm"].nan_to_num(-1).tolist() == [1, 1, -1, -1]
    receive(adapter, server, updates(RIGHT, LEFT, RIGHT, LEFT), round=4)
    norms = MethodAdapter(adapter.method).server_diagnostics(server)
    assert server["cluster"].tolist() == [0, 1, 0, 1]
    assert norms["update_norm"].isnan().all()
    assert norms["mean_update_norm"].isnan().all()
    receive(adapter, server, updates((3.0, 0.0), (0.0, 4.0), (1.0, 0.0), (0.0, 0.0)), round=5)
    norms = MethodAdapter(adapter.method).server_diagnostics(server)
    assert norms["update_norm"].tolist() == [3, 4, 1, 0]
    assert norms["mean_update_norm"].tolist() == [2, 2, 2, 2]


def test_clusters_keep_client_numbers_when_they_split_again() -> None:
    adapter, server = clustered()
    start = adapter.method.context.initial_parameters()
    right, up, down = (2.0,), (-2.0, 1.5), (-2.0, -1.5)
    receive(adapter, server, updates(right, right, right, right, up, up, down, down), round=2)
    assert server["cluster"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    moved = start.expand(2, -1).clone()
    moved[:, 0] += torch.tensor([2.0, -2.0])
    assert torch.equal(server["theta"], moved)
    # cluster 0 agrees, cluster 1 does not: positions 2 and 3 in it are clients 6 and 7
    receive(
        adapter, server, updates(right, right, right, right, *[(0.0, 2.0)] * 2, *[(0.0, -2.0)] * 2), round=3
    )
    assert server["cluster"].tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    moved = moved[[0, 1, 1]]
    moved[0, 0] += 2
    moved[1:, 1] += torch.tensor([2.0, -2.0])
    torch.testing.assert_close(server["theta"], moved)
    sent = adapter.download(server, Cohort(4, (1, 4, 7), torch.ones(3)))["theta"]
    assert torch.equal(sent, server["theta"][[0, 1, 2]])


@pytest.mark.warns
def test_each_part_adds_its_mean_update_to_the_common_model() -> None:
    keys = (*UNEQUAL_FEW, "model.batchnorm=true", "train.rounds=1")
    run = Run(CLUSTERED, *keys, "method.first_round=2", "method.eps_1=0.4")
    # whose sizes do not count
    assert len(set(run.method.context.num_samples.tolist())) > 1
    server = run.adapter.initial_server()
    start = server["theta"][0].clone()
    rows = {}
    for client, value in enumerate((2.0, 3.0, -2.0, -2.5)):
        theta = torch.zeros_like(start)
        theta[7] = value
        rows[client] = {"update": theta, BUFFERS: torch.full((96,), value)}
    receive(run.adapter, server, rows, round=2)
    assert server["cluster"].tolist() == [0, 0, 1, 1]
    means = torch.tensor([2.5, -2.25])
    moved = start.expand(2, -1).clone()
    moved[:, 7] += means
    torch.testing.assert_close(server["theta"], moved)
    torch.testing.assert_close(server[BUFFERS], means.unsqueeze(1).expand(2, 96))
    # of the first part, one client alone is sampled next
    receive(run.adapter, server, {0: {name: 2 * tensor for name, tensor in rows[0].items()}}, round=3)
    moved[0, 7] += 4
    means[0] = 4
    torch.testing.assert_close(server["theta"], moved)
    torch.testing.assert_close(server[BUFFERS], means.unsqueeze(1).expand(2, 96))


def test_a_cluster_splits_only_after_all_its_clients_have_trained_in_it() -> None:
    adapter, server = clustered(6)
    receive(adapter, server, updates(RIGHT, LEFT, RIGHT, clients=[0, 1, 2]), round=2)
    receive(adapter, server, updates(LEFT, RIGHT, clients=[1, 4]), round=3)
    assert server["cluster"].tolist() == [0] * 6
    receive(adapter, server, updates(LEFT, LEFT, clients=[3, 5]), round=4)
    assert server["cluster"].tolist() == [0, 1, 0, 1, 0, 1]
    # the odd ones disagree, also with what client 5 had last sent, but that was before the split
    receive(adapter, server, updates((2.0, 0.5), (0.0, -0.5), clients=[1, 3]), round=5)
    assert server["cluster"].tolist() == [0, 1, 0, 1, 0, 1]
    receive(adapter, server, updates((-2.0, 0.0), clients=[5]), round=6)
    assert server["cluster"].tolist() == [0, 1, 0, 2, 0, 2]


@pytest.mark.parametrize(("gamma_max", "splits"), [(0.499, True), (0.501, False)])
def test_parts_must_differ_by_more_than_noise_explains(gamma_max: float, splits: bool) -> None:
    # 60 degrees across: alpha_cross = 0.5, and sqrt((1 - 0.5) / 2) = 0.5; the others are nearly alike
    adapter, server = clustered(4, gamma_max=gamma_max, eps_1=10)
    receive(adapter, server, updates(*on_circle(0, 1, 61, 62).tolist()), round=2)
    assert server["cluster"].tolist() == ([0, 0, 1, 1] if splits else [0] * 4)


def on_circle(*degrees: float) -> Tensor:
    """Return vectors of various lengths at some angles."""
    angles = torch.tensor(degrees).deg2rad()
    lengths = torch.linspace(1, 5, len(degrees)).unsqueeze(1)
    return lengths * torch.stack([angles.cos(), angles.sin()], dim=1)


def test_bipartitions_equal_those_by_hand() -> None:
    # gaps of 9, 11, 10, 12 and 18 degrees
    vectors = on_circle(0, 9, 20, 30, 42, 60)
    assert bipartition(vectors, "single").tolist() == [False] * 5 + [True]
    # 9 joins 0, 30 joins 20, 60 joins 42 at 18; then 30 degrees are less than 40
    assert bipartition(vectors, "complete").tolist() == [False] * 4 + [True] * 2
    order = [5, 0, 4, 1, 3, 2]
    assert bipartition(vectors[order], "complete").tolist() == [False, True, False, True, True, True]
    lengths_do_not_count = torch.tensor([[1e-3, 0.0], [-5.0, 0.0], [9.0, 1.0]])
    assert bipartition(lengths_do_not_count, "complete").tolist() == [False, True, False]


def test_clustered_fl_finds_three_planted_groups(tmp_path: Path) -> None:
    keys = planted(tmp_path, [PLAIN, MIRRORED, MIRRORED_AND_SWAPPED] * 3)
    splits = ("method.eps_1=0.27", "method.eps_2=0.47", "method.first_round=2")
    run = Run(*keys, CLUSTERED, *splits, "train.batch_size=8", "train.rounds=9")
    assert run.server["cluster"].tolist() == [0, 1, 2] * 3
    assert torch.equal(run.evaluated()["theta"], run.server["theta"][[0, 1, 2] * 3])
    assert torch.pdist(run.server["theta"]).min() > 0.1
    assert run.bytes_by_client.tolist() == [[9 * 4 * 650] * 2] * 9


# FedEM


class Reference:
    """FedEM with a plain torch network and torch's SGD."""

    def __init__(self, run: Run) -> None:
        self.run, start = run, run.adapter.initial_server()
        self.count = run.config.method.options.components
        self.theta = start["theta"]
        self.statistics = start.get(BUFFERS, torch.empty(self.count, 0))
        self.weights = [torch.full((self.count,), 1 / self.count) for _ in range(run.num_clients)]

    def shares(self, client: int, x: Tensor, y: Tensor) -> Tensor:
        """Return q [n, M] of samples for the models as received."""
        models = zip(self.theta, self.statistics, strict=True)
        losses = [sample_losses(self.run, *model, x, y) for model in models]
        joint = self.weights[client] * torch.stack(losses, dim=1).neg().exp()
        return joint / joint.sum(dim=1, keepdim=True)

    def round(self, number: int) -> None:
        cohort = self.run.simulation.cohort(number)
        theta, statistics = torch.zeros_like(self.theta), torch.zeros_like(self.statistics)
        for client, size in zip(cohort.clients, cohort.num_samples, strict=True):
            for m in range(self.count):

                def loss(network: Network, x: Tensor, y: Tensor, m: int = m, client: int = client) -> Tensor:
                    losses = cross_entropy(network(x), y, reduction="none")
                    return self.shares(client, x, y)[:, m] @ losses / len(y)

                network = network_with(self.run, self.theta[m], self.statistics[m])
                train_by_torch(self.run, client, number, network, loss=loss)
                trained, moved = self.run.method.layout.flatten(network)
                theta[m] += size / cohort.num_samples.sum() * trained
                statistics[m] += size / cohort.num_samples.sum() * moved
            everything = self.run.worker.shard.samples("train", client)
            self.weights[client] = self.shares(client, *everything).mean(dim=0)
        self.theta, self.statistics = theta, statistics


@pytest.mark.parametrize(
    "keys",
    [
        (*UNEQUAL_FEW, "model.batchnorm=true", "train.local_epochs=2"),
        ("train.participation=0.5", "train.momentum=0.9", "train.weight_decay=0.01", "train.lr_decay=0.5"),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_of_fedem_equal_a_plain_implementation(keys: tuple[str, ...]) -> None:
    run = Run(*keys, FEDEM, "method.components=2", "train.rounds=2", "train.lr=0.1")
    reference = Reference(run)
    for number in range(2):
        reference.round(number)
    found = (run.server["theta"], run.server.get(BUFFERS, reference.statistics), run.clients["weights"])
    expected = (reference.theta, reference.statistics, torch.stack(reference.weights))
    assert_close(found, expected)


class ByNumbers(FedEM):
    """Components whose every sample has losses as given, by way of the bias of a linear model."""

    def server_state(self) -> State:
        theta = torch.zeros(self.params.components, self.layout.size)
        # class 0 has probability 1/2 or 9/10, the others share the rest
        theta[0, -10], theta[1, -10] = torch.tensor(9.0).log(), torch.tensor(81.0).log()
        return {"theta": theta}


@pytest.mark.usefixtures("double")
def test_the_loss_reported_by_fedem_is_that_of_the_whole_mixture() -> None:
    run = Run(*LINEAR, FEDEM, "method.components=2", "train.rounds=1", "train.batch_size=100", kind=ByNumbers)
    run.server = run.adapter.initial_server()
    run.clients["weights"].fill_(0.5)
    _, clients = work(run, 1)
    is_first = run.worker.shard.samples("train", 1)[1] == 0
    # shares 5/14 and 9/14 of log 2 and log 10/9 for class 0, 5/6 and 1/6 of log 18 and log 90 for the others
    of_first = (5 * math.log(2) + 9 * math.log(10 / 9)) / 14
    of_others = (5 * math.log(18) + math.log(90)) / 6
    expected = torch.where(is_first, of_first, of_others).mean()
    assert clients.steps.tolist() == [2]
    torch.testing.assert_close(clients.loss_sum / clients.steps, expected.reshape(1), rtol=0, atol=1e-12)


def test_a_client_that_never_trained_computes_its_weights_with_the_newest_components() -> None:
    run = Run(FEDEM, *LINEAR, "train.rounds=1", "train.participation=0.5")
    (fresh, *_) = set(range(4)) - set(run.simulation.cohort(0).clients)
    assert (run.clients["weights"][fresh] == 1 / 3).all()
    everyone = run.evaluated()["weights"]
    samples, none = run.worker.shard.samples("train", fresh), torch.empty(0)
    losses = [sample_losses(run, theta, none, *samples) for theta in run.server["theta"]]
    likelihoods = torch.stack(losses, dim=1).neg().exp()
    shares = likelihoods / likelihoods.sum(dim=1, keepdim=True)
    torch.testing.assert_close(everyone[fresh], shares.mean(dim=0))
    assert (everyone[fresh] - 1 / 3).abs().max() > 0.01
    # it is forgotten, and those that trained keep theirs
    assert (run.clients["weights"][fresh] == 1 / 3).all()
    trained = list(run.simulation.cohort(0).clients)
    assert torch.equal(everyone[trained], run.clients["weights"][trained])
    # of equal ones too, which are those of a client that never trained
    run.clients["weights"][trained] = 1 / 3
    assert (run.evaluated()["weights"][trained] == 1 / 3).all()
