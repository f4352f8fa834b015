"""What the README and docs/ promise: commands run, and pages made from the code are as the code is."""

from __future__ import annotations

import importlib
import re
import shlex
import warnings
from itertools import chain
from pathlib import Path

import pytest
from docs_pages import DOCS, pages
from processes import REPOSITORY, Mpirun, run_forked
from results_tables import CLAIMS, MARK, PAPERS, RESULTS, RESULTS_PAGE, with_claims, with_tables

from hpcfl.main import main

README = REPOSITORY / "README.md"
PAGES = (
    *("install", "tutorial", "own_data", "own_model", "write_a_method", "resume", "tables"),
    *("unseen_clients", "clients", "metrics", "report", "python", "performance", "results", "low_accuracy"),
)
WALKED = [README, *(DOCS / f"{name}.md" for name in PAGES), *sorted((DOCS / "examples").glob("*.sh"))]
"""Pages and scripts whose commands all run, each from the top to the end in one folder."""

BENCH = "takes minutes; tests/benchmarks runs its parts in small"
PAPER = "needs CIFAR-10; tests/tables runs every table file in small"
ELSEWHERE = {
    "bash jobs/quickstart.sh": "installs an environment; its run is the one of tests/commands",
    "hpcfl bench": BENCH,
    "mpirun -n 3 hpcfl bench --parts rounds": BENCH,
    "mpirun -n 4 hpcfl bench --parts nodes": BENCH,
    "hpcfl table TABLE.yaml --write-results": PAPER,
    "hpcfl table configs/tables/pfedla_table1.yaml --plan": PAPER,
    "hpcfl table configs/tables/pfedla_table1.yaml --rounds 60 --seeds 0,1": PAPER,
    "hpcfl table configs/tables/pfedla_table1.yaml --column 'CIFAR-10, 10 clients' --row pFedLA": PAPER,
}
"""Commands that the walks leave out, and why."""

PYTHON_FILES = {path.name for top in ("hpcfl", "tests", "docs") for path in (REPOSITORY / top).rglob("*.py")}
PROGRAMS = ("bash", "hpcfl", "mpirun", "python")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """Return the words of each command in lines of a shell."""
    found = [shlex.split(line, comments=True) for line in text.splitlines() if not line.startswith(" ")]
    return [words for words in found if words and words[0] in PROGRAMS]


def typed(page: Path) -> list[list[str]]:
    """Return the words of each command of a page."""
    return [words for language, text, _ in steps(page) if not language for words in commands(text)]


def steps(page: Path) -> list[tuple[str, str, str]]:
    """Return language, text and file of each block of a page; its file is named right before it."""
    text = page.read_text()
    if page.suffix == ".sh":
        return [("", text, "")]
    found, end = [], 0
    for fence in FENCE.finditer(text):
        names = re.findall(r"`(\w+\.(?:py|yaml))`", text[end : fence.start()])
        found.append((fence[1], fence[2], names[-1] if names else ""))
        end = fence.end()
    return found


@pytest.fixture(scope="module")
def slow_imports() -> None:
    """Import once what else each copy of this process would import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch._dynamo", "torch.export", "matplotlib.figure", "rich.live", "jinja2"):
            importlib.import_module(name)


@pytest.mark.usefixtures("slow_imports")
@pytest.mark.parametrize("page", WALKED, ids=lambda page: page.stem)
def test_every_command_and_script_runs_in_the_order_of_the_page(
    page: Path, tmp_path: Path, mpirun: Mpirun
) -> None:
    """From the top to the end, in one folder, as a reader does who types it all."""
    for name in ("configs", "docs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    for language, text, file in steps(page):
        if language in ("python", "yaml") and file:
            (tmp_path / file).write_text(text)
        elif language == "python":
            (tmp_path / "example.py").write_text(text)
            run_forked(["example.py"], cwd=tmp_path)
        for words in commands(text) if not language else ():
            if shlex.join(words) in ELSEWHERE:
                continue
            if words[0] == "mpirun":
                mpirun(int(words[2]), "-m", "hpcfl.main", *words[4:], cwd=tmp_path)
            elif words[0] == "hpcfl":
                run_forked(["-m", "hpcfl.main", *words[1:]], cwd=tmp_path)
            else:
                run_forked(words[1:], cwd=tmp_path)


def test_no_two_pages_use_one_run_folder_otherwise() -> None:
    """A reader who has done one page can do the next one in the same place."""
    uses: dict[str, set[tuple[str, str]]] = {}
    for page in WALKED:
        for words in typed(page):
            if "run" in words and "--out" in words:
                folder = words[words.index("--out") + 1]
                uses.setdefault(folder, set()).add((page.stem, shlex.join(words)))
    assert len(uses) > 30
    for folder, of_folder in uses.items():
        pages, ways = map(set, zip(*of_folder, strict=True))
        assert len(pages) == 1 or len(ways) == 1, (folder, of_folder)


def test_all_commands_that_the_walks_leave_out_are_on_a_page() -> None:
    walked = [shlex.join(words) for page in WALKED for words in typed(page)]
    assert set(ELSEWHERE) <= set(walked)
    assert len(set(walked) - set(ELSEWHERE)) >= 50


def theta_of(folder: Path) -> bytes:
    import h5py

    with h5py.File(folder / "checkpoint.h5", "r", locking=False) as file:
        return bytes(file["server/theta"][:].tobytes())


@pytest.mark.usefixtures("own_code_forgotten")
def test_the_example_of_a_new_method_without_its_pull_is_fedavg(tmp_path: Path) -> None:
    example = tmp_path / "my_method.py"
    example.write_text(next(text for _, text, file in steps(README) if file == example.name))
    settings = ["data.per_client=40", "data.clients=4", "train.rounds=2", "train.local_epochs=2", "--quiet"]
    theta = {}
    for name, words in {
        "fedavg": ["method.name=fedavg"],
        "without": [f"method.path={example}", "method.mu=0"],
        "pulled": [f"method.path={example}", "method.mu=1"],
    }.items():
        assert main([*settings, *words, "--out", str(tmp_path / name)]) == 0
        theta[name] = theta_of(tmp_path / name)
    assert theta["without"] == theta["fedavg"]
    assert theta["pulled"] != theta["fedavg"]


@pytest.mark.parametrize("path", pages(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_pages_made_from_the_code_are_as_the_code_is(path: Path) -> None:
    """If not: python tests/helpers/docs_pages.py."""
    assert path.read_text() == pages()[path]


def test_no_page_of_a_method_is_left_over() -> None:
    assert set((DOCS / "methods").glob("*.md")) <= set(pages())


FAULTS = {
    "the job's time is nearly up, or SIGUSR1": [
        "cluster/test_jobs.py::test_a_job_whose_time_is_nearly_up_comes_back",
        "cluster/test_jobs.py::test_signalled_and_preempted_in_mid_round_a_job_comes_back",
        "cluster/test_slurm_nodes.py::test_signalled_and_preempted_a_job_goes_on_on_other_nodes",
        "simulation/test_resume.py::test_killed_and_then_stopped_or_prolonged",
        "simulation/test_process_faults.py::test_signals_a_second_start_and_fewer_ranks",
    ],
    "pre-emption, `scontrol requeue`; a rank, mpirun or all processes of a node killed": [
        "cluster/test_jobs.py::test_signalled_and_preempted_in_mid_round_a_job_comes_back",
        "simulation/test_process_faults.py::test_one_rank_killed_at_twelve_moments",
        "simulation/test_process_faults.py::test_server_worker_and_mpirun_killed_at_five_moments",
        "cluster/test_nodes.py::test_all_processes_of_a_node_die",
        "soak/test_long_run.py::test_preempted_20_times_on_changing_numbers_of_ranks",
    ],
    "a second stop signal, a second or more later": [
        "simulation/test_process_faults.py::test_a_second_signal_stops_at_once",
        "simulation/test_process_faults.py::test_a_second_signal_to_mpirun_stops_all_ranks_at_once",
    ],
    "`scancel`": [
        "cluster/test_jobs.py::"
        "test_a_second_job_on_a_folder_is_refused_and_a_cancelled_one_does_not_come_back",
    ],
    "three requeues without a new round": [
        "cluster/test_jobs.py::test_a_job_that_saves_no_round_does_not_come_back_for_ever",
    ],
    "a second run on a folder": [
        "cluster/test_jobs.py::"
        "test_a_second_job_on_a_folder_is_refused_and_a_cancelled_one_does_not_come_back",
        "simulation/test_process_faults.py::test_signals_a_second_start_and_fewer_ranks",
        "storage/test_lock.py::test_an_owner_that_was_taken_for_dead_is_told_and_leaves_the_name_of_the_other",
    ],
    "a second run on a folder, on a file system without file locks (`hpcfl doctor` tells)": [
        "storage/test_faults.py::test_a_lock_of_a_dead_job_on_another_node",
        "storage/test_faults.py::test_a_run_whose_folder_another_has_taken_over_ends",
        "storage/test_lock.py::test_where_there_are_no_locks_a_later_start_takes_the_folder_over",
    ],
    "the lock of a job that died on another node": [
        "storage/test_faults.py::test_a_lock_of_a_dead_job_on_another_node",
        "cluster/test_nodes.py::test_all_processes_of_a_node_die",
    ],
    "`srun` with a type of `--mpi` that does not fit the MPI": [
        "cluster/test_jobs.py::test_a_plain_srun_is_refused_with_what_to_type",
        "cluster/test_slurm_nodes.py::test_every_type_of_srun_joins_the_ranks_or_is_refused",
    ],
    "a node without power, under SLURM": [
        "cluster/test_slurm_nodes.py::test_slurm_requeues_a_job_whose_node_loses_its_power",
    ],
    "a node that is started anew": [
        "cluster/test_slurm_nodes.py::test_a_node_that_is_started_anew",
    ],
    "a rank that stops answering, a node without power, a link that is cut": [
        "simulation/test_process_faults.py::test_a_rank_that_stops_answering_is_named",
        "cluster/test_nodes.py::test_a_node_whose_link_is_cut_is_named_and_its_ranks_end",
        "cluster/test_nodes.py::test_a_link_that_the_network_gives_up_ends_the_run",
    ],
    "a link that is slow, or back before `run.timeout` and before the network gives up": [
        "cluster/test_nodes.py::test_a_link_that_comes_back_in_time_or_is_slow_changes_nothing",
    ],
    "data that one node lacks": ["cluster/test_nodes.py::test_data_that_one_node_lacks"],
    "nodes with other versions of hpcfl, Python, torch or NumPy": [
        "cluster/test_nodes.py::test_versions_of_one_node_that_differ",
    ],
    "nodes whose clocks are a minute apart, or that have one name": [
        "cluster/test_nodes.py::test_a_clock_that_is_off_and_two_nodes_of_one_name_are_warned_of",
    ],
    "a rank out of memory": [
        "simulation/test_process_faults.py::test_memory_that_ends_is_told",
        "simulation/test_process_faults.py::test_a_worker_without_memory_ends_all",
    ],
    "a full disk or a quota, at a checkpoint or a CSV file": [
        "storage/test_faults.py::test_a_full_disk_ends_all_ranks_and_takes_no_checkpoint",
        "storage/test_faults.py::test_a_disk_that_takes_no_more_lines",
        "storage/test_faults.py::test_a_quota_at_a_checkpoint",
        "storage/test_faults.py::test_a_quota_in_the_middle_of_a_line",
        "storage/test_faults.py::test_a_run_cannot_go_on_where_not_even_its_lock_has_room",
    ],
    "no room for log.txt, the tracker, the page, the terminal": [
        "storage/test_faults.py::test_what_no_number_hangs_on_is_given_up_with_a_warning",
        "storage/test_faults.py::test_a_run_needs_nobody_to_take_its_words",
    ],
    "a folder read-only, moved, deleted or taken over": [
        "storage/test_faults.py::test_a_folder_that_becomes_read_only",
        "storage/test_faults.py::test_a_folder_that_is_moved",
        "storage/test_faults.py::test_a_folder_that_is_deleted",
        "storage/test_faults.py::test_a_run_whose_folder_another_has_taken_over_ends",
    ],
    "a checkpoint damaged, cut or gone": [
        "storage/test_faults.py::test_a_flipped_byte_in_any_group_falls_back",
        "simulation/test_resume.py::test_a_damaged_checkpoint_falls_back_to_the_previous",
    ],
    "all checkpoints gone": [
        "storage/test_runfolder.py::test_a_folder_without_a_checkpoint_starts_at_round_0",
    ],
    "other files of the run cut or gone": [
        "storage/test_faults.py::test_all_files_but_the_older_checkpoint_are_cut",
        "storage/test_faults.py::test_config_yaml_cut_anywhere_is_read_or_made_up_for",
        "storage/test_faults.py::test_a_folder_without_config_yaml_is_resumed",
    ],
    "a checkpoint of another run, method, model or version": [
        "storage/test_faults.py::test_a_checkpoint_of_another_run_is_refused",
        "storage/test_faults.py::test_an_unfinished_run_of_another_version_is_refused",
        "storage/test_checkpoint.py::test_a_newer_schema_is_refused_without_falling_back",
    ],
    "a client's numbers become nan or infinite": [
        "simulation/test_divergence.py::test_the_run_stops_and_goes_on_without_them",
        "simulation/test_divergence.py::test_a_client_left_out_is_as_if_it_had_not_been_sampled",
        "simulation/test_divergence.py::test_too_large_a_step",
    ],
    "one cell of a table fails": [
        "cluster/test_jobs.py::test_an_array_loses_no_cell_but_the_one_that_fails",
        "tables/test_table.py::test_a_cell_that_fails_does_not_lose_the_others",
    ],
    "the machine's clock is set, /tmp is full or gone": [
        "storage/test_faults.py::test_clocks_and_times_of_files_that_jump",
        "storage/test_faults.py::test_no_place_for_passing_files",
    ],
    "a damaged or malicious file: run folder, checkpoint, npz, LEAF, PFLlib, YAML, table": [
        "hostile/test_hostile.py::test_a_damaged_file_is_read_or_refused",
        "hostile/test_hostile.py::test_a_run_s_own_code_is_run_only_where_the_user_names_it",
        "hostile/test_hostile.py::test_what_no_run_writes_is_refused",
    ],
}
"""The tests of each line of the table of faults, by what happens."""


def test_every_fault_of_the_table_has_its_tests() -> None:
    table = (DOCS / "faults.md").read_text()
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[1:]] == list(FAULTS)
    for place in chain.from_iterable(FAULTS.values()):
        file, _, name = place.partition("::")
        assert f"\ndef {name}(" in (REPOSITORY / "tests" / file).read_text(), place


@pytest.mark.parametrize(
    "page",
    [*sorted(REPOSITORY.glob("*.md")), *sorted(DOCS.rglob("*.md"))],
    ids=lambda page: str(page.relative_to(REPOSITORY)),
)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    for picture, target, anchor in re.findall(r"(!?)\[[^]]*\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if ":" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if picture:
            assert path.stat().st_size < 150_000, target
        if anchor:
            titles = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    for name in re.findall(r"(?:docs|jobs|configs|hpcfl)/[\w./-]+\.(?:md|sh|sbatch|yaml|py)", text):
        assert (REPOSITORY / name).exists() or page.name == "CHANGELOG.md" or "NAME" in name, name
    made = {"FILE.py", "NAME.py", "script.py"} | {file for *_, file in steps(page)}
    for name in re.findall(r"`(?:\w+/)*(\w+\.py)`", text):
        assert name in PYTHON_FILES | made, name


def test_tables_of_results_are_made_from_the_files_beside_the_table_files() -> None:
    text = RESULTS_PAGE.read_text()
    assert MARK.search(text)
    assert with_tables(text) == text


@pytest.mark.parametrize("page", [RESULTS_PAGE, *PAPERS], ids=lambda page: page.stem)
def test_verdicts_on_claims_are_made_from_the_claims_and_result_files(page: Path) -> None:
    text = page.read_text()
    assert "<!-- claims" in text
    assert with_claims(text) == text


def test_every_claims_file_has_a_page() -> None:
    assert {path.stem for path in CLAIMS} == {path.stem for path in (DOCS / "papers").glob("*.md")}


def test_every_file_of_results_is_shown_on_the_page_of_results() -> None:
    shown = {name for _, name, *_ in MARK.findall(RESULTS_PAGE.read_text())}
    tables = {path.stem for path in RESULTS.glob("*.csv")}
    assert {name for name in tables if not name.endswith(("_clients", "_diagnostics"))} <= shown
