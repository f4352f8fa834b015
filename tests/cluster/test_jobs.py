"""Job scripts on a real SLURM: however a job ends, its run ends with the bits of an uninterrupted run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from bits import differing, read_csv, run_here
from conftest import in_mpi_world
from gates import Gates, gated_settings, run_uninterrupted
from processes import REPOSITORY
from slurm import Job, Slurm, running_slurm

from hpcfl.errors import BAD_INPUT, FINISHED

TABLE = """
title: A table with a cell that fails
seeds: [0]
rows:
  - {label: broken, method: {path: %s, fails: true}}
  - {label: waits, method: {path: %s}}
  - {method: {name: local}}
  - {method: {name: ditto}}
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if in_mpi_world():
        pytest.skip("an MPI world cannot start another one")
    folder = tmp_path_factory.mktemp("submit")
    (folder / "jobs").symlink_to(REPOSITORY / "jobs")
    with running_slurm(folder) as running:
        yield running


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return gated_settings(tmp_path_factory.mktemp("settings"))


@pytest.fixture(scope="module")
def uninterrupted(gated: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_uninterrupted(tmp_path_factory.mktemp("uninterrupted"), gated)


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


@pytest.mark.soak
def test_a_job_whose_time_is_nearly_up_is_requeued(
    slurm: Slurm, gated: list[str], gates: Gates, uninterrupted: Path, tmp_path: Path
) -> None:
    gates.close(1)
    limit = ["--time=1", "--signal=B:USR1@45"]
    command = [*limit, "--ntasks=2", "jobs/train.sbatch", *gated, "--out", tmp_path / "run"]
    job = slurm.submit(*command, **gates.env)
    gates.wait(1, job)
    gates.wait_for_signal(job)
    gates.open(1)
    # its other rounds may need another start
    job.until(lambda: "round 3/3" in job.output, "the last round")
    job.wait()
    assert (job.state, job.exit_code) == ("COMPLETED", FINISHED)
    assert "start 2" in job.output
    assert not differing(tmp_path / "run", uninterrupted)


def test_a_job_signalled_and_preempted_during_a_round_is_requeued(
    slurm: Slurm, gated: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    """With mpirun and with srun at the same time; the one with mpirun is also pre-empted."""
    jobs: list[tuple[Job, Gates, Path]] = []
    for launcher in ("mpirun", "srun"):
        gates, folder = Gates(tmp_path / f"gates-{launcher}"), tmp_path / launcher
        gates.close(1, 2)
        command = ["--job-name=train", "--ntasks=2", "jobs/train.sbatch", *gated, "--out", folder]
        jobs.append((slurm.submit(*command, **gates.env, LAUNCHER=launcher), gates, folder))
    for job, gates, _ in jobs:
        gates.wait(1, job)
        slurm.call("scancel", "--signal=USR1", "--batch", job.number)
    for job, gates, _ in jobs:
        gates.wait_for_signal(job)
        gates.open(1)
    for job, _, folder in jobs:
        job.come_back(1)
        assert re.search(rf"stopped early, with a checkpoint of round \d+ in {folder}", job.output)
    by_mpirun, gates, _ = jobs[0]
    gates.wait(2, by_mpirun)
    slurm.call("scontrol", "requeue", by_mpirun.number)
    by_mpirun.come_back(2)
    # the start before may still be there, and would end its round
    by_mpirun.wait_for_start(3)
    for job, gates, folder in jobs:
        last = 3 if job is by_mpirun else 2
        gates.open(2)
        job.until(lambda job=job: "round 3/3" in job.output, "the last round")
        job.wait()
        assert (job.state, job.exit_code) == ("COMPLETED", FINISHED)
        assert not differing(folder, uninterrupted)

        starts = [f"SLURM job train {job.number}, start {number}, on " for number in range(1, last + 1)]
        log = (folder / "log.txt").read_text()
        for start in starts:
            assert log.count(start) == job.output.count(start) == 1
        resumed = "resuming after round 2 of 3"
        assert job.output.count(resumed) == log.count(resumed) == last - 1
        environment = yaml.safe_load((folder / "config.yaml").read_text())["environment"]
        assert environment["job"].startswith(starts[-1].removeprefix("SLURM job "))
        assert not (slurm.folder / "runs" / ".jobs" / job.number).exists()


def test_a_second_job_on_a_folder_is_refused_and_a_cancelled_one_is_not_requeued(
    slurm: Slurm,
    gated: list[str],
    gates: Gates,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "run"
    gates.close(1)
    command = ["--ntasks=2", "jobs/train.sbatch", *gated, "--out", folder]
    job = slurm.submit(*command, **gates.env)
    end_time = gates.wait(1, job)
    assert int(end_time) == datetime.fromisoformat(job.field("EndTime")).timestamp()

    second = slurm.submit("--ntasks=1", *command[1:], **gates.env)
    second.wait()
    assert (second.state, second.exit_code, second.field("Restarts")) == ("FAILED", BAD_INPUT, "0")
    assert f"hpcfl: error: {folder} is in use by pid " in second.output
    assert job.state == "RUNNING"
    assert f"SLURM job hpcfl {second.number}" not in (folder / "log.txt").read_text()

    slurm.call("scancel", job.number)
    job.wait()
    assert (job.state, job.field("Restarts")) == ("CANCELLED", "0")
    assert (folder / "checkpoint.h5").exists()
    gates.open(1)
    monkeypatch.setenv("GATES", gates.env["GATES"])
    assert run_here(folder, gated) == FINISHED
    assert "resuming after round 1 of 3" in (folder / "log.txt").read_text()
    assert not differing(folder, uninterrupted)


def test_a_job_that_saves_no_round_is_not_requeued_for_ever(
    slurm: Slurm, gated: list[str], gates: Gates, tmp_path: Path
) -> None:
    gates.close(0)
    words = ["--ntasks=1", "jobs/train.sbatch", *gated, "--out", tmp_path / "run"]
    job = slurm.submit(*words, **gates.env, MAX_REQUEUES="1")
    for start in (1, 2):
        job.wait_for_start(start)
        slurm.call("scontrol", "requeue", job.number)
        job.come_back(start)
    job.until(lambda: "and ends" in job.output, "giving up")
    job.wait()
    assert (job.state, job.exit_code, job.field("Restarts")) == ("FAILED", 1, "2")
    assert "requeued 2 times in a row without a new round, and ends: a round and its" in job.output
    assert job.output.count("start ") == 2


def test_a_plain_srun_is_refused_with_the_correct_command(
    slurm: Slurm, gated: list[str], gates: Gates
) -> None:
    command = ["python", "-m", "hpcfl.main", *gated, "--out", "plain"]
    refused = slurm.try_call("srun", "--ntasks=2", "--mpi=none", *command, env=gates.env)
    assert refused.returncode == BAD_INPUT
    assert "the launcher started 2 ranks, but each is alone in its MPI world" in refused.stderr
    assert "`srun --mpi=" in refused.stderr
    assert not (slurm.folder / "plain").exists()


def test_an_array_finishes_all_cells_but_the_one_that_fails(
    slurm: Slurm, gated: list[str], gates: Gates, uninterrupted: Path, tmp_path: Path
) -> None:
    """Also where a task is requeued: of the last one, the job number is that of the whole array."""
    *settings, own_method = gated
    path = tmp_path / "table.yaml"
    method = own_method.partition("=")[2]
    path.write_text(TABLE % (method, method))
    out = tmp_path / "out"
    words = ["jobs/table.sbatch", path, *settings, "--own-code", method, "--out", out]
    gates.close(0)
    array = slurm.submit("--array=1-2", "--ntasks=1", *words, **gates.env)
    broken, whole = array.task(1), array.task(2)
    whole.until(lambda: "cell 2/4: waits seed 0" in whole.output, "its first cell")
    slurm.call("scancel", "--signal=USR1", "--batch", whole.number)
    gates.wait_for_signal(whole)
    gates.open(0)
    for task in (broken, whole):
        task.wait()
    assert [task.state for task in (broken, whole)] == ["FAILED", "COMPLETED"]
    assert [task.field("Restarts") for task in (broken, whole)] == ["0", "1"]
    assert broken.output.count("RuntimeError: a mistake of one's own") == 2
    assert "RuntimeError: a mistake of one's own; continuing with the other cells" in broken.output
    missing = {row["label"]: row["missing_seeds"] for row in read_csv(out / "table.csv")}
    assert missing == {"broken": "1", "waits": "0", "local": "0", "ditto": "0"}
    assert f"  broken seed 0, in {out / 'broken-s0'}\n" in whole.output
    assert not differing(uninterrupted, out / "waits-s0")
    for name in ("local", "ditto"):
        assert run_here(tmp_path / name, [*settings, f"method.name={name}"]) == FINISHED
        assert not differing(tmp_path / name, out / f"{name}-s0")
        log = (out / f"{name}-s0" / "log.txt").read_text()
        assert f"({array.number}_{1 if name == 'local' else 2}), start " in log


ON_ALL_CORES = """#!/usr/bin/env bash
source jobs/cluster.sh
# in one write: without Python's buffer, the pieces of what two ranks print may mix
"${launcher[@]}" python -c 'import os; os.write(1, f"cores {sorted(os.sched_getaffinity(0))}\\n".encode())'
"""


def test_ranks_that_mpirun_starts_may_use_all_cores_of_the_job(tmp_path: Path) -> None:
    """Where SLURM binds cores, all ranks of a node would share one; srun gives each its own."""
    if (cores := os.cpu_count() or 1) < 2:
        pytest.skip("needs two cores")
    (tmp_path / "jobs").symlink_to(REPOSITORY / "jobs")
    (tmp_path / "job.sh").write_text(ON_ALL_CORES)
    with running_slurm(tmp_path, binds_cores=True) as slurm:
        found = []
        for launcher in ("mpirun", "srun"):
            words = ["--ntasks=2", "--cpus-per-task=1", "job.sh"]
            job = slurm.submit(*words, LAUNCHER=launcher, SRUN_CPUS_PER_TASK="1")
            job.wait()
            found.append([line for line in job.output.splitlines() if line.startswith("cores")])
    by_mpirun, by_srun = found
    assert by_mpirun == [f"cores {[*range(cores)][:2]}"] * 2
    assert sorted(by_srun) == ["cores [0]", "cores [1]"]
