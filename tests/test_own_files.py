"""A method, a model, a partition and a source of the user, in files outside the package."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import yaml
from bits import differing, refused
from conftest import forgetting_own_code
from processes import Mpirun, run_tree

from hpcfl.config.own_code import allow_files, digest
from hpcfl.errors import BAD_INPUT, FAULT, FINISHED, UserError
from hpcfl.main import main
from hpcfl.methods import METHODS
from hpcfl.registries import load_config
from hpcfl.results.comparison import compare
from hpcfl.results.run import load_run

TINY = ["data.clients=4", "train.local_epochs=1", "train.rounds=2"]

TRIMMED = '''"""Trimmed mean: the server leaves out the largest and smallest numbers of each coordinate."""
from pydantic import Field
from hpcfl.methods.base import Params
from hpcfl.methods.fedavg import FedAvg
class TrimmedMeanParams(Params):
    left_out: int = Field(1, ge=0)
    """Numbers left out at either end of each coordinate."""
class TrimmedMean(FedAvg):
    Params = TrimmedMeanParams
    def server_state(self):
        return super().server_state() | {"rounds": self.context.initial_parameters().new_zeros(1)}
    def aggregate(self, server, cohort, up):
        ordered = up.collect()["theta"].sort(dim=0).values
        server["theta"] = ordered[self.params.left_out : len(cohort) - self.params.left_out].mean(dim=0)
        server["rounds"] = server["rounds"] + 1
'''

DROPPING = '''"""A network that drops half of its features."""
from collections import OrderedDict
from torch import nn
from hpcfl.config.keys import NetworkOptions
from hpcfl.models.networks import Model, Network
class Dropping(Model):
    options = NetworkOptions
    def build(self, sample, num_classes, options):
        body = OrderedDict(flat=nn.Flatten(), drop=nn.Dropout(0.5))
        return Network(body, OrderedDict(head=nn.Linear(64, num_classes)))
DROPPING = Dropping("dropout and a layer")
'''

HALVES = '''"""Each half of the clients shares one half of the classes, all clients of equal size."""
import numpy as np
from pydantic import Field
from hpcfl.data.partition_request import PartitionOptions
from hpcfl.data.partitions import Partition
class HalvesOptions(PartitionOptions):
    samples: int = Field(5, ge=2)
    """Samples of each class of a client."""
def halves_counts(request, options):
    counts = np.zeros((request.num_clients, request.num_classes), dtype=np.int64)
    classes, clients = request.num_classes // 2, request.num_clients // 2
    counts[:clients, :classes] = counts[clients:, classes:] = options.samples
    return counts
HALVES = Partition("halves", HalvesOptions, halves_counts, True, "raise data.partition.samples")
'''

STRIPES = '''"""Images of one bright row each, which is their class."""
import numpy as np
from hpcfl.data.sources import Arrays, Source, arrays_of
def read(path):
    y = np.arange(200) % 8
    x = np.random.default_rng(0).integers(0, 50, (200, 1, 8, 8), np.uint8)
    x[np.arange(200), 0, y] += 200
    return arrays_of(x, y, "stripes")
STRIPES = Source("8x8 stripes, 8 classes, 200 images", read=read)
'''

METHOD, MODEL, PARTITION, READER = KEYS = ("method.path", "model.path", "data.partition.path", "data.reader")
FILES = dict(zip(KEYS, (TRIMMED, DROPPING, HALVES, STRIPES), strict=True))
KINDS = {
    METHOD: ("method", "method.name", "moon"),
    MODEL: ("model", "model.name", "mlp"),
    PARTITION: ("partition", "data.partition.name", "iid"),
    READER: ("source", "data.source", "digits"),
}
"""By the key of a file: the word for what it holds, the key of its name, and the name of another."""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Write the four files."""
    paths = {key: tmp_path / f"my_{key.split('.')[-2]}.py" for key in FILES}
    for key, path in paths.items():
        path.write_text(FILES[key])
    return paths


def words(files: dict[str, Path]) -> list[str]:
    return [f"{key}={path}" for key, path in files.items()]


def test_runs_with_own_files_work_on_any_number_of_ranks_and_are_resumed(
    files: dict[str, Path], tmp_path: Path, mpirun: Mpirun, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*words(files), *TINY, "data.partition.samples=10"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # ranks are copies of this process, which does not know the files yet; the model has dropout
    mpirun(3, "-m", "hpcfl.main", *given, "--out", parts, "train.rounds=1")
    assert main([*given, "--out", str(whole)]) == FINISHED
    assert main([*given, "--out", str(parts)]) == FINISHED
    assert differing(whole, parts) == []
    saved = yaml.safe_load((whole / "config.yaml").read_text())
    method = saved["method"]
    assert (method["name"], method["left_out"], len(method["code"])) == ("my_method", 1, 16)
    assert (saved["model"]["name"], saved["data"]["source"]) == ("my_model", "my_data")
    assert saved["data"]["partition"]["samples"] == 10
    assert main([str(whole / "config.yaml"), "--out", str(whole)]) == FINISHED
    # dropout of many clients at a time
    assert main([*given, "run.engine=batched", "--out", str(tmp_path / "batched")]) == FINISHED
    # another file is another run
    other = files[METHOD].with_name("other.py")
    other.write_text(TRIMMED.replace("+ 1\n", "+ 2\n"))
    assert "method.name: " in refused(capsys, *given, f"method.path={other}", "--out", str(whole), *TINY)


def test_an_own_source_reads_what_data_path_names(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "labels.npy", np.arange(200) % 8)
    files[READER].write_text(STRIPES.replace("y = np.arange(200) % 8", "y = np.load(path)"))
    given = [f"{READER}={files[READER]}", "model.name=mlp", *TINY]
    assert main([*given, f"data.path={tmp_path / 'labels.npy'}", "--out", str(tmp_path / "run")]) == FINISHED
    message = refused(capsys, *given, f"data.path={tmp_path / 'none.npy'}", "--out", str(tmp_path / "none"))
    assert "No such file" in message
    assert message.endswith("; name what it reads with data.path=..., or fix data.reader")


def test_own_files_are_listed(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    given = [word for key, path in files.items() for word in (f"--{KINDS[key][0]}", str(path))]
    assert main(["list", *given]) == FINISHED
    out = capsys.readouterr().out
    assert "method my_method: from my_method.py" in out
    assert "model my_model: dropout and a layer" in out
    assert "partition my_partition: halves" in out
    assert "source my_data: 8x8 stripes" in out


@pytest.mark.parametrize("key", KEYS)
def test_an_edited_own_file_does_not_match_its_configuration(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    config = load_config(None, words(files))
    (tmp_path / "config.yaml").write_text(config.yaml())
    assert load_config(tmp_path / "config.yaml", []).short_hash() == config.short_hash()
    files[key].write_text(FILES[key] + "\n")
    message = refused(capsys, str(tmp_path / "config.yaml"), *TINY)
    assert f"{key}={files[key]} is not the file of this configuration" in message
    assert f"delete the key {key.rpartition('.')[0]}.code to run the file as it is now" in message


@pytest.mark.parametrize("leaves_by", ["raise KeyboardInterrupt", "sys.exit(0)"])
def test_a_file_that_did_not_run_to_its_end_is_run_again(leaves_by: str, tmp_path: Path) -> None:
    file, done = tmp_path / "trimmed.py", tmp_path / "done"
    early = f"import sys, pathlib\nif not pathlib.Path({str(done)!r}).exists():\n    {leaves_by}\n"
    file.write_text(TRIMMED + early + "TrimmedMean.summary = 'set at the end'\n")
    error = KeyboardInterrupt if "Interrupt" in leaves_by else UserError
    with pytest.raises(error, match=r"^$|SystemExit: 0"):
        load_config(None, [f"method.path={file}"])
    done.touch()
    assert METHODS[load_config(None, [f"method.path={file}"]).method.name].summary == "set at the end"


def test_a_run_whose_own_file_has_changed_is_neither_resumed_nor_reported(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, runs = files[METHOD], tmp_path / "runs"
    command = [*words(files), *TINY, "--out", str(runs / "own")]
    assert main(command) == FINISHED
    assert main(["method.name=fedavg", *TINY, "--out", str(runs / "fedavg")]) == FINISHED
    file.write_text(file.read_text() + "# a comment\n")
    assert f"a run with another text of method.path={file}; bring that text back" in refused(capsys, *command)
    allowed = [f"--own-code={path}" for path in files.values()]
    assert main(["report", str(runs), *allowed]) == FINISHED
    shown = capsys.readouterr()
    assert shown.out.startswith("the report of 1 run is in ")
    assert f"left out: {runs / 'own' / 'config.yaml'}: method.path={file} is not" in shown.err
    report = ["report", str(runs / "own"), *allowed[1:]]
    assert "is not the file of this configuration" in refused(capsys, *report)
    assert main([*command, "--fresh"]) == FINISHED
    file.unlink()
    assert f"method.path={file}: No such file or directory; give its present place" in refused(
        capsys, *report
    )


def test_a_run_keeps_its_own_files_and_is_read_and_resumed_without_those_that_it_names(
    files: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with forgetting_own_code():
        assert main([*words(files), *TINY, "--out", str(run)]) == FINISHED
    kept = [run / "own_code" / key.rpartition(".")[0] / files[key].name for key in KEYS]
    assert [file.read_text() for file in kept] == [*FILES.values()]
    for file in files.values():
        file.unlink()
    with forgetting_own_code():
        with pytest.raises(UserError, match="give its present place by --own-code FILE"):
            load_run(run)
        loaded = load_run(run, own_code=kept)
        assert loaded.config.method.name == "my_method"
        own = [f"--own-code={file}" for file in kept]
        assert main([str(run / "config.yaml"), "train.rounds=3", *own, "--out", str(run)]) == FINISHED
    assert sorted(file for file in run.glob("own_code/**/*") if file.is_file()) == sorted(kept)


def test_versions_of_a_method_are_compared_also_when_hpcfl_has_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = [tmp_path / f"version {n}" / "trimmed.py" for n in (1, 2)]
    for n, version in enumerate(versions, start=1):
        version.parent.mkdir()
        version.write_text(TRIMMED.replace("+ 1\n", f"+ {n}\n"))
        with forgetting_own_code():
            assert main([f"method.path={version}", *TINY, "--out", str(tmp_path / f"run{n}")]) == FINISHED
    runs, allowed = [tmp_path / f"run{n}" for n in (1, 2)], [f"--own-code={file}" for file in versions]
    codes = [digest(file.read_bytes()) for file in versions]
    capsys.readouterr()
    with forgetting_own_code():
        assert main(["compare", *map(str, runs), *allowed]) == FINISHED
        lines = capsys.readouterr().out.splitlines()
    assert ["method.code", *codes] in map(str.split, lines)
    with forgetting_own_code():
        monkeypatch.setitem(METHODS, "trimmed", METHODS["fedavg"])
        both = [load_run(run, own_code=file) for run, file in zip(runs, versions, strict=True)]
        assert [run.config.method.name for run in both] == [f"trimmed@{code[:8]}" for code in codes]
        assert "difference in points" in str(compare(*both))
        # a run whose name is in use can go on, but a new one needs another name
        assert main([str(runs[0] / "config.yaml"), "--out", str(runs[0])]) == FINISHED
        message = refused(capsys, f"method.path={versions[0]}", *TINY)
        assert "defines trimmed, but that name is already in use; choose another" in message


@pytest.mark.parametrize("key", KEYS)
def test_a_recorded_configuration_stays_the_same_when_its_names_are_in_use(
    files: dict[str, Path], tmp_path: Path, key: str
) -> None:
    with forgetting_own_code():
        config = load_config(None, words(files))
    (tmp_path / "config.yaml").write_text(config.yaml())
    other = tmp_path / "elsewhere" / files[key].name
    other.parent.mkdir()
    other.write_text(FILES[key] + "# another text\n")
    load_config(None, [f"{key}={other}"])
    allow_files([*files.values()])
    again = load_config(tmp_path / "config.yaml", [])
    assert again.tree() == config.tree()


@pytest.mark.parametrize("key", KEYS)
def test_a_moved_own_file_is_the_same_and_another_name_replaces_it(files: dict[str, Path], key: str) -> None:
    tree = load_config(None, [*words(files), "method.left_out=2", "data.partition.samples=10"]).tree()
    moved = files[key].parent / "elsewhere" / files[key].name
    moved.parent.mkdir()
    moved.write_text(FILES[key])
    there = files[key].parent / "config.yaml"
    there.write_text(yaml.safe_dump(tree))
    config = load_config(there, [f"{key}={moved}"])
    assert f"{key}={moved}" in config.own_code
    assert config.tree()["method"]["left_out"] == 2
    assert config.short_hash() == load_config(there, []).short_hash()
    _, name_key, other = KINDS[key]
    changed = load_config(there, [f"{name_key}={other}"])
    assert not any(name.startswith(f"{key}=") for name in changed.own_code)


@pytest.mark.parametrize("key", KEYS)
def test_names_and_files_that_do_not_match_are_refused(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], key: str
) -> None:
    _, name_key, other = KINDS[key]
    message = refused(capsys, f"{key}={files[key]}", f"{name_key}={other}", *TINY)
    assert f"{name_key}={other} does not go with {key}={files[key]}" in message
    name = files[key].stem
    message = refused(capsys, f"{name_key}={name}", *TINY)
    assert f"{name_key}={name} is in a file of your own; also give {key}=FILE.py" in message


def test_the_name_of_a_file_keeps_it_and_null_removes_it(files: dict[str, Path], tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text(load_config(None, [*words(files), "method.left_out=2"]).yaml())
    for given in ("data.source=my_data", f"data.reader={files[READER]}", "method.name=my_method"):
        config = load_config(saved, [given])
        assert config.source_file["reader"] == str(files["data.reader"])
        assert (config.method.name, config.tree()["method"]["left_out"]) == ("my_method", 2)
    config = load_config(saved, ["data.reader=null", "data.partition.name=iid", "method.path=null"])
    assert (config.data.source, config.source_file, config.method.name) == ("digits", {}, "pfedla")


FEDAVG = "from hpcfl.methods.fedavg import FedAvg\n"
TWO_METHODS = f"{FEDAVG}class A(FedAvg): ...\nclass B(FedAvg): ...\n"
NAMED = f"{FEDAVG}class A(FedAvg):\n    name = 'fedavg'\n"
CODE, PATH = TRIMMED.replace("left_out", "code"), HALVES.replace("samples", "path")
NO_MODEL = " defines 0 instances of Model (none); it needs one"
NET = "from torch import nn\nclass Net(nn.Module): ...\n"
POOLED = f"from hpcfl.models.networks import Model\n{NET}class Pooled(Model): ...\n"
NO_READ = "from hpcfl.data.sources import Source\nA = Source('no read')\n"
UNCHECKED = HALVES.replace("(PartitionOptions)", "(BaseModel)").replace("Field\n", "BaseModel, Field\n")


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        (METHOD, None, ": No such file or directory; give a Python file"),
        (METHOD, "x = 1\ny = nothing\n", ", line 2: NameError: name 'nothing' is not defined"),
        (METHOD, "x = 1\ndef (:\n", ", line 2: SyntaxError: invalid syntax"),
        (METHOD, "x = 1\n", " defines 0 classes derived from Method (none); it needs one"),
        (METHOD, TWO_METHODS, " defines 2 classes derived from Method (A, B); it needs one"),
        (METHOD, NAMED, " defines fedavg, but that name is already in use; choose another"),
        (METHOD, CODE, ": method.code is reserved; rename code of TrimmedMeanParams"),
        (MODEL, "x = 1\n", " defines 0 instances of Model (none); it needs one"),
        (MODEL, POOLED, f"{NO_MODEL}: add a line POOLED = Pooled(...)"),
        (MODEL, NET, f"{NO_MODEL}, whose build returns Net as Network(body, head); see docs/own_model.md"),
        (READER, NO_READ, " defines 0 instances of Source with a read (none); it needs one"),
        (PARTITION, UNCHECKED, ": its options must be a class derived from PartitionOptions"),
        (PARTITION, PATH, ": data.partition.path is reserved; rename path of HalvesOptions"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, text: str | None, expected: str
) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    assert refused(capsys, f"{key}={path}", *TINY) == f"hpcfl: error: {key}={path}{expected}"


CHECK = """
    @model_validator(mode="after")
    def check(self) -> "TrimmedMeanParams":
        if self.left_out > 3:
            raise ValueError("left_out must be 3 or less")
        return self
class TrimmedMean("""
TABLE = "my_partition: its table"
STRIPES_OF = 'arrays_of(x, y, "stripes")'
OWNED = "Arrays(x, y, 8, 255.0, (0.5,), (0.5,),"


@pytest.mark.parametrize(
    ("key", "old", "new", "expected"),
    [
        (METHOD, "Field(1, ge=0)", "'one'", "method.left_out=one is invalid; allowed: an integer (def"),
        (METHOD, "Field(1, ge=0)", "float('inf')", "left_out=inf is invalid; allowed: an integer (default"),
        (METHOD, "Field(1, ge=0)", "Field(ge=0)", "method.left_out is not given and has no default; "),
        (METHOD, "Field(1, ge=0)", "Field(-1, ge=0)", "left_out=-1 is invalid; allowed: an integer >="),
        (METHOD, "int = Field(1, ge=0)", "object = object()", "'object'>, so config.yaml cannot have it; "),
        (PARTITION, "= options.samples", "= -1", f"{TABLE} has the count -1; allowed: 0 or more"),
        (PARTITION, "np.int64", "float", f"{TABLE} is float64 (4, 10); it must be int64 [clients, classes],"),
        (PARTITION, "return counts", "return counts[1:]", f"{TABLE} is int64 (3, 10); it must be int64 ["),
        (PARTITION, "options.samples", "100", f"{TABLE} has 200 samples of class 0; allowed: up to 178"),
        (MODEL, "return Network", "Network", "its build returned a NoneType; return Network(body, head)"),
        (READER, "return", "return (x, y) or", "its read returned a tuple; return arrays_of(x, y, name)"),
        (READER, "read(path", "read(", "read is called with data.path: too many positional arguments; write"),
        (READER, "of(x, y,", "of(x, y / 2,", "y has type float64; labels must be whole numbers"),
        (READER, STRIPES_OF, "Arrays(x, y, 3, 255.0, (), ())", "y holds labels 0..7, and num_classes is 3"),
        (READER, STRIPES_OF, f"{OWNED} np.arange(199))", "owner has shape (199,) and type int64; it needs"),
        (READER, STRIPES_OF, f"{OWNED} np.arange(200) % 3 * 2)", "owner has 3 clients, and numbers up to 4;"),
        (READER, STRIPES_OF, f"{OWNED} y, y)", "is_test has shape (200,) and type int64; it needs true or"),
        (READER, STRIPES_OF, f"{OWNED} y, names=('a',))", "owner has 8 clients or domains, and 1 have names"),
        (READER, STRIPES_OF, "Arrays(x, y, 8, 0.0, (), ())", "std () and scale 0.0; needed: as many means"),
        (READER, "of(x, y,", "of(x[..., None], y,", "x has shape (200, 1, 8, 8, 1); allowed: images ["),
    ],
)
def test_mistakes_inside_a_file_are_reported(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], key: str, old: str, new: str, expected: str
) -> None:
    assert old in FILES[key]
    files[key].write_text(FILES[key].replace(old, new))
    assert expected in refused(capsys, f"{key}={files[key]}", *TINY)


FAULTS = {
    "no message": ("pass", r": TypeError: Own\.train returned a NoneType; return Message\(.*"),
    "no such tensor": ("return down['thta']", r", line 4, in train: KeyError: .*no tensor 'thta'; it has .*"),
    "of torch": ("return down['theta'] @ down['theta']", r", line 4, in train: RuntimeError: .*"),
    "sys.exit": ("raise SystemExit(3)", r", line 4, in train: RuntimeError: own code ends the process by .*"),
    "other samples": ("clients.samples('valid', 0)", ".*no samples of 'valid'; allowed: train, val, test"),
    "no model": ("clients.sgd(down['theta'][:, None])", r".* shape \[1, 1, \d+\]; expected: models \[1, .*"),
    "shape of a pull": (
        "clients.sgd(down['theta'], extra_gradient=lambda theta, members: theta[0])",
        r".* shape \[\d+\]; expected: that of the gradient, \[1, \d+\]",
    ),
    "no __init__": ("0\n    def __init__(*_): 0", r".*__init__ did not call super\(\).__init__\(context, .*"),
}
FAULTY = """from hpcfl.methods.fedavg import FedAvg
class Own(FedAvg):
    def train(self, clients, down):
        {}
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_in_a_round_is_one_line(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body, expected = FAULTS[fault]
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(FAULTY.format(body))
    assert main(["run", *TINY, "method.path=own.py", "--out", "run", "--quiet"]) == FAULT
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"hpcfl: error: own\\.py{expected}\n", err)


def test_a_bug_of_hpcfl_in_a_call_is_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(FAULTY.format("return super().train(clients, down)"))
    # an error of Python's own in a function of hpcfl
    monkeypatch.setattr("hpcfl.training.client_group.Descent", None)
    given = [*TINY, f"method.path={tmp_path / 'own.py'}", "--out", str(tmp_path / "run"), "--quiet"]
    with pytest.raises(TypeError, match="'NoneType' object is not callable") as raised:
        main(["run", *given])
    printed = "".join(traceback.format_exception(raised.value))
    assert f'File "{tmp_path / "own.py"}", line 4, in train\n    return super().train(' in printed


def test_a_mistake_on_ranks_is_a_line_or_a_traceback_with_the_user_s(tmp_path: Path, mpirun: Mpirun) -> None:
    file = tmp_path / "own.py"

    def printed(body: str) -> str:
        file.write_text(FAULTY.format(body))
        given = [*TINY, f"method.path={file}", "--out", str(tmp_path / "run"), "--fresh"]
        done = mpirun(3, "-m", "hpcfl.main", *given, check=False)
        assert done.returncode == FAULT
        return done.stderr

    of_line = printed("return down['thta']")
    found = [line for line in of_line.splitlines() if "own.py" in line]
    assert found
    for line in found:
        assert re.fullmatch(r"hpcfl: error: .*own\.py, line 4, in train: KeyError: .*thta.*", line)
    assert "Traceback" not in of_line
    of_shape = printed("clients.sgd(down['theta'], gradient=lambda w, batch: (2 * w[:, :5], w[:, 0]))")
    assert "Traceback" in of_shape
    assert f'File "{file}", line 4, in train\n    clients.sgd(' in of_shape
    assert re.search("^RuntimeError: .*must match", of_shape, re.MULTILINE)


ROLLED = "from mpi4py import MPI; return np.roll(counts, MPI.COMM_WORLD.rank, axis=0)"


def test_a_partition_that_differs_between_ranks_is_refused(tmp_path: Path, mpirun: Mpirun) -> None:
    """Ranks would wait for each other's clients for ever."""
    (tmp_path / "own.py").write_text(HALVES.replace("return counts", ROLLED))
    given = [*TINY, f"data.partition.path={tmp_path / 'own.py'}", "--out", str(tmp_path / "run"), "--quiet"]
    done = mpirun(3, "-m", "hpcfl.main", *given, check=False)
    assert done.returncode == BAD_INPUT
    assert "hpcfl: error: ranks have divided the samples among clients in different ways" in done.stderr


def test_a_validator_that_needs_a_key_without_a_default_is_left_to_the_run(tmp_path: Path) -> None:
    check = (
        "\n    @__import__('pydantic').model_validator(mode='before')\n    def check(cls, given):\n"
        "        assert given['left_out'] < 4\n        return given\nclass TrimmedMean("
    )
    text = TRIMMED.replace("Field(1, ge=0)", "Field(ge=0)").replace("\nclass TrimmedMean(", check, 1)
    (tmp_path / "own.py").write_text(text)
    words = [*TINY, f"method.path={tmp_path / 'own.py'}", "--out", str(tmp_path / "run"), "--quiet"]
    assert main([*words, "method.left_out=1"]) == FINISHED


def test_options_of_other_types_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As YAML has them: a tuple was another value than the list there."""
    options = (
        "betas: tuple[float, float] = (0.1, 0.2)\n    place: __import__('pathlib').Path = 'here'\n"
        "    level: float = __import__('numpy').float32(0.5)\n"
        "    names: set[str] = {'alpha', 'beta', 'gamma'}\n    left_out"
    )
    (tmp_path / "own.py").write_text(TRIMMED.replace("    left_out", f"    {options}", 1))
    words = [*TINY, f"method.path={tmp_path / 'own.py'}", "--out", str(tmp_path / "run"), "--quiet"]
    for rounds in (1, 1, 2):
        assert main([*words, f"train.rounds={rounds}"]) == FINISHED
    assert main([*words, "train.rounds=3", "method.betas=[0.1,0.3]"]) == BAD_INPUT
    assert "method.betas: [0.1, 0.2] there, [0.1, 0.3] here" in capsys.readouterr().err
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["method"]
    assert (recorded["betas"], recorded["place"], recorded["level"]) == ([0.1, 0.2], "here", 0.5)
    assert recorded["names"] == ["alpha", "beta", "gamma"]


def test_a_run_is_not_resumed_with_other_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that draws from NumPy's own generator trains clients on what others were tested on."""
    file, marker = tmp_path / "own.py", tmp_path / "marker"
    # as a generator without a seed would
    rolled = f"return np.roll(counts, __import__('pathlib').Path({str(marker)!r}).exists(), axis=0)"
    file.write_text(HALVES.replace("return counts", rolled))
    words = [*TINY, f"data.partition.path={file}", "--out", str(tmp_path / "run"), "--quiet"]
    assert main([*words, "train.rounds=1"]) == FINISHED
    assert main([*words, "train.rounds=2"]) == FINISHED
    marker.touch()
    capsys.readouterr()
    assert main([*words, "train.rounds=3"]) == BAD_INPUT
    expected = f"hpcfl: error: the division of the data among clients has changed since {tmp_path}"
    assert capsys.readouterr().err.startswith(expected)


@pytest.mark.parametrize("module", ["hpcfl", "hpcfl.main"])
def test_a_file_cannot_import_one_beside_it(tmp_path: Path, module: str) -> None:
    (tmp_path / "beside.py").write_text("lr = 1")
    (tmp_path / "own.py").write_text(f"from beside import lr\n{TRIMMED}")
    command = [sys.executable, "-m", module, "list", "--method", "own.py"]
    done = run_tree(command, cwd=tmp_path, check=False)
    assert done.returncode == BAD_INPUT
    assert "method.path=own.py, line 1: ModuleNotFoundError: No module named 'beside'" in done.stderr


def test_options_of_a_method_are_checked(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = files[METHOD]
    text = TRIMMED.replace("import Field", "import Field, model_validator")
    path.write_text(text.replace("\nclass TrimmedMean(", CHECK))
    for given, expected in (
        ("method.left_out=-1", "method.left_out=-1 is invalid"),
        ("method.left=1", "method.left=1 is an unknown key; the nearest known one is method.left_out"),
        ("method.left_out=4", "hpcfl: error: method: left_out must be 3 or less"),
    ):
        assert expected in refused(capsys, f"method.path={path}", given, *TINY)
    message = refused(capsys, "method.name=fedavg", "method.code=abc", *TINY)
    assert "method.code=abc is an unknown key" in message


def test_annotations_are_read_as_python_reads_them(files: dict[str, Path]) -> None:
    path = files[METHOD]
    text = TRIMMED.replace("left_out: int", "left_out: __import__('builtins').int")
    path.write_text(f"{text}\nassert TrimmedMeanParams.__annotations__['left_out'] is int\n")
    assert load_config(None, [f"method.path={path}"]).method.name == "my_method"
