"""What a run sends to a tracker, read back by the tracker's own reader."""

from __future__ import annotations

import importlib
import json
import math
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from bits import differing, read_csv, refused, run_here, run_killed_in_round, tiny_settings
from processes import run_forked

from hpcfl.errors import FINISHED
from hpcfl.storage.trackers import BINS, TRACKERS, Tracker

ROUNDS = 4
UNSEEN = 1
TOLERANCE = 1e-6
"""Events hold float32."""


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    return [*tiny_settings(digits), "method.name=fedavg", f"train.rounds={ROUNDS}", "run.checkpoint_every=2"]


@pytest.fixture(scope="module")
def plain(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run without a tracker."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    assert run_here(folder, settings) == FINISHED
    return folder


def reader(folder: Path) -> Any:
    """Return TensorBoard's reader of a folder, whose Reload reads what has come since."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), {"scalars": 0, "histograms": 0}).Reload()


def scalars(found: Any) -> dict[tuple[str, int], float]:
    """Return values by name and round; none may be there twice."""
    names = found.Tags()["scalars"]
    events = [(name, event.step, event.value) for name in names for event in found.Scalars(name)]
    assert max(Counter(event[:2] for event in events).values()) == 1
    return {(name, step): value for name, step, value in events}


def rows(folder: Path) -> dict[tuple[str, int], float]:
    """Return the numbers of metrics.csv by name and round."""
    return {
        (name, int(line["round"])): float(cell)
        for line in read_csv(folder / "metrics.csv")
        for name, cell in line.items()
        if name != "round" and not math.isnan(float(cell))
    }


def test_a_tracker_that_is_added_later_has_all_columns_and_a_histogram_from_the_first_round(
    settings: list[str], tmp_path: Path
) -> None:
    keys = [*settings, "data.unseen_clients=0.2", "clients.drop_rate=0.3", "clients.step_s=1"]
    assert run_here(tmp_path, [*keys, "train.rounds=3"]) == FINISHED
    assert not list(tmp_path.glob("events.*"))
    assert run_here(tmp_path, [*keys, "run.tracker=tensorboard"]) == FINISHED
    expected, found = rows(tmp_path), reader(tmp_path)
    assert {("accuracy_unseen", 1), ("lost", 1), ("simulated_s", 1)} <= expected.keys()
    assert scalars(found) == pytest.approx(expected, rel=TOLERANCE)
    accuracy = np.array([float(row["accuracy"]) for row in read_csv(tmp_path / "clients.csv")][:-UNSEEN])
    last = found.Histograms("accuracy_of_clients")[-1].histogram_value
    assert (last.num, last.min, last.max) == (len(accuracy), accuracy.min(), accuracy.max())
    # a bin that ends at 1 has those at 1 too
    edges = np.minimum(np.searchsorted(BINS, accuracy, side="right"), len(BINS) - 1)
    counts = Counter(BINS[edges].round(9).tolist())
    assert {round(end, 9): n for end, n in zip(last.bucket_limit, last.bucket, strict=True) if n} == counts


def test_a_killed_and_resumed_run_has_every_round_once(
    settings: list[str], plain: Path, tmp_path: Path
) -> None:
    asked = [*settings, "run.tracker=tensorboard"]
    run_killed_in_round(3, tmp_path, asked)
    found = reader(tmp_path)
    # rounds 1 to 3, of which the checkpoint after round 2 does not know the last
    assert {step for _, step in scalars(found)} == {1, 2, 3}
    assert run_here(tmp_path, asked) == FINISHED
    again = reader(tmp_path)
    expected = rows(tmp_path)
    assert {step for _, step in expected} == set(range(1, ROUNDS + 1))
    assert scalars(again) == pytest.approx(expected, rel=TOLERANCE)
    # one that has read the events of before the kill
    assert scalars(found.Reload()) == pytest.approx(expected, rel=TOLERANCE)
    assert [event.step for event in again.Histograms("accuracy_of_clients")] == list(range(1, ROUNDS + 1))
    assert run_here(tmp_path, asked) == FINISHED
    assert scalars(found.Reload()) == pytest.approx(expected, rel=TOLERANCE)
    assert not differing(plain, tmp_path)
    assert not list(plain.glob("events.*"))


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("mlflow", "mlflow-skinny")]
)
def test_a_missing_package_is_reported_before_the_run_and_not_needed_without_the_tracker(
    name: str,
    package: str,
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    top = package.partition("-")[0]
    for module in [module for module in sys.modules if module.partition(".")[0] == top]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, top, None)
    of_run = (*settings, f"run.tracker={name}", "--out", tmp_path / "run")
    for words in (of_run, ("plan", *settings, f"run.tracker={name}"), ("doctor", *of_run)):
        error = refused(capfd, *words)
        assert error.startswith(f"hpcfl: error: run.tracker={name} needs the package {package}")
    assert f"pip install {package}" in error
    assert not (tmp_path / "run").exists()
    assert run_here(tmp_path / "run", [*settings, "train.rounds=1"]) == FINISHED


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Read a log of LevelDB: after a header of 7 bytes, blocks of 32 KiB with pieces of records."""
    place, record = 7, b""
    while place + 7 <= len(data):
        if (left := 2**15 - place % 2**15) < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield record
            record = b""


def wandb_rows(folder: Path) -> list[dict[tuple[str, int], float]]:
    """Return the numbers of each offline file of Weights & Biases, oldest first, by name and round."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    files = folder.glob("wandb/offline-run-*/run-*.wandb")
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns):
        numbers = {}
        for data in wandb_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                for item in record.history.item:
                    name = item.key or item.nested_key[0]
                    if name[0] != "_":
                        numbers[name, record.history.step.num] = json.loads(item.value_json)
        found.append(numbers)
    return found


def run_twice(folder: Path, settings: list[str], tracker: str, env: dict[str, str]) -> None:
    """Run in processes of their own: clients of services leave threads behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(tracker)
    words = ["-m", "hpcfl.main", *settings, f"run.tracker={tracker}", "--out", str(folder)]
    run_forked([*words, "train.rounds=3"], env=env)
    assert run_forked(words, env=env).stderr == ""


def test_wandb_offline_has_every_round_in_the_newest_folder(settings: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_twice(folder, settings, "wandb", {"WANDB_MODE": "offline"})
    first, whole = wandb_rows(folder)
    assert {step for _, step in first} == {1, 2, 3}
    assert whole == pytest.approx(rows(folder))
    name = (folder / "wandb.txt").read_text().strip()
    assert all(name in path.name for path in folder.glob("wandb/offline-run-*"))


def test_mlflow_has_every_round_once(settings: list[str], tmp_path: Path) -> None:
    from mlflow import MlflowClient

    folder = tmp_path / "run"
    uri = f"file://{tmp_path}/mlruns"
    env = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_FILE_STORE": "true"}
    run_twice(folder, settings, "mlflow", env)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name("hpcfl")
        (run,) = client.search_runs([experiment.experiment_id])
        sent = [
            ((name, metric.step), metric.value)
            for name in run.data.metrics
            for metric in client.get_metric_history(run.info.run_id, name)
        ]
    assert run.info.status == "FINISHED"
    assert run.data.params["method.name"] == "fedavg"
    assert dict(sent) == pytest.approx(rows(folder))
    assert len(sent) == len(dict(sent))


class Known(Tracker):
    """In place of a service; knows under which ids runs were opened."""

    module = package = "json"
    opened: ClassVar[list[tuple[str, str | None]]] = []

    def _open(self, known: str | None, folder: Path, keys: dict[str, Any], wall_s: float) -> tuple[str, int]:
        self.opened.append((keys["run.tracker"], known))
        return f"of {keys['run.tracker']}", 0

    def _send(self, done: int, row: dict[str, float], accuracy: np.ndarray) -> None:
        pass

    def close(self, is_finished: bool) -> None:
        if is_finished:
            raise ConnectionError("no answer")


def test_each_service_has_its_own_id_and_one_that_fails_at_the_end_is_reported(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Known.opened.clear()
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(TRACKERS, name, Known)
    for tracker, rounds in [("wandb", 1), ("mlflow", 2), ("wandb", 3)]:
        capsys.readouterr()
        keys = [*settings, f"run.tracker={tracker}", f"train.rounds={rounds}"]
        assert run_here(tmp_path / "run", keys) == FINISHED
        (warning,) = capsys.readouterr().err.splitlines()
        assert f"run.tracker={tracker} has failed: ConnectionError: no answer" in warning
    assert Known.opened == [("wandb", None), ("mlflow", None), ("wandb", "of wandb")]


def test_a_run_that_starts_over_has_a_new_id(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Known.opened.clear()
    monkeypatch.setitem(TRACKERS, "wandb", Known)
    keys = [*settings, "run.tracker=wandb", "run.checkpoint_every=4"]
    run_killed_in_round(2, tmp_path, keys)
    assert (tmp_path / "wandb.txt").read_text() == "of wandb\n"
    assert run_here(tmp_path, [*keys, "train.lr=0.2"]) == FINISHED
    assert "has no checkpoint; starting over at round 0" in capsys.readouterr().err
    assert Known.opened == [("wandb", None)]


def test_a_service_that_cannot_be_reached_is_dropped_with_a_warning(
    settings: list[str], plain: Path, tmp_path: Path
) -> None:
    env = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    words = [*settings, "run.tracker=mlflow", "--quiet", "--out", str(tmp_path / "run")]
    ended = run_forked(["-m", "hpcfl.main", *words], env=env)
    (warning,) = ended.stderr.splitlines()
    assert warning.startswith(f"hpcfl: warning: {tmp_path / 'run'}: run.tracker=mlflow has failed: ")
    assert not differing(plain, tmp_path / "run")
