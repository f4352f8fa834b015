"""The same bits for any number of ranks, any size of block and any rhythm of evaluations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import h5py
import pytest
import torch
from bits import contents, differing, method_settings, run_here, tiny_settings, write_digits
from conftest import REPOSITORY, in_mpi_world, run_tree
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from hpcfl.config import load_config
from hpcfl.experiment import build
from hpcfl.methods import METHODS
from hpcfl.world import World

pytestmark = pytest.mark.skipif(in_mpi_world(), reason="starts worlds of its own")

RANKS = (2, 3, 5, 9)
VARIANT_RANKS = 3
ONE_CLIENT_A_BLOCK = {"fedmn": 30_000, "pfedmb": 40_000}
"""Where one client's numbers are more than 10,000."""

Folders = Callable[[str], Path]


def common_cases() -> dict[str, list[str]]:
    """Return settings by name for every rank count: each method with full and with partial participation."""
    cases = {}
    for method in METHODS:
        cases[f"{method}-all"] = method_settings(method)
        cases[f"{method}-some"] = [*method_settings(method), "train.participation=0.4"]
    return cases


def variant_cases() -> dict[str, list[str]]:
    """Return settings by name for one rank count: what else changes the way tensors travel."""
    cases = {}
    for name, method in METHODS.items():
        for policy in method.buffer_policies[1:]:
            cases[f"{name}-{policy}"] = [*method_settings(name), f"train.buffers={policy}"]
    cases["heurpfedla-k2"] = [*method_settings("heurpfedla"), "method.k=2"]
    cases["fedmn-soft"] = [*method_settings("fedmn"), "method.routing=soft"]
    cases["fedmn-pretrained"] = ["method.name=fedmn", "method.widths=[16,8]", "method.pretrain_rounds=1"]
    cases["pfedmb-simplex"] = [
        *method_settings("pfedmb"),
        "method.constraint=simplex",
        "method.shared_alpha=true",
    ]
    cases["fedafk-sequential"] = [*method_settings("fedafk"), "method.schedule=sequential"]
    return {name: [*case, "train.participation=0.6"] for name, case in cases.items()}


def small_block_cases() -> dict[str, list[str]]:
    """Return settings by name that must give the bits of the common case before the last hyphen."""
    cases = {}
    for name, case in common_cases().items():
        size = ONE_CLIENT_A_BLOCK.get(name.partition("-")[0], 10_000)
        cases[f"{name}-blocks"] = [*case, f"run.max_elements={size}"]
    return cases


SERIAL_CASES = common_cases() | variant_cases()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    digits = tmp_path_factory.mktemp("digits") / "digits.npz"
    write_digits(digits)
    return [*tiny_settings(digits), "train.rounds=2"]


@pytest.fixture(scope="module")
def serial(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return a function from a case to its folder, run on one rank without mpirun."""
    base = tmp_path_factory.mktemp("serial")

    @cache
    def folder(case: str) -> Path:
        assert run_here(base / case, [*settings, *SERIAL_CASES[case]]) == 0
        return base / case

    return folder


@pytest.fixture(scope="module")
def parallel(
    settings: list[str], tmp_path_factory: pytest.TempPathFactory, mpirun_command: list[str]
) -> Callable[[int], Path]:
    """Return a function from a number of ranks to the folder of all its cases, run in one world."""

    @cache
    def base(ranks: int) -> Path:
        cases = common_cases() | (variant_cases() | small_block_cases() if ranks == VARIANT_RANKS else {})
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        runs = {str(folder / name): [*settings, *case] for name, case in cases.items()}
        (folder / "runs.json").write_text(json.dumps(runs))
        script = REPOSITORY / "tests" / "run_matrix.py"
        command = [*mpirun_command, "-n", str(ranks), sys.executable, str(script), str(folder / "runs.json")]
        run_tree(command, timeout=300)
        return folder

    return base


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", common_cases())
def test_rank_counts_give_the_same_bits(
    serial: Folders, parallel: Callable[[int], Path], ranks: int, case: str
) -> None:
    assert not differing(serial(case), parallel(ranks) / case)


@pytest.mark.parametrize("case", variant_cases())
def test_variants_give_the_same_bits(serial: Folders, parallel: Callable[[int], Path], case: str) -> None:
    assert not differing(serial(case), parallel(VARIANT_RANKS) / case)


@pytest.mark.parametrize("case", small_block_cases())
def test_small_blocks_give_the_same_bits(serial: Folders, parallel: Callable[[int], Path], case: str) -> None:
    assert not differing(serial(case.removesuffix("-blocks")), parallel(VARIANT_RANKS) / case)


@pytest.mark.parametrize(("eval_every", "finetune_epochs"), [(2, 0), (1, 1)])
@pytest.mark.parametrize("method", METHODS)
def test_evaluations_change_no_state(
    serial: Folders,
    settings: list[str],
    tmp_path: Path,
    method: str,
    eval_every: int,
    finetune_epochs: int,
) -> None:
    case = f"{method}-some"
    changed = [f"run.eval_every={eval_every}", f"train.finetune_epochs={finetune_epochs}"]
    assert run_here(tmp_path / "run", [*settings, *SERIAL_CASES[case], *changed]) == 0
    assert not differing(serial(case), tmp_path / "run", "server", "clients")


@pytest.mark.parametrize("case", SERIAL_CASES)
def test_personalised_is_what_was_scored(serial: Folders, settings: list[str], case: str) -> None:
    place = build(load_config(None, [*settings, *SERIAL_CASES[case]]), World()).workplace
    with h5py.File(serial(case) / "checkpoint.h5", "r", locking=False) as file:
        expected = file["history/loss"][-1]
        models = {name: torch.from_numpy(data[()]) for name, data in file["personalised"].items()}
    theta, buffers = (models.pop(name).expand(len(expected), -1) for name in ("theta", "buffers"))
    # what else a model has goes into its network after the images
    assert list(models) == (["decision"] if case.startswith("fedmn") else [])
    for client, loss in enumerate(expected):
        others = [rows[client] for rows in models.values()]

        def probabilities(network: nn.Module, x: Tensor, others: list[Tensor] = others) -> Tensor:
            return network(x, *others).softmax(dim=1)

        x, y = place.shard.samples("test", client)
        scores = place.evaluator.outputs(theta[client], buffers[client], probabilities, x)
        assert nll_loss(scores.double().log(), y).item() == pytest.approx(loss, rel=1e-9)


def test_another_seed_gives_other_bits(serial: Folders, settings: list[str], tmp_path: Path) -> None:
    case = "heurpfedla-some"
    assert run_here(tmp_path / "run", [*settings, *SERIAL_CASES[case], "run.seed=1", "data.seed=0"]) == 0
    changed = differing(serial(case), tmp_path / "run")
    expected = {
        "/server/theta",
        "/server/hypernetworks/embedding",
        "/server/alpha",
        "/clients/theta",
        "/personalised/theta",
        "/personalised/buffers",
        "/history/accuracy",
        "/history/alpha",
        "/ledger/metrics",
        "/ledger/client_bytes",
        "metrics.csv",
        "clients.csv",
    }
    assert expected <= set(changed)
    assert {"/layout/parameters/names", "/@round"} <= set(contents(serial(case))) - set(changed)
