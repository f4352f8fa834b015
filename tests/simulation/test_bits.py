"""The same bits for any number of ranks, any size of block, any schedule of evaluations, and with a stop.

Runs on two and three ranks are stopped after their first round and resumed; those on one rank are not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from bits import (
    DIFFERENT,
    KINDS,
    LOCAL_SETTINGS,
    MEETS_ALL_SOON,
    contents,
    differing,
    kept_runs,
    losses_of,
    method_settings,
    run_here,
    saved_models,
    time_is_up,
    tiny_settings,
)
from processes import run_in_one_world
from torch import Tensor

from hpcfl.communication.communicator import Communicator
from hpcfl.errors import STOPPED
from hpcfl.registries import load_config
from hpcfl.results.run import load_run
from hpcfl.setup.experiment import build, load_data, make_method

SMALL_BLOCKS_RANKS = 3
"""The rank count that sends the fewest clients a block, and does all methods and the variants."""
OTHER_RANKS = {
    5: ("fedmn-some", "heurpfedla-some", "pfedhn-some", "scaffold-some"),
    9: ("fedavg-some", "fedfomo-some", "fedem-unseen"),
}
"""Cases among more ranks; the last ones have a worker without a client, and are slow."""
UNSEEN = "data.unseen_clients=0.3"
"""Two clients that take no part in training, of which some workers have one."""
WITH_METRICS = (*KINDS, "gpfl", "knn_per", "pfedla")
"""Methods of each kind and those that predict by a rule of their own: their runs write confusion matrices."""
PARTS = {
    "fedmn": ["decision"],
    "fedem": ["weights"],
    "knn_per": ["labels", "store", "weight"],
    "gpfl": ["shares"],
}
"""What evaluated models consist of beside theta and running statistics."""

Folders = Callable[[str], Path]


OTHER_TENSORS = ("fedamp-cosine", "fedrod-hyper", "pfedhn-private")
"""Those of VARIANTS that send or keep other tensors."""
CHAIN = "fedmn-chain"
"""What more than one worker refuses."""
REALISTIC = [
    *("train.rounds=4", "clients.sampling=power_of_choice", "clients.candidates=5", "clients.drop_rate=0.3"),
    *("clients.step_s=0.5", "clients.slowness=0.6", "clients.bytes_per_s=1e6", "clients.deadline_s=3"),
    *("clients.local_epochs=[1,3]", "clients.batch_size=[6,12]"),
    *("data.label_noise=0.3", "data.label_noise_clients=0.5"),
]
"""All keys of clients at once; runs stop between two evaluations."""


def all_cases() -> dict[str, list[str]]:
    """Return settings by name: every method, some in which all clients take part, and variants.

    Variants are what else changes the way tensors travel, or the state.
    """
    cases = {f"{method}-some": [*method_settings(method), "train.participation=0.4"] for method in DIFFERENT}
    # all clients have trained after two rounds, so that some part
    cases["clustered_fl-some"] += ["train.participation=0.6", "train.rounds=3"]
    # these do only then what makes them special
    alike = ("clustered_fl", "fedala", "fedem", "fedfomo", "fedphp", "ifca")
    cases |= {f"{method}-all": method_settings(method) for method in alike}
    small_fedmn = "method.architecture=[2,2,2]"
    special = {
        "clustered_fl-single": ["method.linkage=single", "train.buffers=local", "train.rounds=3"],
        "fedafk-sequential": ["method.schedule=sequential"],
        "fedamp-cosine": [UNSEEN],
        "fedavg-topk": [*LOCAL_SETTINGS, "train.buffers=local"],
        "fedem-unseen": [UNSEEN, "train.finetune_epochs=1"],
        "fedfomo-unseen": [UNSEEN],
        "fedmn-int8": ["method.routing=soft"],
        "fedmn-topk": [small_fedmn, "method.pretrain_rounds=1"],
        "fedmn-unseen": [small_fedmn, UNSEEN, "method.dropout=0.5", "train.buffers=local"],
        "fedper-patience": ["data.val_fraction=0.3", "train.patience=1", "train.rounds=9"],
        "heurpfedla-topk": ["method.k=2", "train.buffers=mixed"],
        "heurpfedla-unseen": [UNSEEN, "method.heads=low_rank", "method.rank=3", "method.optimiser=adam"],
        "ifca-unseen": [UNSEEN, "train.buffers=local"],
        "lg_fedavg-average": ["train.buffers=average"],
        "pfedhn-sequential": ["method.private_head=true", "method.server_step=sequential"],
        "pfedla-topk": ["train.buffers=mixed"],
        "pfedla-unseen": [UNSEEN, "train.buffers=average"],
        "pfedmb-float16": [UNSEEN],
        "pfedmb-topk": ["method.constraint=simplex", "method.shared_alpha=true", "train.buffers=local"],
        "pfedsim-mixed": ["method.warm_up=0"],
    }
    realistic = {
        "fedavg-realistic": [*REALISTIC, UNSEEN, "comm.codec=topk"],
        "heurpfedla-realistic": [*REALISTIC, UNSEEN],
        "pfedla-realistic": [*REALISTIC, "method.server=sharded"],
        "scaffold-realistic": [*REALISTIC, UNSEEN],
    }
    for case, keys in ({variant: [] for variant in OTHER_TENSORS} | special | realistic).items():
        cases[case] = [*method_settings(case), *keys, "train.participation=0.6"]
    cases[CHAIN] = [*method_settings("fedmn"), "method.order=chain"]
    return {
        case: [*keys, f"run.metrics={str(case.partition('-')[0] in WITH_METRICS).lower()}"]
        for case, keys in cases.items()
    }


SERIAL_CASES = all_cases()


def cases_of(ranks: int) -> dict[str, list[str]]:
    """Return what runs in the world of so many ranks; the one worker of two trains all clients."""
    if ranks in OTHER_RANKS:
        return {name: SERIAL_CASES[name] for name in OTHER_RANKS[ranks]}
    return {
        name: case
        for name, case in SERIAL_CASES.items()
        if (name.endswith("-all") or name == CHAIN) == (ranks == 2)
    }


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    tiny = [*tiny_settings(digits), *MEETS_ALL_SOON, "data.subset_per_class=10"]
    return [*tiny, "train.rounds=2", "run.eval_every=2"]


@pytest.fixture(scope="module")
def serial(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return a function from a case to its folder, run on one rank without mpirun."""
    return kept_runs(tmp_path_factory.mktemp("serial"), lambda case: [*settings, *SERIAL_CASES[case]])


MODELS_IN_A_MESSAGE = {"fedem": 2, "fedfomo": 3, "pfedmb": 2}
"""Of methods that send a client several models of its own."""


def with_small_blocks(cases: dict[str, list[str]], settings: list[str]) -> dict[str, list[str]]:
    """Return the cases with messages cut as finely as each of them allows."""
    arrays, parts = load_data(load_config(None, settings))
    small = {}
    for name, case in cases.items():
        method = make_method(load_config(None, [*settings, *case]), arrays, parts)
        most = MODELS_IN_A_MESSAGE.get(method.name, 1) * method.layout.size
        small[name] = [*case, f"run.max_elements={most}"]
    return small


@pytest.fixture(scope="module")
def parallel(
    settings: list[str], tmp_path_factory: pytest.TempPathFactory, mpirun_command: list[str]
) -> Callable[[int], Path]:
    """Return a function from a number of ranks to the folder of all its cases, run in one world.

    But for OTHER_RANKS, a world stops each of them after its first round, and another one resumes it.
    """

    @cache
    def base(ranks: int) -> Path:
        cases = cases_of(ranks)
        if ranks == SMALL_BLOCKS_RANKS:
            cases = with_small_blocks(cases, settings)
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        runs = {folder / name: [*settings, *case] for name, case in cases.items()}
        # the ranks are copies of this process, and each would need a second and more for this
        import torch._dynamo  # noqa: F401

        if ranks not in OTHER_RANKS:
            run_in_one_world(mpirun_command, ranks, runs, env=time_is_up(), code=STOPPED)
        run_in_one_world(mpirun_command, ranks, runs)
        return folder

    return base


@pytest.mark.parametrize(
    ("ranks", "case"),
    [(ranks, case) for ranks in (2, SMALL_BLOCKS_RANKS, *OTHER_RANKS) for case in cases_of(ranks)],
)
def test_rank_counts_small_blocks_and_a_stop_give_the_same_bits(
    serial: Folders, parallel: Callable[[int], Path], ranks: int, case: str
) -> None:
    assert not differing(serial(case), parallel(ranks) / case)


@pytest.mark.parametrize("case", ["fedavg-some", "fedem-some", "fedmn-some", "gpfl-some", "knn_per-some"])
def test_evaluations_and_finetuning_change_no_state(
    serial: Folders, settings: list[str], tmp_path: Path, case: str
) -> None:
    changed = ["run.eval_every=1", "train.finetune_epochs=2"]
    assert run_here(tmp_path / "run", [*settings, *SERIAL_CASES[case], *changed]) == 0
    assert not differing(serial(case), tmp_path / "run", "server", "clients")
    assert "/personalised/theta" in differing(serial(case), tmp_path / "run", "personalised")


@pytest.mark.parametrize("case", SERIAL_CASES)
def test_personalised_models_are_the_scored_ones(serial: Folders, settings: list[str], case: str) -> None:
    made = build(load_config(None, [*settings, *SERIAL_CASES[case]]), Communicator())
    with h5py.File(serial(case) / "checkpoint.h5", "r", locking=False) as file:
        expected = file["history/loss"][-1].tolist()
    run = load_run(serial(case))
    if case.partition("-")[0] in WITH_METRICS:
        client, label, predicted, samples = run.confusion.values()
        right = np.bincount(client.astype(int), samples * (label == predicted))
        assert (right / run.clients["evaluated_samples"]).tolist() == run.clients["accuracy"].tolist()
    models = saved_models(serial(case), "personalised", len(expected))
    assert sorted({*models} - {"theta", "buffers"}) == PARTS.get(case.partition("-")[0], [])
    assert losses_of(models, made.method, made.worker_context) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "case", ["gpfl-some", "knn_per-some", "fedem-unseen", "fedmn-topk", "ifca-unseen", "heurpfedla-topk"]
)
def test_a_finished_run_that_is_repeated_has_its_metrics(
    serial: Folders, settings: list[str], tmp_path: Path, case: str
) -> None:
    shutil.copytree(serial(case), tmp_path / "run")
    (tmp_path / "run" / "confusion.csv").unlink()
    assert run_here(tmp_path / "run", [*settings, *SERIAL_CASES[case]]) == 0
    assert not differing(serial(case), tmp_path / "run")


def some_between(rows: Tensor, low: float, high: float) -> bool:
    return bool(((rows > low) & (rows < high)).any())


@pytest.mark.parametrize(
    ("case", "name", "happens"),
    [
        ("clustered_fl-all", "server/cluster", lambda cluster: len(cluster.unique()) > 2),
        ("clustered_fl-some", "server/cluster", lambda cluster: len(cluster.unique()) > 1),
        ("clustered_fl-single", "server/cluster", lambda cluster: len(cluster.unique()) > 1),
        ("fedala-all", "clients/weights", lambda weights: some_between(weights, 0, 1)),
        ("fedfomo-all", "server/affinity", lambda affinity: (affinity > 0).any()),
        ("fedper-patience", "ledger/metrics", lambda evaluated: 1 < len(evaluated) < 5),
        ("fedphp-all", "clients/count", lambda count: (count == 2).all()),
        ("scaffold-realistic", "ledger/lost", lambda lost: 0 < lost.sum() < 12),
        ("ifca-all", "personalised/theta", lambda theta: len(theta.unique(dim=0)) == 2),
    ],
)
def test_the_tiny_runs_reach_the_special_steps_of_each_method(
    serial: Folders, case: str, name: str, happens: Callable[[Tensor], bool]
) -> None:
    with h5py.File(serial(case) / "checkpoint.h5", "r", locking=False) as file:
        assert happens(torch.from_numpy(file[name][()]))


def test_another_seed_gives_different_bits(serial: Folders, settings: list[str], tmp_path: Path) -> None:
    case = "heurpfedla-some"
    assert run_here(tmp_path / "run", [*settings, *SERIAL_CASES[case], "run.seed=2"]) == 0
    changed = differing(serial(case), tmp_path / "run")
    assert {"/server/theta", "/clients/theta", "/history/alpha", "/ledger/client_bytes"} <= set(changed)
    assert {"/layout/parameters/names", "/@round"} <= set(contents(serial(case))) - set(changed)
