"""Settings that make a method FedAvg or local training, to the bit."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from by_hand import SLIPPERY, SOME
from harness import UNEQUAL, UNEQUAL_FEW, Run

Keys = tuple[str, ...]
Table = list[tuple[Keys, list[str]]]

SLIDING = (*SOME, *SLIPPERY)
OWN_STATISTICS = (*SOME, "train.buffers=local")
DECAYING = ("train.lr_decay=0.9", "train.weight_decay=0.01")
LINEAR = (*UNEQUAL_FEW, "model.name=mlp", "model.hidden=[]", "train.participation=0.5", *DECAYING)
BATCHNORM = (*UNEQUAL_FEW, "model.batchnorm=true", "train.momentum=0.9", "train.buffers=local")
FINETUNED = (*SLIDING, "train.lr=0.05", "train.finetune_epochs=1")
ALL_CLASSES = ("data.partition.name=iid", "data.per_client=100", "train.momentum=0.9")
ALONE = ("train.momentum=0.5", "data.clients=1", "data.partition.name=iid")

WITHOUT_STEPS = [
    *(f"per_fedavg alpha=0 variant={name}" for name in ("hessian_free", "exact", "first_order")),
    "fedala weights_lr=0 most_passes=1",
]

AS_FEDAVG: Table = [
    (SLIDING, ["fedprox mu=0", "moon mu=0", "fedntd beta=0", "lg_fedavg global_layers=6"]),
    (OWN_STATISTICS, ["fedprox mu=0", "moon mu=0", "fedntd beta=0"]),
    ((*SOME, *DECAYING, "train.rounds=1"), ["scaffold"]),
    (ALL_CLASSES, ["fedlc tau=0"]),
    ((*UNEQUAL, "train.participation=0.75"), ["fedbn"]),
    (FINETUNED, ["ifca clusters=1", "fedem components=1"]),
    *((keys, WITHOUT_STEPS) for keys in (LINEAR, BATCHNORM)),
]
"""Keys of a run, and methods with keys of their own that are FedAvg there."""
AS_LOCAL: Table = [
    (ALONE, ["fedcac", "pfedgraph pull=0"]),
    ((*ALONE, "model.batchnorm=true"), ["pfedsim warm_up=0"]),
    (("train.momentum=0.5",), ["pfedgraph alpha=1e-6 pull=0"]),
]


def cases(table: Table) -> list[tuple[Keys, str]]:
    return [(keys, method) for keys, methods in table for method in methods]


@cache
def run_of(keys: Keys, method: str) -> Run:
    name, *own = method.split()
    own_buffers = ["train.buffers=average"] * (name == "lg_fedavg")
    return Run(*keys, f"method.name={name}", *(f"method.{key}" for key in own), *own_buffers)


@pytest.mark.parametrize(("keys", "method"), cases(AS_FEDAVG))
def test_it_is_fedavg(keys: Keys, method: str, caplog: pytest.LogCaptureFixture) -> None:
    ours, fedavg = run_of(keys, method), run_of(keys, "fedavg")
    told = " ".join(caplog.messages)
    assert ("so fedbn is fedavg here; model.batchnorm=true adds it" in told) == (method == "fedbn")
    assert (fedavg.server["theta"] - fedavg.method.context.initial_parameters()).abs().max() > 0.01
    for name, tensor in fedavg.server.items():
        assert torch.equal(ours.server[name].view_as(tensor), tensor)
    evaluated = ours.evaluated()
    for name, tensor in fedavg.evaluated().items():
        assert torch.equal(evaluated[name].view_as(tensor), tensor)
    # SCAFFOLD also sends its control variates
    assert torch.equal(ours.bytes_by_client, fedavg.bytes_by_client) == (method != "scaffold")


@pytest.mark.parametrize(("keys", "method"), cases(AS_LOCAL))
def test_it_is_local(keys: Keys, method: str) -> None:
    ours, local = run_of(keys, method), run_of(keys, "local")
    assert torch.equal(ours.clients["theta"], local.clients["theta"])
    assert torch.equal(ours.server["models"], local.clients["theta"])
