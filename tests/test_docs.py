"""What the README and docs/ promise: commands run, and generated pages match the code."""

from __future__ import annotations

import importlib
import re
import shlex
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
from bits import differing, read_csv, run_here
from docs_pages import DOCS, pages
from processes import REPOSITORY, Mpirun, run_forked
from results_tables import MARK, PAPERS, README, RESULTS, RESULTS_PAGE, with_claims, with_tables

from hpcfl.errors import FINISHED
from hpcfl.main import main
from hpcfl.methods import METHODS

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
    "hpcfl claims": "test_tables_and_verdicts_are_made_from_the_claims_and_result_files",
    "hpcfl table docs/examples/codecs.yaml --plan": "its runs are made; the page of tables has a plan",
    "hpcfl table docs/examples/codecs.yaml": "the script compressed_messages.sh makes the same runs",
    "hpcfl bench": BENCH,
    "mpirun -n 3 hpcfl bench --parts rounds": BENCH,
    "hpcfl table TABLE.yaml --write-results": PAPER,
    "hpcfl table configs/tables/pfedla_table1.yaml --plan": PAPER,
    "hpcfl table configs/tables/pfedla_table1.yaml --rounds 60 --seeds 0,1": PAPER,
    "hpcfl table configs/tables/pfedla_table1.yaml --column 'CIFAR-10, 10 clients' --row pFedLA": PAPER,
}
"""Commands that the walks leave out, and why."""

FEWER_STEPS = ("train.local_epochs=1", "train.batch_size=64")
FEWER_SAMPLES = "data.subset_fraction=0.4"

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


def made_small(words: list[str]) -> list[str]:
    """Return a command with a third of its rounds, one round for each cell of a table, and fewer steps.

    A run for which the page names no data also has fewer samples.
    """
    if not {"run", "table"} & {*words}:
        return words
    says_more = any(word.startswith("data.") or word.endswith(".yaml") for word in words)
    if "table" in words and not {"--plan", "--rounds"} & {*words}:
        words = [*words, "--rounds", "1"]
    of_rounds = re.compile(r"(?<=^train\.rounds=)\d+")
    words = [of_rounds.sub(lambda found: str(-(-int(found[0]) // 3)), word) for word in words]
    return [*words, *FEWER_STEPS, *(() if says_more else (FEWER_SAMPLES,))]


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


def test_generated_pages_match_the_code() -> None:
    """If not: python tests/helpers/docs_pages.py."""
    there = [*(DOCS / "methods").glob("*.md"), DOCS / "keys.md"]
    assert {path: path.read_text() for path in there} == pages()


def test_the_site_has_every_page() -> None:
    listed = re.findall(r"[\w/]+\.md", (DOCS.parent / ".mkdocs.yml").read_text())
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_number_of_methods_is_right() -> None:
    for page in (README, DOCS / "README.md"):
        assert f"{len(METHODS)} methods under one protocol" in page.read_text()
    assert f"FedAFK and {len(METHODS) - 5} baselines" in README.read_text()


@pytest.fixture(scope="module")
def loaded_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import, read and compile once what each copy of this process would."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch._dynamo", "torch.export", "hpcfl.tables.drawing", "rich.live", "sklearn"):
            importlib.import_module(name)
    folder = tmp_path_factory.mktemp("runs")
    run_here(folder / "run", ["train.rounds=1", *FEWER_STEPS])
    main(["list", "keys", "method"])
    main(["export", str(folder / "run"), "--client", "0", "--out", str(folder / "client0")])


@pytest.mark.usefixtures("loaded_once")
@pytest.mark.parametrize("page", WALKED, ids=lambda page: page.stem)
def test_every_command_and_script_runs_in_the_order_of_the_page(
    page: Path, tmp_path: Path, mpirun: Mpirun
) -> None:
    """From the top to the end, in one folder, as a reader does who types it all, but for fewer steps."""
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
            words = made_small(words)
            if words[0] == "mpirun":
                mpirun(int(words[2]), "-m", "hpcfl.main", *words[4:], cwd=tmp_path)
            elif words[0] == "hpcfl":
                run_forked(["-m", "hpcfl.main", *words[1:]], cwd=tmp_path)
            else:
                run_forked(words[1:], cwd=tmp_path)


def test_no_two_pages_use_one_run_folder_for_different_runs() -> None:
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


def test_all_skipped_commands_are_on_a_page() -> None:
    walked = [shlex.join(words) for page in WALKED for words in typed(page)]
    assert set(ELSEWHERE) <= set(walked)
    assert len(set(walked) - set(ELSEWHERE)) >= 50


def test_the_example_of_a_new_method_without_its_pull_is_fedavg(tmp_path: Path) -> None:
    example = tmp_path / "my_method.py"
    example.write_text(next(text for _, text, file in steps(README) if file == example.name))
    own = f"method.path={example}"
    of_own = {"without": [own, "method.mu=0"], "pulled": [own, "method.mu=1"]}
    for name, words in ({"fedavg": ["method.name=fedavg"]} | of_own).items():
        settings = ["data.per_client=40", "data.clients=4", "train.rounds=2", "train.local_epochs=2", *words]
        assert run_here(tmp_path / name, settings) == FINISHED
    assert differing(tmp_path / "fedavg", tmp_path / "without", "server") == []
    assert differing(tmp_path / "fedavg", tmp_path / "pulled", "server") == ["/server/theta"]


FAULTS = {
    "the job's time is nearly up, or SIGUSR1": (
        "test_a_job_whose_time_is_nearly_up_is_requeued "
        "test_a_job_signalled_and_preempted_during_a_round_is_requeued"
    ),
    "pre-emption, `scontrol requeue`; a rank, mpirun or all processes of a node killed": (
        "test_a_job_signalled_and_preempted_during_a_round_is_requeued "
        "test_a_run_resumes_after_server_worker_and_mpirun_are_killed "
        "test_a_run_resumes_after_all_processes_of_a_node_die"
    ),
    "a second stop signal, a second or more later": "test_a_second_signal_to_mpirun_stops_all_ranks_at_once",
    "`scancel`": "test_a_second_job_on_a_folder_is_refused_and_a_cancelled_one_is_not_requeued",
    "three requeues without a new round": "test_a_job_that_saves_no_round_is_not_requeued_for_ever",
    "a second run on a folder": (
        "test_a_second_job_on_a_folder_is_refused_and_a_cancelled_one_is_not_requeued"
    ),
    "a second `table` on cells that run": "test_a_cell_that_another_command_runs_is_left_to_it",
    "a second run on a folder, on a file system without file locks (`hpcfl doctor` tells)": (
        "test_a_run_whose_folder_another_has_taken_over_ends "
        "test_without_file_locks_a_later_start_takes_over_the_folder"
    ),
    "the lock of a job that died on another node": (
        "test_a_lock_of_a_dead_job_on_another_node_is_taken_over_with_a_warning"
    ),
    "`srun` with a type of `--mpi` that does not fit the MPI": (
        "test_a_plain_srun_is_refused_with_the_correct_command "
        "test_every_type_of_srun_joins_the_ranks_or_is_refused"
    ),
    "a node without power, under SLURM": "test_slurm_requeues_a_job_whose_node_loses_its_power",
    "a node that restarts": "test_a_run_resumes_after_one_of_its_nodes_restarts",
    "a rank that stops answering, a node without power, a link that is cut": (
        "test_a_rank_that_stops_answering_is_named test_a_node_whose_link_is_cut_is_named_and_its_ranks_end "
        "test_a_link_that_the_network_gives_up_ends_the_run"
    ),
    "a link that is slow, or back before `run.timeout` and before the network gives up": (
        "test_a_link_that_comes_back_in_time_or_is_slow_changes_nothing"
    ),
    "data that one node lacks": "test_data_that_one_node_lacks_are_reported",
    "nodes, or scripts on several ranks, with different data": "test_ranks_with_different_data_are_refused",
    "data that have changed since the checkpoint": "test_a_run_is_not_resumed_with_other_data",
    "nodes with other versions of hpcfl, Python, torch or NumPy": (
        "test_different_versions_on_one_node_are_reported"
    ),
    "a rank out of memory": "test_a_worker_out_of_memory_ends_all_ranks",
    "a full disk or a quota, at a checkpoint or a CSV file": (
        "test_a_full_disk_ends_all_ranks_and_keeps_the_checkpoint test_a_fault_at_a_checkpoint_ends_the_run "
        "test_a_quota_in_the_middle_of_a_line_ends_the_run "
        "test_a_run_is_refused_if_the_disk_has_no_room_for_its_lock"
    ),
    "no room for log.txt, the tracker, the page, the terminal": (
        "test_a_run_continues_without_log_tracker_and_page_with_a_warning "
        "test_a_closed_output_prints_no_error_and_ends_no_run"
    ),
    "a folder read-only, moved, deleted or taken over": (
        "test_a_fault_at_a_checkpoint_ends_the_run test_a_folder_that_is_moved_or_deleted_ends_the_run "
        "test_a_run_whose_folder_another_has_taken_over_ends"
    ),
    "a checkpoint damaged, cut or gone": (
        "test_every_truncation_extension_and_flipped_bit_is_detected "
        "test_the_previous_checkpoint_is_used_with_a_warning "
        "test_a_run_resumes_if_only_the_older_checkpoint_is_whole"
    ),
    "all checkpoints gone": "test_a_folder_without_a_checkpoint_starts_at_round_0",
    "other files of the run cut or gone": (
        "test_a_run_resumes_if_only_the_older_checkpoint_is_whole "
        "test_a_truncated_config_yaml_is_written_again test_a_folder_without_config_yaml_is_resumed"
    ),
    "a checkpoint of another run, method, model or version": (
        "test_a_checkpoint_of_another_run_is_refused test_an_unfinished_run_of_another_version_is_refused "
        "test_a_newer_schema_is_refused_without_falling_back"
    ),
    "a client's numbers become nan or infinite": (
        "test_a_diverged_run_stops_and_can_continue_without_the_diverged_clients "
        "test_a_client_left_out_is_as_if_it_had_not_been_sampled"
    ),
    "one cell of a table fails": "test_a_table_with_a_failed_cell_finishes_the_other_cells",
    "the machine's clock is set, /tmp is full or gone": (
        "test_jumps_of_clocks_and_file_times_change_nothing test_a_full_or_missing_tmp_changes_nothing"
    ),
    "a damaged or malicious file: run folder, checkpoint, npz, LEAF, PFLlib, YAML, table": (
        "test_a_damaged_file_is_read_or_refused test_a_run_s_own_code_is_executed_only_if_the_user_names_it "
        "test_checkpoints_that_no_run_writes_are_refused"
    ),
}
"""The tests of each line of the table of faults, by what happens."""


def test_every_fault_of_the_table_has_its_tests() -> None:
    table = (DOCS / "faults.md").read_text()
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[1:]] == list(FAULTS)
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    for name in " ".join(FAULTS.values()).split():
        assert f"\ndef {name}(" in tests, name


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


@pytest.mark.parametrize("page", [README, RESULTS_PAGE, *PAPERS], ids=lambda page: page.stem)
def test_tables_and_verdicts_are_made_from_the_claims_and_result_files(page: Path) -> None:
    """If not: python tests/helpers/results_tables.py."""
    text = page.read_text()
    assert "<!-- claims" in text
    assert with_claims(with_tables(text)) == text


INTERVAL = re.compile(r"\[([-+]?[\d.]+), ([-+]?[\d.]+)\]")


def intervals(texts: Iterable[str]) -> list[tuple[float, float]]:
    """Return the intervals of texts, such as [-1.0, 3.5]."""
    found = INTERVAL.findall("\n".join(texts))
    return [(float(low), float(high)) for low, high in found]


def paragraphs(*pages: Path) -> list[str]:
    """Return the paragraphs of pages, without the lines of tables."""
    texts = (re.sub(r"^\|.*\n", "", page.read_text(), flags=re.MULTILINE) for page in pages)
    return [paragraph for text in texts for paragraph in text.split("\n\n")]


def test_every_interval_in_the_text_is_in_a_table_of_the_results() -> None:
    named = intervals(paragraphs(README, RESULTS_PAGE, *PAPERS))
    tables = (line for line in RESULTS_PAGE.read_text().splitlines() if line.startswith("|"))
    known = {ends for low, high in intervals(tables) for ends in ((low, high), (-high, -low))}
    assert len(named) > 20
    assert [interval for interval in named if interval not in known] == []


FIGURE = re.compile(r"(?<![\d.])(?:\d\d\.\d|\d\.\d(?=\s(?:points?|above|below|\[)))(?!\d)")
"""An accuracy in percent or a difference in points."""
FIGURE_COLUMN = re.compile(
    r"accuracy_(mean|weighted|after_(download|training)|seed_\d+)|published_accuracy|difference"
)


def figures_of(name: str, text: str) -> set[str]:
    """Return the accuracies of a file, and the differences of its rows, of the methods that a text names."""
    found = []
    for path in (RESULTS / f"{name}.csv", RESULTS / f"{name}_differences.csv"):
        for line in read_csv(path) if path.exists() else ():
            labels = [line[column] for column in ("label", "first", "second") if column in line]
            methods = [re.split("[, ]", label)[0].lower() for label in labels]
            if line.get("seeds") != "0" and all(method in text.lower() for method in methods):
                found += [cell for column, cell in line.items() if FIGURE_COLUMN.fullmatch(column) and cell]
    return {f"{100 * abs(float(cell)):.1f}" for cell in found}


def test_every_accuracy_and_difference_in_the_text_is_in_a_file_that_its_paragraph_names() -> None:
    named = {text: FIGURE.findall(INTERVAL.sub("[]", text)) for text in paragraphs(README, *PAPERS)}
    assert sum(map(len, named.values())) > 30
    for text, figures in named.items():
        names = re.findall(r"([\w-]+)\.csv", text)
        known = {figure for name in names for figure in figures_of(name, text)}
        assert [figure for figure in figures if figure not in known] == [], text


def test_every_file_of_results_and_of_claims_has_its_page() -> None:
    shown = {name for _, name, *_ in MARK.findall(RESULTS_PAGE.read_text())}
    tables = {path.stem for path in RESULTS.glob("*.csv")}
    assert {name for name in tables if not name.endswith(("_clients", "_diagnostics"))} <= shown
    assert {*(DOCS / "papers").glob("*.md")} == {*PAPERS}
