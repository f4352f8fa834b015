"""Ranks that talk over a network, as those of several nodes do, and not by a machine's shared memory.

Each test runs tests of other files by `--transport`. Those of the default suite take a minute;
`-m nodes` chooses the whole: collective tests, bits, resume, faults.
"""

from __future__ import annotations

import re
import sys

import pytest
from conftest import TRANSPORTS
from processes import REPOSITORY, run_tree

NETWORKS = [name for name in TRANSPORTS if name != "shared-memory"]

COLLECTIVE = ["communication/test_under_mpirun.py::test_collective_tests_pass[2]"]
AMONG_NINE_RANKS = ["simulation/test_bits.py", "-k", "same_bits and 9-"]

WHOLE = [
    "communication/test_under_mpirun.py",
    *("simulation/test_bits.py", "simulation/test_resume.py", "simulation/test_sharded_runs.py"),
    *("simulation/test_process_faults.py", "simulation/test_placement.py", "storage/test_faults.py"),
]


def run_over(transport: str, tests: list[str], timeout: float) -> None:
    """Run some tests over a transport; none may fail, and some must pass."""
    words = [word if word[0] == "-" or " " in word else f"tests/{word}" for word in tests]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--transport",
        transport,
        *words,
    ]
    done = run_tree([*command, "-W", "error"], timeout=timeout, check=False)
    if "no Open MPI here" in done.stdout:
        pytest.skip("no Open MPI here (packages openmpi-bin and libopenmpi-dev)")
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(r"\d+ passed", done.stdout)


@pytest.mark.parametrize(
    ("transport", "tests"),
    [("ucx", COLLECTIVE), ("ofi", AMONG_NINE_RANKS), ("openmpi-tcp", COLLECTIVE)],
)
def test_ranks_over_a_network(transport: str, tests: list[str]) -> None:
    run_over(transport, tests, timeout=300)


@pytest.mark.nodes
@pytest.mark.parametrize("tests", WHOLE)
@pytest.mark.parametrize("transport", NETWORKS)
def test_all_over_a_network(transport: str, tests: str) -> None:
    assert (REPOSITORY / "tests" / tests).exists()
    run_over(transport, [tests], timeout=3600)
