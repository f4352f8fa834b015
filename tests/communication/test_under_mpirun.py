"""The tests that are collective, on several numbers of ranks."""

from __future__ import annotations

import pytest
from processes import REPOSITORY, Mpirun

COLLECTIVE = [
    path
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py"))
    if "\n@pytest.mark.mpi" in path.read_text()
]


@pytest.mark.parametrize("ranks", [2, 5])
def test_collective_tests_pass(mpirun: Mpirun, ranks: int) -> None:
    options = ("--with-mpi", "-m", "mpi", "-q", "-p", "no:cacheprovider")
    done = mpirun(ranks, "-m", "pytest", *options, *COLLECTIVE, timeout=300)
    assert done.stdout.count(" passed") == ranks
    assert done.stdout.count("MPI version: ") == ranks
