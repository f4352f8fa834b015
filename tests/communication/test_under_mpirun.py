"""The tests that are collective, on several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from processes import REPOSITORY, run_ranks

COLLECTIVE = [
    path
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py"))
    if "\n@pytest.mark.mpi" in path.read_text()
]


def run_collective_tests(
    mpirun_command: Sequence[str],
    ranks: int,
    files: Sequence[Path] = COLLECTIVE,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run collective tests on so many ranks; none may fail on any."""
    words = ("-m", "pytest", "--with-mpi", "-m", "mpi", "-q", "-p", "no:cacheprovider", *files)
    done = run_ranks([*mpirun_command], ranks, *words, timeout=300, env=env)
    assert done.stdout.count(" passed") == ranks
    assert done.stdout.count("MPI version: ") == ranks


def test_collective_tests_pass(mpirun_command: list[str]) -> None:
    # the ranks are copies of this process, and each would need a second and more for this
    import torch._dynamo  # noqa: F401

    run_collective_tests(mpirun_command, 5)
