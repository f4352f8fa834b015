"""Job scripts on a SLURM of several nodes: a job may resume on other nodes, and ends with the same bits."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from bits import differing
from conftest import in_mpi_world
from gates import Gates, gated_settings, run_uninterrupted
from nodes import Nodes, simulated_nodes
from processes import REPOSITORY
from slurm import Job, Slurm, running_slurm

from hpcfl.errors import BAD_INPUT, FINISHED, STOPPED

pytestmark = pytest.mark.nodes

ALONE = (
    "hpcfl: error: the launcher started 4 ranks, but each is alone in its MPI world; under SLURM use `srun"
)
NO_PMIX = (
    "hpcfl: error: the launcher does not speak PMIx, which Open MPI needs; under SLURM use `srun --mpi=pmix`"
)
REFUSED = {
    "mpich": {
        "none": (BAD_INPUT, f"{ALONE} --mpi=pmi2`"),
        "cray_shasta": (BAD_INPUT, f"{ALONE} --mpi=pmi2`"),
        "pmix": (
            BAD_INPUT,
            "hpcfl: error: the launcher speaks PMIx, which this MPICH was built without; under SLURM use",
        ),
    },
    "openmpi": {
        "none": (BAD_INPUT, NO_PMIX),
        "cray_shasta": (BAD_INPUT, NO_PMIX),
        # some builds of Open MPI support it; this one prints that it does not
        "pmi2": (1, "OMPI was not built with SLURM's PMI support"),
    },
}
"""Types of `srun --mpi` that do not join the ranks, by MPI: exit code and message."""


@dataclass(frozen=True)
class Submitted:
    job: Job
    gates: Gates
    folder: Path
    command: list[str | Path]
    env: dict[str, str]

    def ends_as(self, uninterrupted: Path) -> None:
        """Wait for the job's end, which has the bits of an uninterrupted run."""
        self.job.wait()
        assert (self.job.state, self.job.exit_code) == ("COMPLETED", FINISHED), self.job.output
        assert not differing(self.folder, uninterrupted)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    if in_mpi_world():
        pytest.skip("an MPI world cannot start another one")
    with simulated_nodes(3) as up:
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
def uninterrupted(gated: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_uninterrupted(tmp_path_factory.mktemp("uninterrupted"), gated)


@pytest.fixture(params=list(REFUSED))
def mpi(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def env(mpi: str, slurm: Slurm, tmp_path: Path) -> dict[str, str]:
    """Return what a job needs so that its ranks and its mpirun are of this MPI; skip where it is not here."""
    if mpi == "mpich":
        return {}
    mpirun = shutil.which("mpirun.openmpi")
    if mpirun is None:
        pytest.skip("no mpirun.openmpi here (packages openmpi-bin and libopenmpi-dev)")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").symlink_to(mpirun)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = f"{tmp_path / 'bin'}:{slurm.environment()['PATH']}"
    return {**as_root, "MPI4PY_MPIABI": "openmpi", "PATH": path}


def both(slurm: Slurm, gated: list[str], env: dict[str, str], base: Path, *closed: int) -> list[Submitted]:
    """Submit a run on two nodes once for mpirun and once for srun, which wait in the closed rounds."""
    jobs = []
    for launcher in ("mpirun", "srun"):
        gates, folder = Gates(base / f"gates-{launcher}"), base / launcher
        gates.close(*closed)
        command = ["--nodes=2", "--ntasks=4", "jobs/train.sbatch", *gated, "--out", folder]
        # the default of many clusters, which mpirun's own steps must not use
        job_env = {**env, **gates.env, "LAUNCHER": launcher, "SLURM_MPI_TYPE": "pmix"}
        jobs.append(Submitted(slurm.submit(*command, **job_env), gates, folder, command, job_env))
    for one in jobs:
        one.gates.wait(closed[0], one.job)
    return jobs


def test_a_signalled_and_preempted_job_resumes_on_other_nodes(
    slurm: Slurm, gated: list[str], uninterrupted: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    with slurm.drained(3):
        jobs = both(slurm, gated, env, tmp_path, 1, 2)
    with slurm.drained(2):
        for one in jobs:
            slurm.call("scancel", "--signal=USR1", "--batch", one.job.number)
        for one in jobs:
            one.gates.wait_for_signal(one.job)
            one.gates.open(1)
        for one in jobs:
            one.job.come_back(1)
            one.gates.wait(2, one.job)
    with slurm.drained(1):
        for one in jobs:
            slurm.call("scontrol", "requeue", one.job.number)
        for one in jobs:
            one.job.come_back(2)
            # the start before may still be there, and would end its round
            one.job.wait_for_start(3)
            one.gates.open(2)
        for one in jobs:
            one.ends_as(uninterrupted)
            log = (one.folder / "log.txt").read_text()
            for number, names in enumerate(("n[1-2]", "n[1,3]", "n[2-3]"), 1):
                start = f"SLURM job hpcfl {one.job.number}, start {number}, on {names}"
                assert log.count(start) == one.job.output.count(start) == 1
            environment = yaml.safe_load((one.folder / "config.yaml").read_text())["environment"]
            assert environment["job"].endswith("on n[2-3]")
            assert {rank.split()[0] for rank in environment["ranks"]} == {"n2", "n3"}


@pytest.mark.parametrize("script_dies", [True, False])
def test_slurm_requeues_a_job_whose_node_loses_its_power(
    nodes: Nodes,
    slurm: Slurm,
    gated: list[str],
    uninterrupted: Path,
    tmp_path: Path,
    env: dict[str, str],
    script_dies: bool,
) -> None:
    """The job script runs on the first of a job's nodes."""
    spare, dying = (1 if script_dies else 3), 2
    try:
        with slurm.drained(spare):
            jobs = both(slurm, gated, env, tmp_path, 1)
            # the other nodes receive nothing more from it
            nodes.cut(dying)
            nodes[dying].die()
        for one in jobs:
            one.job.come_back(1)
            one.job.wait_for_start(2)
            one.gates.open(1)
        for one in jobs:
            one.ends_as(uninterrupted)
            assert "start 2, on n[1,3]" in one.job.output
            warned = f"{one.folder} was locked by pid "
            assert (warned in one.job.output) == script_dies
    finally:
        nodes.heal(dying)
        slurm.start_node(nodes[dying])


def test_a_run_resumes_after_one_of_its_nodes_restarts(
    nodes: Nodes, slurm: Slurm, gated: list[str], uninterrupted: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    """mpirun's job fails before SLURM notices; srun's fails, too, or is requeued, or its ranks give up."""
    with slurm.drained(3):
        jobs = both(slurm, [*gated, "run.timeout=60"], env, tmp_path, 1)
        nodes[2].die()
        mpirun_s = jobs[0].job
        mpirun_s.until(lambda: mpirun_s.state != "RUNNING", "mpirun's end")
    with slurm.drained(2):
        slurm.start_node(nodes[2])
        for one in jobs:
            one.gates.open(1)
            one.job.wait()
        assert (mpirun_s.state, mpirun_s.field("Restarts")) == ("FAILED", "0")
        assert mpirun_s.exit_code not in (FINISHED, BAD_INPUT, STOPPED)
        for one in jobs:
            resumed = one
            if one.job.state == "FAILED":
                resumed = replace(one, job=slurm.submit(*one.command, **one.env))
            resumed.ends_as(uninterrupted)
            assert "resuming after round 1 of 3" in resumed.job.output


def test_every_type_of_srun_joins_the_ranks_or_is_refused(
    slurm: Slurm, gated: list[str], uninterrupted: Path, tmp_path: Path, mpi: str, env: dict[str, str]
) -> None:
    env = {**env, **Gates(tmp_path / "gates").env}
    listed = slurm.try_call("srun", "--mpi=list")
    types = set(re.findall(r"(?<=\t)\w+|pmix_v\d+", listed.stdout + listed.stderr))
    assert types >= {"none", "pmi2", "pmix"}
    for kind in types:
        folder = tmp_path / kind
        ranks = ["srun", f"--mpi={kind}", "--nodes=2", "--ntasks=4"]
        done = slurm.try_call(*ranks, "python", "-m", "hpcfl.main", *gated, "--out", folder, env=env)
        refused = REFUSED[mpi].get(kind.partition("_v")[0])
        if refused is None:
            assert done.returncode == FINISHED, done.stderr
            assert not differing(folder, uninterrupted)
            continue
        code, line = refused
        assert (done.returncode, folder.exists()) == (code, False), done.stderr
        assert line in done.stderr
