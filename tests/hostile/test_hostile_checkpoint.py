"""A stranger's checkpoint, whose SHA-256 is right for what is wrong in it."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import yaml
from bits import run_here
from mutations import (
    NUMBERS,
    Read,
    assert_refused_or_read,
    code_or_refusal,
    damaged_bytes,
    damaged_tree,
    sweep,
)

from hpcfl.errors import BAD_INPUT, DIVERGED, FINISHED, UserError
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


ARRAYS: tuple[Any, ...] = (
    *(np.zeros(0), np.zeros((3, 0)), np.zeros((2, 3)), np.full((2, 3), np.nan), np.full((2, 3), np.inf)),
    *(
        np.array([-1, 5]),
        np.array([2**62]),
        np.zeros((3, 7), np.float32),
        np.zeros((1, 47)),
        np.int64(3),
        0.5,
    ),
    *(
        np.array([b"a", b"b"]),
        np.array(b"\xff"),
        "text",
        ["a", "b"],
        np.array([True]),
        np.zeros((2, 3), complex),
    ),
    *(np.array([(1, 2.0)], dtype="i4,f4"), np.zeros(3, ">f4"), np.zeros((2, 3), np.float16), -1, 2**62),
)
TEXTS = (
    "a: [",
    "- 1\n- 2",
    "",
    "../../x",
    "pfedla",
    "nothing",
    "\x1b[2J",
    "</script>",
    "a: &a [*a]",
    "uint8",
    '"""\nimport os\n"""',
)


def change(file: h5py.File, draw: random.Random) -> None:
    """Make one part of a checkpoint another."""
    groups, datasets = ["/"], []
    file.visititems(lambda name, item: (datasets if isinstance(item, h5py.Dataset) else groups).append(name))
    kind = draw.randrange(9)
    name = draw.choice(datasets)
    if kind == 0:
        del file[draw.choice(datasets + groups[1:])]
    elif kind in (1, 2):
        del file[name]
        file[name] = draw.choice(ARRAYS)
    elif kind in (3, 4):
        holder = file[draw.choice([one for one in [*groups, *datasets] if len(file[one].attrs)])]
        key = draw.choice(list(holder.attrs))
        old = holder.attrs[key]
        if draw.random() < 0.2:
            del holder.attrs[key]
        elif isinstance(old, bytes) or draw.random() < 0.3:
            holder.attrs[key] = np.bytes_(draw.choice(TEXTS).encode())
        else:
            holder.attrs[key] = draw.choice(ARRAYS)
    elif kind == 5:
        place = draw.choice(groups) + "/" + draw.choice(("theta", "x", "accuracy", "metrics", "names"))
        # which may be what goes
        held = file[name]
        if place in file:
            del file[place]
        file[place] = draw.choice(
            (
                h5py.SoftLink("/server/theta"),
                h5py.SoftLink("/nowhere"),
                h5py.ExternalLink("/etc/passwd", "/"),
                h5py.ExternalLink(str(file.filename), "/"),
                file[draw.choice(groups)],
                held,
            )
        )
    elif kind == 6:
        shape = tuple(draw.choice((1, 3, 10**3, 10**6, 10**9)) for _ in range(draw.randrange(1, 4)))
        del file[name]
        how: dict[str, Any] = draw.choice(
            (
                {"chunks": tuple(min(size, 10) for size in shape)},
                {"chunks": tuple(min(size, 10) for size in shape), "compression": "gzip"},
                {"chunks": tuple(min(size, 10) for size in shape), "fletcher32": True},
                {"external": [("/etc/passwd", 0, h5py.h5f.UNLIMITED)]},
                {"maxshape": (None,) * len(shape)},
            )
        )
        file.create_dataset(name, shape=shape, dtype="f4", **how)
    elif kind == 7:
        del file[name]
        layout = h5py.VirtualLayout(shape=(3, 47), dtype="f4")
        layout[:] = h5py.VirtualSource(draw.choice(("/etc/passwd", ".")), "server/theta", shape=(3, 47))
        file.create_virtual_dataset(name, layout)
    else:
        data = file[name]
        if data.dtype.kind in "iuf" and data.size:
            values = data[()]
            flat = values.reshape(-1)
            with np.errstate(over="ignore"):
                number = draw.choice((*NUMBERS[:-2], -1, -(2**40)))
                flat[draw.randrange(len(flat))] = np.array(number).astype(values.dtype)
            data[()] = values


def hostile_checkpoint(whole: bytes, draw: random.Random, path: Path) -> None:
    """Write a checkpoint with damage to its bytes, or with other parts, and the hash that it would have."""
    if draw.random() < 0.5:
        path.write_bytes(signed(damaged_bytes(whole, draw, 512)))
        return
    path.write_bytes(whole)
    with h5py.File(path, "r+", locking=False) as file:
        for _ in range(draw.choice((1, 1, 2))):
            change(file, draw)
    path.write_bytes(signed(path.read_bytes()))


def checkpoint_reader(folder: Path) -> Read:
    whole = (make_run(folder / "made") / "checkpoint.h5").read_bytes()
    (folder / "one").mkdir(exist_ok=True)

    def read(seed: int) -> object:
        hostile_checkpoint(whole, random.Random(seed), folder / "one" / "checkpoint.h5")
        loaded = CheckpointStore(folder / "one").load()
        assert loaded is not None
        try:
            models = (
                [loaded.model(client) for client in range(loaded.num_clients)] if loaded.has_models else []
            )
            return models, loaded.server, loaded.newest("alpha"), loaded.data, loaded.layout
        finally:
            loaded.close()

    return read


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("hostile") / "made")


@sweep
def test_a_checkpoint_is_read_or_refused(seeds: Sequence[int], made: Path) -> None:
    assert_refused_or_read(checkpoint_reader(made.parent), seeds)


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


def linked_many_times(file: h5py.File) -> None:
    """Name 4 ** 17 groups by a few bytes."""
    for depth in range(18):
        above = file if depth == 0 else file[f"g{depth - 1}"]
        file.create_group(f"g{depth}")
        for number in range(4):
            above[f"h{number}"] = file[f"g{depth}"]
    for depth in range(1, 18):
        del file[f"g{depth}"]


ALIASES = b"a: &a0 [x]\n" + b"".join(
    f"b{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]\n".encode() for number in range(1, 10)
)
"""More values than memory holds."""
HOLE = {"shape": (10**6, 10**6), "dtype": "f4", "chunks": (1, 1000)}
OWN_CODE = np.bytes_(b'uint8"""\nimport os\nos.mkdir("created")\n"""')


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (linked(h5py.ExternalLink("/etc/passwd", "/")), "'theta' is a link to another place"),
        (linked(h5py.SoftLink("/server/alpha")), "'theta' is a link to another place"),
        (virtual, "'/server/theta' is in another file, or packed"),
        (
            replaced("server/theta", shape=(9,), dtype="u1", external=[("/etc/passwd", 0, 9)]),
            "'/server/theta' is in another file, or packed",
        ),
        (replaced("server/theta", data=np.zeros((3, 47)), compression="gzip"), "in another file, or packed"),
        # zeros that are nowhere: 4 TB in memory
        (replaced("server/theta", **HOLE), r"'/server/theta' has the shape \(1000000, 1000000\) and 0 bytes"),
        (replaced("server/theta", data=["a"]), "'/server/theta' is of type object"),
        (replaced("server/theta", data=np.zeros(3, ">f4")), "'/server/theta' is of type >f4"),
        (
            lambda file: file["server"].__setitem__("again", file["/"]),
            "'again' is there under another name, too",
        ),
        (lambda file: file.__delitem__("ledger"), "KeyError"),
        (text("/", "round", -1), "whole number from 0 on"),
        (text("/", "round", np.nan), "cannot convert float NaN"),
        (linked_many_times, "is there under another name, too"),
        (text("/", "config", np.bytes_(b"a: [")), "a configuration that is not YAML"),
        (text("/", "config", np.bytes_(b"- 1\n- 2")), "a configuration without the groups of keys"),
        (text("/", "config", np.bytes_(b"train: {rounds: 2}")), "a configuration without the groups of keys"),
        (text("/", "config", np.bytes_(ALIASES)), "more than 20000 values"),
        (text("/", "method", 3), "has no attribute 'decode'"),
        # this text stands in the source of an exported model, which is run to try it
        (text("data", "dtype", OWN_CODE), "images of type"),
        (text("data", "image_shape", np.array([b"1", b"8", b"8"])), "TypeError|ValueError"),
        (text("data", "image_shape", np.array([1, 0, 8])), "whole number from 1 on"),
        (text("data", "mean", np.array([np.nan])), "where there is a number"),
        (text("data", "num_classes", 2.5), "whole number from 1 on"),
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
    with pytest.warns(UserWarning, match="holds what no run writes .*; going on from .*checkpoint.prev.h5"):
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


def resume_reader(folder: Path) -> Read:
    made = make_run(folder / "made")
    whole = (made / "checkpoint.h5").read_bytes()
    one = folder / "resumed"

    def read(seed: int) -> object:
        shutil.rmtree(one, ignore_errors=True)
        shutil.copytree(made, one)
        (one / "checkpoint.prev.h5").unlink(missing_ok=True)
        draw = random.Random(seed)
        if draw.random() < 0.5:
            hostile_checkpoint(whole, draw, one / "checkpoint.h5")
        else:
            config = damaged_tree(yaml.safe_load((made / "config.yaml").read_text()), draw)
            words = draw.choice((*TEXTS, yaml.safe_dump(config))).encode()
            with h5py.File(one / "checkpoint.h5", "r+", locking=False) as file:
                file.attrs["config"] = np.bytes_(words)
            (one / "checkpoint.h5").write_bytes(signed((one / "checkpoint.h5").read_bytes()))
        if draw.random() < 0.3:
            (one / "config.yaml").write_text(draw.choice(("", "a: [", "- 1\n- 2")))
        keys = [*SMALL, "run.report=false", "train.rounds=3"]
        return code_or_refusal(lambda: run_here(one, keys), FINISHED, DIVERGED)

    return read


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 2000), marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_a_run_goes_on_from_a_checkpoint_or_refuses_it(seeds: Sequence[int], made: Path) -> None:
    assert_refused_or_read(resume_reader(made.parent), seeds, least=3)


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


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "checkpoint.h5")
    with pytest.raises(UserError, match="it is a pipe or a device, and no file"):
        CheckpointStore(tmp_path).load()
