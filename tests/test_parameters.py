"""The layout of a flat vector: offsets, layers, body and head, BatchNorm, running statistics."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from by_hand import is_batchnorm
from harness import make_network
from torch import nn

from hpcfl.models.networks import Network
from hpcfl.parameters import Granularity, ParameterLayout, columns

# digits_cnn with BatchNorm: conv 16/32 3x3, fc 128 -> 64 -> 10
SIZES = {"conv1": 160, "bn1": 32, "conv2": 4640, "bn2": 64, "fc1": 8256, "fc2": 650}


@pytest.fixture
def layout() -> ParameterLayout:
    return ParameterLayout(make_network(batchnorm=True))


def test_a_layout_is_contiguous_with_statistics_apart(layout: ParameterLayout) -> None:
    assert layout.size == 13_802 == sum(SIZES.values())
    assert layout.buffer_size == 2 * (16 + 32)
    statistics = [f"body.bn{n}.{name}" for n in (1, 2) for name in ("running_mean", "running_var")]
    assert [slot.name for slot in layout.buffers] == statistics
    slots = layout.parameters
    assert [slot.start for slot in slots] == [0, *(slot.stop for slot in slots[:-1])]
    first, last = slots[0], slots[-1]
    assert (first.name, first.module, first.stop) == ("body.conv1.weight", "conv1", 144)
    assert first.shape == (16, 1, 3, 3)
    assert (last.name, last.module, last.start) == ("head.fc2.bias", "fc2", 13_792)
    assert (layout.body, layout.head) == (slice(0, 13_152), slice(13_152, 13_802))


def test_a_layer_is_a_module(layout: ParameterLayout) -> None:
    layers = layout.layers()
    assert {layer.name: layer.size for layer in layers} == SIZES
    assert [layer.start for layer in layers] == [0, *(layer.stop for layer in layers[:-1])]
    statistics = [(layer.buffer_start, layer.buffer_stop) for layer in layers]
    assert statistics == [(0, 0), (0, 32), (32, 32), (32, 96), (96, 96), (96, 96)]


def test_a_block_is_a_convolution_with_its_batchnorm(layout: ParameterLayout) -> None:
    layers = layout.layers("block")
    sizes = {"conv1": 192, "conv2": 4704, "fc1": 8256, "fc2": 650}
    assert {layer.name: layer.size for layer in layers} == sizes
    statistics = [(layer.buffer_start, layer.buffer_stop) for layer in layers]
    assert statistics == [(0, 32), (32, 96), (96, 96), (96, 96)]


def test_a_layer_can_be_a_tensor_and_batchnorms_weight_has_the_statistics(layout: ParameterLayout) -> None:
    layers = layout.layers("tensor")
    assert [layer.name for layer in layers][:4] == ["conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias"]
    assert (len(layers), layers[-1].stop) == (12, layout.size)
    with_statistics = [layer.name for layer in layers if layer.buffer_stop > layer.buffer_start]
    assert with_statistics == ["bn1.weight", "bn2.weight"]
    assert (layers[2].buffer_stop, layers[-1].buffer_stop) == (32, layout.buffer_size)


def test_batchnorm_is_known_by_its_type_not_by_its_name() -> None:
    body: OrderedDict[str, nn.Module] = OrderedDict(
        down=nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.BatchNorm2d(2)),
        flatten=nn.Flatten(),
        fc_bn_like=nn.Linear(8, 3),
        norm=nn.BatchNorm1d(3),
    )
    layout = ParameterLayout(Network(body, OrderedDict(fc=nn.Linear(3, 2))))
    assert layout.batchnorm_modules == {"down.1", "norm"}
    mask = is_batchnorm(layout)
    assert mask.sum() == 2 * (2 + 3)
    assert mask[2:6].all()
    assert [layer.name for layer in layout.layers("block")] == ["down.0", "fc_bn_like", "fc"]
    assert layout.buffer_size == 2 * (2 + 3)


def test_views_share_the_vectors_memory_and_its_gradient(layout: ParameterLayout) -> None:
    theta = torch.zeros(layout.size)
    layout.views(theta)["head.fc2.bias"].fill_(3.0)
    assert theta[-10:].tolist() == [3.0] * 10
    assert theta[:-10].count_nonzero() == 0
    theta.requires_grad_()
    layout.views(theta)["body.conv1.weight"].sum().backward()
    assert theta.grad is not None
    assert theta.grad.sum() == 144
    buffers = torch.zeros(layout.buffer_size)
    layout.buffer_views(buffers)["body.bn2.running_var"].fill_(1.0)
    assert buffers.tolist() == [0.0] * 64 + [1.0] * 32


def test_flatten_copies_parameters_and_statistics_in_the_layouts_order(layout: ParameterLayout) -> None:
    network = make_network(batchnorm=True)
    theta, buffers = layout.flatten(network)
    named = dict(network.named_parameters())
    assert all(torch.equal(view, named[name]) for name, view in layout.views(theta).items())
    assert buffers.tolist() == [0.0] * 16 + [1.0] * 16 + [0.0] * 32 + [1.0] * 32
    theta.zero_()
    assert named["head.fc2.weight"].count_nonzero() == 640


def test_a_network_without_batchnorm_has_no_statistics() -> None:
    network = make_network()
    layout = ParameterLayout(network)
    assert layout.buffer_size == 0
    assert layout.flatten(network)[1].shape == (0,)
    assert layout.buffer_views(torch.empty(0)) == {}
    assert layout.batchnorm_modules == frozenset()
    assert layout.layers("block") == layout.layers("module")


def test_a_choice_of_layers_spreads_over_their_numbers(layout: ParameterLayout) -> None:
    keep = torch.eye(6, dtype=torch.bool)[[0, 5]]
    spread = columns(layout.layers(), keep)
    assert spread.shape == (2, 13_802)
    assert spread.sum(dim=1).tolist() == [160, 650]
    assert spread[0, :160].all()
    assert spread[1, -650:].all()


def test_statistics_belong_to_their_own_module_also_without_weights() -> None:
    norms = {"plain": nn.BatchNorm2d(2, affine=False), "bn": nn.BatchNorm2d(2)}
    body = OrderedDict(conv=nn.Conv2d(1, 2, 1), **norms, fc=nn.Linear(2, 2))
    layout = ParameterLayout(Network(body, OrderedDict(out=nn.Linear(2, 2))))
    expected = {"conv": (0, 4), "bn": (4, 8), "fc": (8, 8), "out": (8, 8)}
    assert {layer.name: (layer.buffer_start, layer.buffer_stop) for layer in layout.layers()} == expected
    of_tensors = {layer.name: layer.buffer_stop - layer.buffer_start for layer in layout.layers("tensor")}
    assert of_tensors["bn.weight"] == 4
    assert sum(of_tensors.values()) == 8
    (block, *_) = layout.layers("block")
    assert (block.name, block.buffer_start, block.buffer_stop) == ("conv", 0, 8)


@pytest.mark.parametrize("granularity", ["module", "tensor"])
def test_modules_of_one_name_in_body_and_head_are_layers_of_their_own(granularity: Granularity) -> None:
    layout = ParameterLayout(Network(OrderedDict(fc=nn.Linear(4, 3)), OrderedDict(fc=nn.Linear(3, 2))))
    layers = layout.layers(granularity)
    of_body = [layer.name for layer in layers if layer.stop <= layout.body.stop]
    of_head = [layer.name for layer in layers if layer.stop > layout.body.stop]
    assert {name.partition(".")[0] for name in of_body} == {"body"}
    assert {name.partition(".")[0] for name in of_head} == {"head"}


def test_a_name_is_short_where_only_one_module_with_tensors_has_it() -> None:
    """As of the vision transformer, whose head's last module is `head`, too."""
    layout = ParameterLayout(Network(OrderedDict(fc=nn.Linear(4, 3)), OrderedDict(head=nn.Linear(3, 2))))
    assert [layer.name for layer in layout.layers()] == ["fc", "head"]
