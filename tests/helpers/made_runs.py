"""Run folders made by the ledger and the writer of checkpoints, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import yaml

from hpcfl.communication.messages import Cohort
from hpcfl.communication.traffic import Traffic
from hpcfl.config.keys import ENVIRONMENT
from hpcfl.registries import load_config
from hpcfl.samples import SampleType
from hpcfl.storage.checkpoint import CheckpointStore
from hpcfl.storage.ledger import ClientMetrics, Evaluation, Ledger, write_partition
from hpcfl.storage.snapshot import DataRecord, Rows, Snapshot

LAYERS = ["conv1", "conv2", "fc1", "fc2"]


def make_run(
    folder: Path,
    accuracy: np.ndarray,
    settings: Sequence[str] = (),
    of_method: Mapping[str, np.ndarray] | None = None,
    eval_every: int = 1,
    unseen: np.ndarray | None = None,
    derived: Mapping[str, np.ndarray] | None = None,
    diverged: Sequence[int] = (),
    lost: Sequence[int] = (),
    added: ClientMetrics | None = None,
) -> Path:
    """Write a finished run with these accuracies [E, N], of unseen clients [E, U], and history [E, ...].

    `derived` is what the checkpoint has of the server for readers; `diverged` and `lost` are clients that are
    so in every round, of two simulated seconds; `added` is what `run.metrics` adds. Client c has 40 and 10
    samples, all of class c % 10.
    """
    evaluations, in_training = accuracy.shape
    num_unseen = 0 if unseen is None else unseen.shape[1]
    clients, rounds = in_training + num_unseen, evaluations * eval_every
    keys = [f"data.unseen_clients={num_unseen / clients}"] if num_unseen else []
    config = load_config(None, [f"data.clients={clients}", f"train.rounds={rounds}", *keys, *settings])
    folder.mkdir(parents=True)
    environment = {"hpcfl": "0", "ranks": ["host cpu loop"]}
    (folder / "config.yaml").write_text(config.yaml() + yaml.safe_dump({ENVIRONMENT: environment}))
    everyone, ones = tuple(range(in_training)), np.ones(in_training, np.int64)
    moved = Traffic(np.ones((in_training, len(LAYERS)), np.int64) * 1000, {}, ones, ones)
    ledger = Ledger(
        config.method.name,
        config.clients,
        in_training,
        LAYERS,
        num_unseen,
        is_private=config.privacy.unit is not None,
        has_patience=config.train.patience is not None,
    )
    ledger.start_files(folder)
    cohort = Cohort(0, everyone, torch.ones(in_training))
    for number in range(rounds):
        object.__setattr__(cohort, "round", number)
        steps = {client: 10.0 * (client == 0) for client in everyone}
        ledger.record_round(cohort, (moved, moved), steps, {}, 1 / (number + 1), 0.5, diverged, lost, 2.0)
        if (number + 1) % eval_every == 0:
            at = number // eval_every
            scored = accuracy[at] if unseen is None else np.append(accuracy[at], unseen[at])
            ledger.wall_s = 0.8 * (number + 1)
            ledger.record_evaluation(
                number + 1,
                Evaluation(scored, 1 - scored, scored, scored),
                ones,
                np.minimum(accuracy[at] + 0.05, 1),
                {name: values[at] for name, values in (of_method or {}).items()},
            )
    ledger.append_files(folder)
    CheckpointStore(folder).save(
        Snapshot(
            method=config.method.name,
            round=rounds,
            config=config.yaml(),
            layout=((), ()),
            data=DataRecord(
                sample=SampleType((1, 8, 8)),
                dtype="uint8",
                scale=255.0,
                mean=(0.5,),
                std=(0.5,),
                num_classes=10,
                num_samples=(40,) * clients,
            ),
            server={},
            derived={name: torch.from_numpy(values) for name, values in (derived or {}).items()},
            clients=Rows({}, ()),
            history=ledger.history,
            ledger=ledger.tables,
        )
    )
    ledger.write_clients(folder, np.full(clients, 40), np.full(clients, 10), added)
    counts = np.zeros((clients, 10), np.int64)
    counts[np.arange(clients), np.arange(clients) % 10] = 40
    write_partition(folder, counts, counts // 4, {})
    return folder


def metrics_of_runs(clients: int) -> ClientMetrics:
    """Return metrics, of which client 0 has no AUC; client c has c % 10 of its 10 samples of class c right.

    The others are predicted as class 9, and as 0 those of class 9.
    """
    figures = np.tile([0.25, 0.5, 0.75, 0.125], (clients, 1))
    figures[0, 2] = np.nan
    cells = []
    for client in range(clients):
        label = right = client % 10
        wrong = [client, label, 0 if label == 9 else 9, 10 - right]
        cells += sorted([wrong, *([[client, label, label, right]] if right else [])])
    return ClientMetrics(figures, np.array(cells))


def rising(evaluations: int, clients: int) -> np.ndarray:
    """Return accuracies [E, N] that rise with the evaluations, differently for each client."""
    return np.linspace(0.1, 0.9, evaluations)[:, None] * np.linspace(0.6, 1, clients)[None]
