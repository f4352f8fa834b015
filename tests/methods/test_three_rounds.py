"""Three rounds of every method: golden numbers, what it sends and keeps, what its saved models predict.

A method is under test by being in METHODS; what is expected of it is in `golden.json`, written by
helpers/golden.py, and in the tables TRAFFIC and STATE below.

Shapes: N clients, P trainable numbers, U running statistics, F features, L layers, K classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import golden
import h5py
import numpy as np
import pytest
import torch
from bits import (
    DIFFERENT,
    LAYERS,
    VARIANTS,
    F,
    K,
    N,
    P,
    U,
    expected,
    logits_by_network,
    raw_tests,
    right,
    right_of_run,
)

from hpcfl.methods import METHODS
from hpcfl.results.run import load_run
from hpcfl.storage.ledger import METRICS

KNOWN = json.loads(golden.FILE.read_text())["methods"]

LOSS_TOLERANCE = 2e-3
"""Relative, of three rounds on another processor."""
ACCURACY_TOLERANCE = 0.05
"""Seven clients have three test samples or more, so that one sample is at most a twenty-first of the mean."""

CASES = [*METHODS, *VARIANTS]
FIXED_CHOICES = {"heurpfedla": ["method.k=6"], "fedmn": ["method.routing=open"]}
"""Where traffic depends on what was learnt: all layers are retained, open paths use all blocks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from a case, and settings beside those of golden.py, to the folder of its run."""
    base = tmp_path_factory.mktemp("runs")

    @cache
    def of(case: str, *more: str) -> Path:
        folder = base / "-".join([case, *(word.partition("=")[2] for word in more)])
        golden.run_case(case, folder, *more)
        return folder

    return of


@pytest.mark.parametrize("case", golden.CASES)
def test_a_run_has_the_golden_numbers(folder: Callable[..., Path], case: str) -> None:
    found, known = golden.numbers_of(folder(case)), KNOWN[case]
    assert {name: found[name] for name in golden.COUNTS} == {name: known[name] for name in golden.COUNTS}
    assert found["loss_mean"] == pytest.approx(known["loss_mean"], rel=LOSS_TOLERANCE)
    assert found["train_loss_mean"] == pytest.approx(known["train_loss_mean"], rel=LOSS_TOLERANCE)
    assert found["accuracy_mean"] == pytest.approx(known["accuracy_mean"], abs=ACCURACY_TOLERANCE)


SOME_CLIENTS = (1, 3, 6)
"""One that trained in every round, in the first alone, and in the second alone."""


@pytest.mark.parametrize("case", [*DIFFERENT, *VARIANTS])
def test_predict_and_the_exported_network_classify_the_same_samples_correctly(
    folder: Callable[..., Path], case: str
) -> None:
    run = load_run(folder(case))
    tests, counts, by_predict, by_network = raw_tests(run), right_of_run(run), [], []
    for client in SOME_CLIENTS:
        x, y = tests[client]
        found = run.predict(client, x)
        assert found.dtype == np.float32
        assert np.allclose(found.sum(axis=1), 1, atol=1e-5)
        by_predict.append(right(found, y))
        logits = logits_by_network(run, client, x)
        assert np.allclose(logits.softmax(dim=1), found, atol=1e-5)
        by_network.append(right(logits.numpy(), y))
    assert by_predict == by_network == [counts[client] for client in SOME_CLIENTS]


# Traffic


SAMPLED = (1, 3, 2, 1, 2, 2, 1)
"""Rounds of each client: the cohorts are {1, 3, 4, 5}, {0, 1, 2, 6} and {1, 2, 4, 5}."""

P_BODY, P_HEAD, P_BN, P_UPPER = 7008, 650, 32 + 64, 2112 + 650
P_GUIDE = K * F + 2 * ((F + 1) * F + 2 * F)
"""GPFL's class embeddings and conditional valve: twice a linear layer and LayerNorm."""
P_POLICY = (F + 1) * 2 * F + 2 * 2 * F
"""FedCP's policy: a linear layer and LayerNorm."""

COMPONENTS = CLUSTERS = 2
BRANCHES = MODELS = 3
P_BRANCHES = BRANCHES * (P - P_BN) + P_BN
"""Batch normalisation has one branch; the other four layers have all."""
HIDDEN = 8
P_HYPER = HIDDEN * K + HIDDEN + P_HEAD * HIDDEN + P_HEAD

PATHS = 8
ENCODER = P_BODY + (64 + 1) * 16
ROUTER = P_BODY + (64 + 1) * 128 + (K + 1) * 64 + (128 + 64 + 1) * PATHS
P_MODULAR = ENCODER + 2 * (16 + 1) * 8 + 2 * (8 + 1) * K + ROUTER
"""FedMN's one encoder, two layers of two blocks, and the routing hypernetwork."""


class Traffic(NamedTuple):
    """What a sampled client gets and sends in a round: trainable numbers, running statistics, id bytes."""

    down: int
    up: int
    statistics_down: int = 0
    statistics_up: int = 0
    ids_down: int = 0
    ids_up: int = 0


AS_FEDAVG = (
    *("fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedavg_ft", "fedprox", "per_fedavg"),
    # MOON without the paper's projection
    *("clustered_fl", "fedrod", "fedala", "feddyn", "fedntd", "fedlc", "knn_per", "moon"),
)
WITHOUT_STATISTICS = (
    *("pfedme", "pfedhn", "fedamp", "pfedgraph", "pfedsim", "ditto", "apfl", "fedphp", "pfedla"),
)

TRAFFIC = {
    **dict.fromkeys(AS_FEDAVG, Traffic(P, P, U, U)),
    **dict.fromkeys(WITHOUT_STATISTICS, Traffic(P, P)),
    **dict.fromkeys(("fedrep", "fedper", "fedbabu"), Traffic(P_BODY, P_BODY, U, U)),
    "local": Traffic(0, 0),
    "pfedhn-private": Traffic(P_BODY, P_BODY),
    "fedbn": Traffic(P - P_BN, P - P_BN),
    "fedfomo": Traffic(MODELS * P, P + MODELS, ids_down=8 * MODELS),
    # which numbers are critical, in bits
    "fedcac": Traffic(P, P, ids_up=-(-P // 8)),
    "ifca": Traffic(CLUSTERS * P, P, CLUSTERS * U, U, ids_up=8),
    "fedem": Traffic(COMPONENTS * P, COMPONENTS * P, COMPONENTS * U, COMPONENTS * U),
    "fedrod-hyper": Traffic(P + P_HYPER, P + P_HYPER, U, U),
    "lg_fedavg": Traffic(P_UPPER, P_UPPER),
    "scaffold": Traffic(2 * P, 2 * P, U, U),
    # the number of steps
    "fednova": Traffic(P, P, U, U, ids_up=8),
    # the sensitivity of each number
    "elastic": Traffic(P, 2 * P, U, U),
    "heurpfedla": Traffic(0, P, ids_down=6 * 8),
    "fedafk": Traffic(P_BODY, P_BODY),
    # eight paths are one byte
    "fedmn": Traffic(P_MODULAR, P_MODULAR, 2 * U, 2 * U, ids_up=1),
    "pfedmb": Traffic(P_BRANCHES, P_BRANCHES + 4 * BRANCHES, U, U),
    # the consensus, a number a feature, goes up once and down ever after
    "feddbe": Traffic(P + F, P, U, U),
    "gpfl": Traffic(P_BODY + P_GUIDE, P_BODY + P_GUIDE, U, U),
    "fedcp": Traffic(P + P_POLICY, P + P_POLICY, U, U),
    # prototypes; which of them are known (a byte each) and how many samples they are of (four)
    "fedproto": Traffic(K * F, K * F, ids_down=K, ids_up=4 * K),
    "fedtgp": Traffic(K * F, K * F, ids_down=K, ids_up=K),
    # the head and K * F prototypes both ways; up, the statistics of K * F means and one variance too
    "fedpac": Traffic(P + K * F, P + 2 * K * F + 1, U, U, ids_down=K, ids_up=4 * K),
    # class means and their covariance
    "pfedfda": Traffic(P_BODY + K * F + F * F, P_BODY + K * F + F * F, U, U),
    # the trace
    "fedas": Traffic(P_BODY, P_BODY + 1, U, U),
    # a byte for each class: whether the client holds it
    "fedgh": Traffic(P_HEAD, K * F, ids_up=K),
}


FIRST_TRAFFIC = {"fedfomo": Traffic(0, P), "feddbe": Traffic(P, P + F, U, U)}
"""Traffic of the first round, where it is another: before it, no client has a trained model to share, and the
server no mean of features."""


COUNTED = {
    **dict.fromkeys(("bytes_down", "bytes_up", "buffer_bytes_down", "buffer_bytes_up"), 4),
    **dict.fromkeys(("index_bytes_down", "index_bytes_up"), 1),
}
"""Columns of the ledger in the order of `Traffic`, and the bytes of what it counts."""


@pytest.mark.parametrize("case", CASES)
def test_a_method_sends_the_expected_tensors(folder: Callable[..., Path], case: str) -> None:
    sent = expected("TRAFFIC", TRAFFIC, case)
    first = FIRST_TRAFFIC.get(case, sent)
    finished = folder(case, *FIXED_CHOICES.get(case.partition("-")[0], []))
    with h5py.File(finished / "checkpoint.h5", "r", locking=False) as file:
        by_client = torch.from_numpy(file["ledger/client_bytes"][()])
        metrics = file["ledger/metrics"][-1]
    is_first = [client in (1, 3, 4, 5) for client in range(N)]
    numbers = [
        [(n - early) * sent.down + early * first.down, (n - early) * sent.up + early * first.up]
        for n, early in zip(SAMPLED, is_first, strict=True)
    ]
    assert by_client.tolist() == [[4 * down, 4 * up] for down, up in numbers]
    counted = dict(zip(METRICS, metrics, strict=True))
    early = sum(is_first)
    totals = {
        name: width * ((sum(SAMPLED) - early) * in_others + early * in_first)
        for (name, width), in_others, in_first in zip(COUNTED.items(), sent, first, strict=True)
    }
    assert {name: counted[name] for name in totals} == totals


# State


class Kept(NamedTuple):
    """Shapes by name of what checkpoints hold of the server and of the clients."""

    server: dict[str, tuple[int, ...]]
    clients: dict[str, tuple[int, ...]]


THETA = {"theta": (P,)}
AVERAGED = {"buffers": (U,)}
FIRST, SECOND = {"server_m/theta": (P,)}, {"server_v/theta": (P,)}
OWN_MODEL = {"theta": (N, P), "buffers": (N, U)}
PROTOTYPES = {"prototypes": (K, F), "is_known": (K,)}
BANK = {"models": (N, P), "is_known": (N,)}

HYPERNETWORKS = {
    "embedding": (N, 100),
    "heads.bias": (N, len(LAYERS), N),
    "heads.weight": (N, len(LAYERS), N, 100),
    **{f"trunk{number}.bias": (N, 100) for number in (1, 2, 3)},
    **{f"trunk{number}.weight": (N, 100, 100) for number in (1, 2, 3)},
}
PFEDLA = {
    "theta": (N, P),
    # written for readers
    "alpha": (N, len(LAYERS), N),
    **{f"hypernetworks/{name}": shape for name, shape in HYPERNETWORKS.items()},
    "optimiser/largest_update": (N,),
}


def of_generator(outputs: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of pFedHN's hypernetwork and of its momentum."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (N, 2),
        "trunk1.weight": (10, 2),
        "trunk1.bias": (10,),
        "trunk2.weight": (10, 10),
        "trunk2.bias": (10,),
        "head.weight": (outputs, 10),
        "head.bias": (outputs,),
    }
    return {f"{part}/{n}": shape for part in ("hypernetwork", "velocity") for n, shape in shapes.items()}


MODEL_ALONE = (
    *("fedavg", "fedavg_ft", "fedprox", "per_fedavg", "fednova", "elastic", "fedntd", "knn_per"),
    # h_0 is the initial theta
    "fedbabu",
    # class counts follow from the data
    "fedlc",
)

STATE = {
    **dict.fromkeys(MODEL_ALONE, Kept(THETA | AVERAGED, {})),
    **dict.fromkeys(("fedadagrad", "fedadam", "fedyogi"), Kept(THETA | AVERAGED | FIRST | SECOND, {})),
    **dict.fromkeys(("fedrep", "fedper", "fedrod"), Kept(THETA | AVERAGED, {"head": (N, P_HEAD)})),
    **dict.fromkeys(("pfedme", "ditto"), Kept(THETA, OWN_MODEL)),
    # u_i and weights follow from the models
    **dict.fromkeys(("fedamp", "pfedgraph"), Kept(BANK, OWN_MODEL)),
    "local": Kept({}, OWN_MODEL),
    "fedavgm": Kept(THETA | AVERAGED | FIRST, {}),
    "pfedhn": Kept(of_generator(P), {"buffers": (N, U)}),
    "pfedhn-private": Kept(of_generator(P_BODY), {"buffers": (N, U), "head": (N, P_HEAD)}),
    "fedbn": Kept(THETA, {"batchnorm": (N, P_BN), "buffers": (N, U)}),
    "fedfomo": Kept(BANK | {"affinity": (N, N)}, {"previous": (N, P)} | OWN_MODEL),
    # the model of the warm-up, for clients that have not trained since
    "pfedsim": Kept(BANK | THETA, {"has_own": (N,)} | OWN_MODEL),
    "fedcac": Kept(BANK | {"critical": (N, -(-P // 8))}, OWN_MODEL),
    # a client's number follows from its data and the newest models; its last choice is kept for readers
    "ifca": Kept({"theta": (CLUSTERS, P), "buffers": (CLUSTERS, U), "cluster": (N,)}, {}),
    # each client's last update, which a cluster under partial participation waits for
    "clustered_fl": Kept(
        {"theta": (2, P), "buffers": (2, U), "cluster": (N,), "updates": (N, P), "is_known": (N,)}, {}
    ),
    # q_i follows from the data, pi_i and the newest components
    "fedem": Kept(
        {"theta": (COMPONENTS, P), "buffers": (COMPONENTS, U)},
        {"weights": (N, COMPONENTS), "has_trained": (N,)},
    ),
    "fedrod-hyper": Kept(THETA | AVERAGED | {"hypernetwork": (P_HYPER,)}, {}),
    # theta is the evaluated mixture of `own` and a w_i that nobody keeps
    "apfl": Kept(THETA, {"own": (N, P), "alpha": (N,)} | OWN_MODEL),
    "fedphp": Kept(THETA, {"count": (N,)} | OWN_MODEL),
    "fedala": Kept(THETA | AVERAGED, {"theta": (N, P), "weights": (N, P_HEAD), "stage": (N,)}),
    # the server's lower layers are the common start
    "lg_fedavg": Kept(THETA, {"lower_layers": (N, P - P_UPPER), "buffers": (N, U)}),
    "scaffold": Kept(THETA | AVERAGED | {"variate": (P,)}, {"variate": (N, P)}),
    "feddyn": Kept(THETA | AVERAGED | {"h": (P,)}, {"gradient": (N, P)}),
    "moon": Kept(THETA | AVERAGED, {"previous": (N, P), "previous_buffers": (N, U), "count": (N,)}),
    "pfedla": Kept(PFEDLA, {"buffers": (N, U)}),
    "heurpfedla": Kept(PFEDLA | {"retained_rounds": (N, len(LAYERS))}, OWN_MODEL),
    # theta is phi_i with the head h_i
    "fedafk": Kept(THETA, {"coefficient": (N,)} | OWN_MODEL),
    # what each client decided last
    "fedmn": Kept(
        {"theta": (P_MODULAR,), "buffers": (2 * U,)}, {"probability": (N, PATHS), "decision": (N, PATHS)}
    ),
    "pfedmb": Kept({"branches": (BRANCHES, P), "buffers": (U,)}, {"logits": (N, 4, BRANCHES)}),
    # the store follows from the data and the newest model
    "feddbe": Kept(THETA | AVERAGED | {"consensus": (F,), "has_consensus": (1,)}, {"offset": (N, F)}),
    "gpfl": Kept({"theta": (P + P_GUIDE,)} | AVERAGED, {"head": (N, P_HEAD)}),
    "fedcp": Kept({"theta": (P_HEAD + P + P_POLICY,)} | AVERAGED, {"head": (N, P_HEAD)}),
    "fedproto": Kept(PROTOTYPES, OWN_MODEL),
    "fedtgp": Kept(
        PROTOTYPES
        | {"generator/embeddings": (K, F)}
        | {f"generator/{layer}.weight": (F, F) for layer in ("hidden", "output")}
        | {f"generator/{layer}.bias": (F,) for layer in ("hidden", "output")},
        OWN_MODEL,
    ),
    # the head of a client was combined by the server, and waits there
    "fedpac": Kept(THETA | AVERAGED | PROTOTYPES | {"heads": (N, P_HEAD)}, {}),
    "pfedfda": Kept(THETA | AVERAGED | {"means": (K, F), "covariance": (F, F)}, {}),
    "fedas": Kept(THETA | AVERAGED, {"head": (N, P_HEAD), "prototypes": (N, K, F), "is_known": (N, K)}),
    "fedgh": Kept({"head": (P_HEAD,)}, OWN_MODEL),
}


def shapes_in(group: h5py.Group) -> dict[str, tuple[int, ...]]:
    shapes = {}

    def note(name: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset):
            shapes[name] = item.shape

    group.visititems(note)
    return shapes


@pytest.mark.parametrize("case", CASES)
def test_a_method_keeps_the_expected_state(folder: Callable[..., Path], case: str) -> None:
    kept = expected("STATE", STATE, case)
    with h5py.File(folder(case) / "checkpoint.h5", "r", locking=False) as file:
        assert shapes_in(file["server"]) == kept.server
        assert shapes_in(file["clients"]) == kept.clients
