"""The tests that are collective, on several numbers of ranks."""

from __future__ import annotations

import pytest
from processes import REPOSITORY, Mpirun

COLLECTIVE = [
    path
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py"))
    if "\n@pytest.mark.mpi" in path.read_text()
]


@pytest.mark.parametrize(("ranks", "anew"), [(1, False), (2, False), (3, True), (5, False)])
def test_collective_tests_pass(mpirun: Mpirun, ranks: int, anew: bool) -> None:
    options = ("--with-mpi", "-m", "mpi", "-q", "-p", "no:cacheprovider")
    done = mpirun(ranks, "-m", "pytest", *options, *COLLECTIVE, timeout=300, anew=anew)
    assert done.stdout.count(" passed") == ranks
    assert done.stdout.count("MPI version: ") == ranks
