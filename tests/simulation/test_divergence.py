"""Clients whose numbers become nan or infinite are named; a run stops, leaves them out, or continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from bits import (
    KINDS,
    MEETS_ALL_SOON,
    contents,
    differing,
    leave_out,
    method_settings,
    read_csv,
    run_here,
    run_until_time_is_up,
    tiny_settings,
)
from harness import make_network, make_worker
from processes import Mpirun, run_in_one_world

from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.config.keys import TrainConfig
from hpcfl.errors import DIVERGED, FINISHED, STOPPED
from hpcfl.methods import METHODS, Method
from hpcfl.methods.base import State
from hpcfl.results.run import load_run
from hpcfl.simulation.divergence import LARGEST, diverged_members, losses_and_extremes, not_finite
from hpcfl.training.client_group import ClientGroup

pytestmark = pytest.mark.warns

SKIP = "run.on_divergence=skip"

POISONED = '''"""A method with which some clients send and keep nan or infinity in some rounds."""

import torch

from hpcfl.methods import METHODS

WHO = {who}


class Poisoned(METHODS["{method}"]):
    def train(self, clients, down):
        up = super().train(clients, down)
        for number, client in enumerate(clients.ids):
            if client in WHO.get(clients.round, ()):
                poison = torch.nan if client == 3 else -torch.inf
                for tensors, of_clients in ((up.per_client, up.per_client), (clients, dict(clients.kept))):
                    for name, rows in of_clients.items():
                        if rows.is_floating_point():
                            tensors[name] = rows.clone().index_fill_(0, torch.tensor(number), poison)
        return up
'''
CAUSE = "clients 3 and 5 diverged in round 3 (poisoned; client 3: theta)"


def write_poisoned(path: Path, who: Mapping[int, Sequence[int]], case: str = "fedavg") -> list[str]:
    """Write a method of which some clients diverge, by round; return the settings of a case of it."""
    path.write_text(POISONED.format(method=case.partition("-")[0], who=dict(who)))
    keys = CASES.get(case, [])
    return [f"method.path={path}", *(key for key in keys if not key.startswith("method.name="))]


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    return [*tiny_settings(digits), "run.checkpoint_every=1"]


@pytest.fixture
def poisoned(tmp_path: Path, settings: list[str]) -> list[str]:
    """Return the settings of four rounds of a method of which two clients diverge in the third."""
    return [*settings, *write_poisoned(tmp_path / "poisoned.py", {2: (3, 5)}), "train.rounds=4"]


def test_a_private_run_that_diverges_is_not_advised_to_skip(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = ["method.name=fedavg", "privacy.unit=client", "privacy.clip=1e30", "privacy.noise=1"]
    private.append("train.buffers=local")
    assert run_here(tmp_path / "run", [*settings, *private]) == DIVERGED
    error = capsys.readouterr().err
    assert error.endswith("a lower train.lr (it is 0.05), privacy.clip or privacy.noise\n")


def metrics_of(folder: Path) -> list[dict[str, str]]:
    return read_csv(folder / "metrics.csv")


def printed_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines on standard error since the last look."""
    return capsys.readouterr().err.splitlines()


# What the user reads


def test_a_diverged_run_stops_and_can_continue_without_the_diverged_clients(
    poisoned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    capsys.readouterr()
    assert run_here(folder, poisoned) == DIVERGED
    (line,) = printed_lines(capsys)
    assert line == (
        f"hpcfl: error: {CAUSE}; the last good checkpoint is of round 2: start over with a lower train.lr "
        "(it is 0.05), or set run.on_divergence=skip in the same command to leave such clients "
        "out of the round and continue"
    )
    assert (folder / "log.txt").read_text().splitlines()[-1].endswith(line.removeprefix("hpcfl: "))
    before = contents(folder)
    with h5py.File(folder / "checkpoint.h5", locking=False) as file:
        assert file.attrs["round"] == 2
        assert np.isfinite(file["server/theta"][()]).all()
    # again, it stops at the same place
    assert run_here(folder, poisoned) == DIVERGED
    assert printed_lines(capsys) == [line]
    assert contents(folder) == before
    assert run_here(folder, [*poisoned, SKIP]) == FINISHED
    assert printed_lines(capsys) == [
        f"hpcfl: warning: {CAUSE}: left out of the round (run.on_divergence=skip)"
    ]
    assert run_here(whole, [*poisoned, SKIP]) == FINISHED
    assert differing(whole, folder) == []
    assert [row["diverged"] for row in metrics_of(folder)] == ["0", "0", "2", "2"]
    assert load_run(folder).clients["diverged"].tolist() == [0, 0, 0, 1, 0, 1, 0]
    # what they would have sent is not, and what they received was
    up, down = (load_run(folder).clients[f"bytes_{way}"] for way in ("up", "down"))
    assert (down == down[0]).all()
    assert (up / down).tolist() == [1, 1, 1, 0.75, 1, 0.75, 1]


def test_a_diverged_run_can_continue_with_their_numbers(
    poisoned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(tmp_path / "run", [*poisoned, "run.on_divergence=continue"]) == FINISHED
    first, *others = printed_lines(capsys)
    assert first.endswith("theta): the run continues with these numbers (run.on_divergence=continue)")
    assert others == []
    # all have them from round 4 on
    assert [row["diverged"] for row in metrics_of(tmp_path / "run")] == ["0", "0", "2", "9"]
    assert metrics_of(tmp_path / "run")[-1]["loss_mean"] == "nan"


def test_a_run_with_too_large_a_step_stops(
    settings: list[str], tmp_path: Path, mpirun: Mpirun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real divergence, on three ranks and alone: one line, one exit code, no traceback."""
    keys = [*settings, "method.name=fedavg", "train.lr=1e6", "model.batchnorm=false", "train.local_epochs=4"]
    done = mpirun(3, "-m", "hpcfl.main", *keys, "--quiet", "--out", tmp_path / "ranks", check=False)
    assert done.returncode == DIVERGED
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hpcfl")]
    assert line.startswith("hpcfl: error: all 7 clients diverged in round 1 (fedavg; client 0: loss, ")
    # to leave all out would train nothing
    assert line.endswith("; there is no checkpoint yet: start over with a lower train.lr (it is 1e+06)")
    assert run_here(tmp_path / "alone", keys) == DIVERGED
    assert printed_lines(capsys) == [line]


def test_divergence_of_the_server_is_distinguished_from_that_of_clients(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregate = METHODS["fedavg"].aggregate

    def steep(self: Method, server: State, cohort: Cohort, up: Upload) -> None:
        aggregate(self, server, cohort, up)
        if cohort.round == 1:
            server["theta"][:3] = torch.inf

    monkeypatch.setattr(METHODS["fedavg"], "aggregate", steep)
    for policy, every in (("stop", 1), ("skip", 3)):
        folder = tmp_path / f"{policy}{every}"
        keys = ["method.name=fedavg", f"run.checkpoint_every={every}", f"run.on_divergence={policy}"]
        capsys.readouterr()
        assert run_here(folder, [*settings, *keys, "run.eval_every=3"]) == DIVERGED
        kept = "the last good checkpoint is of round 1" if every == 1 else "there is no checkpoint yet"
        assert printed_lines(capsys) == [
            f"hpcfl: error: the server's state is not finite after round 2 (fedavg; theta); {kept}: "
            "start over with a lower train.lr (it is 0.05), or take smaller steps on the server "
            "(hpcfl list keys method)"
        ]
        assert (folder / "checkpoint.h5").exists() == (every == 1)
        assert not list(folder.glob("*tmp*"))


def test_a_model_that_cannot_be_scored_stops_the_run(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fine-tuning makes nan of a sound model; the last evaluation is part of a checkpoint."""
    finetune = METHODS["fedavg"].finetune

    def spoilt(self: Method, group: ClientGroup, down: Message, epochs: int) -> Message:
        tuned = finetune(self, group, down, epochs)
        if group.round >= 2 and 4 in group.ids:
            tuned.per_client["theta"][group.ids.index(4)] *= torch.nan
        return tuned

    monkeypatch.setattr(METHODS["fedavg"], "finetune", spoilt)
    keys = [*settings, "method.name=fedavg", "train.finetune_epochs=2", "train.rounds=2"]
    what = "fedavg; loss is nan after 2 epochs of fine-tuning"
    cause = f"client 4 diverged in the evaluation after round 2 ({what})"
    capsys.readouterr()
    assert run_here(tmp_path / "run", keys) == DIVERGED
    assert printed_lines(capsys) == [
        f"hpcfl: error: {cause}; the last good checkpoint is of round 1: start over with a lower train.lr "
        "(it is 0.05), or set run.on_divergence=skip in the same command to continue with such scores"
    ]
    assert not list((tmp_path / "run").glob("*tmp*"))
    assert [row["round"] for row in metrics_of(tmp_path / "run")] == ["1"]
    assert run_here(tmp_path / "run", [*keys, SKIP]) == FINISHED
    assert printed_lines(capsys) == [f"hpcfl: warning: {cause}"]
    assert metrics_of(tmp_path / "run")[-1]["diverged"] == "0"


# Left out of a round


CASES = {
    **{name: method_settings(name) for name in (*KINDS, "fedavg-topk", "heurpfedla-topk")},
    "fedmn-chain": [*method_settings("fedmn"), "method.order=chain"],
    "pfedla-sharded": [*method_settings("pfedla"), "method.server=sharded"],
}
ROUNDED = ("heurpfedla", "heurpfedla-topk", "pfedhn", "pfedla-sharded")
"""Products of a whole cohort have other last bits than those of a smaller one."""


def numbers_of(folder: Path) -> dict[str, np.ndarray]:
    """Return the state of server and clients by name."""
    datasets = {name: item for name, item in contents(folder).items() if name[0] == "/" and "@" not in name}
    return {
        name: np.frombuffer(data, dtype).reshape(shape)
        for name, (dtype, shape, data) in datasets.items()
        if name.startswith(("/server/", "/clients/"))
    }


@pytest.mark.parametrize("case", CASES)
def test_a_client_left_out_is_as_if_it_had_not_been_sampled(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    keys = [*settings, *MEETS_ALL_SOON, "train.participation=0.6", "train.rounds=2"]
    keys += ["run.eval_every=2", "run.checkpoint_every=2"]
    own = write_poisoned(tmp_path / "own.py", {1: [2]}, case)
    assert run_here(tmp_path / "skipped", [*keys, *own, SKIP]) == FINISHED
    leave_out(monkeypatch, lambda number, client: (number, client) == (1, 2))
    assert run_here(tmp_path / "absent", [*keys, *CASES[case]]) == FINISHED
    assert metrics_of(tmp_path / "skipped")[-1]["diverged"] == "1"
    if case not in ROUNDED:
        assert differing(tmp_path / "skipped", tmp_path / "absent", "server", "clients") == []
        return
    skipped, absent = (numbers_of(tmp_path / name) for name in ("skipped", "absent"))
    assert list(skipped) == list(absent)
    for name, values in skipped.items():
        np.testing.assert_allclose(values, absent[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_pretraining_ends_although_a_client_diverges(settings: list[str], tmp_path: Path) -> None:
    keys = write_poisoned(tmp_path / "own.py", {0: range(7), 1: range(7)}, "fedmn-pretrained")
    keys += ["method.architecture=[2,1]", "method.pretrain_rounds=1", "train.rounds=2", "run.eval_every=2"]
    assert run_here(tmp_path / "run", [*settings, *keys, SKIP]) == FINISHED
    assert metrics_of(tmp_path / "run")[-1]["diverged"] == "14"
    with h5py.File(tmp_path / "run" / "checkpoint.h5", locking=False) as file:
        names = file["layout/parameters/names"].asstr()[()].tolist()
        parts = np.split(file["server/theta"][()], file["layout/parameters/offsets"][1:])
    weights = dict(zip(names, parts, strict=True))
    first, second = ([w for n, w in weights.items() if n.startswith(f"encoder{k}.body")] for k in (1, 2))
    assert len(first) == len(second) > 0
    assert all(np.array_equal(*pair) for pair in zip(first, second, strict=True))


def test_other_clients_of_a_group_keep_their_training(settings: list[str], tmp_path: Path) -> None:
    """Clients that train as one computation share a group."""
    keys = [*settings, "run.engine=batched", "run.clients_at_once=4", "train.rounds=1"]
    assert run_here(tmp_path / "sound", [*keys, "method.name=local"]) == FINISHED
    own = write_poisoned(tmp_path / "own.py", {0: [2]}, "local")
    assert run_here(tmp_path / "run", [*keys, *own, SKIP]) == FINISHED
    found, sound = (numbers_of(tmp_path / name)["/clients/theta"] for name in ("run", "sound"))
    same = (found == sound).all(axis=1).tolist()
    assert same == [True, True, False, True, True, True, True]
    assert np.isfinite(found).all()


def test_a_difference_that_overflows_counts_as_divergence(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """float32 holds it, but codecs may make nan of it."""
    keys = [*settings, "method.name=fedavg", "comm.codec=int8", "train.rounds=1", "model.batchnorm=false"]
    train = METHODS["fedavg"].train

    def steep(self: Method, group: ClientGroup, down: Message) -> Message:
        up = train(self, group, down)
        if 4 in group.ids:
            up.per_client["theta"][group.ids.index(4), :2] = torch.tensor([1.5, -1.5]) * 2.0**127
        return up

    monkeypatch.setattr(METHODS["fedavg"], "train", steep)
    assert run_here(tmp_path / "run", [*keys, SKIP]) == FINISHED
    assert load_run(tmp_path / "run").diverged.tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert np.isfinite(numbers_of(tmp_path / "run")["/server/theta"]).all()


# Any number of ranks


POISONED_RUNS = {"fedavg": ["comm.codec=topk"], "heurpfedla": ["method.server=sharded", "method.k=2"]}


def test_ranks_and_a_resume_give_the_same_bits(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mpirun_command: list[str]
) -> None:
    """Runs that one rank begins and three finish, with members of the cohort moved to other workers."""
    who = {0: (1,), 1: (2, 5), 2: (0, 1, 2, 3, 4, 5, 6), 3: (6, 1)}
    runs, few = {}, ["train.participation=0.6", "train.rounds=4", "run.eval_every=2", SKIP]
    for method, more in POISONED_RUNS.items():
        keys = [*settings, *write_poisoned(tmp_path / f"own_{method}.py", who, method), *more, *few]
        assert run_here(tmp_path / f"{method}-whole", keys) == FINISHED
        assert run_until_time_is_up(tmp_path / f"{method}-parts", keys) == STOPPED
        runs[tmp_path / f"{method}-parts"] = keys
    run_in_one_world(mpirun_command, 3, runs)
    for method in POISONED_RUNS:
        assert differing(tmp_path / f"{method}-whole", tmp_path / f"{method}-parts") == []
        rows = metrics_of(tmp_path / f"{method}-parts")
        assert [int(row["diverged"]) > 3 for row in rows] == [False, True]


# Parts


def test_divergence_is_described_for_each_client() -> None:
    place = make_worker(make_network(), [4] * 6, TrainConfig(), state={"own": torch.zeros(6, 2)})
    clients = ClientGroup(place, range(6), 0)
    theta = torch.ones(6, 5)
    theta[1, 2:] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    theta[5] = LARGEST
    clients["own"] = torch.zeros(6, 2).index_fill(0, torch.tensor([2]), -1.5 * LARGEST)
    clients.loss_sum[3], clients.loss_sum[4] = torch.inf, torch.nan
    share = torch.tensor([1.0, 1.0, 1.0, 1.0, -torch.inf, 1.0])
    up = Message(per_client={"theta": theta, "share": share, "paths": torch.zeros(6, 1, dtype=torch.uint8)})
    figures = losses_and_extremes(clients, up)
    assert figures.shape == (2, 6)
    assert diverged_members(clients, up, figures) == {1: "theta", 2: "its own", 3: "loss", 4: "loss, share"}


def test_divergence_of_the_server_is_described() -> None:
    ids, nothing = torch.arange(3), torch.empty(0, 4)
    assert not_finite({"theta": torch.ones(2, 3), "ids": ids, "nothing": nothing}) == ""
    large = torch.full((2, 3), torch.finfo(torch.float32).max)
    assert not_finite({"theta": large}) == ""
    spoilt = {name: torch.tensor([1.0, torch.nan, -torch.inf]) for name in "abcde"}
    assert not_finite({"theta": large} | spoilt) == "a, b, c, 2 more"
