"""Wrong labels of training samples: how many, whose, and the same in any shard."""

from __future__ import annotations

import numpy as np
import torch
from harness import Run

from hpcfl.config.keys import DataConfig
from hpcfl.data.label_noise import LabelNoise


def noise_of(**keys: float) -> LabelNoise:
    return LabelNoise.from_config(DataConfig.model_validate(keys), 3, 10, 5)


def test_the_given_share_of_labels_becomes_another_class() -> None:
    y = np.arange(1000) % 5
    for share, wrong in ((0.3333, 333), (1.0, 1000), (0.0004, 0)):
        found = noise_of(label_noise=share).noisy(y, 7)
        assert (found != y).sum() == wrong
        assert {*found.tolist()} <= {*range(5)}


def test_each_other_class_is_equally_likely() -> None:
    found = noise_of(label_noise=1.0).noisy(np.full(4000, 2), 1)
    shares = np.bincount(found, minlength=5) / 4000
    np.testing.assert_allclose(shares, [0.25, 0.25, 0, 0.25, 0.25], atol=0.021)


def test_the_given_share_of_clients_has_wrong_labels() -> None:
    for share, count in ((0.01, 1), (0.25, 3), (1.0, 10)):
        noise, y = noise_of(label_noise=0.5, label_noise_clients=share), np.arange(40) % 5
        noisy = [client for client in range(10) if (noise.noisy(y, client) != y).any()]
        assert len(noisy) == count
        assert noisy == sorted(noise.clients)


def test_only_training_labels_are_wrong_in_a_run() -> None:
    keys = ["method.name=fedavg", "data.unseen_clients=0.25", "train.rounds=1", "data.val_fraction=0.2"]
    right, wrong = Run(*keys), Run(*keys, "data.label_noise=0.5")
    for of_right, of_wrong in ((right.worker, wrong.worker), (right.unseen, wrong.unseen)):
        for place, client in enumerate(of_right.clients):
            for split, share in (("train", 0.5), ("val", 0.0), ("test", 0.0)):
                (x, y), (x_there, y_there) = (at.shard.samples(split, place) for at in (of_right, of_wrong))
                assert torch.equal(x, x_there)
                assert (y != y_there).sum() == int(share * len(y) + 0.5), (client, split)
