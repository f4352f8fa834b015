"""A run that is stopped, killed or prolonged ends with the bits of an uninterrupted one.

test_bits.py resumes every method; damaged checkpoints are those of storage/test_faults.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from bits import (
    LOCAL_SETTINGS,
    MEETS_ALL_SOON,
    completed_rounds,
    differing,
    kept_runs,
    method_settings,
    refused,
    run_here,
    run_killed_in_round,
    run_until_time_is_up,
    tiny_settings,
)
from torch import Tensor

from hpcfl.errors import FINISHED, STOPPED
from hpcfl.methods import METHODS
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.base import State
from hpcfl.registries import load_config
from hpcfl.storage.hdf5 import LoadedCheckpoint

ROUNDS = 3

SPECIAL = {
    "fedmn-pretrained": ["method.pretrain_rounds=1"],
    "fedavg-adam": LOCAL_SETTINGS,
    "heurpfedla-sharded": ["method.server=sharded", "method.heads=low_rank"],
}
"""FedMN whose first round is another than those after it, local training with all there is, and models and
codes that are kept elsewhere."""


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    return [*tiny_settings(digits), *MEETS_ALL_SOON]


@pytest.fixture(scope="module")
def uninterrupted(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a method to the folder of its run from the first round to the last."""
    return kept_runs(tmp_path_factory.mktemp("uninterrupted"), lambda method: [*settings, *short(method)])


def short(method: str) -> list[str]:
    """Return settings, of a method, a variant or a case of SPECIAL, whose first round is not evaluated."""
    return [*method_settings(method), *SPECIAL.get(method, []), "train.participation=0.6", "run.eval_every=2"]


# Every round boundary


@pytest.mark.parametrize("method", SPECIAL)
def test_a_run_killed_and_then_stopped_or_prolonged_has_the_same_bits(
    uninterrupted: Callable[[str], Path], settings: list[str], tmp_path: Path, method: str
) -> None:
    """It resumes from either boundary of its rounds; other methods are stopped after one in test_bits.py.

    SIGKILL comes when a round begins, after a checkpoint like those of stops. The last
    boundary is the end of a shorter run, where a method can be prolonged.
    """
    keys = [*settings, *short(method), "run.checkpoint_every=1"]
    uses_rounds = METHODS[method.partition("-")[0]].traits.uses_total_rounds
    shorter = [*keys, f"train.rounds={ROUNDS if uses_rounds else 2}"]
    run_killed_in_round(1, tmp_path / "run", shorter)
    assert completed_rounds(tmp_path / "run") == 1
    code = run_until_time_is_up(tmp_path / "run", shorter)
    assert code == (STOPPED if uses_rounds else FINISHED)
    assert completed_rounds(tmp_path / "run") == 2
    assert run_here(tmp_path / "run", keys) == FINISHED
    assert not differing(uninterrupted(method), tmp_path / "run")
    assert f"resuming after round 2 of {ROUNDS}" in (tmp_path / "run" / "log.txt").read_text()
    assert load_config(tmp_path / "run" / "config.yaml", []).train.rounds == ROUNDS


def test_two_copies_of_the_server_state_never_exist_at_once(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run checks the initial state again; a machine may have memory for one copy only."""
    initial, load = MethodAdapter.initial_server, LoadedCheckpoint.server.func
    made: list[weakref.ref[Tensor]] = []
    loads = []

    def make(self: MethodAdapter) -> State:
        state = initial(self)
        made.extend(map(weakref.ref, state.values()))
        return state

    def read(self: LoadedCheckpoint) -> State:
        loads.append(sum(tensor() is not None for tensor in made))
        return load(self)

    keys = [*settings, *short("pfedla")]
    assert run_here(tmp_path / "run", [*keys, "train.rounds=1"]) == FINISHED
    monkeypatch.setattr(MethodAdapter, "initial_server", make)
    monkeypatch.setattr(LoadedCheckpoint, "server", property(read))
    assert run_here(tmp_path / "run", keys) == FINISHED
    assert len(made) > 1
    assert loads == [0]


ANNEALED = ["train.lr_decay=1", "train.lr_end=0.01"]


@pytest.mark.parametrize(
    ("method", "more"),
    [*((name, []) for name, kind in METHODS.items() if kind.traits.uses_total_rounds), ("fedavg", ANNEALED)],
)
def test_schedules_over_all_rounds_cannot_be_prolonged(
    settings: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str, more: list[str]
) -> None:
    keys = [*settings, *short(method), *more]
    assert run_here(tmp_path / "run", [*keys, "train.rounds=1"]) == FINISHED
    assert "train.rounds" in refused(capfd, *keys, "train.rounds=2", "--out", tmp_path / "run")


def test_a_run_prolonged_by_mistake_and_killed_in_its_first_new_round_is_repeated(
    settings: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, keys = tmp_path / "run", [*settings, *short("fedavg")]
    assert run_here(folder, [*keys, "train.rounds=2"]) == FINISHED
    before = {path: path.read_bytes() for path in folder.glob("*.csv")}
    assert folder / "clients.csv" in before
    run_killed_in_round(2, folder, [*keys, "train.rounds=20"])
    assert not (folder / "clients.csv").exists()
    assert load_config(folder / "config.yaml", []).train.rounds == 20
    assert "rounds can be added, unless results depend on" in refused(
        capfd, *keys, "train.rounds=1", "--out", folder
    )
    assert run_here(folder, [*keys, "train.rounds=2"]) == FINISHED
    assert {path: path.read_bytes() for path in folder.glob("*.csv")} == before


def test_a_run_killed_before_config_yaml_was_written_is_resumed(
    uninterrupted: Callable[[str], Path], settings: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").touch()
    (folder / ".config.yaml.node-7").write_text("method:\n  na")
    assert run_here(folder, [*settings, *short("fedavg")]) == FINISHED
    assert not differing(uninterrupted("fedavg"), folder)
