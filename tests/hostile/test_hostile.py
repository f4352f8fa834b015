"""Files from strangers are read or refused with one line, whatever they contain; their code is never run.

A run folder and its checkpoint, npz, LEAF, PFLlib, configurations and table files.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import shutil
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import mutations
import numpy as np
import pytest
import yaml
from bits import refused, run_here
from conftest import forgetting_own_code
from mutations import Read, damaged_bytes, sign
from PIL import Image

from hpcfl import load_run
from hpcfl.config.keys import DataConfig
from hpcfl.data.client_files import read_leaf, read_pfllib
from hpcfl.data.csv_tables import read_csv_table
from hpcfl.data.domains import read_domains
from hpcfl.data.npz import read_npz
from hpcfl.errors import BAD_INPUT, FINISHED, MAX_CHARACTERS, UserError, for_terminal
from hpcfl.main import main
from hpcfl.registries import load_config
from hpcfl.storage.checkpoint import CheckpointStore
from hpcfl.tables.cells import Table

FEW = (
    *("model.name=mlp", "model.hidden=[3]", "data.clients=3", "data.per_client=20", "train.rounds=2"),
    *("train.local_epochs=1", "run.device=cpu", "run.report=false"),
)
SMALL = ("method.name=pfedla", "method.hidden=4", "method.embedding=3", *FEW)
"""The smallest run that has all parts of a checkpoint."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "made"
    assert run_here(folder, SMALL) == FINISHED
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


# Seeded damage


def zipped(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


LABELS = np.arange(6) % 3
MEMBERS = {"x.npy": npy(np.arange(96, dtype=np.uint8).reshape(6, 4, 4)), "y.npy": npy(LABELS)}


def npz_reader(folder: Path) -> Read:
    def read(draw: random.Random) -> object:
        members, name = dict(MEMBERS), draw.choice(list(MEMBERS))
        kind = draw.randrange(3)
        if kind == 1:
            # the checksum is that of the damaged bytes
            members[name] = damaged_bytes(members[name], draw)
        elif kind == 2:
            members[draw.choice(("x", "../x.npy", "x.npy", "y.npy.npy"))] = members.pop(name)
        whole = zipped(members)
        (folder / "x.npz").write_bytes(damaged_bytes(whole, draw) if kind == 0 else whole)
        return read_npz(str(folder / "x.npz"), "NCHW")

    return read


IMAGE = [0.0, 0.25, 1, 0.5] * 196
LEAF = {
    "users": ["a", "b"],
    "num_samples": [2, 1],
    "user_data": {"a": {"x": [IMAGE, IMAGE], "y": [0, 61]}, "b": {"x": [IMAGE], "y": [5]}},
    "hierarchies": [],
}


def leaf_reader(folder: Path) -> Read:
    def read(draw: random.Random) -> object:
        text = json.dumps(mutations.damaged_tree(LEAF, draw), default=str).encode()
        if draw.random() < 0.3:
            text = damaged_bytes(json.dumps(LEAF).encode(), draw)
        (folder / "all_data_0.json").write_bytes(text)
        return read_leaf(str(folder))

    return read


CSV_TABLE = b"a,job,c,y\n" + b"".join(b"%d,%c,0.%d,%d\n" % (i, b"nx"[i % 2], i, i % 3) for i in range(9))


def csv_reader(folder: Path) -> Read:
    def read(draw: random.Random) -> object:
        (folder / "x.csv").write_bytes(damaged_bytes(CSV_TABLE, draw))
        missing = draw.choice((None, "mean", "drop"))
        path = str(folder / "x.csv")
        return read_csv_table(DataConfig(path=path, target="y", categorical=["job"], missing=missing))

    return read


def image_reader(folder: Path) -> Read:
    (folder / "a" / "b").mkdir(parents=True)
    pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    wholes = {}
    for ending in ("png", "jpg"):
        Image.fromarray(pixels).save(folder / f"whole.{ending}")
        wholes[ending] = (folder / f"whole.{ending}").read_bytes()

    def read(draw: random.Random) -> object:
        whole = wholes[draw.choice(("png", "jpg"))]
        # the content determines the kind
        (folder / "a" / "b" / "0.png").write_bytes(damaged_bytes(whole, draw))
        return read_domains(str(folder), None, 8)

    return read


PART = {"x": np.linspace(0, 1, 96, dtype=np.float32).reshape(2, 3, 4, 4), "y": np.array([0, 1])}
PART_VALUES = (
    *(*mutations.VALUES, (), PART["x"], PART["y"], np.array(["a"]), np.array([None]), np.zeros((0, 10**9))),
    *(np.array([1j]), np.array([(1, 2.0)], dtype="i4,f4"), PART["x"].astype(">f2"), np.array([np.nan, 0.0])),
)


def of_pickle(content: bytes) -> bytes:
    """Return an npz file whose array `data` of one object is this pickle."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|O", "fortran_order": False, "shape": ()})
    return zipped({"data.npy": head.getvalue() + content})


def pfllib_reader(folder: Path) -> Read:
    whole = pickle.dumps(np.array(PART, dtype=object), 4)
    for part in ("train", "test"):
        (folder / part).mkdir()
        (folder / part / "0.npz").write_bytes(of_pickle(whole))

    def read(draw: random.Random) -> object:
        content = pickle.dumps(np.array(mutations.damaged_tree(PART, draw, PART_VALUES), dtype=object), 4)
        kind = draw.randrange(3)
        npz = of_pickle(damaged_bytes(whole, draw) if kind == 1 else content)
        (folder / "train" / "0.npz").write_bytes(damaged_bytes(npz, draw) if kind == 2 else npz)
        return read_pfllib(str(folder))

    return read


CONFIG = load_config(None, ["data.clients=3", "method.name=pfedla"]).tree()
TABLE: dict[str, Any] = {
    "title": "A small table",
    "size": "small",
    "source": "nowhere",
    "seeds": [0, 1],
    "config": "base.yaml",
    "settings": {"train": {"rounds": 2}},
    "columns": [{"label": "few", "data": {"clients": 3}}, {"sweep": {"key": "train.lr", "values": [1, 2]}}],
    "rows": [
        {"method": {"name": "pfedla"}, "published": {"few": 61.4}, "tuned": "train.lr"},
        {"label": "alone", "method": {"name": "local"}, "without": ["lr = 2"]},
    ],
    "compare": [["pfedla", "alone"], {"rows": ["alone", "pfedla"], "columns": ["few"], "weighted": True}],
    "show": ["accuracy"],
    "figure": [{"draw": "heat_maps", "quantity": "alpha", "layers": {"few": ["fc1"]}, "rounds": [1, "last"]}],
}
TEXTS = (
    *("a: !!python/object/apply:os.system [touch created]", "a: !!bool x", "a: !!int ''", "a: 2001-99-99"),
    *("a: 1e99999", "a: &a {<<: *a}", "[" * 3000, "%YAML 9.9\n---\na: 1", "--- a\n--- b", "a: b: c", "\x00"),
)


def hostile_yaml(tree: dict[str, Any], draw: random.Random) -> bytes:
    kind = draw.randrange(10)
    if kind == 0:
        return draw.choice(TEXTS).encode()
    made = tree if kind <= 2 else mutations.damaged_tree(tree, draw)
    text = yaml.safe_dump(made, sort_keys=False, default_flow_style=draw.random() < 0.2).encode()
    return damaged_bytes(text, draw) if kind <= 2 else text


def config_reader(folder: Path) -> Read:
    def read(draw: random.Random) -> object:
        (folder / "config.yaml").write_bytes(hostile_yaml(CONFIG, draw))
        config = load_config(folder / "config.yaml", [])
        return config.yaml(), config.run_name()

    return read


def table_reader(folder: Path) -> Read:
    (folder / "base.yaml").write_text("data: {clients: 4}\n")
    (folder / "under.yaml").write_text(yaml.safe_dump(TABLE))
    above = {"extends": "under.yaml", "rows": ["alone", *TABLE["rows"][:1]]}

    def read(draw: random.Random) -> object:
        (folder / "table.yaml").write_bytes(hostile_yaml(above if draw.random() < 0.2 else TABLE, draw))
        table = Table(folder / "table.yaml", [], folder / "runs")
        for cell in table.cells:
            assert (folder / "runs") in cell.folder.parents, cell.folder
            assert ".." not in cell.folder.relative_to(folder).parts
        return table

    return read


TABLES = ("metrics.csv", "clients.csv", "bytes.csv", "confusion.csv", "partition.csv")
CELLS = ("", "nan", "-inf", "-1", "0", "1e308", "0.5", "1_0", " 1", "\u0661", "a", '"', "\x1b[2J", "1" * 400)


def hostile_table(whole: bytes, draw: random.Random) -> bytes:
    """Return a CSV file with other bytes, cells, columns or rows."""
    if draw.random() < 0.4:
        return damaged_bytes(whole, draw)
    rows = [line.split(",") for line in whole.decode().splitlines()]
    row, at = draw.randrange(len(rows)), draw.randrange(len(rows[0]))
    kind = draw.randrange(4)
    if kind == 0:
        for one in rows:
            del one[at : at + 1]
    elif kind == 1:
        rows.insert(row, list(draw.choice(rows)))
    else:
        rows[row][at] = draw.choice((*CELLS, str(draw.choice(mutations.NUMBERS))))
    return "".join(",".join(row) + "\n" for row in rows).encode()


def run_folder_reader(folder: Path) -> Read:
    good, hostile = folder / "made", folder / "hostile"
    assert run_here(good, [*SMALL, "run.metrics=true"]) == FINISHED
    np.savez(folder / "x.npz", x=np.zeros((2, 1, 8, 8), np.float32))
    record = yaml.safe_load((good / "config.yaml").read_text())
    page, out = ["--out", str(folder / "page.html")], ["--out", str(folder / "out")]
    commands = (
        ["watch", "--once", str(hostile)],
        ["report", str(hostile), *page],
        ["report", str(hostile), str(good), *page],
        ["compare", str(hostile), str(good)],
        ["export", str(hostile), "--client", "0", *out],
        ["predict", str(hostile), str(folder / "x.npz"), "--client", "1", "--out", str(folder / "p.csv")],
    )

    def read(draw: random.Random) -> object:
        shutil.rmtree(hostile, ignore_errors=True)
        shutil.copytree(good, hostile)
        kind = draw.randrange(6)
        name = draw.choice(TABLES) if kind <= 2 else draw.choice(("log.txt", "checkpoint.h5"))
        if kind <= 2:
            (hostile / name).write_bytes(hostile_table((good / name).read_bytes(), draw))
        elif kind == 3:
            (hostile / "config.yaml").write_bytes(hostile_yaml(record, draw))
        elif kind == 4:
            (hostile / name).write_bytes(damaged_bytes((good / name).read_bytes(), draw))
        else:
            what = draw.choice((*TABLES, "config.yaml", "log.txt", "checkpoint.h5", ".lock"))
            (hostile / what).unlink()
            if draw.random() < 0.5:
                (hostile / what).mkdir()
        return mutations.code_or_refusal(lambda: main(draw.choice(commands)), FINISHED)

    return read


READERS = {
    "npz": npz_reader,
    "csv": csv_reader,
    "image": image_reader,
    "leaf": leaf_reader,
    "pfllib": pfllib_reader,
    "configuration": config_reader,
    "table": table_reader,
    "run folder": run_folder_reader,
}


@pytest.mark.parametrize("most", [200, pytest.param(5000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused(name: str, most: int, tmp_path: Path) -> None:
    # a run folder is read by whole commands, which take longer
    cases = range(80 if (name, most) == ("run folder", 200) else most)
    mutations.assert_refused_or_read(READERS[name](tmp_path), cases)


# npz, LEAF and YAML


def test_the_header_of_an_array_is_not_executed(tmp_path: Path) -> None:
    shape = "__import__('os').mkdir('created')"
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    member = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(96)
    (tmp_path / "x.npz").write_bytes(zipped({"x.npy": member, "y.npy": npy(LABELS)}))
    with pytest.raises(UserError, match=r"x.npz: cannot be read as an npz .*malformed node or string"):
        read_npz(str(tmp_path / "x.npz"), "NCHW")
    assert not Path("created").exists()


def test_one_long_text_does_not_make_a_large_array(tmp_path: Path) -> None:
    """One of a million characters among a hundred thousand short ones: 400 GB."""
    x = ["a" * 10**6, *[""] * 10**5]
    content = {"users": ["a"], "user_data": {"a": {"x": x, "y": [0]}}}
    (tmp_path / "all_data_0.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="writer a: x is not an array of numbers"):
        read_leaf(str(tmp_path))


def test_yaml_executes_no_code(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: !!python/object/apply:os.mkdir [created]")
    with pytest.raises(UserError, match=r"config.yaml is not YAML: .*could not determine a constructor"):
        load_config(tmp_path / "config.yaml", [])
    assert not Path("created").exists()


def test_an_error_is_one_printable_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text('method: {name: "a\\e[2Jb\\u2028c\\u202e"}\n')
    line = refused(capsys, "plan", tmp_path / "config.yaml")
    assert r"method.name=a\x1b[2Jb c\u202e is unknown" in line
    assert len(for_terminal(UserError("a" * 10**6))) < MAX_CHARACTERS + 10


@pytest.mark.parametrize("source", ["npz", "pfllib", "domains"])
def test_an_impossible_file_name_is_refused(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "plan", f"data.source={source}", f"data.path={'a' * 3000}")
    assert line.startswith("hpcfl: error: ")


# Checkpoints with wrong content, whose SHA-256 is correct


Change = Callable[[h5py.File], object]


def change(folder: Path, make: Change) -> None:
    """Change the only checkpoint of a run."""
    with h5py.File(folder / "checkpoint.h5", "r+", locking=False) as file:
        make(file)
    sign(folder / "checkpoint.h5")
    (folder / "checkpoint.prev.h5").unlink(missing_ok=True)


def replaced(name: str, **how: Any) -> Change:
    def replace(file: h5py.File) -> None:
        attributes = dict(file[name].attrs)
        del file[name]
        file.create_dataset(name, **how).attrs.update(attributes)

    return replace


def linked(link: Any) -> Change:
    def replace(file: h5py.File) -> None:
        del file["server/theta"]
        file["server/theta"] = link

    return replace


def text(name: str, key: str, value: Any) -> Change:
    return lambda file: file[name].attrs.__setitem__(key, value)


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(shape=(3, 47), dtype="f4")
    layout[:] = h5py.VirtualSource("/etc/passwd", "server/theta", shape=(3, 47))
    del file["server/theta"]
    file.create_virtual_dataset("server/theta", layout)


OWN_CODE = np.bytes_(b'uint8"""\nimport os\nos.mkdir("created")\n"""')


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (linked(h5py.ExternalLink("/etc/passwd", "/")), "'theta' is a link to another place"),
        (linked(h5py.SoftLink("/server/alpha")), "'theta' is a link to another place"),
        (virtual, "'theta' is in another file"),
        (replaced("server/theta", shape=(9,), dtype="u1", external=[("/etc/passwd", 0, 9)]), "another file"),
        (lambda file: file.__delitem__("ledger"), "KeyError"),
        (text("/", "config", np.bytes_(b"- 1\n- 2")), "a configuration without the groups of keys"),
        (text("data", "dtype", OWN_CODE), "samples of type"),
        (replaced("history/loss", data=np.zeros((9, 3))), "are not those of the ledger"),
        (replaced("history/accuracy", data=np.zeros(2)), "IndexError"),
        (replaced("personalised/theta", data=np.array([b"text"])), "a dataset that does not hold numbers"),
        (replaced("personalised/theta", data=np.zeros((3, 7))), "holds no model of .*: its parts do not fit"),
        (replaced("personalised/theta", data=np.zeros((2, 47))), "is damaged .it cannot be read: "),
    ],
)
def test_checkpoints_that_no_run_writes_are_refused(
    make: Change,
    expected: str,
    copied: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(copied.parent)
    change(copied, make)
    line = refused(capsys, "export", copied, "--client", "2", "--out", "out")
    assert re.search(f"checkpoint.h5 (is not a valid hpcfl checkpoint .*)?({expected})", line)
    assert not Path("created").exists()


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("server/theta", np.zeros((2, 47), np.float32)),
        ("server/theta", np.zeros((3, 47))),
        ("ledger/client_bytes", np.zeros((3, 1), np.int64)),
        ("history/loss", np.zeros((3, 2))),
    ],
)
def test_a_run_does_not_resume_from_parts_of_another_run(
    part: str, values: np.ndarray, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change(copied, replaced(part, data=values))
    assert "--fresh" in refused(capfd, "--quiet", "--out", copied, *SMALL, "train.rounds=4")


def test_a_damaged_config_is_not_rewritten_from_the_checkpoint_of_another_run(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change(copied, text("/", "config", np.bytes_(b"a: [")))
    (copied / "config.yaml").write_bytes(b"a: [")
    line = refused(capfd, "--quiet", "--out", copied, *SMALL)
    assert line.startswith(f"hpcfl: error: {copied / 'checkpoint.h5'} is not a valid hpcfl checkpoint (Value")
    assert line.endswith(f"; add --fresh to move {copied} aside and start over")
    assert (copied / "config.yaml").read_bytes() == b"a: ["


def test_a_checkpoint_with_numbers_outside_the_file_is_refused(copied: Path) -> None:
    path = copied / "checkpoint.h5"
    with h5py.File(path, locking=False) as file:
        place = (file["server/theta"].id.get_offset() - 512).to_bytes(8, "little")
    whole = path.read_bytes()
    # the file contains the address of contiguous numbers once
    assert whole.count(place) == 1
    path.write_bytes(whole.replace(place, (2**45).to_bytes(8, "little")))
    sign(path)
    with pytest.raises(UserError, match=r"checkpoint.h5 (is damaged|is not a valid hpcfl checkpoint)"):
        CheckpointStore(copied).load().server  # type: ignore[union-attr]  # noqa: B018


# Run folders: own code, links, tables and the log

METHOD = """
import os
from hpcfl.methods.fedavg import FedAvg
os.mkdir("created")
class Own(FedAvg):
    pass
"""


@pytest.fixture
def with_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run folder that contains the Python file it names as its own code, unknown here."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    (tmp_path / "own.py").write_text(METHOD)
    # as in another process
    with forgetting_own_code():
        assert main(["--quiet", "--out", str(folder), *FEW, "method.path=own.py"]) == FINISHED
    Path("created").rmdir()
    (tmp_path / "own.py").rename(folder / "own.py")
    record = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(record.replace(str(tmp_path / "own.py"), str(folder / "own.py")))
    return folder


def test_a_run_s_own_code_is_executed_only_if_the_user_names_it(
    with_own_code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, own = with_own_code, with_own_code / "own.py"
    np.savez("x.npz", x=np.zeros((2, 1, 8, 8), np.uint8))
    rows = [{"method": {"path": str(own)}}]
    Path("table.yaml").write_text(yaml.safe_dump({"title": "t", "seeds": [0], "rows": rows}))
    for command in (
        ["report", run],
        ["compare", run, run],
        ["export", run, "--client", "0", "--out", "out"],
        ["predict", run, "x.npz", "--client", "0"],
        ["plan", run / "config.yaml"],
        ["--out", "again", run / "config.yaml"],
        ["table", "table.yaml", "--plan"],
    ):
        places = {"plan": "", "--out": "", "table": "table.yaml, row 1 (own): "}
        place = places.get(str(command[0]), f"{run / 'config.yaml'}: ")
        line = refused(capsys, *command)
        assert line.startswith(f"hpcfl: error: {place}method.path={own}: refused to run this Python file")
        assert line.endswith(f"; read it, then add --own-code {own} (in Python: own_code=...)")
    with pytest.raises(UserError, match="refused to run this Python file"):
        load_run(run)
    # looking at it needs no code
    assert main(["watch", "--once", str(run)]) == FINISHED
    Path("other.py").write_text(METHOD + "# other\n")
    refused(capsys, "report", run, "--own-code", "other.py")
    assert not Path("created").exists()
    doctor = ["doctor", run / "config.yaml", "--own-code", own]
    assert "train.rounds=0 is invalid" in refused(capsys, *doctor, "train.rounds=0")
    Path("created").rmdir()
    assert load_run(run, own_code=[own]).config.method.name == "own"
    assert main(["report", str(run), "--own-code", str(own)]) == FINISHED


def test_the_text_of_own_code_is_not_written_through_a_link(
    with_own_code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, mine = with_own_code, tmp_path / "mine"
    mine.mkdir()
    shutil.rmtree(run / "own_code" / "method")
    (run / "own_code" / "method").symlink_to(mine)
    words = ["--quiet", run / "config.yaml", "train.rounds=3", "--own-code", run / "own.py", "--out", run]
    assert f"{run / 'own_code' / 'method'} is a link, a pipe or a device" in refused(capsys, *words)
    assert not list(mine.iterdir())


@pytest.mark.parametrize(
    ("name", "fresh"), [(".lock", []), ("checkpoint.tmp.h5", []), ("notes.txt", []), ("log.txt", ["--fresh"])]
)
def test_a_link_in_a_run_folder_is_not_written_through(
    name: str, fresh: list[str], copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (copied / name).unlink(missing_ok=True)
    (copied / name).symlink_to(mine)
    line = refused(capsys, "--quiet", "--out", copied, *SMALL, "train.rounds=3", *fresh)
    assert f"{copied / name} is a link, a pipe or a device, which no run makes, and would be w" in line
    assert mine.read_text() == "mine"


def test_a_page_is_not_written_through_a_link(copied: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (copied / "report.html").symlink_to(mine)
    assert main(["report", str(copied)]) == FINISHED
    assert mine.read_text() == "mine"
    assert not (copied / "report.html").is_symlink()
    (copied / f".report.html.{socket.gethostname()}-{os.getpid()}").symlink_to(mine)
    assert main(["report", str(copied)]) == BAD_INPUT
    assert mine.read_text() == "mine"


def test_a_log_cannot_send_commands_to_a_terminal(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (copied / "log.txt").open("a") as file:
        file.write("2026-01-01 00:00:00 \x1b]0;owned\x07 round " + "9" * 5000 + "/1 \n")
    assert main(["watch", "--once", str(copied)]) == FINISHED
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert r"\x1b]0;owned\x07" in printed
