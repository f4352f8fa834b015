"""Accuracies and costs of the finished runs of a table, read from their folders."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan, nan

import numpy as np

from hpcfl.config.keys import Config, TrainConfig
from hpcfl.privacy import drawn_clients
from hpcfl.results.comparison import num_partitions, samples_of
from hpcfl.results.run import Run, scored_when
from hpcfl.results.statistics import PairedDifference, mean_and_deviation, paired_difference, worst_tenth
from hpcfl.storage.ledger import mean_of_known
from hpcfl.tables.cells import Cell, Table
from hpcfl.tables.file import Pair, Row
from hpcfl.training.metrics import CLIENT_METRICS

ACCURACIES = (
    "accuracy_mean",
    "best_accuracy",
    "accuracy_weighted",
    "accuracy_after_download",
    "accuracy_after_training",
    "spread_over_clients",
    "worst_tenth_accuracy",
    "accuracy_unseen",
    *CLIENT_METRICS,
)
"""Figures between 0 and 1; tables show their mean and standard deviation over seeds. `spread_over_clients` is
the population standard deviation over clients at the last evaluation, `worst_tenth_accuracy` the mean over
the worst tenth of the clients. `accuracy_unseen` is the mean over clients that take no part in training
(`data.unseen_clients`); all other figures are of those that do. CLIENT_METRICS are means over the clients
that have them; runs without `run.metrics` have none."""

COSTS = ("bytes_down", "bytes_up", "other_bytes_down", "other_bytes_up", "client_steps_per_s", "wall_s")
"""Bytes are per client and round; `other_bytes` are those of running statistics and indices."""


@dataclass(frozen=True)
class Result:
    """A row in a column: its cells, all seeds together, and the runs of those that are finished."""

    row: Row
    cells: list[Cell]
    runs: dict[int, Run]
    """By seed."""

    @property
    def column(self) -> str:
        return self.cells[0].column

    @property
    def config(self) -> Config:
        """Configuration of its first seed."""
        return self.cells[0].config

    @property
    def missing(self) -> int:
        """Seeds that are not finished."""
        return len(self.cells) - len(self.runs)

    @cached_property
    def figures(self) -> dict[int, dict[str, float]]:
        """What its runs gave and cost, by finished seed."""
        return {seed: _figures(run, self.config.train) for seed, run in self.runs.items()}

    def by_client(self, seed: int, name: str = "accuracy") -> list[float]:
        """Return a column of clients.csv of the clients in training.

        Of accuracies, it is nan where there was no model, or the run was not scored, at that moment.
        """
        clients = self.runs[seed].in_training
        return clients.get(name, np.full(len(clients["client"]), nan)).tolist()

    def values(self, name: str) -> list[float]:
        return [figures[name] for figures in self.figures.values()]

    def count(self, name: str) -> int:
        """Return how many of the finished seeds have a figure; runs that did not score a moment have none."""
        return sum(not isnan(value) for value in self.values(name))

    def mean(self, name: str) -> float | None:
        return mean_and_deviation(self.values(name))[0]

    def known_clients(self, name: str) -> tuple[int, int]:
        """Return how many clients in training have a figure of clients.csv, and how many there are, of all
        seeds."""
        values = [value for seed in self.runs for value in self.by_client(seed, name)]
        return sum(not isnan(value) for value in values), len(values)

    @property
    def accuracy_by_class(self) -> np.ndarray:
        """Mean of `Run.accuracy_by_class` [K] over the seeds that have the class; nan where none has it."""
        found = [run.accuracy_by_class for run in self.runs.values()]
        by_class = itertools.zip_longest(*found, fillvalue=nan)
        return np.array([mean_of_known(np.array(values)) for values in by_class])

    def deviation(self, name: str) -> float | None:
        return mean_and_deviation(self.values(name))[1]

    @property
    def published(self) -> float | None:
        """In %."""
        return self.row.published.get(self.column)

    @property
    def published_bytes(self) -> float | None:
        """Down and up together, of a client in a round."""
        return self.row.published_bytes.get(self.column)

    @property
    def scored(self) -> str:
        """When the accuracy is measured."""
        return scored_when(self.config.method.name, self.config.train)


def read_results(table: Table) -> list[Result]:
    """Return what is finished of each row in each column, column by column, from the cells' folders."""
    return [
        Result(row, cells, {cell.seed: run for cell in cells if (run := cell.finished_run)})
        for column in table.columns
        for row in table.rows
        if (cells := table.cells_of(row.label, column))
    ]


@dataclass(frozen=True)
class Difference:
    """Two compared rows in a column."""

    pair: Pair
    column: str
    moment: str
    """When the models are scored: one moment for both rows, or the first row's, then the second row's."""
    seeds: int
    """Number of seeds that both rows have finished with data of one file, in which some client has a model of
    both rows at the moment."""
    partitions: int
    """Number of partitions that these seeds have drawn."""
    paired: PairedDifference | None
    """None without a seed."""


def differences(table: Table, results: Sequence[Result]) -> list[Difference]:
    """Return the first minus the second row of each compared pair, in each of its columns."""
    by_place = {(result.row.label, result.column): result for result in results}
    return [
        _difference(pair, column, *(by_place[label, column] for label in pair.rows))
        for pair in table.compare
        for column in pair.columns
    ]


def _difference(pair: Pair, column: str, first: Result, second: Result) -> Difference:
    name = "accuracy" if pair.at is None else f"accuracy_{pair.at}"
    by_seed = {}
    for seed, run in first.runs.items():
        if seed not in second.runs or len(samples_of(run, second.runs[seed])) > 1:
            continue
        wanted = (first, name), (second, name), (first, "evaluated_samples")
        figures = np.array([row.by_client(seed, column) for row, column in wanted])
        known = figures[:, ~np.isnan(figures).any(axis=0)]
        if known.size:
            by_seed[seed] = known.tolist()
    paired = None
    if by_seed:
        of_first, of_second, weights = zip(*by_seed.values(), strict=True)
        paired = paired_difference(of_first, of_second, weights if pair.weighted else None)
    moments = [pair.at.replace("_", " ")] if pair.at else [first.scored, second.scored]
    partitions = num_partitions([first.runs[seed] for seed in by_seed])
    return Difference(pair, column, ", ".join(dict.fromkeys(moments)), len(by_seed), partitions, paired)


def _figures(run: Run, train: TrainConfig) -> dict[str, float]:
    """Return what a finished run gave and cost."""
    last, best, clients = run.last, run.best, run.in_training
    accuracies = clients["accuracy"].tolist()
    members = float(run.done * train.cohort_size(len(accuracies)))
    if run.config.privacy.unit == "client":
        drawn = (len(accuracies), train.participation, run.config.run.seed)
        members = float(sum(len(drawn_clients(*drawn, number)) for number in range(run.done)))
    silent = last.get("lost", 0.0) + last.get("diverged", 0.0) * (run.config.run.on_divergence == "skip")
    turns = {"down": members, "up": members - silent}
    # no steps where all members of all rounds in between were lost
    rates = [rate for rate in run.metrics["client_steps_per_s"].tolist() if rate]
    sent = {
        way: (last[f"bytes_{way}"], last[f"buffer_bytes_{way}"] + last[f"index_bytes_{way}"]) for way in turns
    }
    figures = {
        # not every run has all of them
        **dict.fromkeys(ACCURACIES, nan),
        **last,
        **{name: mean_of_known(clients[name]) for name in CLIENT_METRICS if name in clients},
        "best_accuracy": best["accuracy_mean"],
        "best_round": best["round"],
        "spread_over_clients": last["accuracy_std"],
        "worst_tenth_accuracy": worst_tenth(accuracies),
        # harmonic mean: there are about equally many steps between any two evaluations
        "client_steps_per_s": statistics.harmonic_mean(rates) if rates else 0.0,
        # fewer than train.rounds if train.patience has ended the run
        "rounds_done": float(run.done),
        # of all rounds and clients
        "bytes": sum(map(sum, sent.values())),
    }
    for way, (numbers, others) in sent.items():
        # 0 where all members of all rounds were lost
        count = turns[way] or 1.0
        figures |= {f"bytes_{way}": numbers / count, f"other_bytes_{way}": others / count}
    return figures
