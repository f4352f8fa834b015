"""Small data sets of each kind of samples, and the words that train a network on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

NUM_SAMPLES, NUM_CLASSES = 240, 4
MODELS_OF = {
    "features": ("model.name=mlp", "model.hidden=[8]"),
    "series": ("data.layout=NCL", "model.name=cnn1d", "model.batchnorm=true"),
    "tokens": ("model.name=textcnn", "model.embedding=6", "model.filters=4"),
}
"""The kinds that are not images, and a small network for each."""
FEW_ROUNDS = {"clustered_fl": ["method.first_round=0"], "fedmn": ["method.pretrain_rounds=1"]}
"""What methods need to do in two rounds what makes them special."""


def made(kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the arrays of a file in which classes differ."""
    stream = np.random.default_rng(seed)
    y = stream.integers(NUM_CLASSES, size=NUM_SAMPLES)
    if kind == "features":
        x = (stream.normal(size=(NUM_CLASSES, 10))[y] + stream.normal(size=(len(y), 10))) * np.arange(1, 11)
    elif kind == "series":
        phase = stream.uniform(0, 6, (len(y), 1))
        wave = np.sin(np.arange(30) * (y[:, None] + 1) / 4 + phase) + stream.normal(size=(len(y), 30)) / 4
        x = np.stack([wave, 5 + stream.normal(size=wave.shape)], axis=1).astype(np.float32)
    else:
        others = stream.integers(NUM_CLASSES, 30, (len(y), 12))
        x = np.where(stream.random(others.shape) < 0.4, y[:, None], others)
    return {"x": x, "y": y}


def words_of(kind: str, folder: Path) -> list[str]:
    """Write such a file, and return the words of a configuration that reads it."""
    path = folder / f"{kind}.npz"
    np.savez(path, **made(kind))
    return ["data.source=npz", f"data.path={path}", "data.partition.name=iid", *MODELS_OF[kind]]
