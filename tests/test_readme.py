"""The README's promises: its commands run, its example of a new method works."""

from __future__ import annotations

import re
import shlex
import sys
from itertools import chain
from pathlib import Path

import pytest
from processes import REPOSITORY, Mpirun, run_forked, run_tree
from readme_tables import CLAIMS, MARK, PAGES, PAPERS, RESULTS, with_claims, with_tables

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
    "mpirun -n 4 python -m hpcfl.main bench --parts nodes": "the same",
    "python -m hpcfl.main table TABLE.yaml --write-results": "tests/tables runs every table file in small",
    "python -m hpcfl.main table configs/tables/pfedla_table1.yaml --plan": "needs CIFAR-10; see tests/tables",
    "python -m hpcfl.main table configs/tables/pfedla_table1.yaml --rounds 60 --seeds 0,1": "the same",
    "python -m hpcfl.main table configs/tables/pfedla_table1.yaml --write-results": "the same",
    "python -m hpcfl.main table configs/tables/pfedla_table1.yaml "
    "--column 'CIFAR-10, 10 clients' --row pFedLA": "the same",
}
"""Commands of the README that the walk through it leaves out, and why."""

PROGRAMS = ("bash", "hpcfl", "mpirun", "python")


def test_every_command_and_script_runs_in_the_order_of_the_page(tmp_path: Path, mpirun: Mpirun) -> None:
    """From the top to the end, in one folder, as a reader does who types it all."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    run_lines, run_mpirun, left_out = 0, False, set()
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
                # the first one starts its ranks as a reader's does
                mpirun(int(words[2]), *words[4:], cwd=tmp_path, anew=not run_mpirun)
                run_mpirun = True
            elif words[0] == "hpcfl":
                run_forked(words[1:], cwd=tmp_path)
            else:
                run_tree([sys.executable, *words[1:]], cwd=tmp_path)
            run_lines += 1
    assert left_out == set(ELSEWHERE)
    assert run_lines >= 15


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
        "simulation/test_process_faults.py::test_server_worker_and_mpirun_killed_at_eight_moments",
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
    "no new round in three comebacks": [
        "cluster/test_jobs.py::test_a_job_that_saves_no_round_does_not_come_back_for_ever",
    ],
    "a second run on a folder": [
        "cluster/test_jobs.py::"
        "test_a_second_job_on_a_folder_is_refused_and_a_cancelled_one_does_not_come_back",
        "simulation/test_process_faults.py::test_signals_a_second_start_and_fewer_ranks",
        "storage/test_lock.py::test_an_owner_that_was_taken_for_dead_is_told_and_leaves_the_name_of_the_other",
    ],
    "the same from another machine, where `hpcfl doctor` misses locks": [
        "storage/test_faults.py::test_a_lock_of_a_dead_job_on_another_node",
        "storage/test_faults.py::test_a_run_whose_folder_another_has_taken_over_ends",
        "storage/test_lock.py::test_where_there_are_no_locks_a_live_owner_here_keeps_the_folder",
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
    "no room for log.txt, TensorBoard, the page, the terminal": [
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
    "other files of the run cut or gone": [
        "storage/test_faults.py::test_all_files_but_the_older_checkpoint_are_cut",
        "storage/test_faults.py::test_config_yaml_cut_anywhere_is_read_or_made_up_for",
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
        "simulation/test_process_faults.py::test_a_clock_that_jumps_changes_neither_numbers_nor_durations",
        "storage/test_faults.py::test_clocks_and_times_of_files_that_jump",
        "storage/test_faults.py::test_no_place_for_passing_files",
    ],
    "a file of a stranger: run folder, checkpoint, npz, LEAF, PFLlib, YAML, table": [
        "hostile/test_hostile_run_folder.py::test_a_run_folder_is_read_or_refused",
        "hostile/test_hostile_run_folder.py::test_a_run_s_own_code_is_run_only_where_the_user_names_it",
        "hostile/test_hostile_checkpoint.py::test_a_checkpoint_is_read_or_refused",
        "hostile/test_hostile_npz.py::test_an_npz_is_read_or_refused",
        "hostile/test_hostile_client_files.py::test_leaf_s_files_are_read_or_refused",
        "hostile/test_hostile_client_files.py::test_pfllib_s_files_are_read_or_refused",
        "hostile/test_hostile_yaml.py::test_a_configuration_is_read_or_refused",
        "hostile/test_hostile_yaml.py::test_a_table_is_read_or_refused",
    ],
}
"""The tests of each line of the README's table of faults, by what happens."""


def test_every_fault_of_the_table_has_its_tests() -> None:
    table = README.partition("### When something goes wrong")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[1:]] == list(FAULTS)
    for place in chain.from_iterable(FAULTS.values()):
        file, _, name = place.partition("::")
        assert f"\ndef {name}(" in (REPOSITORY / "tests" / file).read_text(), place


def test_the_readme_shows_pictures_that_exist() -> None:
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert len(shown) >= 3
    for path in shown:
        assert (REPOSITORY / path).stat().st_size < 150_000, path


def test_the_readme_names_files_that_exist() -> None:
    for path in re.findall(r"(?:docs|jobs|configs|hpcfl)/[\w./-]+\.(?:md|sh|sbatch|yaml|py)", README):
        assert (REPOSITORY / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_tables_of_results_are_made_from_the_files_beside_the_table_files(page: Path) -> None:
    text = page.read_text()
    assert MARK.search(text)
    assert with_tables(text) == text


@pytest.mark.parametrize("page", [PAGES[0], *PAPERS], ids=lambda page: page.stem)
def test_verdicts_on_claims_are_made_from_the_claims_and_result_files(page: Path) -> None:
    text = page.read_text()
    assert "<!-- claims" in text
    assert with_claims(text) == text


def test_every_claims_file_has_a_page() -> None:
    pages = REPOSITORY / "docs" / "papers"
    assert {path.stem for path in CLAIMS} == {path.stem for path in pages.glob("*.md")}
    for page in PAPERS:
        for path in re.findall(r"\]\(([\w./-]+)\)", page.read_text()):
            assert (pages / path).exists(), path


def test_every_file_of_results_is_shown_on_the_page_of_results() -> None:
    shown = {name for _, name, *_ in MARK.findall((RESULTS / "README.md").read_text())}
    tables = {path.stem for path in RESULTS.glob("*.csv")}
    assert {name for name in tables if not name.endswith(("_clients", "_diagnostics"))} <= shown


def test_nothing_in_the_readme_waits_to_be_filled_in() -> None:
    assert not re.findall(r"\b[A-Z]+_[A-Z]+\b", re.sub(r"`[^`]*`", "", README))
