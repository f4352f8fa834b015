"""What codecs send, what arrives, how many bytes it counts, and what clients keep.

Shapes: S clients of a cohort, P = 9 trainable numbers in L = 3 layers of 3, 2 and 4.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from bits import CODED, KINDS, method_settings, run_here
from harness import SMALL, Run, random
from torch import Tensor

from hpcfl.communication import channel as channel_module
from hpcfl.communication.channel import Channel
from hpcfl.communication.codecs import UNSENT, Codec, ErrorFeedback, Frame, UploadCoding, codec_of
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import BUFFERS, Cohort, Message, Piece
from hpcfl.communication.traffic import INDEX_BYTES, Traffic, count_bytes
from hpcfl.communication.upload import Upload
from hpcfl.config.keys import CommConfig
from hpcfl.methods.base import State
from hpcfl.methods.pfedla import PFedLA
from hpcfl.parameters import Layer
from hpcfl.simulation.round_loop import Simulation
from hpcfl.storage.ledger import DIRECTIONS, INDICES_LABEL
from hpcfl.training.client_group import ClientGroup

LAYERS = (Layer("a", 0, 3, 0, 0), Layer("b", 3, 5, 0, 2), Layer("c", 5, 9, 2, 2))
P = 9
CODECS = ("float16", "int8", "topk")
THIRD = 0.333251953125
"""1/3 in 16 bits."""


class Wire:
    """A server and its clients on one rank, with what the clients keep."""

    def __init__(self, codec: str, num_clients: int = 1, **more: object) -> None:
        self.settings = CommConfig.model_validate({"codec": codec, **more})
        self.num_clients, self.state = num_clients, dict[str, Tensor]()
        self.channel = Channel(Communicator(), LAYERS, num_clients)

    @property
    def cohort(self) -> Cohort:
        return Cohort(0, tuple(range(self.num_clients)), torch.ones(self.num_clients, dtype=torch.int64))

    def down(self, message: Message) -> Message:
        """Return what the clients receive, which is what the server thinks they do."""
        codec = codec_of(self.settings, "down")
        received = self.channel.down(message, self.cohort, codec)
        sent = self.channel.as_received(message, codec)
        for name in message.names:
            if name not in message.layer_mask:
                assert torch.equal(received[name], sent[name])
        return received

    def up(self, message: Message, received: Message | None = None) -> Message:
        """Return what the server receives of clients that received something before."""
        before = received or Message(num_clients=self.num_clients)
        everyone = range(self.num_clients)
        unsent = ErrorFeedback(
            [(self.state, self.num_clients)], [(self.state, client) for client in everyone]
        )
        coding = UploadCoding(codec_of(self.settings, "up"), before, tuple(before.names), unsent)
        upload = self.channel.up(message, self.cohort, before, coding)
        return replace(upload.outline, per_client=upload.collect())


def theta(*rows: list[float], **keep: Tensor) -> Message:
    numbers = torch.tensor(rows, dtype=torch.float32)
    return Message(per_client={"theta": numbers}, layer_mask=keep, num_clients=len(rows))


def bytes_of(message: Message) -> Traffic:
    return count_bytes(message, LAYERS)


# Numbers worked out by hand


def test_float16_rounds_and_saturates() -> None:
    numbers = [1 / 3, 1e6, -1e6, 2049.0, 1e-9, 65504.0, 65519.0, -0.0, 0.5]
    expected = [THIRD, 65504.0, -65504.0, 2048.0, 0.0, 65504.0, 65504.0, -0.0, 0.5]
    for arrived in (Wire("float16").down(theta(numbers)), Wire("float16").up(theta(numbers))):
        assert arrived["theta"].tolist() == [expected]
    traffic = bytes_of(Wire("float16").up(theta(numbers)))
    assert traffic.layers.tolist() == [[6, 4, 8]]


def test_float16_codes_all_floats_but_no_integers_and_keeps_types() -> None:
    message = Message(
        shared={"theta": torch.full((P,), 1 / 3), "routes": torch.tensor([2**40])},
        per_client={BUFFERS: torch.full((2, 2), 1e5), "mix": torch.full((2, 3), 1 / 3, dtype=torch.float64)},
        num_clients=2,
    )
    arrived = Wire("float16", 2).down(message)
    assert arrived["theta"].tolist() == [[THIRD] * P] * 2
    assert arrived.per_client["mix"].dtype == torch.float64
    assert arrived.per_client["mix"].tolist() == [[THIRD] * 3] * 2
    assert arrived.per_client[BUFFERS].tolist() == [[65504.0] * 2] * 2
    assert arrived.shared["routes"].tolist() == [2**40]
    codec = codec_of(CommConfig(codec="float16"), "down")
    sent = Channel(Communicator(), LAYERS, 2).as_received(message, codec)
    traffic = bytes_of(sent)
    assert traffic.layers.tolist() == [[6, 4, 8]] * 2
    assert traffic.buffers.tolist() == [4, 4]
    assert traffic.indices.tolist() == [8, 8]
    assert traffic.others["mix"].tolist() == [6, 6]


def test_int8_has_a_scale_for_each_layer() -> None:
    # scales 2, none and 1; 1.5 and -2.5 are ties
    numbers = [254.0, 3.0, -5.0, 0.0, 0.0, -127.0, 0.4, 0.6, 126.5]
    expected = [254.0, 4.0, -4.0, 0.0, 0.0, -127.0, 0.0, 1.0, 126.0]
    arrived = Wire("int8").up(theta(numbers))
    assert arrived["theta"].tolist() == [expected]
    assert bytes_of(arrived).layers.tolist() == [[3 + 4, 2 + 4, 4 + 4]]
    assert Wire("int8").down(theta(numbers))["theta"].tolist() == [expected]


def test_int8_codes_each_client_and_each_model_separately() -> None:
    branches = torch.tensor([[[127.0] * P, [254.0] * P], [[1e-3] * P, [-5.0] * P]])
    branches[..., 0] = 1.2
    message = Message(per_client={"branches": branches}, num_clients=2)
    arrived = Wire("int8", 2).up(message)["branches"]
    assert arrived[0, :, 0].tolist() == [1.0, 2.0]
    assert arrived[1, :, 0].tolist() == pytest.approx([1.2, 5 / 127 * 30])
    torch.testing.assert_close(arrived[:, :, 3:], branches[:, :, 3:])


def test_int8_codes_other_tensors_with_one_scale_and_does_not_change_running_statistics() -> None:
    rows = {"mix": torch.tensor([[[127.0, 0.6], [-3.2, 0.0]]]), BUFFERS: torch.tensor([[0.3, 127.0]])}
    arrived = Wire("int8").up(Message(per_client=rows | {"count": torch.tensor([3])}))
    assert arrived.per_client["mix"].tolist() == [[[127.0, 1.0], [-3.0, 0.0]]]
    assert torch.equal(arrived.per_client[BUFFERS], rows[BUFFERS])
    assert arrived.per_client["count"].tolist() == [3]
    traffic = bytes_of(arrived)
    assert traffic.others["mix"].tolist() == [4 + 4]
    assert (traffic.buffers.tolist(), traffic.indices.tolist()) == ([8], [8])


def test_int8_sends_differences_to_the_download_up_and_values_down() -> None:
    received = theta([1000.0] * P)
    trained = [1000.0, 1001.0, 1127.0, 1000.0, 1000.0, 873.0, 1000.25, 1000.75, 1000.0]
    arrived = Wire("int8").up(theta(trained), received)
    assert arrived["theta"].tolist() == [[1000, 1001, 1127, 1000, 1000, 873, 1000, 1001, 1000]]
    other_shape = Message(per_client={"theta": torch.full((1, 2, P), 1000.0)})
    with_itself = Wire("int8").up(theta(trained), other_shape)
    assert torch.equal(with_itself.per_client["theta"], Wire("int8").down(theta(trained)).per_client["theta"])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_int8_sends_a_layer_that_contains_nan_as_nan(bad: float) -> None:
    arrived = Wire("int8").up(theta([1.0, bad, 2.0, *[127.0] * 6])).per_client["theta"][0]
    assert arrived.isnan().tolist() == [True] * 3 + [False] * 6


def test_topk_sends_the_largest_values_of_each_layer_and_remembers_the_rest() -> None:
    link = Wire("topk", topk_ratio=0.5)
    received = theta([1.0] * P)
    # differences 3, -1, 2 | 1, -1 (a tie) | 0, 4, 0.5, -5: two, one and two of them
    trained = theta([4.0, 0.0, 3.0, 2.0, 0.0, 1.0, 5.0, 1.5, -4.0])
    arrived = link.up(trained, received)
    assert arrived["theta"].tolist() == [[4.0, 1.0, 3.0, 2.0, 1.0, 1.0, 5.0, 1.0, -4.0]]
    assert link.state[f"{UNSENT}theta"].tolist() == [[0.0, -1.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.5, 0.0]]
    traffic = bytes_of(arrived)
    assert traffic.layers.tolist() == [[8, 4, 8]]
    assert traffic.indices.tolist() == [4 * (2 + 1 + 2)]
    # nothing new: what was left goes, and of zeros those in front
    again = link.up(received, received)
    assert again["theta"].tolist() == [[1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.5, 1.0]]
    assert not link.state[f"{UNSENT}theta"].any()


def test_topk_without_error_feedback_forgets_what_it_did_not_send() -> None:
    link = Wire("topk", topk_ratio=0.5, error_feedback=False)
    received, trained = theta([1.0] * P), theta([4.0, 0.0, 3.0, 2.0, 0.0, 1.0, 5.0, 1.5, -4.0])
    assert link.up(trained, received)["theta"].tolist() == [[4.0, 1.0, 3.0, 2.0, 1.0, 1.0, 5.0, 1.0, -4.0]]
    assert torch.equal(link.up(received, received)["theta"], received["theta"])
    assert link.state == {}


def test_topk_sends_tensors_without_a_counterpart_unchanged() -> None:
    shapes = {"theta": (P,), "branches": (3, P), "alpha": (4,), "figure": (), BUFFERS: (2,)}
    rows = {name: random(2, *shape) for name, shape in shapes.items()} | {"count": torch.tensor([3, 4])}
    received = {name: tensor + 1 for name, tensor in rows.items()}
    received["branches"] = random(2, 2, P)
    del received["theta"]
    link = Wire("topk", 2)
    before = Message({"theta": random(2, P)}, received, num_clients=2)
    arrived = link.up(Message(per_client=rows, num_clients=2), before)
    assert all(torch.equal(arrived.per_client[name], tensor) for name, tensor in rows.items())
    assert link.state == {}


@pytest.mark.parametrize(("share", "sent"), [(1.0, 9), (0.34, 5), (1 / 3, 4), (0.01, 3)])
def test_topk_sends_at_least_its_share_of_each_layer(share: float, sent: int) -> None:
    arrived = Wire("topk", topk_ratio=share).up(theta([*range(1, 10)]), theta([0.0] * P))
    assert arrived["theta"].count_nonzero() == sent
    assert bytes_of(arrived).indices.tolist() == [4 * sent]


def test_topk_uses_the_decimal_value_of_its_share() -> None:
    codec = codec_of(CommConfig(codec="topk", topk_ratio=0.07), "up")
    layers = (Layer("a", 0, 100, 0, 0),)
    known = torch.ones(1, 1, dtype=torch.bool)
    frame = Frame("theta", (100,), torch.float32, 1, (100,), True, received_layers=known)
    assert Frame.from_message(theta([0.0] * 100), "theta", layers).sizes == (100,)
    assert [piece.sizes for piece in codec.pieces(frame)] == [(100,), (7,), (7,)]


# Layer masks


@pytest.mark.parametrize("codec", CODECS)
def test_layers_that_are_not_sent_arrive_as_zero_and_count_no_bytes(codec: str) -> None:
    keep = torch.tensor([[True, False, True], [False, True, True]])
    message = theta([3.0] * P, [5.0] * P, theta=keep)
    received = theta([1.0] * P, [1.0] * P)
    arrived = Wire(codec, 2).up(message, received)
    first, second = [True] * 3 + [False] * 2 + [True] * 4, [False] * 3 + [True] * 6
    assert (arrived["theta"] != 0).tolist() == [first, second]
    traffic = bytes_of(arrived)
    assert (traffic.layers > 0).tolist() == keep.tolist()
    assert (traffic.indices >= INDEX_BYTES).all()
    static = theta([3.0] * P, [5.0] * P, theta=torch.tensor([True, False, True]))
    traffic = bytes_of(Wire(codec, 2).up(static, received))
    assert (traffic.layers > 0).tolist() == [[True, False, True]] * 2
    if codec != "topk":
        assert traffic.indices.tolist() == [0, 0]
        arrived = Wire(codec, 2).down(message)
        assert (arrived["theta"] != 0).sum(dim=1).tolist() == [7, 6]


def test_topk_sends_layers_that_a_client_did_not_receive_in_full() -> None:
    """As with HeurpFedLA, whose clients keep a layer and upload all."""
    received = theta([1.0] * P, [1.0] * P, theta=torch.tensor([[True, False, True], [True, True, True]]))
    trained = theta([*range(2, 11)], [*range(2, 11)])
    link = Wire("topk", 2, topk_ratio=0.25)
    link.state[f"{UNSENT}theta"] = torch.full((2, P), 0.5)
    arrived = link.up(trained, received)
    assert arrived["theta"].tolist() == [
        [1.0, 1.0, 4.5, 5.0, 6.0, 1.0, 1.0, 1.0, 10.5],
        [1.0, 1.0, 4.5, 1.0, 6.5, 1.0, 1.0, 1.0, 10.5],
    ]
    left = [1.5, 2.5, 0.0, 0.5, 0.5, 6.5, 7.5, 8.5, 0.0]
    assert link.state[f"{UNSENT}theta"].tolist() == [left, [*left[:3], 4.5, 0.0, *left[5:]]]
    traffic = bytes_of(arrived)
    assert traffic.layers.tolist() == [[4, 8, 4], [4, 4, 4]]
    assert traffic.indices.tolist() == [8, 12]


def test_int8_takes_layers_that_a_client_did_not_receive_as_zero() -> None:
    received = theta([1000.0] * P, theta=torch.tensor([True, False, True]))
    arrived = Wire("int8").up(theta([1127.0] * 3 + [127.0, 3.0] + [1127.0] * 4), received)
    assert arrived["theta"].tolist() == [[1127.0] * 3 + [127.0, 3.0] + [1127.0] * 4]


# What a run does with it


def test_the_codec_none_changes_nothing_and_codecs_apply_to_their_directions() -> None:
    assert type(codec_of(CommConfig(), "up")) is type(codec_of(CommConfig(), "down")) is Codec
    for codec in ("float16", "int8"):
        for directions, coded in ((None, {"up", "down"}), ("both", {"up", "down"}), ("up", {"up"})):
            settings = CommConfig.model_validate({"codec": codec, "directions": directions})
            assert {way for way in ("up", "down") if type(codec_of(settings, way)) is not Codec} == coded
    assert type(codec_of(CommConfig(codec="topk"), "down")) is Codec


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the bytes of numbers and indices that rounds of four clients, not evaluations, give to MPI."""
    total, is_round, copies = Counter[str](), False, 1
    pack, broadcast, round_of = channel_module._pack, Channel._broadcast, Simulation._round

    def packed(numbers: Tensor, piece: Piece) -> Tensor:
        flat = pack(numbers, piece)
        is_index = piece.is_index or not (flat.is_floating_point() or flat.dtype == torch.int8)
        if is_round:
            total["indices" if is_index else "numbers"] += copies * flat.nbytes
        return flat

    def broadcast_to_four(*arguments: Any) -> Tensor:
        nonlocal copies
        copies = 4
        row = broadcast(*arguments)
        copies = 1
        return row

    def whole_round(*arguments: Any) -> Any:
        nonlocal is_round
        is_round = True
        result = round_of(*arguments)
        is_round = False
        return result

    monkeypatch.setattr(channel_module, "_pack", packed)
    monkeypatch.setattr(Channel, "_broadcast", broadcast_to_four)
    monkeypatch.setattr(Simulation, "_round", whole_round)
    return total


@pytest.mark.parametrize("case", sorted({*CODED, *(f"{method}-topk" for method in KINDS)}))
@pytest.mark.warns
def test_counted_bytes_are_those_sent(sent: Counter[str], case: str) -> None:
    method, codec = case.split("-")
    # heurpfedla retains layers from the third round on
    rounds = 3 if method == "heurpfedla" else 2
    keys = ["model.batchnorm=true", "data.per_client=20", f"comm.codec={codec}", f"train.rounds={rounds}"]
    run = Run(*method_settings(method), *keys)
    assert all(rows.isfinite().all() for rows in run.evaluated().values())
    table = run.simulation.ledger.tables()["bytes"]
    of_columns = dict(zip(table.columns, table.values.sum(axis=0).tolist(), strict=True))
    indices = sum(of_columns.pop(f"{way}/{INDICES_LABEL}") for way in DIRECTIONS)
    numbers = sum(of_columns.values()) - of_columns["round"]
    if method == "heurpfedla":
        retained = int(run.server["retained_rounds"].sum())
        assert retained > 0
        indices -= retained * INDEX_BYTES
    if method == "fedmn":
        # all blocks are sent to all clients, and counted for those that asked for them
        assert numbers < sent["numbers"]
    else:
        assert numbers == sent["numbers"]
    assert indices == sent["indices"]


@pytest.mark.parametrize(
    ("method", "left"), [("fedavg", None), ("pfedmb", None), ("ifca", "theta"), ("scaffold", "change")]
)
def test_a_run_warns_once_of_what_topk_leaves(
    method: str, left: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ["data.per_client=20", "model.batchnorm=true", "comm.codec=topk", "train.rounds=2"]
    Run(*method_settings(method), *keys)
    found = re.findall(r"topk does not compress (\w+) in the uploads of method\.name=(\w+)", caplog.text)
    assert found == ([] if left is None else [(left, method)])


@pytest.mark.parametrize("codec", ["float16", "int8"])
def test_the_server_uses_what_clients_decoded(codec: str) -> None:
    received: dict[tuple[int, int], Tensor] = {}
    known: list[Tensor] = []

    class Watched(PFedLA):
        def train(self, clients: ClientGroup, down: Message) -> Message:
            for client, row in zip(clients.ids, down["theta"], strict=True):
                received[clients.round, client] = row
            return super().train(clients, down)

        def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
            assert up.sent is not None
            known.extend(up.sent.per_client["theta"])
            super().aggregate(server, cohort, up)

    Run(f"comm.codec={codec}", kind=Watched)
    assert len(known) == len(received) == 3 * 4
    assert all(torch.equal(one, other) for one, other in zip(known, received.values(), strict=True))


def test_clients_are_scored_with_what_they_would_receive(tmp_path: Path) -> None:
    keys = [*SMALL, "train.rounds=2", "train.buffers=average", "model.batchnorm=true"]
    assert run_here(tmp_path, [*keys, "comm.codec=float16"]) == 0
    with h5py.File(tmp_path / "checkpoint.h5", "r", locking=False) as file:
        for name in ("theta", "buffers"):
            model = torch.from_numpy(file[f"personalised/{name}"][()])
            assert torch.equal(model, model.half().float())
