"""Feature shift: each kind by hand, who shares a shift; test_domains.py has a run on ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import run_here, tiny_settings

import hpcfl
from hpcfl.data.arrays import Arrays
from hpcfl.data.partitions import ClientIndices
from hpcfl.data.shard import SPLITS, Shard
from hpcfl.data.shift import Shift, shift_of
from hpcfl.errors import FINISHED, UserError
from hpcfl.main import main
from hpcfl.registries import load_config
from hpcfl.setup.experiment import describe, load_data

ALL = np.arange(6)


def shift(*words: str, clients: int = 5, seed: int = 5) -> Shift:
    """Return the shift of a federation of so many clients."""
    config = load_config(None, [*words, f"data.clients={clients}", f"data.seed={seed}"])
    return shift_of(config.data, config.data_seed, clients)


def images(channels: int = 1, side: int = 9) -> torch.Tensor:
    return torch.rand(len(ALL), channels, side, side, generator=torch.Generator().manual_seed(0))


def test_a_quarter_turn_moves_every_pixel_counter_clockwise() -> None:
    turns = shift("data.shift=rotation", "data.shift_groups=4", clients=6)
    x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    expected = {0: [[1, 2], [3, 4]], 1: [[2, 4], [1, 3]], 2: [[4, 3], [2, 1]], 3: [[3, 1], [4, 2]]}
    for client in range(6):
        assert turns.changed(x, client, ALL[:1])[0, 0].tolist() == expected[client % 4]


def test_other_rotations_have_the_same_direction_and_zeros_in_the_corners() -> None:
    eighths = shift("data.shift=rotation", "data.shift_groups=8")
    assert [eighths.angle(group) for group in (0, 1, 3)] == [0, 45, 135]
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, 8] = 1
    # from the middle of the right side to the upper right
    turned = eighths.changed(x, 1, ALL[:1])[0, 0]
    assert divmod(int(turned.argmax()), 9) == (1, 7)
    whole = eighths.changed(torch.ones(1, 1, 9, 9), 1, ALL[:1])[0, 0]
    assert (whole[0, 0], whole[4, 4]) == (0, 1)
    # images that are no squares keep their shape
    quarters = shift("data.shift=rotation", "data.shift_groups=4")
    assert quarters.changed(x[:, :, :5], 1, ALL[:1]).shape == (1, 1, 5, 9)


def test_angles_are_evenly_spread_without_groups() -> None:
    spread = shift("data.shift=rotation", "data.shift_strength=30")
    assert [spread.angle(client) for client in range(5)] == [-30, -15, 0, 15, 30]
    assert shift("data.shift=rotation", clients=1).angle(0) == 0
    assert torch.equal(spread.changed(images(), 2, ALL), images())


def test_colours_multiply_each_channel_by_a_factor_of_the_client() -> None:
    colours = shift("data.shift=colour", "data.shift_strength=0.2")
    x = images(channels=3)
    ratios = torch.stack([(colours.changed(x, client, ALL) / x).mean((0, 2, 3)) for client in range(5)])
    assert ((ratios > 0.8) & (ratios < 1.2)).all()
    assert len(ratios.unique()) == 15
    torch.testing.assert_close(colours.changed(x, 3, ALL), x * ratios[3].view(1, 3, 1, 1))


def test_grey_images_change_in_contrast_and_brightness() -> None:
    greys = shift("data.shift=colour")
    x = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)
    found = torch.stack([greys.changed(x, client, ALL[:2]).flatten() for client in range(5)])
    brightness, contrast = found[:, 0], found[:, 1] - found[:, 0]
    assert (brightness.abs() <= 0.25).all()
    assert ((contrast - 1).abs() <= 0.5).all()
    assert len(brightness.unique()) == len(contrast.unique()) == 5


def test_the_deviation_of_noise_grows_over_the_clients() -> None:
    noise = shift("data.shift=noise", "data.shift_strength=0.4")
    x = images(side=40)
    deviations = [float((noise.changed(x, client, ALL) - x).std()) for client in range(5)]
    # 9600 numbers: a relative error of 0.7 %
    np.testing.assert_allclose(deviations, [0, 0.1, 0.2, 0.3, 0.4], rtol=0.03)
    added = (noise.changed(x, 4, ALL) - x).flatten(1)
    assert (torch.corrcoef(added) - torch.eye(6)).abs().max() < 0.1
    # each sample has its own noise, wherever it is among others
    assert torch.equal(noise.changed(x[2:4], 4, ALL[2:4]), noise.changed(x, 4, ALL)[2:4])


def test_blur_is_a_gaussian_that_keeps_the_mean() -> None:
    blur = shift("data.shift=blur", "data.shift_strength=1.5", clients=4)
    assert torch.equal(blur.changed(images(), 0, ALL), images())
    x = torch.zeros(1, 2, 15, 15)
    x[0, 1, 7, 7] = 1
    found = blur.changed(x, 2, ALL[:1])
    distance = torch.arange(15) - 7
    line = torch.exp(-(distance**2) / 2) * (distance.abs() <= 3)
    line /= line.sum()
    torch.testing.assert_close(found[0, 1], torch.outer(line, line))
    assert found[0, 0].abs().max() == 0
    # a Gaussian wider than the image
    wide = shift("data.shift=blur", "data.shift_strength=9")
    assert wide.changed(images(side=2), 4, ALL).shape[2:] == (2, 2)


@pytest.mark.parametrize("kind", ["rotation", "colour", "noise", "blur"])
def test_clients_of_a_group_share_a_shift_and_others_do_not(kind: str) -> None:
    in_groups = shift(f"data.shift={kind}", "data.shift_groups=3", clients=7)
    found = [in_groups.changed(images(), client, ALL) for client in range(7)]
    assert torch.equal(found[1], found[4])
    assert torch.equal(found[0], found[6])
    assert not torch.equal(found[1], found[2])
    again = shift(f"data.shift={kind}", "data.shift_groups=3", clients=7, seed=6).changed(images(), 1, ALL)
    assert torch.equal(again, found[1]) == (kind in ("rotation", "blur"))


def test_all_splits_are_shifted_before_normalisation_and_the_pool_is_not_changed() -> None:
    x = np.arange(4 * 6, dtype=np.uint8).reshape(6, 1, 2, 2)
    arrays = Arrays(x.copy(), np.zeros(6, np.int64), 1, 10.0, (), ())
    one = [np.array([number]) for number in range(6)]
    parts = [ClientIndices(one[0], one[2], one[4]), ClientIndices(one[1], one[3], one[5])]
    turns = shift("data.shift=rotation", "data.shift_groups=2", clients=2)
    shard = Shard.build(arrays, parts, range(1, 2), (0.5,), (2.0,), "cpu", turns)
    for split, sample in zip(SPLITS, (1, 3, 5), strict=True):
        expected = (x[sample, :, ::-1, ::-1] / 10 - 0.5) / 2
        torch.testing.assert_close(shard.samples(split, 0)[0][0], torch.from_numpy(expected.copy()).float())
    np.testing.assert_array_equal(arrays.x, x)


def test_predict_and_export_expect_shifted_samples(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients 5 and 6 take no part in training."""
    words = [*tiny_settings(digits), "method.name=fedavg", "train.rounds=1", "data.unseen_clients=0.3"]
    words += ["data.shift=rotation", "data.shift_groups=2"]
    assert run_here(tmp_path / "run", words) == FINISHED
    arrays, parts = load_data(load_config(None, words))
    run = hpcfl.load_run(tmp_path / "run")
    assert run.clients["unseen"].tolist() == [0] * 5 + [1] * 2
    for client in (1, 5, 6):
        tests, half_turns = parts[client].test, 2 * (client % 2)
        for turns, is_right in ((half_turns, True), (2 - half_turns, False)):
            x = np.rot90(arrays.x[tests], turns, (2, 3))
            np.savez(tmp_path / "samples.npz", x=x, y=arrays.y[tests])
            of_labels = run.models.probabilities(client, x)[np.arange(len(tests)), arrays.y[tests]]
            loss = run.clients["loss"][client]
            assert (-np.log(of_labels).mean() == pytest.approx(loss, rel=1e-5)) == is_right
    given = [str(tmp_path / "run"), "--client", "1"]
    out = ["--out", str(tmp_path / "labels.csv")]
    assert main(["predict", *given, str(tmp_path / "samples.npz"), *out]) == FINISHED
    assert "data.shift=rotation is not applied here: samples of a client must have" in capsys.readouterr().out
    assert main(["export", *given, "--out", str(tmp_path / "a.pt")]) == FINISHED
    assert json.loads((tmp_path / "a.json").read_text())["shift"] == "rotation"


def test_impossible_shifts_are_refused() -> None:
    for words, expected in (
        ("shift_groups=2", "data.shift_groups=2 needs data.shift; set that"),
        ("shift_strength=2", "data.shift_strength=2.0 needs data.shift; set that"),
        ("shift=rotation shift_strength=190", "data.shift_strength=190.0 needs to be at most 180"),
        ("shift=colour shift_strength=1.1", "at most 1 with data.shift=colour"),
        ("shift=rotation shift_groups=4 shift_strength=20", "=20.0 needs data.shift_groups=null with data.s"),
    ):
        with pytest.raises(UserError) as caught:
            load_config(None, [f"data.{word}" for word in words.split()])
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_shift_of_samples_that_are_not_images_is_refused() -> None:
    for source, named in (("wine", "13 features"), ("topics", "sequences of 32 of 96 tokens")):
        config = load_config(None, [f"data.source={source}", "data.shift=blur", "model.name=mlp"])
        expected = f"data.shift=blur changes images, and the data are {named}; set data.shift=null"
        with pytest.raises(UserError, match=f"^{expected}$"):
            describe(config.data, *load_data(config))
