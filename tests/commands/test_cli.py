"""What the command line returns and prints: exit codes, one line for each mistake, the screen of a user."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from bits import refused
from processes import HELPERS, Mpirun, forked_on_terminal, read_all, run_forked

from hpcfl import __version__
from hpcfl.commands.arguments import command_line
from hpcfl.communication.codecs import CODECS
from hpcfl.data.partitions import PARTITIONS
from hpcfl.data.sources import SOURCES
from hpcfl.errors import BAD_INPUT, BROKEN_PIPE, FINISHED, OUT_OF_MEMORY
from hpcfl.main import main
from hpcfl.methods import METHODS
from hpcfl.models import MODELS
from hpcfl.results.run import Run
from hpcfl.storage.lock import LOCK_NAME, locked

TINY = ["data.clients=4", "data.per_client=20", "train.local_epochs=1", "train.rounds=2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of TINY."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert main([*TINY, "--quiet", "--out", str(folder)]) == FINISHED
    return folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the bytes and the time of change of every file of a folder, but of its lock."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOCK_NAME]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


MISTAKES = [
    (["data.source=imagenet"], "allowed: " + ", ".join(SOURCES)),
    (["data.per_client=1000"], "the data allows at most 172"),
    (["data.subset_fraction=0.5", "data.subset_per_class=9"], "=0.5 needs data.subset_per_class=null; set"),
    (["data.partition.name=given", "data.subset_fraction=0.5"], "needs another data.partition.name than "),
    (["data.source=topics", "data.clients=null", "data.subset_fraction=0.5"], "share no characters; set"),
    (["method.name=fedafk", "model.name=mlp", "model.hidden=[]"], "and model.name=mlp has no layers before"),
    (["one.yaml", "two.yaml"], "more than one configuration file: one.yaml, two.yaml"),
    (["--colour"], "unrecognized arguments: --colour; see hpcfl run --help"),
    (["--out"], "argument --out: expected one argument"),
    (["run", "method.name", "fedavg"], "method.name has no value; write method.name=VALUE, without sp"),
    (["train.lr", "=", "0.1"], "train.lr has no value; write train.lr=VALUE, without spaces"),
    (["train.lr", "=0.1"], "train.lr has no value; write train.lr=VALUE"),
    (["train.lr=", "0.1"], "train.lr has no value; write train.lr=VALUE, without spaces"),
    (["method.name="], "method.name=null is unknown; allowed: " + ", ".join(METHODS)),
    (["run.seed", "train.lr=0.1"], "run.seed has no value; write run.seed=VALUE"),
    (["--train.lr=0.1"], "arguments: --train.lr=0.1; keys have no dashes, write key.sub=VALUE; see hpc"),
    (["plan", "--train.lr", "0.1"], "keys have no dashes, write key.sub=VALUE; see hpcfl plan --help"),
    (["reprot"], "unknown command 'reprot'; did you mean report?"),
    (["zzz"], "unknown command 'zzz'; a configuration file ends in .yaml; commands: run, list, plan, "),
    (["table", "."], "cannot read .: Is a directory; give a table file (YAML)"),
    (["data", "fetch", "imagenet"], "allowed: mnist, fashionmnist, emnist, cifar10, cifar100"),
    (["data"], "the following arguments are required: action, name; see hpcfl data --help"),
    (["list", "methods"], "list methods: type hpcfl list for all names, or hpcfl list keys method.pf"),
    (["list", "fedavg"], "list fedavg: type hpcfl list for all names, or hpcfl list keys method.fedavg"),
    (["list", "keys", "lr"], "lr is not a key or a group of keys; did you mean train.lr?"),
    (["list", "keys", "pfedla"], "did you mean method.pfedla?"),
    (["list", "keys", "zzz"], "zzz is not a key or a group of keys; see hpcfl list keys"),
    (["list", "keys", "method.fedavg"], "method.fedavg has no keys of its own; see hpcfl list keys"),
    (["watch", "none"], "none is not a run folder: No such file or directory: none/config.yaml; name one"),
    (["watch"], "the following arguments are required: RUN; see hpcfl watch --help"),
    (["bench", "--parts", "speed"], "has 'speed'; allowed: start, steps, engines, rounds, methods"),
    (["bench", "--repeats", "0"], "--repeats: 0 is invalid; give an integer from 1 on"),
    (["bench", "--parts", "start", "--json", "no/such/folder.json"], "cannot write no/such/folder.json"),
    (["plan", "--ranks", "0"], "--ranks: 0 is invalid; give an integer from 1 on; see hpcfl plan --help"),
    (["plan", "--time", "4h"], "--time 4h is invalid; give HH:MM:SS or D-HH:MM:SS, such as --time 04:00:00"),
    (["plan", "--time", "00:00:30", "data.per_client=40", "method.name=fedavg"], "give --time 00:03:00 or m"),
    (["plan", "--ranks", "3", "method.name=fedmn", "method.order=chain"], "and needs a single worker"),
    (["method.name=fedmn", "method.order=chain", "clients.step_s=1"], "times clients that train at the same"),
    (["clients.sampling=power_of_choice", "clients.candidates=3"], "=3 are too few for the 10 clients of a"),
    (["plan", "clients.sampling=power_of_choice", "clients.candidates=3"], "=3 are too few for the 10 clien"),
    (["plan", "method.name=fedmn", "method.order=chain", "clients.step_s=1"], "times clients that train at "),
    (["method.name=fedrep", "method.body_epochs=null", "clients.local_epochs=[2,3]"], "null does not go"),
    (["train.beta1=0.5"], "train.beta1=0.5 needs train.optimiser=adam or adamw; set that, or"),
    (["train.lr_decay_rounds=[3]"], "train.lr_decay_rounds=[3] needs train.lr_decay below 1; set that"),
    (["train.lr_end=0.01", "train.lr_decay=0.9"], "train.lr_end=0.01 needs train.lr_decay=1.0; set that"),
    (["train.lr_end=0.1"], "train.lr_end=0.1 needs a train.lr that is not below it; set that, or"),
    (
        ["train.optimiser=adam", "train.momentum=0.5"],
        "=0.5 needs train.optimiser=sgd; set that, ",
    ),
    (["train.patience=3"], "train.patience=3 needs data.val_fraction, such as 0.2"),
    (["data.unseen_clients=0.3", "data.clients=1"], "leaves none of 1 client to train; set data.clients=2"),
    (["train.unseen_epochs=3"], "needs data.unseen_clients; set that, or train.unseen_epochs=null"),
    (["data.unseen_clients=0.3", "method.name=heurpfedla", "method.server=sharded"], "go with method.server"),
    (["data.unseen_clients=0.5", "method.name=fedfomo", "method.models=5"], "0 to 4, as there are 5 clients"),
    (["method.name=fedmn", "method.architecture=[2]"], "(2 or more of them)"),
    (["method.name=fedmn", "method.architecture=[2,0]"], "method.architecture"),
    (["method.name=fedmn", "method.widths=[8]"], "method.architecture=[2, 2, 2]; allowed: 2 widths"),
    (["method.name=fedmn", "method.pretrain_rounds=3", "train.rounds=3"], "3 leaves none of train.rounds=3"),
    (["method.name=scaffold", "train.momentum=0.9"], "variates are means of plain gradients; allowed: 0.0"),
    (["method.name=lg_fedavg", "method.global_layers=5"], "4 layers (conv1, conv2, fc1, fc2); allowed: up"),
]
COMMANDS = ("list", "table", "plan", "bench", "watch", "data", "reprot", "zzz")
"""First words of commands that are no run."""


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_a_mistake_is_reported_with_one_line_and_changes_no_file(
    words: list[str], expected: str, finished: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = refused(capsys, *words)
    assert expected in line
    assert any(word.partition("=")[0] in line for word in words)
    assert list(tmp_path.iterdir()) == []
    if words[0] in COMMANDS:
        return
    before = contents(finished)
    refused(capsys, *words, "--out", finished)
    assert expected in refused(capsys, *words, "--out", finished, "--fresh")
    assert contents(finished) == before
    assert [path.name for path in finished.parent.iterdir()] == ["run"]


def test_a_model_larger_than_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "run"):
        assert main([command, "model.name=mlp", "model.hidden=[1000000000000]"]) == OUT_OF_MEMORY
        (line,) = capsys.readouterr().err.splitlines()
        assert "is out of memory; try" in line


def test_all_spellings_of_a_command_are_the_same_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = "data: {clients: 4, per_client: 20}\ntrain: {local_epochs: 1, rounds: 2}\n"
    for name in ("tiny.yaml", "tiny"):
        (tmp_path / name).write_text(tiny)
    for words in (["run", *TINY], ["run", "tiny.yaml"], ["tiny.yaml"]):
        assert main([*words, "--out", str(finished)]) == FINISHED
        assert "finished" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["python -m hpcfl", "tiny", "--out", str(finished)])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_module("hpcfl", run_name="__main__")
    assert leaving.value.code == FINISHED
    assert "finished" in capsys.readouterr().out


def test_another_configuration_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(finished)
    for words, expected in (
        (["train.lr=0.5", "run.seed=3"], "(train.lr: 0.05 there, 0.5 here; run.seed: 0 there, 3 here)"),
        (["train.rounds=1"], "(train.rounds: 2 there, 1 here); rounds can be added, unless results depend"),
    ):
        message = refused(capsys, *TINY, *words, "--out", finished)
        assert expected in message
        assert "--out DIR names another folder, and --fresh starts over" in message
    assert contents(finished) == before


def test_a_character_that_the_terminal_lacks_is_escaped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert main([*TINY, "--out", str(tmp_path / "r\u00fcn")]) == FINISHED
    assert rb"r\xfcn" in printed.getvalue()


def test_folders_of_something_else_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "letters"
    folder.mkdir()
    (folder / "draft.txt").write_text("Dear")
    before = contents(tmp_path)
    for out in (folder, folder / "draft.txt"):
        for fresh in ([], ["--fresh"]):
            message = refused(capsys, *TINY, *fresh, "--out", out)
            assert f"{out} exists but is not a run folder; name another with --out DIR, or move it" in message
    assert "cannot write the run folder" in refused(capsys, *TINY, "--out", folder / "draft.txt" / "run")
    assert "--out 's\\udcff' is not UTF-8" in refused(capsys, *TINY, "--out", os.fsdecode(b"s\xff"))
    assert contents(tmp_path) == before


def test_a_damaged_record_is_refused_until_it_is_moved_aside(
    finished: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    # which would contain the configuration as well
    (folder / "checkpoint.h5").unlink()
    expected = "config.yaml is damaged; restore it from a backup, or add --fresh to move the folder"
    for text in ("train: {rounds: 3\n", "- 1\n", "train: 3\n"):
        (folder / "config.yaml").write_text(text)
        assert expected in refused(capsys, *TINY, "--out", folder)
    assert main([*TINY, "--quiet", "--fresh", "--out", str(folder)]) == FINISHED
    assert (tmp_path / "run.old1" / "config.yaml").read_text() == "train: 3\n"


def test_a_folder_in_use_is_not_moved_aside(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(finished):
        before = contents(finished)
        for fresh in ([], ["--fresh"]):
            message = refused(capsys, *TINY, *fresh, "--out", finished)
            assert f"{finished} is in use by pid {os.getpid()} on " in message
            assert "--out DIR" in message
        assert contents(finished) == before


def test_a_rank_alone_in_its_mpi_world_is_refused(tmp_path: Path) -> None:
    for command, launcher in (
        ("run", "SLURM_STEP_NUM_TASKS"),
        ("doctor", "PMI_SIZE"),
        ("run", "OMPI_COMM_WORLD_SIZE"),
    ):
        pytest.importorskip("mpi4py")
        words = ["-m", "hpcfl.main", command, *TINY, "--out", str(tmp_path / "run")]
        done = run_forked(words, env={launcher: "4"}, check=False, timeout=60)
        assert done.returncode == BAD_INPUT
        assert done.stderr.startswith("hpcfl: error: the launcher started 4 ranks")
        assert "srun --mpi=pm" in done.stderr
        assert (done.stdout, done.stderr.count("\n")) == ("", 1)
        assert not (tmp_path / "run").exists()


def test_mistakes_under_mpirun_are_reported_once(mpirun: Mpirun, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "damaged.yaml").write_text("train: {rounds: 3\n")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "draft.txt").write_text("Dear")
    mistakes = [
        ["method.name=heurpfedla", "method.k=5"],
        ["data.per_client=1000"],
        ["damaged.yaml"],
        ["--colour"],
        ["--out", "letters/draft.txt/run"],
        [*TINY, "train.lr=1", "--out", str(finished)],
    ]
    good = [["--help"], ["list"], ["plan", "--no-timing", *TINY], [*TINY, "--quiet", "--out", "run"]]
    before = contents(finished)
    commands = (HELPERS / "world_commands.py", json.dumps([*mistakes, *good]))
    done = mpirun(3, *commands, cwd=tmp_path, timeout=60)
    expected = [BAD_INPUT] * len(mistakes) + [FINISHED] * len(good)
    for rank in range(3):
        assert json.loads((tmp_path / f"codes{rank}.json").read_text()) == expected
    assert done.stderr.count("hpcfl: error: ") == len(done.stderr.splitlines()) == len(mistakes)
    assert done.stdout.count("usage: ") == 1
    assert sum(line.startswith("method pfedla: ") for line in done.stdout.splitlines()) == 1
    assert done.stdout.count("classes partition of digits") == 1
    assert contents(finished) == before
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["letters", "run"]
    ranks = (tmp_path / "run" / "config.yaml").read_text().partition("  ranks:\n")[2].splitlines()
    assert [line.split()[2:] for line in ranks] == [["cpu", "loop"]] * 3


def test_the_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("", "list", "plan", "doctor", "data", "bench", "watch", "claims", "table"):
        with pytest.raises(SystemExit) as leaving:
            main([*command.split(), "--help"])
        assert leaving.value.code == FINISHED
        lines = capsys.readouterr().out.splitlines()
        assert 3 < len(lines) < 40
        assert max(map(len, lines)) <= 100
        assert len({line for line in lines if line}) == len([line for line in lines if line])


def test_list_has_a_line_for_each_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == FINISHED
    lines = capsys.readouterr().out.splitlines()
    kinds = ("method", "source", "partition", "model", "codec")
    registries: list[Iterable[str]] = [METHODS, SOURCES, PARTITIONS, MODELS, CODECS]
    expected = [f"{kind} {name}" for kind, names in zip(kinds, registries, strict=True) for name in names]
    assert [line.partition(":")[0] for line in lines] == expected
    assert all(line.partition(": ")[2].strip() for line in lines)


def pipe_without_a_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


RUN = [*TINY, "--out", "run"]
TINY_TABLE = """
title: one cell
seeds: [0]
settings: {data: {clients: 4, per_client: 20}, train: {local_epochs: 1, rounds: 1}}
columns: [{label: digits}]
rows: [{method: {name: local}}]
"""


@pytest.mark.parametrize(
    ("words", "output", "code"),
    [
        (["list", "keys"], pipe_without_a_reader, BROKEN_PIPE),
        # it fits the buffer
        (["list"], pipe_without_a_reader, BROKEN_PIPE),
        (RUN, pipe_without_a_reader, FINISHED),
        (RUN, full_disk, FINISHED),
        (["table", "table.yaml"], full_disk, FINISHED),
    ],
)
def test_a_closed_output_prints_no_error_and_ends_no_run(
    words: list[str],
    output: Callable[[], int],
    code: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("table.yaml").write_text(TINY_TABLE)
    # at its end, as at Python's, what is left in the buffer would fail
    with open(output(), "w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert main(words) == code
    assert capfd.readouterr() == ("", "")
    assert words != RUN or Run(Path("run")).is_finished


def test_commands_are_quoted_for_the_shell() -> None:
    quoted = "hpcfl a.yaml 'data.normalise=[[0.5], [1]]'"
    assert command_line(["a.yaml", "data.normalise=[[0.5], [1]]"], 1) == quoted


def test_a_terminal_shows_the_progress_and_the_result(tmp_path: Path) -> None:
    out = tmp_path / ("a_long_name" * 8)
    child, leader = forked_on_terminal(lambda: main([*TINY, "--out", str(out)]))
    seen = read_all(leader)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == FINISHED
    assert "\x1b[?25l" in seen
    assert "\x1b[?25h" in seen
    drawn = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text) for text in re.split(r"[\r\n]+", seen)]
    bars = [text for text in drawn if text.startswith("round ")]
    assert bars[-1].startswith("round 2/2 ")
    assert "accuracy " in bars[-1]
    assert max(map(len, bars)) <= 80
    curves = [text.rstrip() for text in drawn if text.startswith("last evaluations ")]
    assert re.fullmatch(r"last evaluations \d+\.\d\d% \S\S \d+\.\d\d%", curves[-1])
    assert max(map(len, curves)) <= 80
    lines = [text.rstrip() for text in drawn if text.strip() and text not in bars]
    wide = [line for line in lines if len(line) > 80]
    assert wide == [f"pfedla on digits, 4 clients, in {out}", f"  in {out}", f"  {out}/report.html"]
    figures = [line for line in lines if re.search(r"^[a-z].*\S {2,}\S", line)]
    assert [re.split(" {2,}", line)[0] for line in figures] == [
        *("mean accuracy, round 2", "spread over clients", "weighted by samples", "best round"),
        *("bytes down, up", "speed", "results"),
    ]
    assert lines[-2:] == ["open in a browser", f"  {out}/report.html"]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"hpcfl {__version__}\n"
