"""A run that is stopped, killed, damaged or prolonged ends with the bits of an undisturbed one."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from bits import (
    CODED,
    DIFFERENT,
    KINDS,
    LOCAL_SETTINGS,
    MEETS_ALL_SOON,
    completed_rounds,
    differing,
    method_settings,
    run_here,
    run_killed_in_round,
    tiny_settings,
)
from processes import Mpirun
from torch import Tensor

from hpcfl.errors import BAD_INPUT, FINISHED, STOPPED
from hpcfl.methods import METHODS
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.base import State
from hpcfl.storage.hdf5 import LoadedCheckpoint

ROUNDS = 3

SPECIAL = {
    "fedmn-pretrained": ["method.pretrain_rounds=1"],
    "fedavg-adam": LOCAL_SETTINGS,
    "heurpfedla-sharded": ["method.server=sharded", "method.heads=low_rank"],
}
"""FedMN whose first round is another than those after it, local training with all there is, and models and
codes that are kept elsewhere."""

OTHER_STATE = (
    *("fedrod-hyper", "pfedhn-private"),
    *(case for case in CODED if case.endswith("-topk") and case != "pfedla-topk"),
)
"""Variants whose state is another than their method's, and clients that keep what a codec has not sent."""


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    return [*tiny_settings(digits), *MEETS_ALL_SOON]


@pytest.fixture(scope="module")
def undisturbed(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a method to the folder of its run from the first round to the last."""
    base = tmp_path_factory.mktemp("undisturbed")

    @cache
    def folder(method: str) -> Path:
        assert run_here(base / method, [*settings, *short(method)]) == FINISHED
        return base / method

    return folder


def short(method: str) -> list[str]:
    """Return settings, of a method, a variant or a case of SPECIAL, whose first round is not evaluated."""
    return [*method_settings(method), *SPECIAL.get(method, []), "train.participation=0.6", "run.eval_every=2"]


def run_until_time_is_up(folder: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run one more round, since SLURM's time is up by then, and return the exit code."""
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_JOB_END_TIME", str(int(time.time())))
        return run_here(folder, settings)


# Every round boundary


@pytest.mark.parametrize("method", [*KINDS, *SPECIAL])
def test_killed_and_then_stopped_or_prolonged(
    undisturbed: Callable[[str], Path],
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """It goes on from either boundary of its rounds.

    SIGKILL comes while the last member of a cohort trains, after a checkpoint like those of stops. The last
    boundary is the end of a shorter run, where a method can be prolonged.
    """
    keys = [*settings, *short(method), "run.checkpoint_every=1"]
    uses_rounds = METHODS[method.partition("-")[0]].traits.uses_total_rounds
    shorter = [*keys, f"train.rounds={ROUNDS if uses_rounds else 2}"]
    run_killed_in_round(1, tmp_path / "run", shorter)
    assert completed_rounds(tmp_path / "run") == 1
    code = run_until_time_is_up(tmp_path / "run", shorter, monkeypatch)
    assert code == (STOPPED if uses_rounds else FINISHED)
    assert completed_rounds(tmp_path / "run") == 2
    assert run_here(tmp_path / "run", keys) == FINISHED
    assert not differing(undisturbed(method), tmp_path / "run")


@pytest.mark.parametrize("method", [*(name for name in DIFFERENT if name not in KINDS), *OTHER_STATE])
def test_stopped_after_the_first_round(
    undisturbed: Callable[[str], Path],
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    keys = [*settings, *short(method)]
    assert run_until_time_is_up(tmp_path / "run", keys, monkeypatch) == STOPPED
    assert run_here(tmp_path / "run", keys) == FINISHED
    assert not differing(undisturbed(method), tmp_path / "run")


def test_two_states_of_the_server_are_never_there_at_once(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run begins with is looked at once more where it goes on; a machine may have room for one."""
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


READS_NO_NUMBERS = """
import sys
from hpcfl.errors import UserError
from hpcfl.main import main
from hpcfl.storage.hdf5 import LoadedCheckpoint

def refuse(self):
    raise UserError("the disk is gone")

LoadedCheckpoint.server = property(refuse)
sys.exit(main(sys.argv[1:]))
"""


def test_numbers_that_cannot_be_read_end_all_ranks(
    settings: list[str], tmp_path: Path, mpirun: Mpirun
) -> None:
    keys = [*settings, *short("fedavg")]
    assert run_here(tmp_path / "run", [*keys, "train.rounds=1"]) == FINISHED
    words = ["--quiet", "--out", tmp_path / "run", *keys]
    done = mpirun(2, "-c", READS_NO_NUMBERS, *words, check=False, timeout=60)
    assert done.returncode == BAD_INPUT
    # Open MPI's mpirun adds words of its own
    told = done.stderr.splitlines()
    assert told[:1] == ["hpcfl: error: the disk is gone"]
    assert not [line for line in told[1:] if line.startswith(("hpcfl", "Traceback"))]


def test_prolonged_round_by_round_past_an_evaluation_off_schedule(
    undisturbed: Callable[[str], Path], settings: list[str], tmp_path: Path
) -> None:
    for rounds in range(1, ROUNDS + 1):
        keys = [*settings, *short("heurpfedla"), f"train.rounds={rounds}"]
        assert run_here(tmp_path / "run", keys) == FINISHED
    assert not differing(undisturbed("heurpfedla"), tmp_path / "run")


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
    assert run_here(tmp_path / "run", [*keys, "train.rounds=2"]) == BAD_INPUT
    (error,) = capfd.readouterr().err.splitlines()
    assert "train.rounds" in error


def test_killed_before_config_yaml_was_in_place(
    undisturbed: Callable[[str], Path], settings: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").touch()
    (folder / "config.yaml.tmp").write_text("method:\n  na")
    assert run_here(folder, [*settings, *short("fedavg")]) == FINISHED
    assert not differing(undisturbed("fedavg"), folder)


# Damaged checkpoints


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_a_damaged_checkpoint_falls_back_to_the_previous(
    undisturbed: Callable[[str], Path],
    settings: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
) -> None:
    keys = [*settings, *short("pfedla")]
    assert run_here(tmp_path, [*keys, "train.rounds=2", "run.checkpoint_every=1"]) == FINISHED
    damage(tmp_path / "checkpoint.h5")
    assert run_here(tmp_path, keys) == FINISHED
    warning = capfd.readouterr().err
    assert warning.startswith(f"hpcfl: warning: {tmp_path / 'checkpoint.h5'} is ")
    assert f"taking {tmp_path / 'checkpoint.prev.h5'}, round 1" in warning
    assert warning.count("\n") == 1
    assert not differing(undisturbed("pfedla"), tmp_path)
