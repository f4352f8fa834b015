"""The job scripts on a SLURM of several nodes: wherever a job goes on, it ends with the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from bits import differing
from conftest import in_mpi_world
from gates import Gates, gated_settings, run_undisturbed
from nodes import Nodes, played
from processes import REPOSITORY
from slurm import Job, Slurm, running_slurm

from hpcfl.errors import FINISHED

pytestmark = pytest.mark.usefixtures("own_code_forgotten")

MPIS = ["mpich", pytest.param("openmpi", marks=pytest.mark.nodes)]
WORKING = {"mpich": {"pmi2"}, "openmpi": {"pmix", "pmix_v4"}}
"""Types of `srun --mpi` that join the ranks, by MPI."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    if in_mpi_world():
        pytest.skip("an MPI world cannot start another one")
    with played(3) as up:
        yield up


@pytest.fixture(scope="module")
def slurm(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("submit")
    (folder / "jobs").symlink_to(REPOSITORY / "jobs")
    with running_slurm(folder, nodes.nodes) as running:
        yield running


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return gated_settings(tmp_path_factory.mktemp("settings"))


@pytest.fixture(scope="module")
def undisturbed(gated: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), gated)


def environment_of(mpi: str, slurm: Slurm, folder: Path) -> dict[str, str]:
    """Return what a job needs so that its ranks and its mpirun are of this MPI; skip where it is not here."""
    if mpi == "mpich":
        return {}
    mpirun = shutil.which("mpirun.openmpi")
    if mpirun is None:
        pytest.skip("no mpirun.openmpi here (packages openmpi-bin and libopenmpi-dev)")
    (folder / "bin").mkdir()
    (folder / "bin" / "mpirun").symlink_to(mpirun)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = f"{folder / 'bin'}:{slurm.environment()['PATH']}"
    return {**as_root, "MPI4PY_MPIABI": "openmpi", "PATH": path}


@pytest.mark.parametrize("mpi", MPIS)
def test_signalled_and_preempted_a_job_goes_on_on_other_nodes(
    slurm: Slurm, gated: list[str], undisturbed: Path, tmp_path: Path, mpi: str
) -> None:
    """Once with mpirun and once with srun, at the same time."""
    env = environment_of(mpi, slurm, tmp_path)
    jobs: list[tuple[Job, Gates, Path]] = []
    slurm.drain(3)
    for launcher in ("mpirun", "srun"):
        gates, folder = Gates(tmp_path / f"gates-{launcher}"), tmp_path / launcher
        gates.close(1, 2)
        command = ["--nodes=2", "--ntasks=4", "jobs/train.sbatch", *gated, "--out", folder]
        # the default of many a cluster, which mpirun's own steps must not have
        env |= {"LAUNCHER": launcher, "SLURM_MPI_TYPE": "pmix", **gates.env}
        jobs.append((slurm.submit(*command, **env), gates, folder))
    try:
        for job, gates, _ in jobs:
            gates.wait(1, job)
        slurm.resume(3)
        slurm.drain(2)
        for job, _, _ in jobs:
            slurm.call("scancel", "--signal=USR1", "--batch", job.number)
        for job, gates, _ in jobs:
            gates.wait_for_signal(job)
            gates.open(1)
        for job, gates, _ in jobs:
            job.come_back(1)
            gates.wait(2, job)
        slurm.resume(2)
        slurm.drain(1)
        for job, _, _ in jobs:
            slurm.call("scontrol", "requeue", job.number)
        for job, gates, _ in jobs:
            job.come_back(2)
            # the start before may still be there, and would end its round
            job.wait_for_start(3)
            gates.open(2)
        for job, _, folder in jobs:
            job.wait()
            assert (job.state, job.exit_code) == ("COMPLETED", FINISHED), job.output
            assert not differing(folder, undisturbed)
            log = (folder / "log.txt").read_text()
            for number, names in enumerate(("n[1-2]", "n[1,3]", "n[2-3]"), 1):
                start = f"start {number}, on {names}"
                assert log.count(start) == job.output.count(start) == 1
            environment = yaml.safe_load((folder / "config.yaml").read_text())["environment"]
            assert environment["job"].endswith("on n[2-3]")
    finally:
        for number in (1, 2, 3):
            slurm.resume(number)
