"""What holds for whatever is drawn: the wire, the bytes and configurations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpcfl.communication.channel import Channel
from hpcfl.communication.codecs import UNSENT, ErrorFeedback, UploadCoding, codec_of
from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.traffic import count_bytes
from hpcfl.config import RESULT_NEUTRAL, differences, flatten
from hpcfl.config.keys import CommConfig
from hpcfl.parameters import Layer, Tensors
from hpcfl.registries import load_config, resolve

settings.register_profile(
    "hpcfl",
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("hpcfl")

# The wire


class CountingWorld(Communicator):
    """A world of one rank that adds up the float32 numbers it moves, to all and to or from single clients."""

    def __init__(self, max_elements: int) -> None:
        super().__init__(None, max_elements)
        self.to_all = self.of_single = 0

    def broadcast(self, tensor: Tensor) -> None:
        self.to_all += tensor.numel() if tensor.dtype == torch.float32 else 0
        super().broadcast(tensor)

    def scatter(self, send: Tensor | None, counts: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.of_single += sum(counts)
        return super().scatter(send, counts, dtype)

    def gather(self, send: Tensor, counts: Sequence[int]) -> Tensor | None:
        self.of_single += sum(counts) if send.dtype == torch.float32 else 0
        return super().gather(send, counts)


@st.composite
def messages(draw: st.DrawFn) -> tuple[tuple[Layer, ...], Message]:
    """Draw layers and a message of tensors that consist of them, some of whose layers stay behind."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    stops = list(itertools.accumulate(sizes))
    layers = tuple(Layer(f"l{n}", stop - sizes[n], stop, 0, 0) for n, stop in enumerate(stops))
    clients = draw(st.integers(1, 5))
    message = Message(num_clients=clients)
    for number in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from([f"t{number}", BUFFERS]))
        is_shared = draw(st.booleans())
        kind = draw(st.sampled_from(["whole", "some layers", "layers by client", "no layers"]))
        leading = draw(st.lists(st.integers(1, 3), max_size=2))
        shape = [*leading, stops[-1] + (kind == "no layers" or name == BUFFERS)]
        torch.manual_seed(draw(st.integers(0, 2**16)))
        if name in message:
            continue
        if is_shared:
            message.shared[name] = torch.rand(shape) + 1
        else:
            message.rows[name] = torch.rand(clients, *shape) + 1
        if name != BUFFERS and kind == "some layers":
            message.keep[name] = torch.rand(len(sizes)) < 0.6
        if name != BUFFERS and kind == "layers by client":
            message.keep[name] = torch.rand(clients, len(sizes)) < 0.6
    return layers, message


def expected(layers: Sequence[Layer], message: Message, name: str) -> Tensor:
    """Return what each client has of a tensor once it has travelled."""
    tensor, keep = message[name], message.keep.get(name)
    if keep is None or (name in message.shared and keep.dim() == 2):
        return tensor
    sizes = torch.tensor([layer.size for layer in layers])
    columns = keep.repeat_interleave(sizes, dim=-1).expand(message.num_clients, -1)
    while columns.dim() < tensor.dim():
        columns = columns.unsqueeze(1)
    return tensor * columns


@given(messages(), st.integers(200, 1000))
def test_what_is_packed_arrives_and_is_what_is_counted(
    drawn: tuple[tuple[Layer, ...], Message], max_elements: int
) -> None:
    layers, message = drawn
    cohort = Cohort(0, tuple(range(message.num_clients)), torch.ones(message.num_clients, dtype=torch.int64))
    world = CountingWorld(max_elements)
    received = Channel(world, layers, message.num_clients).down(message, cohort)
    for name in message.names:
        assert torch.equal(received[name], expected(layers, message, name))
    counted = count_bytes(message, layers)
    whole_shared = [name for name in message.shared if message.keep.get(name, torch.ones(1)).dim() == 1]
    if len(whole_shared) == len(message.shared):
        numbers = world.to_all * message.num_clients + world.of_single
        assert counted.of_numbers.sum() + counted.buffers.sum() == 4 * numbers

    up = Message(rows=message.rows, keep={n: message.keep[n] for n in message.rows if n in message.keep})
    up.num_clients = message.num_clients
    world = CountingWorld(max_elements)
    collected = Channel(world, layers, message.num_clients).up(up, cohort).collect()
    for name in up.rows:
        assert torch.equal(collected[name], expected(layers, up, name))
    counted = count_bytes(up, layers)
    assert counted.of_numbers.sum() + counted.buffers.sum() == 4 * world.of_single


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[tuple[Layer, ...], Message, Message]:
    """Draw layers, a download, and an upload of new values of its tensors without some of their layers."""
    layers, down = draw(messages())
    up = Message(num_clients=down.num_clients)
    for name in down.names:
        torch.manual_seed(draw(st.integers(0, 2**16)))
        up.rows[name] = down[name] + 0.1 * torch.randn(down[name].shape)
        kind = draw(st.sampled_from(["whole", "some layers", "layers by client"]))
        if kind != "whole" and up.rows[name].shape[-1] == layers[-1].stop:
            shape = (len(layers),) if kind == "some layers" else (down.num_clients, len(layers))
            up.keep[name] = torch.rand(shape) < 0.6
    return layers, down, up


LARGEST_ERROR = {"float16": 1e-3, "int8": 3 / 254 + 1e-6, "topk": 1e-6}
"""Of numbers below 3; with topk, of what arrives and what the client keeps together."""


@settings(max_examples=30)
@given(name=st.sampled_from(sorted(LARGEST_ERROR)), drawn=exchanges(), max_elements=st.integers(200, 400))
def test_what_a_codec_sends_arrives_and_hangs_on_no_block(
    name: str, drawn: tuple[tuple[Layer, ...], Message, Message], max_elements: int
) -> None:
    layers, message, up = drawn
    clients = message.num_clients
    cohort = Cohort(0, tuple(range(clients)), torch.ones(clients, dtype=torch.int64))
    comm = CommConfig.model_validate({"codec": name, "topk_ratio": 0.3 if name == "topk" else None})

    def exchange(most: int) -> tuple[Message, Message, Tensors, Tensors]:
        channel, state = Channel(Communicator(None, most), layers, clients), {}
        received = channel.down(message, cohort, codec_of(comm, "down"))
        sent = channel.as_received(message, codec_of(comm, "down"))
        unsent = ErrorFeedback([(state, clients)], [(0, client) for client in range(clients)])
        coding = UploadCoding(codec_of(comm, "up"), received, sent, unsent)
        return received, sent, channel.up(up, cohort, coding=coding).collect(), state

    received, sent, arrived, state = exchange(2**20)
    for tensor in message.names:
        assert torch.equal(received[tensor], expected(layers, sent, tensor))
        torch.testing.assert_close(sent[tensor], message[tensor], rtol=0, atol=LARGEST_ERROR[name])
        wanted = expected(layers, up, tensor)
        left = state.get(UNSENT + tensor, torch.zeros(()))
        torch.testing.assert_close(arrived[tensor] + left, wanted, rtol=0, atol=LARGEST_ERROR[name])
    _, _, in_blocks, of_blocks = exchange(max_elements)
    assert all(torch.equal(in_blocks[tensor], rows) for tensor, rows in arrived.items())
    assert all(torch.equal(of_blocks[tensor], rows) for tensor, rows in state.items())


# Partitions


# The simplex


# Configurations

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "method.name": st.sampled_from(["fedavg", "pfedla", "fedem", "pfedmb", "local"]),
    "data.clients": st.integers(1, 100),
    "data.test_fraction": st.floats(0.05, 0.9),
    "data.subset_per_class": st.none() | st.integers(1, 100),
    "data.normalise": st.sampled_from(["auto", "none", [[0.5], [0.25]]]),
    "model.batchnorm": st.booleans(),
    "train.rounds": st.integers(1, 10_000),
    "train.lr": st.floats(1e-6, 10),
    "train.last_batch": st.sampled_from(["even", "drop", "keep"]),
    "train.participation": st.floats(0.01, 1),
    "run.seed": st.integers(0, 2**40),
    "run.eval_every": st.integers(1, 100),
    "run.checkpoint_every": st.integers(1, 100),
}


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_a_configuration_survives_yaml_and_the_command_line(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    words = [f"{key}={yaml_word(value)}" for key, value in values.items()]
    config = load_config(None, words)
    saved: Path = tmp_path_factory.mktemp("saved") / "config.yaml"
    saved.write_text(config.yaml())
    for same in (load_config(saved, []), load_config(saved, words), resolve(config.tree())):
        assert same == config
        assert same.run_name() == config.run_name()
        assert differences(same.tree(), config.tree()) == []
    known = flatten(config.tree())
    assert all(known[key] == value for key, value in values.items())


@given(st.sampled_from(sorted(set(VALUES) - {"method.name"})), st.data())
def test_only_neutral_keys_leave_the_name_of_a_run(key: str, data: st.DataObject) -> None:
    first, second = data.draw(VALUES[key]), data.draw(VALUES[key])
    runs = [load_config(None, ["method.name=fedavg", f"{key}={yaml_word(v)}"]) for v in (first, second)]
    is_same = runs[0].short_hash() == runs[1].short_hash()
    assert is_same == (first == second or key in (*RESULT_NEUTRAL, "train.rounds"))


def yaml_word(value: object) -> str:
    """Write a value as on the command line."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
