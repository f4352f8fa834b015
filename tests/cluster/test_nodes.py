"""Runs on several nodes have the bits of a run on one; nodes and links fail, or nodes differ."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from bits import MUCH_STATE, completed_rounds, differing, run_here, tiny_settings
from nodes import Node, Nodes, simulated_nodes
from processes import Launch, Mpirun, run_tree, until

from hpcfl.errors import BAD_INPUT, FINISHED, STOPPED

ROUNDS = 30
TIMEOUT_S = 3
REPORTED_WITHIN_S = 30
"""Longest time from a fault to the end of all processes, besides `run.timeout`; cores are shared."""
CUT_S = 2
HOUR_S = 3600
GIVEN_UP_WITHIN_S = 45
"""A beat after 10 s sends into the cut link; Linux gives it up 13 s later; MPI learns it at the next beat."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with simulated_nodes(3) as up:
        yield up


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    return [*tiny_settings(digits), *MUCH_STATE]


@pytest.fixture(scope="module")
def uninterrupted(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one rank."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert run_here(folder, [*settings, f"train.rounds={ROUNDS}"]) == FINISHED
    return folder


@pytest.fixture
def openmpi(mpirun_command: list[str]) -> list[str]:
    """Return the mpirun of Open MPI, beside that of the other tests."""
    program = shutil.which("mpirun.openmpi")
    if program is None or "--oversubscribe" in mpirun_command:
        pytest.skip("there is no mpirun.openmpi beside another MPI (package openmpi-bin)")
    # mpirun gives a silent node up after 6 s, not after 8 minutes
    keys = {"time": 3, "intvl": 1, "probes": 3}
    alive = [f"OMPI_MCA_oob_tcp_keepalive_{key}={value}" for key, value in keys.items()]
    return ["env", "MPI4PY_MPIABI=openmpi", *alive, program, "--oversubscribe", "--allow-run-as-root"]


MPIS = pytest.mark.parametrize(
    "mpi", ["mpirun_command", pytest.param("openmpi", marks=pytest.mark.nodes)], indirect=True
)
"""The mpirun of all tests, and Open MPI's."""


@pytest.fixture
def mpi(request: pytest.FixtureRequest) -> list[str]:
    command: list[str] = request.getfixturevalue(request.param)
    return command


Launcher = Callable[..., AbstractContextManager[Launch]]


@pytest.fixture
def launch(nodes: Nodes, settings: list[str], tmp_path: Path) -> Launcher:
    """Return a context manager that starts or resumes a run; in the end, no link is cut."""

    @contextmanager
    def started(
        mpi: list[str], ranks: int = 5, on: tuple[int, ...] = (1, 2, 3), timeout_s: int = TIMEOUT_S
    ) -> Iterator[Launch]:
        keys = [f"train.rounds={ROUNDS}", f"run.timeout={timeout_s}"]
        words = ["-m", "hpcfl.main", "--quiet", "--out", tmp_path / "run", *settings, *keys]
        with Launch(nodes.mpirun(mpi, ranks, *words, on=on), tmp_path / "run") as running:
            try:
                yield running
            finally:
                for node in nodes.nodes:
                    nodes.heal(node.number)
                    node.die()

    return started


Resume = Callable[..., str]


@pytest.fixture
def resume(nodes: Nodes, launch: Launcher, uninterrupted: Path, tmp_path: Path) -> Resume:
    """Return a function that resumes a run to its last round on other nodes, and returns what it printed."""

    def check(mpi: list[str], ranks: int = 2, on: tuple[int, ...] = (2, 1)) -> str:
        with launch(mpi, ranks, on, HOUR_S) as running:
            printed = running.end()
            assert running.process.returncode == FINISHED, printed
        assert not differing(uninterrupted, tmp_path / "run")
        return printed

    return check


def until_empty(*nodes: Node, within_s: float = REPORTED_WITHIN_S) -> None:
    """Wait until all processes of some nodes have ended."""
    until(lambda: not any(node.pids() for node in nodes), "the end of all processes", within_s)


def rows_once_stalled(running: Launch) -> int:
    """Return the number of rows of a run's metrics.csv once a second has added none."""
    rows, since_s = running.rows(), time.monotonic()
    while time.monotonic() - since_s < CUT_S / 2:
        time.sleep(0.05)
        if running.rows() != rows:
            rows, since_s = running.rows(), time.monotonic()
    return rows


# Nodes and links that fail


@MPIS
def test_a_node_whose_link_is_cut_is_named_and_its_ranks_end(
    nodes: Nodes, launch: Launcher, settings: list[str], uninterrupted: Path, tmp_path: Path, mpi: list[str]
) -> None:
    """The rounds on three nodes before it have the bits of a run on one rank."""
    with launch(mpi, 3) as running:
        running.wait_for_rounds(3)
        config = (tmp_path / "run" / "config.yaml").read_text()
        assert all(f"- {node.name} cpu" in config for node in nodes.nodes)
        nodes.cut(3)
        began_s = time.monotonic()
        code = running.process.wait(TIMEOUT_S + REPORTED_WITHIN_S)
        # what was started over a link that is cut, such as ssh, does not notice it
        until_empty(nodes[3])
        assert time.monotonic() - began_s < TIMEOUT_S + REPORTED_WITHIN_S
        assert running.is_gone()
        nodes.heal(3)
        printed = running.end()
        until_empty(*nodes.nodes)
    assert code not in (FINISHED, BAD_INPUT, STOPPED)
    lines = [line for line in printed.splitlines() if line.startswith("hpcfl: ")]
    opening = f"hpcfl: error: rank 2 on n3 has sent no heartbeat for {TIMEOUT_S} s (run.timeout) in round "
    assert len(lines) == 1, printed
    assert lines[0].startswith(opening)
    assert "Traceback" not in printed
    assert 2 <= completed_rounds(tmp_path / "run") < ROUNDS
    assert run_here(tmp_path / "run", [*settings, f"train.rounds={ROUNDS}"]) == FINISHED
    assert not differing(uninterrupted, tmp_path / "run")


@pytest.mark.nodes
@MPIS
def test_a_link_that_the_network_gives_up_ends_the_run(
    nodes: Nodes, launch: Launcher, resume: Resume, mpi: list[str], mpirun_command: list[str]
) -> None:
    """It does so before `run.timeout` has passed; MPI crashes, or mpirun ends all ranks."""
    with launch(mpi, timeout_s=HOUR_S) as running:
        running.wait_for_rounds(3)
        nodes.cut(3)
        until_empty(nodes[2], nodes[3], within_s=GIVEN_UP_WITHIN_S)
        # mpirun may wait for what started the ranks there, such as ssh
        nodes.heal(3)
        printed = running.end()
        assert running.process.returncode not in (FINISHED, BAD_INPUT, STOPPED)
        until_empty(*nodes.nodes)
    assert "Traceback" not in printed
    resume(mpirun_command)


@pytest.mark.nodes
@pytest.mark.parametrize(("mpi", "then"), [(0, 1), (1, 0)])
def test_a_run_resumes_after_all_processes_of_a_node_die(
    nodes: Nodes,
    launch: Launcher,
    resume: Resume,
    tmp_path: Path,
    mpirun_command: list[str],
    openmpi: list[str],
    mpi: int,
    then: int,
) -> None:
    """A run started with one MPI is resumed with the other."""
    both = (mpirun_command, openmpi)
    with launch(both[mpi]) as running:
        running.wait_for_rounds(3)
        nodes[3].die()
        began_s = time.monotonic()
        printed = running.end()
        assert time.monotonic() - began_s < REPORTED_WITHIN_S
        assert running.process.returncode not in (FINISHED, BAD_INPUT, STOPPED)
        assert running.is_gone()
        until_empty(*nodes.nodes)
    # mpirun ends all ranks before one of them has noticed
    assert "hpcfl: " not in printed
    assert "Traceback" not in printed
    assert 2 <= completed_rounds(tmp_path / "run") < ROUNDS
    printed = resume(both[then])
    assert re.search(r"was locked by pid \d+ on n1. This machine cannot see whether it still runs", printed)
    assert printed.count("\n") == 1


@pytest.mark.nodes
@MPIS
@pytest.mark.parametrize("fault", ["comes back", "slow"])
def test_a_link_that_comes_back_in_time_or_is_slow_changes_nothing(
    nodes: Nodes, launch: Launcher, uninterrupted: Path, tmp_path: Path, mpi: list[str], fault: str
) -> None:
    # the network uses the link again at its next try, which comes up to twice the cut later
    with launch(mpi, timeout_s=30 * CUT_S) as running:
        running.wait_for_rounds(3)
        if fault == "slow":
            nodes.slow(3, "100mbit")
        else:
            nodes.cut(3)
            still = rows_once_stalled(running)
            assert still < ROUNDS
            time.sleep(CUT_S / 2)
            assert running.rows() == still
            nodes.heal(3)
        assert running.end() == ""
        assert running.process.returncode == FINISHED
        until_empty(*nodes.nodes)
    assert not differing(uninterrupted, tmp_path / "run")


# Nodes that differ


UNLIKE = """
import os, socket, sys
from hpcfl.checks import nodes
from hpcfl.communication.communicator import open_world
from hpcfl.main import main

versions = nodes.package_versions
if open_world().rank == 1:
    socket.gethostname = lambda: "n2"
    CHANGE
sys.exit(main(sys.argv[1:]))
"""
"""A run whose rank 1 seems to be on another node."""


@pytest.fixture
def error_if(settings: list[str], digits: Path, tmp_path: Path, mpirun: Mpirun) -> Callable[[str], str]:
    """Return a function that runs on two ranks, with a change of rank 1, and returns the error."""

    def error(change: str) -> str:
        words = ["--quiet", "--out", tmp_path / "run", *settings, f"data.path={digits.name}"]
        done = mpirun(2, "-c", UNLIKE.replace("CHANGE", change), *words, cwd=digits.parent, check=False)
        assert (done.returncode, done.stdout) == (BAD_INPUT, "")
        assert not (tmp_path / "run").exists()
        # Open MPI's mpirun adds words of its own
        (line,) = (line for line in done.stderr.splitlines() if line.startswith(("hpcfl", "Traceback")))
        return line

    return error


def test_data_that_one_node_lacks_are_reported(error_if: Callable[[str], str]) -> None:
    error = error_if("os.chdir('/')")
    assert error.startswith("hpcfl: error: rank 1 on n2: data.path=digits.npz: no such file; ")


def test_different_versions_on_one_node_are_reported(error_if: Callable[[str], str]) -> None:
    assert error_if("nodes.package_versions = lambda names: {**versions(names), 'numpy': '1.0'}") == (
        f"hpcfl: error: rank 1 on n2 has numpy 1.0 (rank 0: {np.__version__}): activate the same environment "
        "on every node"
    )


@pytest.mark.nodes
def test_the_doctor_checks_two_nodes(
    nodes: Nodes, settings: list[str], tmp_path: Path, mpirun_command: list[str]
) -> None:
    words = ("-m", "hpcfl.main", "doctor", "--out", tmp_path / "run", *settings)
    command = nodes.mpirun(mpirun_command, 3, *words, on=(1, 2))
    with nodes[2].seeing_empty(tmp_path):
        apart = run_tree(command, check=False)
    assert apart.returncode == BAD_INPUT
    assert f"{tmp_path / 'run'}: rank 2 on n2 does not see what rank 0 wrote there" in apart.stderr
    fine = run_tree(command, check=False)
    assert (fine.returncode, fine.stderr) == (FINISHED, "")
    for ranks, host in (("0-1", "n1"), ("2", "n2")):
        assert re.search(rf"^{ranks} +{host} +cpu +[\d,-]+ of \d+$", fine.stdout, re.MULTILINE)
    assert re.search(r"^messages: .* and its node, .* and other nodes$", fine.stdout, re.MULTILINE)
    assert not (tmp_path / "run").exists()
