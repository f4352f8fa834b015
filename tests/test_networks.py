"""The papers' networks: parameter counts, and their initial weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpcfl.errors import UserError
from hpcfl.models import MODELS, NetworkOptions, build_network
from hpcfl.parameters import ParameterLayout

CIFAR, MNIST = (3, 32, 32), (1, 28, 28)


def layout_of(
    name: str, shape: tuple[int, int, int], classes: int, *, batchnorm: bool = False
) -> ParameterLayout:
    return ParameterLayout(build_network(name, shape, classes, NetworkOptions(batchnorm=batchnorm), 0))


@pytest.mark.parametrize(
    ("name", "shape", "classes", "batchnorm", "size"),
    [
        ("lenet", CIFAR, 10, False, 121_182),
        ("lenet", CIFAR, 10, True, 121_278),
        ("lenet", CIFAR, 100, False, 128_832),
        ("lenet", CIFAR, 100, True, 128_928),
        ("lenet", MNIST, 10, False, 85_822),
        ("lenet", MNIST, 62, False, 90_242),
        ("lenet_small", CIFAR, 10, False, 62_006),
        ("lenet_small", CIFAR, 100, False, 69_656),
        ("lenet_small", MNIST, 10, False, 44_426),
        ("lenet_small", MNIST, 62, False, 48_846),
        ("fedavgcnn", MNIST, 10, False, 582_026),
        ("fedavgcnn", CIFAR, 10, False, 878_538),
        ("fedavgcnn", CIFAR, 100, False, 924_708),
        ("digits_cnn", (1, 8, 8), 10, False, 13_706),
    ],
)
def test_parameter_counts(
    name: str, shape: tuple[int, int, int], classes: int, batchnorm: bool, size: int
) -> None:
    assert layout_of(name, shape, classes, batchnorm=batchnorm).size == size


@pytest.mark.parametrize(
    ("name", "shape", "sizes"),
    [
        ("lenet", CIFAR, {"conv1": 1216, "conv2": 12_832, "fc1": 96_120, "fc2": 10_164, "fc3": 850}),
        ("lenet", MNIST, {"conv1": 416, "conv2": 12_832, "fc1": 61_560, "fc2": 10_164, "fc3": 850}),
        ("lenet_small", CIFAR, {"conv1": 456, "conv2": 2416, "fc1": 48_120, "fc2": 10_164, "fc3": 850}),
        ("fedavgcnn", CIFAR, {"conv1": 2432, "conv2": 51_264, "fc1": 819_712, "fc2": 5130}),
    ],
)
def test_layer_sizes(name: str, shape: tuple[int, int, int], sizes: dict[str, int]) -> None:
    assert {layer.name: layer.size for layer in layout_of(name, shape, 10).layers()} == sizes


@pytest.mark.parametrize(("classes", "size"), [(10, 850), (26, 2210), (47, 3995), (62, 5270), (100, 8500)])
def test_lenets_classifier_grows_with_the_classes(classes: int, size: int) -> None:
    assert layout_of("lenet", MNIST, classes).layers()[-1].size == size


@pytest.mark.parametrize(("shape", "size"), [(MNIST, 576_896), (CIFAR, 873_408)])
def test_fedavgcnns_extractor_is_all_but_the_last_layer(shape: tuple[int, int, int], size: int) -> None:
    layout = layout_of("fedavgcnn", shape, 10)
    assert layout.body == slice(0, size)
    assert layout.head == slice(size, size + 5130)


def test_batchnorm_adds_96_trainable_numbers_and_96_statistics_to_lenet() -> None:
    layout = layout_of("lenet", CIFAR, 10, batchnorm=True)
    assert layout.is_batchnorm().sum() == 96
    assert layout.buffer_size == 96
    assert [layer.name for layer in layout.layers()] == ["conv1", "bn1", "conv2", "bn2", "fc1", "fc2", "fc3"]


@pytest.mark.parametrize("name", MODELS)
def test_weights_depend_on_seed_and_client_alone(name: str) -> None:
    def weights(seed: int, client: int = -1) -> torch.Tensor:
        network = build_network(name, CIFAR, 10, NetworkOptions(), seed, client)
        return torch.cat([p.detach().flatten() for p in network.parameters()])

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = weights(5)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(weights(5), first)
    assert not torch.equal(weights(6), first)
    assert not torch.equal(weights(5, client=0), first)
    assert not torch.equal(weights(5, client=0), weights(5, client=1))


def test_pooling_before_relu_is_relu_before_pooling() -> None:
    network = build_network("lenet", MNIST, 10, NetworkOptions(), 0)
    named = dict(network.named_parameters())
    papers = nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)
    )
    papers += nn.Sequential(nn.Flatten(), nn.Linear(512, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())
    papers.append(nn.Linear(84, 10))
    with torch.no_grad():
        for parameter, ours in zip(papers.parameters(), named.values(), strict=True):
            parameter.copy_(ours)
    x = torch.randn(5, *MNIST, generator=torch.Generator().manual_seed(0))
    assert torch.equal(network(x), papers(x))


def test_body_and_head_are_the_network() -> None:
    network = build_network("lenet", MNIST, 10, NetworkOptions(batchnorm=True), 0).eval()
    x = torch.randn(3, *MNIST, generator=torch.Generator().manual_seed(0))
    assert network.body(x).shape == (3, 84)
    assert torch.equal(network.head(network.body(x)), network(x))


@pytest.mark.parametrize(("name", "side"), [("lenet", 8), ("lenet_small", 15), ("fedavgcnn", 4)])
def test_images_too_small_for_a_network_are_refused(name: str, side: int) -> None:
    with pytest.raises(
        UserError, match=rf"model\.name={name} needs images larger than {side}x{side}; allowed"
    ):
        build_network(name, (1, side, side), 10, NetworkOptions(), 0)
    build_network(name, (1, 16, 16), 10, NetworkOptions(), 0)
