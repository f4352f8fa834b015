"""Read a run's folder, also while the run is running.

Shapes: N clients, E evaluations.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from hpcfl.config.keys import ENVIRONMENT, Config, Layout, TrainConfig
from hpcfl.config.load import differences
from hpcfl.config.own_code import allow_files, code_in_use
from hpcfl.data.arrays import Arrays, digest_of
from hpcfl.data.partitions import ClientIndices
from hpcfl.errors import UserError, printable
from hpcfl.methods import METHODS
from hpcfl.registries import resolve
from hpcfl.results.export import export
from hpcfl.results.models import ClientName, TrainedModels
from hpcfl.setup.experiment import digest_of_parts, load_data
from hpcfl.storage.checkpoint import CheckpointStore
from hpcfl.storage.hdf5 import LoadedCheckpoint
from hpcfl.storage.ledger import ACCURACY_VAL, is_over
from hpcfl.storage.lock import holder
from hpcfl.storage.reading import Columns, damaged, read_columns, read_record, whole_lines

LOG = logging.getLogger(__name__)

RunState = Literal["running", "finished", "stopped", "killed", "unknown"]
"""`stopped`: the lock is released; `killed`: it is not. `unknown`: on another machine, may be
running."""

ENDED: tuple[RunState, ...] = ("finished", "stopped", "killed")


@dataclass(frozen=True)
class Status:
    """State of a run at one moment."""

    state: RunState
    owner: str
    """Owner of the lock, alive or killed, such as `pid 7 on node3`; may be empty."""
    changed_s: float
    """Time of the run's last write (except checkpoints), in seconds since 1970."""


def load_run(path: str | Path, own_code: str | Path | Sequence[str | Path] = ()) -> Run:
    """Return the run in a folder, which may still be running.

    Args:
        path: the folder; it is safe to read folders from others.
        own_code: a Python file, or several, that may run if the run was made with them, such as that of your
        own method. No other code runs, except code that this process has already run.

    Raises:
        UserError: there is no run, it is damaged, or its own code is missing, has changed, or is not allowed
        to run.
    """
    allow_files(own_code)
    run = Run(Path(path))
    # report errors of the configuration now
    _ = run.config
    return run


def run_folders(folder: Path) -> list[Path]:
    """Return the folders of the runs in a folder of runs, such as a table's; else the folder itself."""
    try:
        if (folder / "config.yaml").is_file():
            return [folder]
        records = [record for pattern in ("*", "*/*") for record in folder.glob(f"{pattern}/config.yaml")]
    except OSError:
        # such as a folder of someone else: whoever reads it gets the reason
        return [folder]
    inside = {record.parent for record in records}
    # runs that --fresh moved aside do not belong to a table
    current = sorted(path for path in inside if not re.search(r"\.old\d+$", path.name))
    return current or [folder]


def finished_runs(folder: Path) -> list[Run]:
    """Return the run in a folder, which may still be running, or all finished runs in a folder of runs.

    Of a folder of runs, those that cannot be read are left out with a warning.
    Raises UserError as `load_run`, or if no run in it is finished.
    """
    folders = run_folders(folder)
    if folders == [folder]:
        return [load_run(folder)]
    finished = []
    for path in folders:
        try:
            run = load_run(path)
        except UserError as error:
            LOG.warning(f"left out: {error}")
            continue
        if run.is_finished:
            finished.append(run)
    if not finished:
        raise UserError(
            f"{folder} has no finished run; name the folder of one that is running, such as {folders[0]}"
        )
    return finished


class Run:
    """The run in a folder. Files are read when they are first asked for, and never written or locked."""

    def __init__(self, path: Path) -> None:
        """Read config.yaml, but no other file; raise UserError if there is none or it is damaged."""
        self.path = path
        self.record: Mapping[str, Any] = read_record(path)
        """The nested keys of config.yaml."""
        self.environment: Mapping[str, Any] = self.record.pop(ENVIRONMENT, {})
        """Versions, processor, command and ranks."""
        self.rounds: int = self.record["train"]["rounds"]
        """The run's `train.rounds`."""

    def __repr__(self) -> str:
        accuracy = f"accuracy {self.last['accuracy_mean']:.2%}" if self.metrics else "no evaluation yet"
        return f"<Run {self.path.name}: {self.status.state}, round {self.done}/{self.rounds}, {accuracy}>"

    @cached_property
    def config(self) -> Config:
        """The configuration; raises UserError where it is damaged, or a file of its own code is another."""
        try:
            return resolve(self.record)
        except UserError as error:
            raise UserError(f"{self.path / 'config.yaml'}: {error}") from error

    @property
    def status(self) -> Status:
        """How the run is going now; raises UserError where its files cannot be read."""
        try:
            owner, is_held = holder(self.path)
            files = [self.path / name for name in ("config.yaml", "metrics.csv", "log.txt")]
            changed_s = max(path.stat().st_mtime for path in files if path.exists())
            state: RunState = "unknown" if is_held is None else "killed"
            # not by what this object has read before
            if Run(self.path).is_finished:
                state = "finished"
            elif is_held or not owner:
                state = "running" if is_held else "stopped"
            return Status(state, printable(owner), changed_s)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}: {error.filename}") from error

    @property
    def log(self) -> list[str]:
        """The lines of log.txt."""
        return [printable(line) for line in whole_lines(self.path / "log.txt")]

    @property
    def done(self) -> int:
        """Rounds completed at the last evaluation."""
        return int(self.metrics["round"][-1]) if self.metrics else 0

    @property
    def is_finished(self) -> bool:
        """Whether no round follows; clients.csv is written last, and deleted when a run is resumed."""
        known = self.metrics.get(ACCURACY_VAL, np.empty(0)).tolist()
        patience = self.record["train"].get("patience")
        return is_over(self.done, self.rounds, known, patience) and (self.path / "clients.csv").is_file()

    @cached_property
    def metrics(self) -> Columns:
        """Columns of metrics.csv [E], such as "round" and "accuracy_mean"."""
        return self._columns("metrics.csv")

    @property
    def last(self) -> dict[str, float]:
        """The last row of metrics.csv by column; raises UserError without an evaluation."""
        return self._evaluation(-1)

    @property
    def best(self) -> dict[str, float]:
        """The first row with the highest mean accuracy, as `last`."""
        means = self.metrics.get("accuracy_mean", np.zeros(1))
        return self._evaluation(int(np.argmax(np.nan_to_num(means, nan=-1))))

    def _evaluation(self, row: int) -> dict[str, float]:
        if not self.metrics:
            raise UserError(f"{self.path} has no evaluation yet; wait for the first one")
        return {name: float(values[row]) for name, values in self.metrics.items()}

    @cached_property
    def bytes(self) -> Columns:
        """Columns of bytes.csv: "round", "direction", "layer" and "bytes"."""
        return self._columns("bytes.csv")

    @cached_property
    def clients(self) -> Columns:
        """Columns of clients.csv; empty while the run is not finished.

        Clients that take no part in training come last, with 1 in a column "unseen".
        Raises UserError if the file is damaged, or has other clients than partition.csv.
        """
        path = self.path / "clients.csv"
        if not path.exists():
            return {}
        found = self._columns("clients.csv")
        count = len(found.get("client", ()))
        if self.partition and count != self.partition["client"].max() + 1:
            # the header is line 1
            raise damaged(path, count + 2)
        return found

    @property
    def num_unseen(self) -> int:
        """Clients that take no part in training; 0 before the run has divided its samples."""
        ids = (self.partition or self.clients).get("client", np.empty(0))
        return self.config.data.num_unseen(int(ids.max()) + 1) if len(ids) else 0

    @property
    def in_training(self) -> Columns:
        """Columns of clients.csv of the clients in training [N]; empty while the run is not finished."""
        is_there = self.clients.get("unseen", np.zeros(len(self.clients.get("client", ())))) == 0
        return {name: values[is_there] for name, values in self.clients.items() if name != "unseen"}

    @property
    def diverged(self) -> np.ndarray:
        """In how many rounds each client in training has diverged [N]; empty before the first checkpoint.

        While the run is running, it comes from the newest checkpoint.
        """
        if self.is_finished:
            return self.in_training.get("diverged", np.zeros(len(self.in_training["client"])))
        found = None if self.checkpoint is None else self.checkpoint.ledger.get("diverged")
        return np.empty(0) if found is None else found.values[:, 0]

    @cached_property
    def partition(self) -> Columns:
        """Columns of partition.csv: samples of each client by class, where there are any."""
        return self._columns("partition.csv")

    def samples_by_class(self, column: str) -> np.ndarray:
        """Return a column of partition.csv by client and class, int64 [N + U, K]; there must be the file."""
        client, label = (self.partition[name].astype(np.int64) for name in ("client", "class"))
        table = np.zeros((client.max() + 1, label.max() + 1), np.int64)
        table[client, label] = self.partition[column]
        return table

    @property
    def domains(self) -> list[str]:
        """The domain of each client [N + U]; [] where the data have none."""
        if "domain" not in self.partition:
            return []
        of_client = dict(
            zip(self.partition["client"].tolist(), self.partition["domain"].tolist(), strict=True)
        )
        return [of_client[client] for client in sorted(of_client)]

    @cached_property
    def checkpoint(self) -> LoadedCheckpoint | None:
        """The newest whole checkpoint; None before the first.

        Raises:
            UserError: all checkpoints are damaged.
        """
        self._check_unchanged()
        return CheckpointStore(self.path).load(
            "its models and histories are lost, the figures in its CSV files are not; restore the checkpoint "
            "from a backup, or name the folder of another run"
        )

    @cached_property
    def confusion(self) -> Columns:
        """Columns of confusion.csv: samples of each client by class and predicted class.

        Empty before the end of the run, and where it was run without `run.metrics`. Raises UserError if the
        file is damaged.
        """
        return self._columns("confusion.csv") if self.is_finished else {}

    @property
    def accuracy_by_class(self) -> np.ndarray:
        """Share of the samples of each class that are predicted correctly, clients in training together [K].

        nan for a class without samples; empty where `confusion` is.
        """
        found = self.confusion
        if not found:
            return np.empty(0)
        is_there = found["client"] < len(self.in_training["client"])
        label, predicted = (found[name][is_there].astype(int) for name in ("class", "predicted"))
        samples = found["evaluated_samples"][is_there]
        total = np.bincount(label, samples)
        with np.errstate(invalid="ignore"):
            return np.bincount(label, samples * (label == predicted)) / total

    def _columns(self, name: str) -> Columns:
        self._check_unchanged()
        return read_columns(self.path / name)

    def _check_unchanged(self) -> None:
        """Raise UserError if another run has taken the folder, or this one has got more rounds."""
        now = read_record(self.path)
        now.pop(ENVIRONMENT, None)
        if lines := differences(self.record, now, but=["data.path"]):
            changed = ", ".join(line.partition(":")[0] for line in lines)
            raise UserError(
                f"{self.path} has another {changed} now than when this run was loaded; load it again"
            )

    def close(self) -> None:
        """Free the checkpoint and its history; they are read again when needed."""
        checkpoint = self.__dict__.pop("checkpoint", None)
        if checkpoint is not None:
            checkpoint.close()

    @property
    def history(self) -> Mapping[str, np.ndarray]:
        """Accuracy and loss of all clients [E, N], and the method's diagnostics [E, ...].

        They end at the newest checkpoint (see `history_rounds`), and are empty before the first.
        """
        return {} if self.checkpoint is None else self.checkpoint.history

    @property
    def history_rounds(self) -> np.ndarray:
        """The rounds after which there are entries in `history`, int64 [E]."""
        return np.empty(0, np.int64) if self.checkpoint is None else self.checkpoint.rounds

    def recorded(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return a method's diagnostic [E, ...] and its rounds [E]; None without it.

        If the history has none, as with very many clients, only the newest is returned, from the server.
        """
        if self.checkpoint is None:
            return None
        if name in self.history:
            return self.history[name], self.history_rounds
        newest = self.checkpoint.newest(name)
        return None if newest is None else (newest[None], np.array([self.checkpoint.round]))

    def layers(self, count: int) -> list[str]:
        """Return the names of the `count` layers of the method's models, in order."""
        return [] if self.checkpoint is None else self.checkpoint.layers[:count]

    @cached_property
    def models(self) -> TrainedModels:
        """The models of the newest checkpoint; raises UserError where there is no checkpoint, or where the
        run's own method has been defined anew since then."""
        if self.checkpoint is None:
            raise UserError(
                f"{self.path} has no checkpoint.h5, which has the models; copy it from where the run was "
                "made, or let the run finish (run its command again to resume)"
            )
        name, code = self.config.method.name, self.record["method"].get("code")
        if code != code_in_use("method.path", name, METHODS[name]):
            remedy = "call hpcfl.run again with the class that made them"
            if "path" in self.record["method"]:
                remedy = "load the run in another process"
            raise UserError(
                f"{self.path}: its models are not those of the method.name={name} that this process has now; "
                f"{remedy}"
            )
        return TrainedModels(self.config, self.checkpoint)

    def model(self, client: ClientName) -> dict[str, Tensor]:
        """Return a client's personalised model, or with "global" the server's, as named tensors.

        They are the state of `network`; for a method that does not predict by one network, its parts by name.

        Raises:
            UserError: there is no such model, as before the last round.
        """
        return self.models.tensors(client)

    def network(self, client: ClientName) -> nn.Module:
        """Return the same model as a network in evaluation mode, from normalised samples to logits.

        Raises:
            UserError: as `model`, or its method does not predict by one network.
        """
        return self.models.network(client)

    @cached_property
    def _pool(self) -> tuple[Arrays, list[ClientIndices]]:
        """The data set and each client's samples; raises UserError if they are not those of the run."""
        arrays, parts = load_data(self.config)
        known = self.models.data
        if known.digest not in (0, digest_of(arrays)):
            raise UserError(f"{self.path}: the data set is not that of the run; bring its files back")
        if known.partition_digest not in (0, digest_of_parts(parts)):
            raise UserError(
                f"{self.path}: this version of hpcfl divides the data in another way; use that of the run"
            )
        return arrays, parts

    def samples(
        self, client: int, part: Literal["train", "val", "test"] = "test"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a client's samples as its data set has them, as `predict` takes them, and labels int64 [n].

        The data set is read anew. Raises UserError where it cannot be read, where it is not that of the run,
        for another client, and where `data.shift` changed what the client saw.
        """
        if self.config.data.shift is not None:
            raise UserError(
                f"{self.path}: data.shift changed its samples, and the data set has them unchanged"
            )
        number, (arrays, parts) = self.models.number(client), self._pool
        chosen = getattr(parts[number], part)
        return arrays.x[chosen], arrays.y[chosen]

    def predict(self, client: ClientName, samples: object, layout: Layout | None = None) -> np.ndarray:
        """Return class probabilities float32 [n, K] of samples as the run's data set stores them, by the
        method's own rule.

        Channels of images and series are the second or last axis, and grey images may be [n, H, W]; `layout`
        is by default the one that fits, or the run's data.layout if both fit. Raises UserError as `model`, or
        if samples are not like the run's.
        """
        return self.models.probabilities(client, samples, layout)

    def export(self, client: ClientName | Literal["all"], out: str | Path) -> list[Path]:
        """Write models for use without hpcfl, and return the files (see hpcfl.results.export)."""
        return export(self.models, client, Path(out), self.clients if self.is_finished else {})


def folder_names(runs: Sequence[Run]) -> list[str]:
    """Return the names of the runs' folders, with as much of the path as makes them different."""
    paths = [run.path.resolve().parts for run in runs]
    length = 1
    # a set, since a run that is given twice has only one path
    while max(Counter(path[-length:] for path in set(paths)).values()) > 1:
        length += 1
    return ["/".join(path[-length:]) for path in paths]


def scored_when(method: str, train: TrainConfig) -> str:
    """Return when a run's models are scored: after the download, after training, or after fine-tuning."""
    return f"after {'fine-tuning' if train.finetune_epochs else METHODS[method].traits.eval_after}"
