"""Completion scripts in the shells that they are for."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from hpcfl.commands import COMMANDS
from hpcfl.data.sources import SOURCES
from hpcfl.errors import BAD_INPUT, FINISHED
from hpcfl.main import main
from hpcfl.methods import METHODS

PATIENCE_S = 30

BASH = r"""
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
COMP_LINE="$*"
COMP_LINE=${COMP_LINE// = /=}
_hpcfl
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    for name in ("one.yaml", "other.yaml", "notes.txt"):
        (tmp_path / "configs" / name).touch()


def script(capsys: pytest.CaptureFixture[str], shell: str) -> Path:
    """Return a file with the script of a shell."""
    capsys.readouterr()
    assert main(["completion", shell]) == FINISHED
    path = Path(f"completion.{shell}").resolve()
    path.write_text(capsys.readouterr().out)
    return path


def completed(path: Path, *words: str) -> list[str]:
    """Return what bash offers for the last of the words, which it has cut at `=`."""
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", str(path), "hpcfl", *words], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


def test_bash_completes_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    path = script(capsys, "bash")
    first = completed(path, "")
    assert first[: len(COMMANDS)] == list(COMMANDS)
    assert {"method.", "data.", "model.", "train.", "comm.", "run.", "configs/"} <= set(first)
    assert completed(path, "configs/o") == ["configs/one.yaml", "configs/other.yaml"]
    assert completed(path, "plan", "configs/on") == ["configs/one.yaml"]
    assert completed(path, "train.last") == ["train.last_batch="]
    assert completed(path, "configs/one.yaml", "train.last") == ["train.last_batch="]
    # bash gives the value alone its place, whether or not it cuts words at =
    assert completed(path, "train.last_batch", "=") == ["even", "drop", "keep"]
    assert completed(path, "train.last_batch", "=", "d") == ["drop"]
    assert completed(path, "train.last_batch=d") == ["train.last_batch=drop"]
    assert completed(path, "method.name", "=") == list(METHODS)
    assert completed(path, "data.source", "=", "p") == [name for name in SOURCES if name.startswith("p")]
    assert completed(path, "run.tf", "32") == []
    assert completed(path, "run.tf32", "=", "t") == ["true"]
    assert completed(path, "data.path", "=", "con") == ["configs/"]


def test_keys_are_those_of_the_method_that_the_line_names(capsys: pytest.CaptureFixture[str]) -> None:
    path = script(capsys, "bash")
    common = ["method.path="]
    named = completed(path, "method.name", "=", "pfedme", "method.p")
    assert named == [*common, "method.pull=", "method.personal_lr="]
    assert set(named) < set(completed(path, "method.p"))
    assert completed(path, "method.name", "=", "fedavg", "method.p") == common
    assert completed(path, "model.name", "=", "mlp", "model.h") == ["model.hidden="]


def test_commands_have_words_and_options_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    path = script(capsys, "bash")
    assert completed(path, "watch", "--") == ["--help", "--every", "--once"]
    assert completed(path, "--o") == ["--out", "--own-code"]
    assert completed(path, "train.lr", "=", "1", "--fr") == ["--fresh"]
    assert completed(path, "list", "ke") == ["keys"]
    assert completed(path, "list", "keys", "method.pfedl") == ["method.pfedla"]
    assert completed(path, "data", "fetch", "cifar1") == ["cifar10", "cifar100"]
    assert completed(path, "completion", "") == ["bash", "zsh"]
    assert "configs/" in completed(path, "watch", "c")


def test_files_are_those_that_the_place_takes(capsys: pytest.CaptureFixture[str]) -> None:
    path = script(capsys, "bash")
    for name in ("runs", "runs/x"):
        Path(name).mkdir()
    for name in ("images.npz", "rule.py", "ruler.yaml"):
        Path(name).touch()
    assert completed(path, "predict", "runs/x", "im") == ["images.npz"]
    assert completed(path, "data.path", "=", "im") == ["images.npz"]
    for key in ("method.path", "model.path", "data.partition.path", "data.reader"):
        assert completed(path, key, "=", "rul") == ["rule.py"]
    for kind in ("method", "source", "partition", "model"):
        assert completed(path, "list", f"--{kind}", "rul") == ["rule.py"]
    assert completed(path, "report", "--own-code", "rul") == ["rule.py"]
    assert completed(path, "plan", "rul") == ["ruler.yaml"]
    for command in ("report", "watch", "compare", "export", "predict"):
        assert completed(path, command, "r") == ["runs/"]
    assert completed(path, "plan", "r") == ["run.", "ruler.yaml", "runs/"]


def test_zsh_completes_at_the_press_of_tab(capsys: pytest.CaptureFixture[str]) -> None:
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("there is no zsh")
    path = script(capsys, "zsh")
    for name in ("images.npz", "rule.py", "ruler.yaml"):
        Path(name).touch()
    typed = {
        "train.last": "train.last_batch=",
        "train.last_batch=k": "train.last_batch=keep",
        "method.name=pfedme method.pu": "method.name=pfedme method.pull=",
        "plan configs/on": "plan configs/one.yaml",
        "data.path=configs/ot": "data.path=configs/other.yaml",
        "watch --on": "watch --once",
        "predict runs/x im": "predict runs/x images.npz",
        "method.path=rul": "method.path=rule.py",
        "list --method rul": "list --method rule.py",
        "comp": "completion",
    }
    pid, leader = pty.fork()
    if pid == 0:
        os.execvpe(zsh, [zsh, "-f", "-i"], {**os.environ, "TERM": "dumb", "PS1": ""})
    try:
        start = f'autoload -Uz compinit; compinit -u -D; source {path}; hpcfl() {{ print -r "<$*>" }}'
        os.write(leader, f"{start}; hpcfl rea''dy\n".encode())
        read_until(leader, "<ready>")
        for line, expected in typed.items():
            os.write(leader, f"hpcfl {line}\t\n".encode())
            read_until(leader, f"<{expected}>")
    finally:
        os.close(leader)
        os.waitpid(pid, 0)


def read_until(leader: int, text: str) -> None:
    seen, deadline_s = "", time.monotonic() + PATIENCE_S
    while text not in seen:
        assert time.monotonic() < deadline_s, seen
        if select.select([leader], [], [], 0.1)[0]:
            seen += os.read(leader, 65536).decode(errors="replace")


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == BAD_INPUT
    assert "choose from" in capsys.readouterr().err
