"""The content of a report page, as numbers and text.

Shapes: E evaluations, N clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcfl.config.keys import flatten
from hpcfl.errors import UserError
from hpcfl.formatting import clock, readable_bytes
from hpcfl.methods import METHODS
from hpcfl.report.packing import Json, Recorded, base64_of, numbers, packed_pictures, spread_out
from hpcfl.results.comparison import sample_keys, samples_of
from hpcfl.results.run import Run, scored_when
from hpcfl.results.statistics import worst_tenth
from hpcfl.simulation.divergence import named
from hpcfl.storage.ledger import (
    BUFFERS_LABEL,
    DIRECTIONS,
    EPSILON,
    INDICES_LABEL,
    LOST,
    SIMULATED,
    SPENT,
    UNSEEN_METRICS,
    mean_of_known,
)
from hpcfl.storage.reading import COLUMNS, Columns
from hpcfl.training.metrics import CLIENT_METRICS

PICTURE_BYTES = 1_400_000
"""Bytes of the pictures of all runs of a page, before base64."""
MAX_POINTS = 500
"""Most evaluations in a run's curves; all runs together have at most four times as many."""
MAX_CONFIGURATIONS = 20
"""Most runs with their configurations on the page."""
QUANTILES = (0.1, 0.25, 0.75, 0.9)
CURVES = (
    "accuracy_mean",
    "accuracy_after_download",
    "accuracy_after_training",
    "loss_mean",
    "train_loss_mean",
)
CLIENT_COLUMNS = (
    *("accuracy", "accuracy_after_download", "accuracy_after_training", "loss"),
    *("train_samples", "evaluated_samples", "bytes_down", "bytes_up", LOST),
    *CLIENT_METRICS,
)
METRIC_NAMES = dict(
    zip(CLIENT_METRICS, ("Balanced accuracy", "Macro F1", "AUC", "Calibration error"), strict=True)
)
CONFUSION_LINES = 20_000
"""Lines of confusion matrices of all runs of a page."""
MAX_CLASSES = 1000
"""Most classes of a confusion matrix that is drawn."""
UNSEEN_CURVES = ("accuracy_unseen", "loss_unseen")

HEADLINES = (
    *("Mean accuracy", "Spread", "Worst tenth", "Unseen clients"),
    *METRIC_NAMES.values(),
    *("Best round", "Diverged", "Lost", "Epsilon", "Bytes", "Time", "Simulated time", "Training steps"),
)
"""Names of the headline figures, in the order of the page."""


def page_content(runs: Sequence[Run], labels: Sequence[str]) -> Json:
    """Return the content of the page of some runs.

    Raises:
        UserError: a run has no evaluation yet or is damaged, or runs are scored on different splits.
    """
    for run in runs:
        if not run.metrics:
            raise UserError(
                f"{run.path} has no evaluation yet, so that there is nothing to show; wait for the first one"
            )
    splits = {run.config.run.eval_split: label for run, label in zip(runs, labels, strict=True)}
    if len(splits) > 1:
        names = ", ".join(f"{split} in {label}" for split, label in splits.items())
        raise UserError(
            f"run.eval_split differs ({names}), so that accuracies cannot be compared; name runs of one split"
        )
    shown = [_run_content(run, label, len(runs)) for run, label in zip(runs, labels, strict=True)]
    known = {figure["name"] for one in shown for figure in one["headline"]}
    for one in shown:
        of_run = {figure["name"]: figure for figure in one["headline"]}
        one["headline"] = [of_run.get(name, _figure(name, "none")) for name in HEADLINES if name in known]
    return {"runs": shown, "differing": _differing(runs), "notes": _notes(runs)}


def _run_content(run: Run, label: str, num_runs: int) -> Json:
    """Return the content for one run."""
    config, metrics, clients = run.config, run.metrics, _clients(run)
    count = len(metrics["round"])
    kept = spread_out(count, max(40, min(MAX_POINTS, 4 * MAX_POINTS // num_runs)))
    kept = np.union1d(kept, np.flatnonzero(metrics["round"] == run.best["round"]))
    notes = [] if len(kept) == count else [f"curves: {len(kept)} of {count} evaluations"]
    seconds = np.diff(metrics.get("train_s", np.zeros(count)), prepend=0.0)
    steps = np.cumsum(metrics["client_steps_per_s"] * seconds).round()
    sent = sum(values for name, values in metrics.items() if "bytes_" in name)
    has_detail = num_runs <= MAX_CONFIGURATIONS
    pictures = [
        Recorded(diagnostic, *found, is_newest=diagnostic.name not in run.history)
        for diagnostic in METHODS[config.method.name].diagnostics
        if (found := run.recorded(diagnostic.name))
    ]
    # [E, client, layer, ...]
    num_layers = [one.values.shape[2] for one in pictures if "layer" in one.diagnostic.axes]
    layers = run.layers(max(num_layers, default=0))
    packed = packed_pictures(pictures, PICTURE_BYTES // num_runs)
    for one, shown in zip(pictures, packed, strict=True):
        entries, axis = one.diagnostic.entries, one.diagnostic.axes[-1]
        shown["names"] = {"layer": layers} | ({axis: entries(config.method.options)} if entries else {})
    confusion, left_out = _confusion(run, CONFUSION_LINES // num_runs)
    notes += left_out
    clients_round = int(run.history_rounds[-1]) if len(run.history_rounds) else 0
    bands = _bands(run, metrics["round"][kept])
    headline = _headline(run, clients, clients_round, steps[-1])
    # free each run's history: those of many runs would not fit in memory together
    run.close()
    return {
        "label": label,
        "method": config.method.name,
        "seed": config.run.seed,
        "data": ", ".join(filter(None, (config.data.source, config.partition.name, config.data.shift))),
        "done": run.done,
        "rounds": run.rounds,
        "isFinished": run.is_finished,
        "clientsRound": clients_round,
        "scored": scored_when(config.method.name, config.train),
        "trainsSome": config.train.participation < 1 or config.clients.loses_members,
        "split": config.run.eval_split,
        "headline": headline,
        "curves": {
            "round": metrics["round"][kept].astype(int).tolist(),
            "bytes": numbers(np.asarray(sent)[kept], 6),
            "steps": numbers(steps[kept], 6),
            **({"simulated": numbers(metrics[SIMULATED][kept], 6)} if SIMULATED in metrics else {}),
            **{name: numbers(metrics[name][kept]) for name in (*CURVES, *UNSEEN_CURVES) if name in metrics},
        },
        "bands": bands,
        "clients": {name: numbers(values, 6) for name, values in clients.items()},
        "numUnseen": run.num_unseen,
        "classes": _classes(run),
        "confusion": confusion,
        "layerBytes": _layer_bytes(run),
        "seconds": _seconds(metrics),
        "pictures": packed,
        "configuration": list(flatten(config.tree()).items()) if has_detail else [],
        "environment": list(run.environment.items()) if has_detail else [],
        "notes": notes,
    }


def _headline(run: Run, clients: Columns, clients_round: int, steps: float) -> list[Json]:
    """Return the headline figures that a run has: name, text, the number for sorting, and a remark.

    All but those of unseen clients are of the clients in training; `clients` are those after `clients_round`.
    """
    best, last, privacy = run.best, run.last, run.config.privacy
    found = _accuracies(run, clients.get("accuracy", np.empty(0)), clients_round)
    found.append(_percent("Best round", best["accuracy_mean"], f"round {best['round']:.0f}, in hindsight"))
    if diverged := last.get("diverged"):
        clients_here = np.flatnonzero(run.diverged).tolist()
        of_clients = f" ({named(clients_here)})" if clients_here else ""
        what = "continued with them" if run.config.run.on_divergence == "continue" else "left them out"
        remark = f"clients with nan or infinity, round by round{of_clients}; the run {what}"
        found.append(_figure("Diverged", f"{diverged:.0f}", diverged, remark))
    if LOST in last:
        lost = last[LOST]
        found.append(_figure("Lost", f"{lost:.0f}", lost, "clients dropped or late, round by round"))
    if EPSILON in last:
        remark = f"delta {privacy.delta_in_use:g}, of a {privacy.unit}'s presence"
        found.append(_figure("Epsilon", f"{last[EPSILON]:.3g}", last[EPSILON], remark))
    down, up = last["bytes_down"], last["bytes_up"]
    remark = f"{readable_bytes(down)} down, {readable_bytes(up)} up"
    if others := sum(last[f"{kind}_bytes_{way}"] for kind in ("buffer", "index") for way in ("down", "up")):
        remark += f"; beside them {readable_bytes(others)} of running statistics and indices"
    found.append(_figure("Bytes", readable_bytes(down + up), down + up, remark))
    found.append(_figure("Time", clock(last["wall_s"]), last["wall_s"], "h:min:s, up to the last evaluation"))
    if SIMULATED in last:
        seconds = last[SIMULATED]
        remark = "h:min:s on the clock of clients.step_s"
        found.append(_figure("Simulated time", clock(seconds), seconds, remark))
    return [*found, _figure("Training steps", f"{steps:,.0f}", steps, "of all clients")]


def _figure(name: str, text: str, value: float = math.nan, remark: str = "") -> Json:
    """Return a headline figure."""
    return {
        "name": name,
        "text": text,
        "value": value if math.isfinite(value) else None,
        "remark": remark,
    }


def _percent(name: str, value: float, remark: str) -> Json:
    return _figure(name, f"{100 * value:.2f} %" if math.isfinite(value) else "nan", value, remark)


def _accuracies(run: Run, accuracies: np.ndarray, clients_round: int) -> list[Json]:
    """Return the headline figures of accuracy; `accuracies` [N + U] are known from a checkpoint on."""
    last, unseen = run.last, run.num_unseen
    in_training = (len(accuracies) or len(np.unique(run.partition.get("client", ())))) - unseen
    counted = _counted(in_training) if in_training else "the clients"
    of_clients = f"mean over {counted}{' in training' * bool(unseen)}"
    found = [
        _percent("Mean accuracy", last["accuracy_mean"], of_clients),
        _percent("Spread", last["accuracy_std"], "standard deviation over clients"),
    ]
    if len(accuracies):
        worst = worst_tenth(accuracies[:in_training].tolist())
        moment = "" if run.is_finished else f" after round {clients_round}"
        found.append(_percent("Worst tenth", worst, f"mean of the worst 10 % of the clients{moment}"))
    if {*UNSEEN_METRICS} <= {*last}:
        spread = last["accuracy_unseen_std"]
        remark = f"mean over {_counted(unseen)} with no part in training, spread {100 * spread:.2f} %"
        found.append(_percent("Unseen clients", last["accuracy_unseen"], remark))
    for name in [name for name in CLIENT_METRICS if name in run.in_training]:
        values = run.in_training[name]
        known = int((~np.isnan(values)).sum())
        some = f"{known} of " * (known < in_training)
        remark = f"mean over {some}{_counted(in_training)}"
        found.append(_percent(METRIC_NAMES[name], mean_of_known(values), remark))
    return found


def _counted(clients: int) -> str:
    return f"{clients} client{'s' * (clients != 1)}"


def _clients(run: Run) -> Columns:
    """Return figures of each client: at the end, or those of the newest checkpoint; {} without either.

    Unseen clients come last, with nan where they have no figure.
    """
    if run.is_finished:
        return {name: run.clients[name] for name in CLIENT_COLUMNS if name in run.clients}
    nothing = np.full(run.num_unseen, math.nan)
    found = {
        name: np.concatenate([values[-1], run.history.get(f"{name}_unseen", [nothing])[-1]])
        for name in CLIENT_COLUMNS
        if len(values := run.history.get(name, np.empty(0)))
    }
    if found and run.partition:
        names = ("train_samples", "evaluated_samples")
        found |= {name: run.samples_by_class(name).sum(axis=1) for name in names}
    return found


def _bands(run: Run, rounds: np.ndarray) -> Json:
    """Return quantiles over the clients, by quantity and by quantile, at the rounds that the history has."""
    kept = np.flatnonzero(np.isin(run.history_rounds, rounds))
    found: Json = {"round": run.history_rounds[kept].tolist()}
    for name in ("accuracy", "loss"):
        values = run.history.get(name, np.empty((0, 1)))[kept]
        # the nan of one diverged client would hide all others
        values = np.where(np.isfinite(values), values, np.nan)
        is_known = np.isfinite(values).any(axis=1)
        levels = np.full((len(QUANTILES), len(values)), np.nan)
        if is_known.any():
            levels[:, is_known] = np.nanquantile(values[is_known], QUANTILES, axis=1)
        found[name] = [numbers(level, 4) for level in levels]
    return found


def _classes(run: Run) -> Json:
    """Return samples by client and class, training and evaluated together, as uint16 in base64."""
    if not run.partition:
        return {}
    table = run.samples_by_class("train_samples") + run.samples_by_class("evaluated_samples")
    return {"shape": table.shape, "counts": base64_of(table.clip(max=2**16 - 1).astype("<u2"))}


def _confusion(run: Run, max_lines: int) -> tuple[Json, list[str]]:
    """Return the confusion matrices of all clients in training together and of single clients, and notes.

    Lines of uint32 in base64: 0 or a client's number plus 1, class, predicted class, samples.
    """
    columns = run.confusion
    if not columns:
        return {}, []
    lines = np.stack([columns[name] for name in COLUMNS["confusion.csv"]], axis=1).clip(max=2**32 - 1)
    classes = int(lines[:, 1:3].max()) + 1
    if classes > MAX_CLASSES:
        return {}, [f"no confusion matrix of {classes} classes"]
    together = np.zeros((classes, classes))
    in_training = lines[lines[:, 0] < len(run.in_training["client"])].astype(np.int64)
    np.add.at(together, (in_training[:, 1], in_training[:, 2]), in_training[:, 3])
    places = np.nonzero(together)
    whole = np.column_stack([np.zeros(len(places[0])), *places, together[places]])
    # of whole clients, as many as there is room for
    clients = np.unique(lines[:, 0])
    ends = np.searchsorted(lines[:, 0], clients, side="right")
    shown = int((ends <= max_lines).sum())
    of_clients = lines[: ends[shown - 1] if shown else 0]
    of_clients[:, 0] += 1
    packed = np.concatenate([whole, of_clients]).clip(max=2**32 - 1).astype("<u4")
    notes = [] if shown == len(clients) else [f"confusion matrices: {shown} of {len(clients)} clients"]
    return {"classes": classes, "lines": base64_of(packed)}, notes


def _layer_bytes(run: Run) -> Json:
    """Return the bytes of all rounds by layer and direction, entries without a layer last."""
    columns = run.bytes
    if not columns:
        return {"layers": []}
    names = list(dict.fromkeys(columns["layer"].tolist()))
    names.sort(key=lambda name: name in (BUFFERS_LABEL, INDICES_LABEL))
    found: Json = {"layers": names}
    for direction in DIRECTIONS:
        is_there = columns["direction"] == direction
        layers, moved = columns["layer"][is_there], columns["bytes"][is_there]
        found[direction] = [float(moved[layers == name].sum()) for name in names]
    return found


def _seconds(metrics: Columns) -> dict[str, float]:
    """Return the seconds of a run by activity."""
    if not all(name in metrics for name in SPENT):
        return {}
    names = ("training", "evaluation", "checkpoints")
    found = {name: float(metrics[column][-1]) for name, column in zip(names, SPENT, strict=True)}
    return found | {"the rest": max(0.0, float(metrics["wall_s"][-1]) - sum(found.values()))}


def _differing(runs: Sequence[Run]) -> Json:
    """Return the keys that all runs have and in which some differ, with each run's values."""
    trees = [run.config.result_keys() for run in runs]
    keys = _keys_that_differ(trees)
    return {"keys": keys, "rows": [[str(tree[key]) for key in keys] for tree in trees]}


def _keys_that_differ(trees: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that all have and in which some differ."""
    return [
        key
        for key, value in trees[0].items()
        if all(key in tree for tree in trees) and any(tree[key] != value for tree in trees)
    ]


def _notes(runs: Sequence[Run]) -> list[str]:
    """Return notes about several runs."""
    if differ := _keys_that_differ([sample_keys(run) for run in runs]):
        return [f"Clients of these runs hold different samples: {', '.join(differ)} differ."]
    if len(samples := samples_of(*runs)) > 1:
        return [f"The data of these runs have changed in between: {', '.join(samples)} (environment)."]
    return []
