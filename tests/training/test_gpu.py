"""What only a GPU can show: `bash jobs/test.sh -m gpu`. Each test is skipped where there is none.

What can be shown without one is in test_marked_device.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
import yaml
from bits import (
    DIFFERENT,
    MEETS_ALL_SOON,
    VARIANTS,
    method_settings,
    run_here,
    run_until_time_is_up,
    tiny_settings,
)
from harness import SMALL, Run
from processes import Mpirun, run_tree

from hpcfl.errors import FINISHED, OUT_OF_MEMORY, STOPPED
from hpcfl.main import main
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="there is no GPU: torch.cuda.is_available() is false"
    ),
]

CASES = [*DIFFERENT, *VARIANTS]
ENGINES = ["loop", "batched"]


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    keys = [*tiny_settings(digits), *MEETS_ALL_SOON, "train.rounds=2", "train.participation=0.6"]
    return ["data.per_client=null", *keys]


@pytest.fixture(scope="module")
def on_cpu(settings: list[str]) -> Callable[..., Run]:
    """Return a function from a case and settings to its run by the loop engine on the CPU."""
    return cache(lambda case, *keys: Run(*settings, *method_settings(case), *keys, "run.engine=loop"))


def on_gpu(settings: list[str], case: str, engine: str, *keys: str) -> Run:
    run = Run(
        *settings,
        *method_settings(case),
        *keys,
        f"run.engine={engine}",
        "run.clients_at_once=3",
        "run.device=cuda",
    )
    assert run.worker.device.type == run.worker.shard.x.device.type == "cuda"
    kept_on = "cpu" if "run.state=host" in keys else "cuda"
    assert {rows.device.type for rows in run.clients.values()} <= {kept_on}
    return run


def assert_alike(one: Run, other: Run, **tolerance: float) -> None:
    torch.testing.assert_close(one.server, other.server, **tolerance)
    torch.testing.assert_close(one.clients, other.clients, check_device=False, **tolerance)
    rounds = one.config.train.rounds
    scores = [vars(run.simulation._evaluator.evaluate(run.server, rounds)) for run in (one, other)]
    torch.testing.assert_close(*scores, **tolerance, equal_nan=True)


# A GPU computes what a CPU computes


@pytest.mark.warns
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("case", "state"),
    [*((case, "auto") for case in CASES), *((case, "host") for case in ("ditto", "moon", "heurpfedla"))],
)
@pytest.mark.usefixtures("double")
def test_two_rounds_in_float64_equal_those_on_a_cpu(
    settings: list[str], on_cpu: Callable[..., Run], case: str, state: str, engine: str
) -> None:
    run = on_gpu(settings, case, engine, f"run.state={state}")
    assert_alike(run, on_cpu(case), rtol=1e-7, atol=1e-9)


@pytest.mark.warns
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_one_step_in_float32_equals_that_on_a_cpu(
    settings: list[str], on_cpu: Callable[..., Run], case: str, engine: str
) -> None:
    one_step = ("train.rounds=1", "train.batch_size=1000", "train.participation=1")
    assert_alike(on_gpu(settings, case, engine, *one_step), on_cpu(case, *one_step), rtol=1e-4, atol=1e-5)


@pytest.mark.warns
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_a_run_has_the_same_bits_twice(settings: list[str], case: str, engine: str) -> None:
    assert_alike(on_gpu(settings, case, engine), on_gpu(settings, case, engine), rtol=0, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["fedavg", "pfedmb", "apfl", "fedrod"])
def test_the_gpu_does_not_wait_between_two_steps(
    settings: list[str], case: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ClientGroup.batches

    def strict(self: ClientGroup, *arguments: Any, **keys: Any) -> Iterator[Batch]:
        batches = order(self, *arguments, **keys)
        yield next(batches)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield from batches
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(ClientGroup, "batches", strict)
    on_gpu(settings, case, engine)


def test_bench_has_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda", "--parts", "engines", "--repeats", "1"]) == FINISHED
    assert "100 clients on cuda: batched engine / loop engine" in capsys.readouterr().out


# Runs


@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_has_the_same_bits(settings: list[str], tmp_path: Path, engine: str) -> None:
    keys = [*settings, "method.name=ditto", f"run.engine={engine}", "run.device=cuda"]
    assert run_here(tmp_path / "whole", keys) == FINISHED
    assert run_until_time_is_up(tmp_path / "stopped", keys) == STOPPED
    assert run_here(tmp_path / "stopped", keys) == FINISHED
    found = []
    for name in ("whole", "stopped"):
        with h5py.File(tmp_path / name / "checkpoint.h5", "r", locking=False) as file:
            assert file.attrs["round"] == 2
            found.append(
                {part: torch.from_numpy(file[part][:]) for part in ("server/theta", "clients/theta")}
            )
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_are_distributed_over_the_gpus(
    settings: list[str], tmp_path: Path, mpirun: Mpirun, ranks: int
) -> None:
    keys = [*settings, "method.name=fedavg", "run.device=cuda", "run.engine=batched"]
    mpirun(ranks, "-m", "hpcfl.main", *keys, "--out", tmp_path / "run", "--quiet", timeout=300, anew=True)
    record = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["environment"]["ranks"]
    devices = [re.split(r"\s+", rank)[1] for rank in record]
    gpus = torch.cuda.device_count()
    assert devices == ["cpu", *(f"cuda:{worker % gpus}" for worker in range(ranks - 1))]


def test_a_gpu_out_of_memory_is_reported(tmp_path: Path) -> None:
    keys = [*SMALL, "run.device=cuda", "--out", str(tmp_path / "run")]
    code = f"""
import sys, torch
from hpcfl.main import main
torch.cuda.set_per_process_memory_fraction(1e-6)
sys.exit(main({keys}))
"""
    done = run_tree([sys.executable, "-c", code], check=False)
    assert done.returncode == OUT_OF_MEMORY
    assert re.search(r"hpcfl: error: the GPU of rank 0 on \S+ is out of memory; try", done.stderr)
    assert "Traceback" not in done.stderr


def test_clients_at_once_follow_from_free_memory() -> None:
    run = Run("method.name=fedavg", "run.device=cuda", "run.engine=batched")
    assert run.worker.engine.clients_at_once == 4
    assert run.simulation._experiment.engine_name == "batched by 4"
