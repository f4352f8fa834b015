"""Ranks that communicate over a network, as on several nodes, and not by shared memory.

`-m nodes` runs tests of other files by `--transport`: collective tests, bits, resume, faults.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from bits import differing, method_settings, run_here, tiny_settings
from conftest import TRANSPORTS, openmpi_command
from processes import run_in_one_world, run_tree
from test_under_mpirun import COLLECTIVE, run_collective_tests

NETWORKS = [name for name in TRANSPORTS if name != "shared-memory"]

WHOLE = [
    "communication/test_under_mpirun.py",
    *("simulation/test_bits.py", "simulation/test_resume.py", "simulation/test_sharded_runs.py"),
    *("simulation/test_process_faults.py", "simulation/test_placement.py", "storage/test_faults.py"),
]


OF_MESSAGES = [path for path in COLLECTIVE if path.parent.name == "communication"]
"""Files of collective tests that are useful on two ranks."""


def test_collective_tests_pass_over_ucx(mpirun_command: list[str]) -> None:
    run_collective_tests(mpirun_command, 2, OF_MESSAGES, TRANSPORTS["ucx"])


def test_collective_tests_pass_with_open_mpi_over_tcp() -> None:
    command = [*openmpi_command(), "--mca", "btl", "tcp,self"]
    run_collective_tests(command, 2, OF_MESSAGES, TRANSPORTS["openmpi-tcp"])


def test_a_run_over_ofi_has_the_bits_of_one_rank(
    digits: Path, tmp_path: Path, mpirun_command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*tiny_settings(digits), *method_settings("fedfomo"), "train.rounds=2"]
    assert run_here(tmp_path / "one", settings) == 0
    for name, value in TRANSPORTS["ofi"].items():
        monkeypatch.setenv(name, value)
    run_in_one_world(mpirun_command, 4, {tmp_path / "four": settings})
    assert not differing(tmp_path / "one", tmp_path / "four")


@pytest.mark.nodes
@pytest.mark.parametrize("tests", WHOLE)
@pytest.mark.parametrize("transport", NETWORKS)
def test_collective_tests_pass_over_a_network(transport: str, tests: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "--transport", transport, "-W", "error"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/{tests}"]
    done = run_tree(command, timeout=3600, check=False)
    if "no Open MPI here" in done.stdout:
        pytest.skip("no Open MPI here (packages openmpi-bin and libopenmpi-dev)")
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(r"\d+ passed", done.stdout)
