"""Settings that make a method FedAvg or local training, to the bit or, in float64, but for rounding."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from by_hand import SLIPPERY, SOME, assert_close, cohort_of
from harness import MLP, UNEQUAL, UNEQUAL_FEW, Run

Keys = tuple[str, ...]
Table = list[tuple[Keys, list[str]]]

SLIDING = (*SOME, *SLIPPERY)
OWN_STATISTICS = (*SLIDING, "train.buffers=local")
DECAYING = ("train.lr_decay=0.9", "train.weight_decay=0.01")
LINEAR = (*UNEQUAL_FEW, "model.name=mlp", "model.hidden=[]", "train.participation=0.5", *DECAYING)
BATCHNORM = (*UNEQUAL_FEW, "model.batchnorm=true", "train.momentum=0.9", "train.buffers=local")
FINETUNED = (*SLIDING, "train.lr=0.05", "train.finetune_epochs=1")
ALL_CLASSES = ("data.partition.name=iid", "data.per_client=100", "train.momentum=0.9")
UNEQUAL_MLP = (*MLP, *UNEQUAL_FEW)
ALONE = ("train.momentum=0.5", "data.clients=1", "data.partition.name=iid")

WITHOUT_STEPS = [
    *(f"per_fedavg alpha=0 variant={name}" for name in ("hessian_free", "exact", "first_order")),
    "fedala weights_lr=0 most_passes=1",
]
UNTIED = ["ditto pull=0", "apfl alpha=1 alpha_lr=0", "fedphp transfer=0"]
"""Beside FedAvg's model they have the clients' own, which they evaluate."""

AS_FEDAVG: Table = [
    (SLIDING, ["fedprox mu=0", "moon mu=0", "fedntd beta=0", "lg_fedavg global_layers=6", "knn_per"]),
    (OWN_STATISTICS, ["fedprox mu=0", "moon mu=0", "fedntd beta=0", "pfedsim warm_up=1", *UNTIED]),
    ((*SOME, *DECAYING, "train.rounds=1"), ["scaffold", "feddbe"]),
    (ALL_CLASSES, ["fedlc tau=0"]),
    ((*UNEQUAL, "train.participation=0.75"), ["fedbn"]),
    (FINETUNED, ["ifca clusters=1", "fedem components=1", "pfedmb branches=1 constraint=simplex"]),
    (
        (*OWN_STATISTICS, "train.finetune_epochs=1"),
        ["pfedmb branches=1 shared_alpha=true aggregation=plain finetune=weights"],
    ),
    *((keys, WITHOUT_STEPS) for keys in (LINEAR, BATCHNORM)),
]
"""Keys of a run, and methods with keys of their own that are FedAvg there."""
NEXT_AS_FEDAVG: Table = [
    ((*UNEQUAL_MLP, "train.momentum=0.5"), ["fedcac share=0", "pfedgraph alpha=1e12 pull=0"]),
    # clients with as many steps, or one alone
    ((*MLP, "train.momentum=0.9"), ["fednova"]),
    ((*UNEQUAL_MLP, "train.participation=0.25"), ["fednova"]),
    # one cluster, of equal clients
    (("model.batchnorm=true", "train.participation=0.5"), ["clustered_fl eps_1=0 eps_2=0 first_round=0"]),
]
"""Likewise in float64, so with keys that no other table has: these methods send FedAvg's model next."""
AS_LOCAL: Table = [
    (ALONE, ["fedcac", "pfedgraph pull=0", "fedamp pull=0", "fedamp pull=0 weights=cosine"]),
    ((*ALONE, "model.batchnorm=true"), ["pfedsim warm_up=0"]),
    (("train.momentum=0.5",), ["pfedgraph alpha=1e-6 pull=0"]),
    # FedPHP's own models inherit from what was trained in the round
    (OWN_STATISTICS, UNTIED[:2]),
    (("train.participation=0.5", "model.batchnorm=true"), ["heurpfedla k=6 hypernetwork_lr=0.1"]),
    ((*SLIDING, "train.lr=0.05"), ["fedproto alignment=0", "fedtgp alignment=0 server_epochs=1"]),
]


def cases(table: Table) -> list[tuple[Keys, str]]:
    return [(keys, method) for keys, methods in table for method in methods]


@cache
def run_of(keys: Keys, method: str) -> Run:
    name, *own = method.split()
    own_buffers = ["train.buffers=average"] * (name == "lg_fedavg")
    return Run(*keys, f"method.name={name}", *(f"method.{key}" for key in own), *own_buffers)


@pytest.mark.parametrize(("keys", "method"), cases(AS_FEDAVG))
def test_a_method_with_these_settings_is_fedavg(
    keys: Keys, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, fedavg = run_of(keys, method), run_of(keys, "fedavg")
    warnings = " ".join(caplog.messages)
    assert ("so fedbn trains as fedavg does; networks with convolutions" in warnings) == (method == "fedbn")
    assert (fedavg.server["theta"] - fedavg.method.context.initial_parameters()).abs().max() > 0.01
    for name, tensor in fedavg.server.items():
        own_name = "branches" if name == "theta" and name not in ours.server else name
        assert torch.equal(ours.server[own_name].view_as(tensor), tensor)
    evaluated = ours.evaluated()
    for name, tensor in fedavg.evaluated().items():
        assert method in UNTIED or torch.equal(evaluated[name].view_as(tensor), tensor)
    # SCAFFOLD also sends its control variates, FedDBE means of features, pFedMB weights of branches
    is_as_much = torch.equal(ours.bytes_by_client, fedavg.bytes_by_client)
    assert is_as_much == (ours.method.name not in ("scaffold", "feddbe", "pfedmb"))


@pytest.mark.parametrize(("keys", "method"), cases(NEXT_AS_FEDAVG))
@pytest.mark.usefixtures("double")
def test_the_next_download_is_fedavg_s_model_up_to_rounding(keys: Keys, method: str) -> None:
    ours, fedavg = run_of(keys, method), run_of(keys, "fedavg")
    sent = ours.adapter.download(ours.server, cohort_of(ours.method, range(4), 3))
    for name, tensor in fedavg.server.items():
        assert_close(sent[name].expand(4, -1), tensor.expand(4, -1), atol=1e-12)


@pytest.mark.parametrize(("keys", "method"), cases(AS_LOCAL))
def test_a_method_with_these_settings_is_local_training(keys: Keys, method: str) -> None:
    ours, local = run_of(keys, method), run_of(keys, "local")
    for name, tensor in local.clients.items():
        assert torch.equal(ours.clients[name], tensor)
        # methods with alignment predict by prototypes
        assert "alignment" in method or torch.equal(ours.evaluated()[name], tensor)
    assert torch.equal(ours.server.get("models", local.clients["theta"]), local.clients["theta"])


@pytest.mark.parametrize(
    ("method", "simpler"),
    [
        ("fedas alignment_epochs=0", "fedper"),
        ("fedpac alignment=0 head_lr=0.05", "fedrep head_epochs=1 body_epochs=1"),
    ],
)
def test_with_one_client_a_round_and_no_alignment_it_is_a_simpler_method(method: str, simpler: str) -> None:
    ours, expected = (run_of((*SLIDING, "train.participation=0.25"), name) for name in (method, simpler))
    for name in ("theta", "buffers"):
        assert torch.equal(ours.server[name], expected.server[name])
    assert torch.equal(ours.server.get("heads", ours.clients.get("head")), expected.clients["head"])
