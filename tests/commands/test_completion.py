"""Completion scripts in their shells."""

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
from hpcfl.errors import FINISHED
from hpcfl.main import main
from hpcfl.methods import METHODS

PATIENCE_S = 30

BASH = r"""
eval "$(<"$1")"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_hpcfl 2>/dev/null
printf '%s\n' "${COMPREPLY[@]}"
"""
"""Offers what bash offers for the last of the words, which it has cut at `=`."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("configs", "runs"):
        (tmp_path / folder).mkdir()
    for name in ("configs/one.yaml", "configs/other.yaml", "configs/notes.txt", "images.npz", "rule.py"):
        (tmp_path / name).touch()


def script(capsys: pytest.CaptureFixture[str], shell: str) -> Path:
    """Return a file with the script of a shell."""
    capsys.readouterr()
    assert main(["completion", shell]) == FINISHED
    path = Path(f"completion.{shell}").resolve()
    path.write_text(capsys.readouterr().out)
    return path


def test_bash_completes_commands_options_files_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    path = script(capsys, "bash")

    def completed(*words: str) -> list[str]:
        command = ["bash", "-c", BASH, "bash", str(path), "hpcfl", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return [line for line in done.stdout.splitlines() if line]

    assert completed("") == ["run", *COMMANDS]
    assert completed("run", "train.lr", "=", "1", "--fr") == ["--fresh"]
    assert completed("watch", "--") == ["--help", "--once"]
    assert completed("bench", "--device", "") == ["cpu", "cuda"]
    assert sorted(completed("plan", "configs/o")) == ["configs/one.yaml", "configs/other.yaml"]
    assert completed("watch", "r") == ["runs"]
    assert completed("predict", "runs/x", "im") == ["images.npz"]
    for option in (("list", "--method"), ("report", "--own-code")):
        assert completed(*option, "rul") == ["rule.py"]
    # a key that may be words is offered with each of them
    for command in ("run", "plan", "doctor", "table"):
        assert completed(command, "configs/one.yaml", "train.weight_d") == ["train.weight_decay="]
    assert completed("run", "run.tf") == ["run.tf32=true", "run.tf32=false"]
    assert completed("run", "run.tf32=t") == ["run.tf32=true"]
    assert completed("run", "train.last_batch", "=") == ["even", "drop", "keep"]
    assert completed("run", "train.last_batch", "=", "d") == ["drop"]
    assert completed("run", "method.name", "=") == list(METHODS)


def test_zsh_completes_on_tab(capsys: pytest.CaptureFixture[str]) -> None:
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("there is no zsh")
    path = script(capsys, "zsh")
    typed = {
        "compl": "completion",
        "predict runs/x im": "predict runs/x images.npz",
        "run train.last": "run train.last_batch=",
        "run train.last_batch=k": "run train.last_batch=keep",
        "run method.name=pfedme method.pu": "run method.name=pfedme method.pull=",
        "plan configs/on": "plan configs/one.yaml",
        "plan data.path=configs/ot": "plan data.path=configs/other.yaml",
    }
    pid, leader = pty.fork()
    if pid == 0:
        os.execvpe(zsh, [zsh, "-f", "-i"], {**os.environ, "TERM": "dumb", "PS1": ""})
    try:
        start = f'autoload -Uz compinit; compinit -u -D; eval "$(<{path})"; hpcfl() {{ print -r "<$*>" }}'
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
