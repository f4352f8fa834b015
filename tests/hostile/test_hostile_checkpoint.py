"""A stranger's checkpoint, whose SHA-256 is right for what is wrong in it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from bits import run_here

from hpcfl.errors import BAD_INPUT, UserError
from hpcfl.main import main
from hpcfl.storage.checkpoint import CheckpointStore

SMALL = (
    *("method.name=pfedla", "method.hidden=4", "method.embedding=3", "model.name=mlp", "model.hidden=[3]"),
    *("data.clients=3", "data.per_client=20", "train.rounds=2", "train.local_epochs=1", "run.device=cpu"),
)


def make_run(folder: Path) -> Path:
    """Make the smallest run that has all parts of a checkpoint."""
    if not folder.exists():
        assert run_here(folder, [*SMALL, "run.report=false"]) == 0
    return folder


def signed(content: bytes) -> bytes:
    """Put the SHA-256 that a run would write before what follows the first 512 bytes."""
    line = f"hpcfl checkpoint sha256 {hashlib.sha256(content[512:]).hexdigest()}\n".encode()
    return line.ljust(512, b"\0") + content[512:]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("hostile") / "made")


def replaced(name: str, **how: Any) -> Callable[[h5py.File], None]:
    def replace(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, **how)

    return replace


def linked(link: Any) -> Callable[[h5py.File], None]:
    def replace(file: h5py.File) -> None:
        del file["server/theta"]
        file["server/theta"] = link

    return replace


def text(name: str, key: str, value: Any) -> Callable[[h5py.File], None]:
    return lambda file: file[name].attrs.__setitem__(key, value)


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(shape=(3, 47), dtype="f4")
    layout[:] = h5py.VirtualSource("/etc/passwd", "server/theta", shape=(3, 47))
    del file["server/theta"]
    file.create_virtual_dataset("server/theta", layout)


OWN_CODE = np.bytes_(b'uint8"""\nimport os\nos.mkdir("created")\n"""')


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (linked(h5py.ExternalLink("/etc/passwd", "/")), "'theta' is a link to another place"),
        (linked(h5py.SoftLink("/server/alpha")), "'theta' is a link to another place"),
        (virtual, "'theta' is in another file"),
        (
            replaced("server/theta", shape=(9,), dtype="u1", external=[("/etc/passwd", 0, 9)]),
            "'theta' is in another file",
        ),
        (lambda file: file.__delitem__("ledger"), "KeyError"),
        (text("/", "round", np.nan), "cannot convert float NaN"),
        (text("/", "config", np.bytes_(b"a: [")), "while parsing"),
        (text("/", "config", np.bytes_(b"- 1\n- 2")), "a configuration without the groups of keys"),
        (text("/", "config", np.bytes_(b"train: {rounds: 2}")), "a configuration without the groups of keys"),
        (text("/", "method", 3), "has no attribute 'decode'"),
        # this text stands in the source of an exported model, which is run to try it
        (text("data", "dtype", OWN_CODE), "images of type"),
        (text("data", "image_shape", np.array([b"1", b"8", b"8"])), "TypeError|ValueError"),
        (replaced("ledger/metrics", data=np.zeros((2, 3))), "KeyError|columns"),
        (replaced("history/accuracy", data=np.zeros(3)), "not by evaluation and client"),
        (replaced("personalised/theta", data=np.zeros((2, 47), np.float32)), "has 2 rows for 3 clients"),
    ],
)
def test_what_no_run_writes_is_refused(
    make: Callable[[h5py.File], None],
    said: str,
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(made, tmp_path / "run")
    with h5py.File(folder / "checkpoint.h5", "r+", locking=False) as file:
        make(file)
    (folder / "checkpoint.h5").write_bytes(signed((folder / "checkpoint.h5").read_bytes()))
    (folder / "checkpoint.prev.h5").unlink(missing_ok=True)
    with pytest.raises(UserError, match=f"checkpoint.h5 holds what no run writes .*({said})"):
        CheckpointStore(folder).load()
    assert main(["export", str(folder), "--client", "0", "--out", "out"]) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds what no run writes" in line
    assert not Path("created").exists()


def test_the_one_before_takes_the_place_of_a_foreign_checkpoint(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made, tmp_path / "run")
    whole = (folder / "checkpoint.h5").read_bytes()
    (folder / "checkpoint.prev.h5").write_bytes(whole)
    with h5py.File(folder / "checkpoint.h5", "r+", locking=False) as file:
        del file["server"]
    (folder / "checkpoint.h5").write_bytes(signed((folder / "checkpoint.h5").read_bytes()))
    with pytest.warns(UserWarning, match="holds what no run writes .*; resuming from .*checkpoint.prev.h5"):
        loaded = CheckpointStore(folder).load()
    assert loaded is not None
    loaded.close()


def test_models_of_another_size_are_no_models_of_the_run(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(made, tmp_path / "run")
    with h5py.File(folder / "checkpoint.h5", "r+", locking=False) as file:
        replaced("personalised/theta", data=np.zeros((3, 7), np.float32))(file)
    (folder / "checkpoint.h5").write_bytes(signed((folder / "checkpoint.h5").read_bytes()))
    assert main(["export", str(folder), "--client", "0", "--out", str(tmp_path / "out")]) == BAD_INPUT
    assert "holds no model of method.name=pfedla: its parts do not fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("server/theta", np.zeros((2, 47), np.float32)),
        ("server/theta", np.zeros((3, 47))),
        ("server/theta", np.zeros((3, 47), ">f4")),
        ("server/hypernetworks/embedding", None),
        ("ledger/client_bytes", np.zeros((3, 1), np.int64)),
        ("ledger/pending", np.zeros((0, 7))),
        ("history/accuracy_after_training", None),
        ("history/alpha", np.zeros((3, 3))),
        ("history/loss", np.zeros((3, 2))),
    ],
)
def test_a_run_does_not_go_on_from_parts_that_are_not_its_own(
    part: str, values: np.ndarray | None, made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(made, tmp_path / "run")
    group, _, name = part.partition("/")
    with h5py.File(folder / "checkpoint.h5", "r+", locking=False) as file:
        columns = dict(file[part].attrs)
        del file[part]
        if values is None:
            file[group].attrs["names"] = [one for one in file[group].attrs["names"] if one != name.encode()]
        else:
            file[part] = values
            file[part].attrs.update(columns)
    (folder / "checkpoint.h5").write_bytes(signed((folder / "checkpoint.h5").read_bytes()))
    (folder / "checkpoint.prev.h5").unlink(missing_ok=True)
    assert run_here(folder, [*SMALL, "run.report=false", "train.rounds=4"]) == BAD_INPUT
    error = capfd.readouterr().err
    assert error.startswith("hpcfl: error: ")
    assert error.count("\n") == 1
    assert "--fresh" in error


@pytest.mark.parametrize("config", [b"a: [", b"- 1\n- 2"])
def test_a_damaged_config_is_not_written_anew_from_a_foreign_checkpoint(
    config: bytes, made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(made, tmp_path / "run")
    with h5py.File(folder / "checkpoint.h5", "r+", locking=False) as file:
        text("/", "config", np.bytes_(config))(file)
    (folder / "checkpoint.h5").write_bytes(signed((folder / "checkpoint.h5").read_bytes()))
    (folder / "checkpoint.prev.h5").unlink(missing_ok=True)
    (folder / "config.yaml").write_bytes(config)
    assert run_here(folder, [*SMALL, "run.report=false"]) == BAD_INPUT
    assert capfd.readouterr().err == (
        f"hpcfl: error: {folder / 'config.yaml'} is damaged; bring it back from a copy, or add --fresh to "
        "move the folder aside and start over\n"
    )


def test_numbers_that_are_not_where_they_should_be(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made, tmp_path / "run")
    path = folder / "checkpoint.h5"
    with h5py.File(path, locking=False) as file:
        offset = file["server/theta"].id.get_offset() - 512
    whole = path.read_bytes()
    # the address of contiguous numbers stands in the file once
    place = offset.to_bytes(8, "little")
    assert whole.count(place) == 1
    path.write_bytes(signed(whole.replace(place, (2**45).to_bytes(8, "little"))))
    with pytest.raises(UserError, match=r"checkpoint.h5 (is damaged|holds what no run writes)"):
        CheckpointStore(folder).load().server  # type: ignore[union-attr]  # noqa: B018
