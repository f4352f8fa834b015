"""Costs and results of a run: bytes, seconds, accuracy and diagnostics, in CSV files and checkpoints.

Shapes: N clients, E evaluations, K labels of bytes (the layers, other tensors that were sent, running
statistics, indices).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfl.communication.messages import Cohort
from hpcfl.communication.traffic import Traffic
from hpcfl.config.keys import ClientsConfig
from hpcfl.storage.atomic import csv_text, replace_file
from hpcfl.storage.reading import COLUMNS
from hpcfl.storage.snapshot import LedgerTable
from hpcfl.training.metrics import CLIENT_METRICS

METRICS = (
    "round",
    "wall_s",
    "accuracy_mean",
    "accuracy_std",
    "accuracy_weighted",
    "accuracy_after_download",
    "accuracy_after_training",
    "coverage",
    "loss_mean",
    "train_loss_mean",
    "bytes_down",
    "bytes_up",
    "buffer_bytes_down",
    "buffer_bytes_up",
    "index_bytes_down",
    "index_bytes_up",
    "client_steps_per_s",
    "train_s",
    "evaluate_s",
    "save_s",
    "diverged",
)
UNSEEN_METRICS = ("accuracy_unseen", "accuracy_unseen_std", "loss_unseen")
"""More columns where clients take no part in training: plain mean and deviation of these clients' accuracies
once they have adapted, and their mean loss."""
EPSILON = "epsilon"
"""One more column with `privacy.unit`: epsilon of all rounds so far."""
ACCURACY_VAL = "accuracy_val"
"""One more column with `train.patience`: plain mean of the clients' accuracies on validation samples."""
LOST, SIMULATED = "lost", "simulated_s"
"""More columns: how often a member of a cohort was lost so far, where `clients.*` lets some be lost; and
seconds of the simulated clock so far, where there is one."""
WHOLE_NUMBERS = frozenset({"round", "diverged", LOST} | {name for name in METRICS if "bytes" in name})
SPENT = ("train_s", "evaluate_s", "save_s")
"""Columns of the seconds that went into training, evaluations and checkpoints since round 0."""
PENDING = ("steps", "steps_s", "train_loss", "wall_s", *SPENT)
"""Columns: sums since the last evaluation, and the seconds so far."""

MOMENTS = ("after_download", "after_training")
"""Moments at which clients are scored besides the evaluation: right after a download, and right after local
training (the round's cohort only)."""
OF_CLIENTS = ("accuracy", "loss", *(f"accuracy_{moment}" for moment in MOMENTS))
OF_UNSEEN = ("accuracy_unseen", "loss_unseen")
"""Results of an evaluation for each client in training, and for each one that takes no part in it."""

BUFFERS_LABEL, INDICES_LABEL = "(running statistics)", "(indices)"
DIRECTIONS = ("down", "up")


@dataclass(frozen=True)
class Evaluation:
    """Figures of each client, unseen ones last [N + U]; zero before an evaluation, and on other ranks than
    the server."""

    accuracy: np.ndarray
    loss: np.ndarray
    after_download: np.ndarray
    """Accuracy of the model right after a download; nan where a client has none. Not for unseen clients."""
    accuracy_val: np.ndarray
    """Accuracy on validation samples; nan without `train.patience`, and for unseen clients."""

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """The arrays themselves, in this order."""
        return self.accuracy, self.loss, self.after_download, self.accuracy_val

    @staticmethod
    def zeros(num_clients: int) -> Evaluation:
        """Return the evaluation of `num_clients` clients before any of them is scored: all zeros."""
        return Evaluation(*np.zeros((4, num_clients)))


@dataclass(frozen=True)
class ClientMetrics:
    """What `run.metrics` adds at the end of a run, of all clients; unseen ones come last."""

    figures: np.ndarray
    """Float64 [N + U, CLIENT_METRICS]."""
    confusion: np.ndarray
    """Int64 [lines, 4], in order: client, class, predicted class, and how many samples, at least one."""


class Ledger:
    """Rows of metrics.csv and bytes.csv so far, and the bytes of each client.

    Bytes are cumulative since round 0 in `metrics`, and of one round in `bytes`. `num_unseen` clients take no
    part in training, and are scored separately. `is_private` and `has_patience`: `privacy.unit` and
    `train.patience` are set.
    """

    def __init__(
        self,
        method: str,
        settings: ClientsConfig,
        num_clients: int,
        layers: Sequence[str],
        num_unseen: int = 0,
        *,
        is_private: bool,
        has_patience: bool,
    ) -> None:
        self._method, self._settings = method, settings
        self._num_unseen, self._is_private = num_unseen, is_private
        has = {
            **dict.fromkeys(UNSEEN_METRICS, num_unseen > 0),
            LOST: settings.loses_members,
            SIMULATED: settings.has_clock,
            ACCURACY_VAL: has_patience,
            EPSILON: is_private,
        }
        self.columns = (*METRICS, *(name for name, is_there in has.items() if is_there))
        """Columns of metrics.csv."""
        self._layers = list(layers)
        self._labels = [*layers, BUFFERS_LABEL, INDICES_LABEL]
        self.metrics: list[list[float]] = []
        of_unseen = dict.fromkeys(OF_UNSEEN, num_unseen) if num_unseen else {}
        self._sizes = dict.fromkeys(OF_CLIENTS, num_clients) | of_unseen
        self.evaluated: dict[str, list[np.ndarray]] = {name: [] for name in self._sizes}
        """One entry per evaluation: OF_CLIENTS [N], nan where a client has no model; OF_UNSEEN [U], of
        adapted models; and the method's own by their names."""
        self._rounds: list[int] = []
        self._bytes: list[np.ndarray] = []
        """Bytes of each round [2, K]."""
        self._total = np.zeros((len(DIRECTIONS), len(self._labels)), np.int64)
        self.client_bytes = np.zeros((num_clients, len(DIRECTIONS)), np.int64)
        """Bytes of trainable numbers addressed to and sent by each client so far [N, 2]."""
        self.diverged = np.zeros(num_clients, np.int64)
        """In how many rounds each client has diverged so far [N]; a column of metrics.csv has the sum."""
        self.client_steps = np.zeros(num_clients, np.int64)
        """Training steps of each client so far [N], for epsilon; kept with `privacy.unit` only."""
        self.lost = np.zeros(num_clients, np.int64)
        """In how many rounds each client was a member of the cohort and lost, so far [N]."""
        self.simulated_s = 0.0
        """Seconds of the simulated clock so far."""
        self.client_losses = np.full(num_clients, np.nan)
        """Training loss of each client in the last round that it completed [N]; nan before."""
        self.is_sampled = np.zeros(num_clients, np.bool_)
        """Whether each client has been in a cohort [N]."""
        self._steps = 0.0
        self._train_s = 0.0
        self._train_loss = float("nan")
        self.wall_s = 0.0
        """Seconds the run has taken so far."""
        self.spent = dict.fromkeys(SPENT, 0.0)
        """Seconds by what they went into: the slowest worker's training, evaluations, checkpoints."""
        self._written = {"metrics.csv": 0, "bytes.csv": 0}

    def record_round(
        self,
        cohort: Cohort,
        traffic: Sequence[Traffic],
        steps: Mapping[int, float],
        losses: Mapping[int, float],
        train_loss: float,
        train_s: float,
        diverged: Iterable[int] = (),
        lost: Iterable[int] = (),
        simulated_s: float = 0.0,
    ) -> None:
        """Add one round: its traffic down and up, training steps and finite training losses by client, mean
        training loss and training seconds.

        `diverged` are the members whose numbers were nan or infinite, `lost` those that were lost;
        `simulated_s` is what the simulated clock took.
        """
        self.client_steps[list(steps)] += np.array(list(steps.values()), np.int64)
        self.client_losses[list(losses)] = list(losses.values())
        self.diverged[list(diverged)] += 1
        self.lost[list(lost)] += 1
        self.simulated_s += simulated_s
        self.is_sampled[list(cohort.clients)] = True
        for moved in traffic:
            self._add_labels(self._label(name) for name in moved.others)
        others = self._labels[len(self._layers) : -2]
        rows = []
        for direction, moved in enumerate(traffic):
            found = {self._label(name): count.sum() for name, count in moved.others.items()}
            of_others = [found.get(label, 0) for label in others]
            rows.append([*moved.layers.sum(axis=0), *of_others, moved.buffers.sum(), moved.indices.sum()])
            self.client_bytes[list(cohort.clients), direction] += moved.of_numbers
        self._rounds.append(cohort.round + 1)
        self._bytes.append(np.array(rows, np.int64))
        self._total += self._bytes[-1]
        self._steps += sum(steps.values())
        self._train_s += train_s
        self.spent["train_s"] += train_s
        self._train_loss = train_loss

    def _label(self, name: str) -> str:
        """Return the label of a tensor without layers; a layer may have the tensor's name."""
        return f"{name} (tensor)" if name in self._layers else name

    def _add_labels(self, labels: Iterable[str]) -> None:
        """Add labels to the counted bytes; their bytes are 0 in all rounds so far."""
        for label in labels:
            if label not in self._labels:
                self._labels.insert(-2, label)
                *self._bytes, self._total = (
                    np.insert(counts, -2, 0, axis=1) for counts in (*self._bytes, self._total)
                )

    def record_evaluation(
        self,
        round: int,
        found: Evaluation,
        num_samples: np.ndarray,
        after_training: np.ndarray,
        of_method: Mapping[str, np.ndarray],
        epsilon: float = np.nan,
    ) -> None:
        """Add one evaluation after `round` completed rounds.

        Takes the accuracy right after training [N] (nan where a client has no such model), the method's
        history, and epsilon with `privacy.unit`. Raises TypeError if the history has other names or shapes
        than before.
        """
        self._check_diagnostics(of_method)
        count = len(after_training)
        accuracy, loss, after_download, of_val = (of_all[:count] for of_all in found.columns)
        values = {
            "round": round,
            "wall_s": self.wall_s,
            "accuracy_mean": accuracy.mean(),
            "accuracy_std": accuracy.std(),
            "accuracy_weighted": float(accuracy @ num_samples / num_samples.sum()),
            "accuracy_after_download": mean_of_known(after_download),
            "accuracy_after_training": mean_of_known(after_training),
            "coverage": self.is_sampled.mean(),
            "loss_mean": loss.mean(),
            "train_loss_mean": self._train_loss,
            "client_steps_per_s": self._steps / self._train_s if self._train_s else 0.0,
            "diverged": self.diverged.sum(),
            ACCURACY_VAL: of_val.mean(),
            EPSILON: epsilon,
            LOST: self.lost.sum(),
            SIMULATED: self.simulated_s,
        } | self.spent
        for direction, name in enumerate(DIRECTIONS):
            values[f"bytes_{name}"] = self._total[direction, :-2].sum()
            values[f"buffer_bytes_{name}"] = self._total[direction, -2]
            values[f"index_bytes_{name}"] = self._total[direction, -1]
        of_each = (accuracy, loss, after_download, after_training)
        evaluated = dict(zip(OF_CLIENTS, of_each, strict=True))
        if self._num_unseen:
            accuracy, loss = found.accuracy[count:], found.loss[count:]
            unseen = (accuracy.mean(), accuracy.std(), loss.mean())
            values |= dict(zip(UNSEEN_METRICS, unseen, strict=True))
            evaluated |= dict(zip(OF_UNSEEN, (accuracy, loss), strict=True))
        self.metrics.append([float(values[name]) for name in self.columns])
        for name, entry in {**evaluated, **of_method}.items():
            # a copy: the state that it may be a part of keeps changing
            self.evaluated.setdefault(name, []).append(np.array(entry))
        self._steps = self._train_s = 0.0

    def _check_diagnostics(self, found: Mapping[str, np.ndarray]) -> None:
        """Raise TypeError for a method's history that the results of all evaluations cannot hold."""
        of = f"method.name={self._method}: the diagnostic"
        if taken := found.keys() & {*OF_CLIENTS, *OF_UNSEEN}:
            raise TypeError(f"{of} {min(taken)} has the name of a figure of all runs; choose another")
        if not self.metrics:
            return
        for name, values in found.items():
            if values.shape != (before := self.evaluated[name][0].shape):
                raise TypeError(
                    f"{of} {name} has the shape {[*values.shape]}, and {[*before]} in earlier evaluations; "
                    "return one shape in all"
                )

    def forget_last_evaluation(self) -> None:
        """Remove the newest evaluation; its steps count for the next one."""
        newest = dict(zip(self.columns, self.metrics.pop(), strict=True))
        seconds = newest["train_s"] - (self.last("train_s") if self.metrics else 0.0)
        self._steps += round(newest["client_steps_per_s"] * seconds)
        self._train_s += seconds
        for entries in self.evaluated.values():
            entries.pop()

    def column(self, name: str) -> list[float]:
        """Return a column of all evaluations."""
        return [row[self.columns.index(name)] for row in self.metrics]

    def last(self, name: str) -> float:
        """Return a column of the newest evaluation."""
        return self.column(name)[-1]

    def best(self) -> tuple[float, int]:
        """Return the highest mean accuracy and after which round it was first reached."""
        means = self.column("accuracy_mean")
        best = int(np.argmax(means))
        return means[best], int(self.metrics[best][0])

    def tables(self) -> dict[str, LedgerTable]:
        """Return everything needed to resume, as tables of a checkpoint."""
        count = len(self._bytes)
        flat = np.array(self._bytes, np.int64).reshape(count, 2 * len(self._labels))
        names = [f"{direction}/{label}" for direction in DIRECTIONS for label in self._labels]
        rounds = np.array(self._rounds, np.int64).reshape(count, 1)
        pending = np.array(
            [[self._steps, self._train_s, self._train_loss, self.wall_s, *self.spent.values()]]
        )
        return {
            "metrics": LedgerTable(
                np.array(self.metrics, np.float64).reshape(-1, len(self.columns)), self.columns
            ),
            "bytes": LedgerTable(np.concatenate([rounds, flat], axis=1), ["round", *names]),
            "client_bytes": LedgerTable(self.client_bytes, [f"bytes_{name}" for name in DIRECTIONS]),
            "diverged": LedgerTable(self.diverged.reshape(-1, 1), ["rounds"]),
            "pending": LedgerTable(pending, PENDING),
        } | self._tables_of_settings()

    def _tables_of_settings(self) -> dict[str, LedgerTable]:
        """Return the tables that only runs with certain keys have."""
        found = {}
        if self._is_private:
            found["client_steps"] = LedgerTable(self.client_steps.reshape(-1, 1), ["steps"])
        if self._settings.loses_members:
            found["lost"] = LedgerTable(self.lost.reshape(-1, 1), ["rounds"])
        if self._settings.has_clock:
            found["clock"] = LedgerTable(np.array([[self.simulated_s]]), [SIMULATED])
        if self._settings.sampling == "power_of_choice":
            known = np.stack([self.client_losses, self.is_sampled], axis=1)
            found["choice"] = LedgerTable(known, ["train_loss", "is_sampled"])
        return found

    def history(self) -> dict[str, np.ndarray]:
        """Return the results of all evaluations: the method's history, and figures by client [E, N]."""
        found = {name: np.array(entries) for name, entries in self.evaluated.items() if entries}
        return {name: np.empty((0, size)) for name, size in self._sizes.items()} | found

    def restore(self, tables: Mapping[str, LedgerTable], history: Mapping[str, np.ndarray]) -> None:
        """Take over the tables of a checkpoint and its `history`.

        Raises KeyError, IndexError or ValueError if these are not of a run like this one.
        """
        for name, size in self._sizes.items():
            if history[name].shape[1:2] != (size,):
                raise ValueError(f"history/{name} has another shape")
        self.metrics = tables["metrics"].values.tolist()
        self.evaluated = {name: list(history[name]) for name in {**self._sizes, **history}}
        columns = tables["bytes"].columns[1:]
        self._labels = [name.removeprefix("down/") for name in columns[: len(columns) // 2]]
        bytes_table = tables["bytes"].values
        self._rounds = bytes_table[:, 0].tolist()
        self._bytes = list(bytes_table[:, 1:].reshape(-1, len(DIRECTIONS), len(self._labels)))
        self._total = np.sum(self._bytes, axis=0)
        self.client_bytes = tables["client_bytes"].values.copy()
        self.diverged = tables["diverged"].values[:, 0].copy()
        if self._is_private:
            self.client_steps = tables["client_steps"].values[:, 0].copy()
        pending = tables["pending"].values[0].tolist()
        self._steps, self._train_s, self._train_loss, self.wall_s, *spent = pending
        self.spent = dict(zip(SPENT, spent, strict=True))
        if self._settings.loses_members:
            self.lost = tables["lost"].values[:, 0].copy()
        if self._settings.has_clock:
            self.simulated_s = float(tables["clock"].values[0, 0])
        if self._settings.sampling == "power_of_choice":
            losses, is_sampled = tables["choice"].values.T
            self.client_losses, self.is_sampled = losses.copy(), is_sampled.astype(np.bool_)

    def start_files(self, folder: Path, is_over: bool = False) -> None:
        """Rewrite the CSV files with all rows so far; delete those that are written at the end.

        These stay if the run is over: others may be reading them.
        """
        for name in () if is_over else ("clients.csv", "confusion.csv"):
            (folder / name).unlink(missing_ok=True)
        self._written = {"metrics.csv": 0, "bytes.csv": 0}
        headers = {"metrics.csv": self.columns, "bytes.csv": COLUMNS["bytes.csv"]}
        for name, rows in self._take_new_rows().items():
            replace_file(folder / name, csv_text([headers[name], *rows]))

    def append_files(self, folder: Path) -> None:
        """Append new rows to the CSV files."""
        for name, rows in self._take_new_rows().items():
            with (folder / name).open("a", newline="") as file:
                file.write(csv_text(rows))

    def _take_new_rows(self) -> dict[str, list[Sequence[object]]]:
        """Return the rows of each file that are not written yet, and count them as written."""
        new = self.metrics[self._written["metrics.csv"] :]
        rows: list[Sequence[object]] = [
            [_cell(name, v) for name, v in zip(self.columns, row, strict=True)] for row in new
        ]
        first = self._written["bytes.csv"]
        lines: list[Sequence[object]] = [
            (self._rounds[number], direction, label, count)
            for number in range(first, len(self._rounds))
            for direction, row in zip(DIRECTIONS, self._bytes[number].tolist(), strict=True)
            for label, count in zip(self._labels, row, strict=True)
            if count or label in self._layers
        ]
        self._written = {"metrics.csv": len(self.metrics), "bytes.csv": len(self._rounds)}
        return {"metrics.csv": rows, "bytes.csv": lines}

    def write_clients(
        self,
        folder: Path,
        num_train: np.ndarray,
        num_evaluated: np.ndarray,
        added: ClientMetrics | None = None,
    ) -> None:
        """Write clients.csv: one row per client, from the newest evaluation; with `added` confusion.csv too.

        Clients that take no part in training come last, with 1 in a column `unseen`, which is there only if
        they are. They have no bytes, no rounds that diverged, and no accuracy at the other moments.
        """
        newest = {name: entries[-1] for name, entries in self.evaluated.items()}
        nothing = np.zeros(self._num_unseen, np.int64)
        columns = {
            "client": np.arange(len(num_train)),
            "accuracy": np.append(newest["accuracy"], newest.get("accuracy_unseen", [])),
            "loss": np.append(newest["loss"], newest.get("loss_unseen", [])),
            "train_samples": num_train,
            "evaluated_samples": num_evaluated,
            "bytes_down": np.append(self.client_bytes[:, 0], nothing),
            "bytes_up": np.append(self.client_bytes[:, 1], nothing),
        }
        for moment in MOMENTS:
            columns[f"accuracy_{moment}"] = np.append(newest[f"accuracy_{moment}"], nothing + np.nan)
        columns["diverged"] = np.append(self.diverged, nothing)
        if self._settings.loses_members:
            columns[LOST] = np.append(self.lost, nothing)
        if self._num_unseen:
            columns["unseen"] = np.append(np.zeros(len(self.diverged), np.int64), nothing + 1)
        if added is not None:
            columns |= dict(zip(CLIENT_METRICS, added.figures.T, strict=True))
            replace_file(
                folder / "confusion.csv", csv_text([COLUMNS["confusion.csv"], *added.confusion.tolist()])
            )
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        replace_file(folder / "clients.csv", csv_text([list(columns), *rows]))


def is_over(done: int | None, rounds: int, accuracies: Sequence[float], patience: int | None) -> bool:
    """Whether no round follows the first `done`: all are done, or `train.patience` is over.

    `accuracies` is the column ACCURACY_VAL, empty without patience.
    """
    if done == rounds or patience is None or not len(accuracies):
        return done == rounds
    return len(accuracies) - 1 - int(np.argmax(accuracies)) >= patience


def is_off_schedule(done: int, rounds: int, eval_every: int) -> bool:
    """Whether a run has no evaluation after this round: only a shorter one has, at its end."""
    return done != rounds and done % eval_every != 0


def write_partition(
    folder: Path, train: np.ndarray, evaluated: np.ndarray, texts: Mapping[str, Sequence[str]]
) -> None:
    """Write partition.csv: each client's samples by class.

    `train` and `evaluated` are int64 [N, K], `texts` more columns, of each a text for each client [N].
    """
    header = [*COLUMNS["partition.csv"], *texts]
    rows = [
        (
            client,
            label,
            train[client, label],
            evaluated[client, label],
            *(of[client] for of in texts.values()),
        )
        for client, label in np.argwhere(train + evaluated).tolist()
    ]
    replace_file(folder / "partition.csv", csv_text([header, *rows]))


def mean_of_known(values: np.ndarray) -> float:
    """Return the mean of the entries that are not nan; nan where there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _cell(name: str, value: float) -> str:
    return str(int(value)) if name in WHOLE_NUMBERS else repr(float(value))
