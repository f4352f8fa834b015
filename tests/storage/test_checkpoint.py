"""Checkpoints are read back bit for bit, and every damage to a file is detected."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import yaml
from bits import round_of
from mutations import sign
from processes import exit_code, forked

import hpcfl
from hpcfl.errors import StorageError, UserError
from hpcfl.parameters import Slot
from hpcfl.samples import SampleType
from hpcfl.storage import checkpoint
from hpcfl.storage.checkpoint import CheckpointStore
from hpcfl.storage.hdf5 import SCHEMA, LoadedCheckpoint, write_snapshot
from hpcfl.storage.snapshot import Block, DataRecord, LedgerTable, Rows, Snapshot

NUM_CLIENTS = 7
DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64)
LAYOUT = (
    (
        Slot("conv1.weight", (2, 1, 3, 3), 0, 18, "conv1"),
        Slot("conv1.bias", (2,), 18, 20, "conv1"),
        Slot("größe", (), 20, 21, "scale"),
        Slot("none.weight", (0, 4), 21, 21, "none"),
    ),
    (),
)
DATA = DataRecord(
    sample=SampleType((3, 8, 9)),
    dtype="uint8",
    scale=255.0,
    mean=(0.5, 0.1, 0.25),
    std=(0.2, 0.3, 1.0),
    num_classes=10,
    num_samples=tuple(range(2, 9)),
)
LAYOUT_COLUMNS = ("names", "shapes", "offsets", "layers")


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return numbers with arbitrary bits: NaNs of all kinds, infinities, denormals."""
    if dtype == torch.bool:
        return torch.randint(2, shape).bool()
    raw = torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    same_kind = first.dtype == second.dtype and first.shape == second.shape
    return same_kind and first.numpy().tobytes() == second.numpy().tobytes()


def blocks_of(rows: dict[str, torch.Tensor], *ids_of_blocks: Iterable[int]) -> Iterator[Block]:
    for ids in ids_of_blocks:
        ids_array = np.array(list(ids), dtype=np.int64)
        yield ids_array, {name: tensor[torch.from_numpy(ids_array)] for name, tensor in rows.items()}


def rows_of(tensors: dict[str, torch.Tensor], *ids_of_blocks: Iterable[int]) -> Rows:
    shapes = {name: rows.to("meta") for name, rows in tensors.items()}
    return Rows(shapes, blocks_of(tensors, *ids_of_blocks))


def config_of(seed: int, method: str = "ditto") -> str:
    groups = {"data": {"source": "digits"}, "model": {"name": "mlp"}, "train": {"rounds": 9}}
    tree = {"method": {"name": method}, **groups, "run": {"seed": seed}}
    return yaml.safe_dump(tree, allow_unicode=True)


def snapshot_of(round_: int, num_rows: int = NUM_CLIENTS) -> Snapshot:
    """Return a small state whose every number is the round."""
    clients = {
        "personal": torch.full((num_rows, 50), float(round_)),
        "steps": torch.full((num_rows,), round_),
    }
    return Snapshot(
        method="ditto",
        round=round_,
        config=config_of(round_),
        layout=LAYOUT,
        data=DATA,
        server={"theta": torch.full((50,), float(round_))},
        derived={},
        clients=rows_of(clients, range(3), range(3, num_rows)),
        history=lambda: {"accuracy": np.full((2, num_rows), float(round_))},
        ledger=lambda: {
            "metrics": LedgerTable(np.full((2, 2), float(round_)), ("round", "wall_s")),
            "bytes": LedgerTable(np.zeros((0, 3), np.int64), ("round", "down/fc", "up/fc")),
        },
    )


def rounds_in(loaded: LoadedCheckpoint) -> set[float]:
    """Return all the different numbers in a state of `snapshot_of`."""
    rows = loaded.client_rows(0, NUM_CLIENTS)
    tensors = [loaded.server["theta"], rows["personal"], rows["steps"]]
    arrays = [loaded.history["accuracy"], loaded.ledger["metrics"].values]
    everything = [*(tensor.numpy() for tensor in tensors), *arrays]
    return {loaded.round, *(number for part in everything for number in part.ravel().tolist())}


def load(folder: Path) -> LoadedCheckpoint:
    """Load with a fresh store; a warning fails the test unless the test takes it."""
    loaded = CheckpointStore(folder).load()
    assert loaded is not None
    return loaded


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def damage(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(flipped(data, len(data) // 2))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path)


def test_every_bit_of_a_checkpoint_is_read_back(tmp_path: Path, store: CheckpointStore) -> None:
    torch.manual_seed(0)
    server = {f"{dtype}".removeprefix("torch."): numbers(dtype, 3, 5) for dtype in DTYPES}
    server |= {"empty": torch.zeros(0, 3), "a strided view": torch.arange(12).view(3, 4).T}
    server |= {"hypernetworks/a/b": numbers(torch.float64, 2)}
    clients = {f"state/{dtype}": numbers(dtype, NUM_CLIENTS, 2, 3) for dtype in DTYPES}
    clients |= {"coefficient": numbers(torch.float32, NUM_CLIENTS), "nothing": torch.zeros(NUM_CLIENTS, 0)}
    history: dict[str, np.ndarray] = {"accuracy": numbers(torch.float64, 4, NUM_CLIENTS).numpy()}
    history |= {"alpha/mean": np.zeros((4, 0, 3), dtype=np.float32)}
    metrics = LedgerTable(
        np.array([[1.0, np.nan], [2.0, -0.0], [3.0, 0.5], [4.0, np.inf]]), ("round", "loss_mean")
    )
    nothing = LedgerTable(np.zeros((0, 1), dtype=np.int64), ("down",))
    config = config_of(0, "méthode" + "x" * 100_000)
    store.save(
        replace(
            snapshot_of(12),
            config=config,
            server=server,
            derived={"alpha": torch.ones(7, 2, 7), "hypernetworks/gap": torch.ones(1)},
            clients=rows_of(clients, range(0, 3), range(3, NUM_CLIENTS)),
            history=lambda: history,
            ledger=lambda: {"metrics": metrics, "bytes": nothing},
        )
    )

    loaded = load(tmp_path)
    assert loaded.path == tmp_path / "checkpoint.h5"
    assert (loaded.round, loaded.record) == (12, yaml.safe_load(config))
    assert loaded.data == DATA
    assert loaded.layout == LAYOUT
    assert list(loaded.server) == list(server)
    assert all(same_bits(loaded.server[name], server[name]) for name in server)
    for start, stop in ((0, NUM_CLIENTS), (2, 5), (3, 3)):
        rows = loaded.client_rows(start, stop)
        assert list(rows) == list(clients)
        assert all(same_bits(rows[name], clients[name][start:stop]) for name in clients)
    assert list(loaded.history) == list(history)
    assert loaded.history["accuracy"].tobytes() == history["accuracy"].tobytes()
    assert loaded.history["alpha/mean"].shape == (4, 0, 3)
    assert loaded.rounds.tolist() == [1, 2, 3, 4]
    assert loaded.ledger["metrics"].values.tobytes() == metrics.values.tobytes()
    assert loaded.ledger["metrics"].columns == ("round", "loss_mean")
    assert loaded.ledger["bytes"].values.shape == (0, 1)
    assert loaded.ledger["bytes"].values.dtype == np.int64


def test_plain_h5py_reads_the_documented_structure(tmp_path: Path, store: CheckpointStore) -> None:
    """The same state gives the same file, which begins with its hash."""
    derived, shared = {"alpha": torch.ones(7, 2, 7)}, {"theta": torch.ones(1, 50)}
    models = {"personalised": lambda: rows_of(shared, [0])}
    for _ in range(2):
        store.save(replace(snapshot_of(3), derived=derived, models=models))
    with h5py.File(tmp_path / "checkpoint.h5") as file:
        assert dict(file.attrs) == {
            "schema": SCHEMA,
            "hpcfl": hpcfl.__version__.encode(),
            "method": b"ditto",
            "round": 3,
            "config": config_of(3).encode(),
            "complete": 1,
        }
        names: list[str] = []
        file.visit(names.append)
        assert set(names) == {
            *("layout", "data", "server", "clients", "personalised", "history", "ledger"),
            *("layout/parameters", "layout/buffers"),
            *(f"layout/{vector}/{name}" for vector in ("parameters", "buffers") for name in LAYOUT_COLUMNS),
            *("server/theta", "server/alpha", "clients/personal", "clients/steps", "personalised/theta"),
            *("history/accuracy", "ledger/metrics", "ledger/bytes", "data/num_samples"),
        }
        assert file["layout/parameters/names"].asstr()[2] == "größe"
        assert file["layout/parameters/shapes"][:2].tolist() == [[2, 1, 3, 3], [2, -1, -1, -1]]
        assert file["layout/parameters/offsets"][:2].tolist() == [0, 18]
        assert file["layout/parameters/layers"].asstr()[1] == "conv1"
        assert file["data/num_samples"][:].tolist() == [2, 3, 4, 5, 6, 7, 8]
        assert file["data"].attrs["sample_shape"].tolist() == [3, 8, 9]
        assert file["data"].attrs["mean"].tolist() == [0.5, 0.1, 0.25]
        assert file["data"].attrs["dtype"] == b"uint8"
        assert file["server/alpha"].attrs["derived"] == 1
        assert "derived" not in file["server/theta"].attrs
        assert file["clients/personal"].chunks == (1, 50)
        assert file["personalised/theta"].shape == (1, 50)
        assert file["ledger/metrics"].attrs["columns"].tolist() == [b"round", b"wall_s"]
        datasets = [file[name] for name in names if isinstance(file[name], h5py.Dataset)]
        assert all(data.ndim > 0 and data.compression is None for data in datasets)
        assert all(h5py.check_string_dtype(data.dtype) is None or data.dtype.kind == "S" for data in datasets)
    assert list(load(tmp_path).server) == ["theta"]
    written = (tmp_path / "checkpoint.h5").read_bytes()
    assert written == (tmp_path / "checkpoint.prev.h5").read_bytes()
    sign(tmp_path / "checkpoint.h5")
    assert written == (tmp_path / "checkpoint.h5").read_bytes()


def test_blocks_may_have_any_order_and_any_names(tmp_path: Path, store: CheckpointStore) -> None:
    tensors = {"x": torch.arange(14.0).view(7, 2), "flag": torch.arange(7) % 2 == 0}
    rows = rows_of(tensors)
    blocks = [
        *blocks_of(tensors, [1, 2, 5], []),
        *blocks_of({"x": tensors["x"]}, [0, 6], [3, 4]),
        *blocks_of({"flag": tensors["flag"]}, [0, 3, 4, 6]),
    ]
    personalised = {"theta": torch.arange(3.0).view(1, 3), "buffers": torch.arange(21.0).view(7, 3)}
    shared, own = ({name: personalised[name]} for name in personalised)
    of_models = [*blocks_of(own, [4, 5, 6]), *blocks_of(shared, [0]), *blocks_of(own, [0, 1, 2, 3])]
    models = {"personalised": lambda: replace(rows_of(personalised), blocks=of_models)}
    store.save(replace(snapshot_of(1), clients=replace(rows, blocks=blocks), models=models))
    loaded = load(tmp_path).client_rows(0, 7)
    assert all(same_bits(loaded[name], tensors[name]) for name in tensors)
    with h5py.File(tmp_path / "checkpoint.h5") as file:
        assert file["personalised/theta"][()].tolist() == [[0.0, 1.0, 2.0]]
        assert file["personalised/buffers"][()].tolist() == personalised["buffers"].tolist()


def test_blocks_of_a_method_without_client_state_are_consumed(tmp_path: Path, store: CheckpointStore) -> None:
    blocks = blocks_of({}, range(4), range(4, 7))
    store.save(replace(snapshot_of(1), clients=Rows({}, blocks)))
    assert list(blocks) == []
    assert load(tmp_path).client_rows(0, NUM_CLIENTS) == {}


def test_one_block_is_in_memory_at_a_time(store: CheckpointStore) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def blocks() -> Iterator[Block]:
        for client in range(NUM_CLIENTS):
            assert all(reference() is None for reference in made)
            rows = torch.ones(1, 50)
            made.append(weakref.ref(rows))
            yield np.array([client]), {"x": rows}
            del rows

    rows = Rows({"x": torch.empty(NUM_CLIENTS, 50, device="meta")}, blocks())
    store.save(replace(snapshot_of(1), clients=rows))
    assert len(made) == NUM_CLIENTS


FLOATS = torch.zeros(NUM_CLIENTS, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server": {"a": torch.ones(1)}, "derived": {"a": torch.ones(1)}}, "exists"),
        ({"clients": rows_of({"x": FLOATS}, range(6))}, r"rows \[6\].* of 'x' were not written exactly once"),
        (
            {"clients": rows_of({"x": FLOATS}, range(7), [2])},
            r"rows \[2\].* of 'x' were not written exactly once",
        ),
    ],
)
def test_a_wrong_snapshot_is_refused_and_the_old_checkpoint_is_kept(
    tmp_path: Path, store: CheckpointStore, changes: dict[str, object], message: str
) -> None:
    store.save(snapshot_of(1))
    with pytest.raises(ValueError, match=message):
        store.save(replace(snapshot_of(2), **changes))  # type: ignore[arg-type]
    assert names_of(tmp_path) == ["checkpoint.h5"]
    assert rounds_in(load(tmp_path)) == {1}


def test_the_newest_and_previous_checkpoint_are_of_the_last_two_rounds(
    tmp_path: Path, store: CheckpointStore
) -> None:
    (tmp_path / "checkpoint.tmp.h5").write_bytes(b"left by a killed run")
    assert store.load() is None
    for round_ in (1, 2, 3):
        store.save(snapshot_of(round_))
    assert names_of(tmp_path) == ["checkpoint.h5", "checkpoint.prev.h5"]
    assert round_of(tmp_path / "checkpoint.h5") == 3
    assert round_of(tmp_path / "checkpoint.prev.h5") == 2
    resumed = CheckpointStore(tmp_path)
    loaded = resumed.load()
    assert loaded is not None
    assert rounds_in(loaded) == {3}
    resumed.save(snapshot_of(4))
    assert round_of(tmp_path / "checkpoint.prev.h5") == 3
    assert rounds_in(loaded) == {3}
    (tmp_path / "checkpoint.h5").unlink()
    resumed.save(snapshot_of(5))
    assert round_of(tmp_path / "checkpoint.prev.h5") == 3


def test_a_checkpoint_is_on_the_disk_before_it_replaces_another(
    tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without power loses what was not flushed; a killed process does not."""
    store.save(snapshot_of(1))
    done: list[str] = []
    fsync, replace_file = os.fsync, os.replace

    def syncing(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def replacing(source: Path, target: Path) -> None:
        done.append(f"{source.name} to {target.name}")
        replace_file(source, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", replacing)
    store.save(snapshot_of(2))
    renamed = ["checkpoint.h5 to checkpoint.prev.h5", "checkpoint.tmp.h5 to checkpoint.h5"]
    assert done == ["sync checkpoint.tmp.h5", *renamed, f"sync {tmp_path.name}"]


def test_every_truncation_extension_and_flipped_bit_is_detected(
    tmp_path: Path, store: CheckpointStore
) -> None:
    store.save(snapshot_of(1))
    path = tmp_path / "checkpoint.h5"
    whole = path.read_bytes()
    cut = [whole[:length] for length in (0, 1, 100, 511, 512, 513, 2048, len(whole) // 2, len(whole) - 1)]
    # in the user block, in the superblock and in whatever part of the state follows
    changed = [flipped(whole, place) for place in (30, 520, *range(1000, len(whole), 500))]
    for content in [*cut, *changed, whole + b"\0"]:
        path.write_bytes(content)
        with pytest.raises(UserError, match="damaged"):
            store.load()


@pytest.mark.parametrize(("harm", "word"), [(damage, "damaged"), (Path.unlink, "missing")])
def test_the_previous_checkpoint_is_used_with_a_warning(
    tmp_path: Path,
    store: CheckpointStore,
    harm: Callable[[Path], None],
    word: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store.save(snapshot_of(1))
    store.save(snapshot_of(2))
    harm(tmp_path / "checkpoint.h5")
    resumed = CheckpointStore(tmp_path)
    loaded = resumed.load()
    assert loaded is not None
    assert loaded.path == tmp_path / "checkpoint.prev.h5"
    assert rounds_in(loaded) == {1}
    (warning,) = caplog.messages
    assert f"{tmp_path / 'checkpoint.h5'} is {word}" in warning
    assert f"{tmp_path / 'checkpoint.prev.h5'}, round 1" in warning

    resumed.save(snapshot_of(3))
    assert round_of(tmp_path / "checkpoint.h5") == 3
    assert round_of(tmp_path / "checkpoint.prev.h5") == 1
    assert rounds_in(load(tmp_path)) == {3}

    harm(tmp_path / "checkpoint.h5")
    damage(tmp_path / "checkpoint.prev.h5")
    with pytest.raises(UserError) as caught:
        resumed.load("bring it back")
    message = str(caught.value)
    assert "\n" not in message
    assert f"{tmp_path / 'checkpoint.h5'} is {word}" in message
    assert f"{tmp_path / 'checkpoint.prev.h5'} is damaged" in message
    assert message.endswith("; bring it back")


def test_a_newer_schema_is_refused_without_falling_back(tmp_path: Path, store: CheckpointStore) -> None:
    store.save(snapshot_of(1))
    store.save(snapshot_of(2))
    with h5py.File(tmp_path / "checkpoint.h5", "r+") as file:
        file.attrs["schema"] = 7
    sign(tmp_path / "checkpoint.h5")
    with pytest.raises(UserError) as caught:
        store.load()
    message = str(caught.value)
    assert f"{tmp_path / 'checkpoint.h5'} has checkpoint schema 7" in message
    assert all(words in message for words in (f"up to {SCHEMA}", "upgrade hpcfl", "--fresh"))


def test_a_run_that_has_lost_its_folder_leaves_the_unfinished_checkpoint_of_the_other(
    tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise StorageError("taken over")

    def write_of_other_and_fail(path: Path, _: Snapshot) -> None:
        path.write_bytes(b"half")
        raise OSError("no space")

    monkeypatch.setattr(checkpoint, "write_snapshot", write_of_other_and_fail)
    with pytest.raises(OSError, match="no space"):
        store.save(snapshot_of(1), lost)
    assert (tmp_path / "checkpoint.tmp.h5").read_bytes() == b"half"


def test_bytes_that_a_bad_disk_changes_are_not_accepted(
    tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of what was written is another before it is read back."""

    def write(path: Path, snapshot: Snapshot) -> None:
        write_snapshot(path, snapshot)
        damage(path)

    store.save(snapshot_of(1))
    monkeypatch.setattr(checkpoint, "write_snapshot", write)
    with pytest.raises(OSError, match=r"checkpoint\.tmp\.h5 is damaged"):
        store.save(snapshot_of(2))
    assert names_of(tmp_path) == ["checkpoint.h5"]
    assert rounds_in(load(tmp_path)) == {1}


def save_and_die_at(folder: Path, event_to_die_at: int) -> None:
    """Run one more round; die just before the n-th time that a file is opened, renamed or removed."""
    store = CheckpointStore(folder)
    loaded = store.load()
    assert loaded is not None
    seen = 0

    def die(event: str, _: tuple[object, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.rename", "os.remove"):
            seen += 1
            if seen == event_to_die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    store.save(snapshot_of(loaded.round + 1))


@pytest.mark.warns
def test_a_kill_at_any_step_leaves_a_complete_checkpoint(tmp_path: Path, store: CheckpointStore) -> None:
    store.save(snapshot_of(1))
    for step in itertools.count(1):
        saving = forked(functools.partial(save_and_die_at, tmp_path, step))
        code = exit_code(saving)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        loaded = store.load()
        assert loaded is not None
        [round_] = rounds_in(loaded)
        assert round_ in (2 * step - 1, 2 * step)
        loaded.close()
        store.save(snapshot_of(2 * step + 1))
        assert "checkpoint.tmp.h5" not in names_of(tmp_path)
        assert rounds_in(load(tmp_path)) == {2 * step + 1}
    assert step > 6
