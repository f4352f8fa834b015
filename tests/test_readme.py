"""The README's promises: its commands run, its example of a new method works."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPOSITORY, run_forked, run_tree
from readme_tables import MARK, PAGES, RESULTS, with_tables

from hpcfl.main import main

README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """Return the README's code blocks of a language; "" are those without."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in fences if name == language]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the README's example of a new method as a file of the user's own."""
    path = tmp_path_factory.mktemp("own") / "my_method.py"
    path.write_text(next(text for text in blocks("python") if "class FedProx(" in text))
    return path


def theta_of(folder: Path) -> bytes:
    import h5py

    with h5py.File(folder / "checkpoint.h5", "r", locking=False) as file:
        return bytes(file["server/theta"][:].tobytes())


def run(folder: Path, *overrides: str) -> bytes:
    settings = ["data.per_client=40", "data.clients=4", "train.rounds=2", "train.local_epochs=2", *overrides]
    assert main([*settings, "--out", str(folder), "--quiet"]) == 0
    return theta_of(folder)


@pytest.mark.usefixtures("own_code_forgotten")
def test_the_example_of_a_new_method_runs_and_without_its_pull_is_fedavg(
    tmp_path: Path, example: Path
) -> None:
    fedavg = run(tmp_path / "fedavg", "method.name=fedavg")
    without = run(tmp_path / "without", f"method.path={example}", "method.mu=0")
    pulled = run(tmp_path / "pulled", f"method.path={example}", "method.mu=1")
    assert without == fedavg
    assert pulled != fedavg


ELSEWHERE = {
    "bash jobs/quickstart.sh": "installs an environment; its run is the one of tests/commands",
    "bash jobs/test.sh": "runs this test",
    "hpcfl bench": "takes minutes; tests/benchmarks runs its parts in small",
    "mpirun -n 3 python -m hpcfl.main bench --parts rounds": "the same",
    "hpcfl bench --parts scale --clients 100,1000": "the same",
    "python -m hpcfl.main table TABLE.yaml --write-results": "tests/tables runs every table file in small",
    "python -m hpcfl.main table configs/tables/pfedla_table1.yaml --plan": "needs CIFAR-10; see tests/tables",
    "python -m hpcfl.main table configs/tables/pfedla_table1.yaml --rounds 60 --seeds 0,1": "the same",
    "python -m hpcfl.main table configs/tables/pfedla_table1.yaml --write-results": "the same",
}
"""Commands of the README that the walk through it leaves out, and why."""

PROGRAMS = ("bash", "hpcfl", "mpirun", "python")


def test_every_command_and_script_runs_in_the_order_of_the_page(
    tmp_path: Path, mpirun: Callable[..., object], mpirun_command: list[str]
) -> None:
    """From the top to the end, in one folder, as a reader does who types it all."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    run_lines, left_out = 0, set()
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE):
        if language == "python" and "class FedProx(" in text:
            (tmp_path / "my_method.py").write_text(text)
        elif language == "python":
            needs_no_hpcfl = "from model import" in text
            folder = tmp_path / "client3_own" if needs_no_hpcfl else tmp_path
            if needs_no_hpcfl:
                (folder / "images.npz").symlink_to(tmp_path / "images.npz")
            (folder / "example.py").write_text(text)
            run_tree([sys.executable, "example.py"], cwd=folder)
        for line in text.splitlines() if not language else ():
            words = shlex.split(line, comments=True)
            if not words or words[0] not in PROGRAMS or line.startswith(" "):
                continue
            if (typed := shlex.join(words)) in ELSEWHERE:
                left_out.add(typed)
                continue
            if words[0] == "mpirun":
                command = [*mpirun_command, *words[1:3], sys.executable, *words[4:]]
                run_tree(command, cwd=tmp_path)
            elif words[0] == "hpcfl":
                run_forked(words[1:], cwd=tmp_path)
            else:
                run_tree([sys.executable, *words[1:]], cwd=tmp_path)
            run_lines += 1
    assert left_out == set(ELSEWHERE)
    assert run_lines >= 15


def test_the_readme_shows_pictures_that_exist() -> None:
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert len(shown) >= 3
    for path in shown:
        assert (REPOSITORY / path).stat().st_size < 150_000, path


def test_the_readme_names_files_that_exist() -> None:
    for path in re.findall(r"(?:jobs|configs|hpcfl)/[\w./-]+\.(?:sh|sbatch|yaml|py)", README):
        assert (REPOSITORY / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_tables_of_results_are_made_from_the_files_beside_the_table_files(page: Path) -> None:
    text = page.read_text()
    assert MARK.search(text)
    assert with_tables(text) == text


def test_every_file_of_results_is_shown_on_the_page_of_results() -> None:
    shown = {name for _, name, *_ in MARK.findall((RESULTS / "README.md").read_text())}
    tables = {path.stem for path in RESULTS.glob("*.csv")}
    assert {name for name in tables if not name.endswith(("_clients", "_diagnostics"))} <= shown


def test_nothing_in_the_readme_waits_to_be_filled_in() -> None:
    assert not re.findall(r"\b[A-Z]+_[A-Z]+\b", re.sub(r"`[^`]*`", "", README))
