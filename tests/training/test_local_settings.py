"""Local training beyond plain SGD: which methods support it, and which refuse it.

The numbers are compared with torch's in the tests of methods, with `ADAM` of by_hand.py.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import DIFFERENT, method_settings
from harness import Run, make_network, make_worker, random

from hpcfl.communication.communicator import Communicator
from hpcfl.config.keys import Change, TrainConfig
from hpcfl.errors import UserError
from hpcfl.methods import METHODS
from hpcfl.registries import load_config
from hpcfl.setup.experiment import build
from hpcfl.training.augmentation import Augmentation, padding
from hpcfl.training.client_group import ClientGroup

# mini-batches of 4: 13 are four, 11 three, 8 two, 3 and 2 are one
SIZES = (13, 11, 8, 3, 2)

KEYS: dict[str, object] = {
    "optimiser": "adamw",
    "clip": 0.5,
    "warmup_rounds": 2,
    "label_smoothing": 0.1,
    "augment": ["crop", "flip"],
}
"""A value by key that changes what clients do."""


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "height", "width"), [(["crop"], 28, 32), (["flip"], 7, 9), (["crop", "flip"], 7, 9)]
)
def test_images_move_and_are_mirrored_as_by_hand(changes: list[Change], height: int, width: int) -> None:
    x = random(2, 3, 2, height, width)
    black = torch.tensor([-0.5, 3.0])
    # the least and the most, between them, and what comes right before the next pixel
    drawn = torch.tensor([[[0.001, 0.999, 0.4], [0.5, 0.5, 0.6], [0.999, 0.001, 0.001]]]).expand(2, -1, -1)
    found = Augmentation(changes, black)(x, drawn)
    up, left = -(-height // 8), -(-width // 8)
    starts = [(0, 2 * left), (up, left), (2 * up, 0)] if "crop" in changes else [(up, left)] * 3
    for client in range(2):
        for number, (top, first) in enumerate(starts):
            padded = black[:, None, None].expand(2, height + 2 * up, width + 2 * left).clone()
            padded[:, up : up + height, left : left + width] = x[client, number]
            expected = padded[:, top : top + height, first : first + width]
            if "flip" in changes and number != 1:
                expected = expected.flip(2)
            assert torch.equal(found[client, number], expected)
    assert padding(28) == padding(32) == 4


def test_black_is_the_pixel_0_of_each_channel_and_lines_are_no_images(tmp_path: Path) -> None:
    x = np.zeros((40, 1, 8, 2), dtype=np.float32)
    np.savez(tmp_path / "line.npz", x=x, y=np.arange(40) % 4)
    np.savez(tmp_path / "images.npz", x=np.repeat(x, 4, axis=1), y=np.arange(40) % 4)
    keys = ["data.source=npz", "data.layout=NHWC", "data.clients=2", "data.normalise=[[1,2],[2,8]]"]
    keys += ["train.augment=[crop]", "model.name=mlp", "method.name=fedavg"]
    place = build(load_config(None, [*keys, f"data.path={tmp_path / 'images.npz'}"]), Communicator())
    (batch, *_) = ClientGroup(place.worker_context, [0], 0).batches(epochs=1)
    assert batch.x[0, :, 0].unique().tolist() == [-0.5]
    assert batch.x[0, :, 1].unique().tolist() == [-0.25]
    with pytest.raises(
        UserError, match=r"^train\.augment=\[crop\] changes images .*, and the data are images of 2x1x8;"
    ):
        build(load_config(None, [*keys, f"data.path={tmp_path / 'line.npz'}"]), Communicator())


def test_a_clients_changes_depend_on_round_and_purpose_but_not_on_its_group() -> None:
    train = TrainConfig.model_validate({"batch_size": 4, "augment": ["flip"]})
    place = make_worker(make_network(), SIZES, train, clients_at_once=5)
    x, _ = place.shard.samples("train", 1)

    def mirrored(ids: list[int], round: int = 0, **keys: Any) -> dict[int, bool]:
        """Return by sample of client 1 whether it is mirrored."""
        found = {}
        for batch in ClientGroup(place, ids, round).batches(epochs=1, **keys):
            rows = list(range(len(ids))) if isinstance(batch.members, slice) else batch.members.tolist()
            if ids.index(1) in rows:
                row = rows.index(ids.index(1))
                for index, image in zip(batch.index[row].tolist(), batch.x[row], strict=True):
                    found[index] = not torch.equal(image, x[index])
                    assert torch.equal(image.flip(2) if found[index] else image, x[index])
        assert sorted(found) == list(range(SIZES[1]))
        return found

    alone = mirrored([1])
    assert set(alone.values()) == {False, True}
    assert mirrored([0, 1, 2, 3, 4]) == mirrored([3, 1]) == alone
    assert mirrored([1], round=1) != alone
    assert mirrored([1], purpose="head") != alone
    assert not any(mirrored([1], augmented=False).values())


@cache
def with_settings_of(method: str, *changed: str) -> Run:
    other = {"fedbn": ["model.batchnorm=true"], "fedmn": []}
    small = other.get(method, ["model.name=mlp", "model.hidden=[8]"])
    return Run(*method_settings(method), *small, "data.per_client=20", "train.rounds=1", *changed)


@pytest.mark.parametrize(
    ("method", "key"),
    [
        (name, key)
        for name in DIFFERENT
        for key in ("label_smoothing", "augment")
        if key not in METHODS[name].traits.refuses
    ],
)
def test_every_method_trains_with_local_settings_or_refuses_them(method: str, key: str) -> None:
    plain = with_settings_of(method)
    changed = with_settings_of(method, f"train.{key}={KEYS[key]}".replace("'", ""))
    assert any(
        not torch.equal(before[name], after[name])
        for before, after in ((plain.server, changed.server), (plain.clients, changed.clients))
        for name in before
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"lr_decay": 0.5}, [1, 0.5, 0.25, 0.125, 0.0625]),
        ({"lr_decay": 0.5, "lr_decay_rounds": [3, 1]}, [1, 0.5, 0.5, 0.25, 0.25]),
        # 0.2 + 0.8 (1 + cos(k pi / 3)) / 2; evaluations after the last round have k = 3, and stay there
        ({"lr_end": 0.1}, [1, 0.8, 0.4, 0.2, 0.2]),
        ({"warmup_rounds": 2}, [1 / 3, 2 / 3, 1, 1, 1]),
        ({"warmup_rounds": 1, "lr_end": 0.1}, [0.5, 0.8, 0.4, 0.2, 0.2]),
    ],
)
def test_step_sizes_by_round_are_those_by_hand(keys: dict[str, object], expected: list[float]) -> None:
    train = TrainConfig.model_validate({"lr": 0.5, "rounds": 3} | keys)
    assert [train.lr_factor(round) for round in range(5)] == pytest.approx(expected, rel=1e-12)


REFUSALS = [(name, key) for name, method in METHODS.items() for key in method.traits.refuses]


@pytest.mark.parametrize(("method", "key"), REFUSALS)
def test_a_method_names_the_settings_that_it_does_not_support(method: str, key: str) -> None:
    value = {"momentum": 0.5, **KEYS}[key]
    words = [f"method.name={method}", f"train.{key}={value}".replace("'", "")]
    with pytest.raises(UserError, match=rf"^train\.{key}=.* does not go with .*{method}, wh.*; allowed: "):
        Run(*words, "train.rounds=1")
