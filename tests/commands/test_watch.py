"""`hpcfl watch` of runs that are running, have been killed, or are finished."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bits import run_here, start_run, tiny_settings
from processes import forked_on_terminal, read_all, run_forked, until

from hpcfl import terminal
from hpcfl.errors import FINISHED
from hpcfl.main import main
from hpcfl.results.run import Run

ENDLESS = 100_000


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    return [*tiny_settings(digits), "method.name=fedavg"]


@pytest.fixture(scope="module")
def finished(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run_here(folder, settings) == FINISHED
    return folder


@pytest.fixture
def in_progress(settings: list[str], tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """Return the folder of a run in progress, with evaluations, and its process."""
    folder = tmp_path / "a run"
    pid = start_run(folder, [*settings, f"train.rounds={ENDLESS}", "run.checkpoint_every=2"])
    try:
        until(lambda: (folder / "config.yaml").exists() and Run(folder).done > 2, "three rounds")
        yield folder, pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


Watched = Callable[..., str]


@pytest.fixture
def watched(capsys: pytest.CaptureFixture[str]) -> Watched:
    """Return a function that returns what `hpcfl watch` prints."""

    def run(*words: str | Path) -> str:
        capsys.readouterr()
        assert main(["watch", *map(str, words)]) == FINISHED
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


def figures(text: str) -> dict[str, str]:
    """Return the lines of a run in full by name, but for those of the log."""
    pairs = [(line[:10].strip(), line[12:]) for line in text.splitlines()]
    return {name: value for name, value in pairs if name}


def test_a_run_runs_and_is_killed(in_progress: tuple[Path, int], finished: Path, watched: Watched) -> None:
    folder, pid = in_progress
    before = Run(folder).done
    shown = figures(watched(folder, "--once"))
    assert shown["run"] == str(folder)
    assert shown["what"] == "fedavg on npz, 7 clients, dirichlet partition, digits_cnn, seed 0"
    assert shown["state"].startswith(f"running, pid {pid} on ")
    done, _, rounds = shown["rounds"].partition("/")
    assert before <= int(done) <= Run(folder).done
    assert int(rounds) == ENDLESS
    assert re.fullmatch(r"\d+\.\d\d% \(round \d+\)", shown["accuracy"])
    assert re.fullmatch(r"\d+\.\d\d% \(round \d+\)", shown["best"])
    assert re.fullmatch(r"\d+\.\d\d% over clients", shown["spread"])
    assert re.fullmatch(r"\d+\.\d\d% \S+ \d+\.\d\d%", shown["curve"])
    assert re.fullmatch(r"\S+ \wB down, \S+ \wB up", shown["bytes"])
    assert re.fullmatch(r"\d+ client steps/s, \S+ m?s a round", shown["speed"])
    assert re.fullmatch(r"(\d+ days?, )?\d+:\d\d:\d\d", shown["time left"])
    assert shown["log"].endswith(f"fedavg on npz, 7 clients, in {folder}")
    header, first, second = watched(folder, finished).splitlines()
    assert header.split() == ["run", "state", "rounds", "accuracy", "best", "curve", "left"]
    assert re.match(r"a run +running ", first)
    assert second.split()[:3] == ["run", "finished", "3/3"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: Run(folder).status.state == "killed", "the kill is seen")
    shown = figures(watched(folder))
    assert shown["state"].startswith(f"killed or failed, pid {pid} on ")
    assert "time left" not in shown


def test_rounds_between_evaluations_are_shown(settings: list[str], tmp_path: Path, watched: Watched) -> None:
    """By the lines in log.txt, but not by those of an attempt that was killed."""
    folder = tmp_path / "run"
    rare = [*settings, f"train.rounds={ENDLESS}", f"run.eval_every={ENDLESS}", "run.checkpoint_every=1"]

    def log_every_round() -> None:
        terminal.LINE_EVERY_S = 0.0

    def shown_after(line: str, prepare: Callable[[], None]) -> dict[str, str]:
        log = folder / "log.txt"
        pid = start_run(folder, rare, prepare)
        try:
            until(lambda: log.exists() and line in log.read_text(), line)
            return figures(watched(folder, "--once"))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    shown = shown_after(" round 2/", log_every_round)
    assert shown["accuracy"] == "no evaluation yet"
    assert 2 <= int(shown["rounds"].partition("/")[0]) < ENDLESS
    assert re.fullmatch(r"(\d+ days?, )?\d+:\d\d:\d\d", shown["time left"])
    shown = shown_after("resuming after round", lambda: None)
    assert (shown["rounds"], shown["time left"]) == (f"0/{ENDLESS}", "unknown")


LOOK = """
import fcntl, os, sys
from hpcfl.main import main
folder = os.path.realpath(sys.argv[1])
def hook(event, args):
    if event == "open" and isinstance(args[0], str) and os.path.realpath(args[0]).startswith(folder):
        assert args[2] & os.O_ACCMODE == os.O_RDONLY and not args[2] & os.O_CREAT, args
        print("read", os.path.basename(args[0]))
    assert event != "fcntl.fcntl" or args[1] == fcntl.F_OFD_GETLK, args
    assert event not in ("fcntl.lockf", "fcntl.flock", "os.rename", "os.remove", "os.mkdir"), event
sys.addaudithook(hook)
sys.exit(main(["watch", folder]))
"""


def test_watch_opens_no_file_for_writing_and_takes_no_lock(in_progress: tuple[Path, int]) -> None:
    folder, _ = in_progress
    done = run_forked(["-c", LOOK, str(folder)])
    read = set(re.findall("^read (.*)", done.stdout, re.MULTILINE))
    assert read == {"config.yaml", "metrics.csv", "log.txt", ".lock"}
    assert "state       running" in done.stdout


def test_watch_shows_the_progress_on_a_terminal_until_ctrl_c(
    in_progress: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcfl.commands.watch.PAUSE_S", 0.05)
    folder, _ = in_progress
    child, leader = forked_on_terminal(lambda: main(["watch", str(folder)]))
    seen = ""
    try:
        while len(set(re.findall(r"rounds +(\d+)/", seen))) < 3:
            seen += os.read(leader, 65536).decode(errors="replace")
        os.kill(child, signal.SIGINT)
        until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT), "its end")
    finally:
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == FINISHED
    seen += read_all(leader)
    assert "Traceback" not in seen
    assert "\x1b[?25h" in seen.rpartition("\x1b[?25l")[2]


def test_a_finished_run_is_shown(finished: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal it ends at once."""
    shown = figures(watched(finished))
    assert (shown["state"], shown["rounds"]) == ("finished", "3/3")
    accuracy = Run(finished).metrics["accuracy_mean"][-1]
    assert shown["accuracy"] == f"{accuracy:.2%} (round 3)"
    assert "resume with" not in shown
    assert "time left" not in shown
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "state       finished" in watched(finished)


def test_watch_shows_the_runs_in_a_folder_of_runs(finished: Path, watched: Watched, tmp_path: Path) -> None:
    for name in ("all/a-s0", "all/a-s0.old1", "half/a-s0"):
        shutil.copytree(finished, tmp_path / name)
    lines = watched(tmp_path).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["all/a-s0", "half/a-s0"]
    of_two = watched(tmp_path / "all", tmp_path / "half").splitlines()[1:]
    assert [line.split()[0] for line in of_two] == ["all/a-s0", "half/a-s0"]
    assert figures(watched(tmp_path / "half"))["run"] == str(tmp_path / "half" / "a-s0")


def test_a_diverged_run_is_not_resumed(finished: Path, watched: Watched, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "clients.csv").unlink()
    assert "resume with" in watched(folder)
    with (folder / "log.txt").open("a") as log:
        log.write("2026-01-02 03:04:05 error: client 3 diverged in round 3\n")
    shown = watched(folder)
    assert figures(shown)["state"].startswith("diverged, see the log; ")
    assert "resume with" not in shown
    assert watched(folder, finished).splitlines()[1].split()[:2] == ["run", "diverged"]


def test_a_run_may_have_no_evaluation_yet(finished: Path, watched: Watched, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(finished / "config.yaml", folder)
    shown = figures(watched(folder))
    assert shown["accuracy"] == "no evaluation yet"
    assert shown["rounds"] == "0/3"
    assert shown["state"].startswith("stopped; ")
    assert "curve" not in shown
    line = watched(folder, finished).splitlines()[1]
    assert line.split() == ["run", "stopped", "0/3", "-", "-"]


def test_watch_shortens_only_names_in_a_line_and_only_on_a_terminal(
    finished: Path, watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 20)
    shutil.copytree(finished, folder)
    assert watched(folder, finished).splitlines()[1].startswith(f"{folder.name}  finished")
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    header, line, _ = watched(folder, finished, "--once").splitlines()
    assert max(len(header), len(line)) <= 80
    assert header.split() == ["run", "state", "rounds", "accuracy", "best", "curve", "left"]
    name, *cells = line.split()
    assert "longlong" in name
    assert cells[:2] == ["finished", "3/3"]
    assert all(re.fullmatch(r"\d+\.\d\d%", cell) for cell in cells[2:4])
