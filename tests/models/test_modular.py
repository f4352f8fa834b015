"""FedMN's modular network against equation 13 worked out by hand, and its sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from by_hand import paths_by_hand
from torch import Tensor

from hpcfl.models import MODELS, build_network
from hpcfl.models.modular import ModularNetwork, Norm, num_paths, path_names
from hpcfl.samples import SampleType

SIZES = [[1, 1], [2, 2, 2], [3, 1, 2], [1, 3, 2, 2], [2, 4, 3]]


pytestmark = pytest.mark.usefixtures("double")


def modular(
    sizes: list[int],
    widths: list[int] | None = None,
    *,
    model: str = "mlp",
    shape: tuple[int, int, int] = (1, 2, 2),
    classes: int = 3,
    with_classifier: bool = False,
    router_spread: float = 1.0,
    router_norm: Norm = "separate",
    **options: Any,
) -> ModularNetwork:
    chosen = MODELS[model].options.model_validate(options)
    made = [build_network(model, SampleType(shape), classes, chosen, 0, -1 - n) for n in range(sizes[0] + 1)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        widths = widths or [5, 4, 6, 3][: len(sizes) - 1]
        return ModularNetwork(sizes, widths, classes, made, with_classifier, router_spread, router_norm)


def stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_decisions(sizes: list[int], share: float, count: int = 30) -> Iterator[Tensor]:
    """Yield hard decisions [E] with a share of open paths."""
    random = stream(1)
    for _ in range(count):
        yield (torch.rand(num_paths(sizes), generator=random) < share).double()


def reaches_output(network: ModularNetwork, decision: Tensor) -> bool:
    """Return whether the outputs are not those of no path, which are zero."""
    x = torch.randn(4, 1, 2, 2, generator=stream(2))
    return bool(paths_by_hand(network, x, decision.tolist())[0].any())


# Equation 13


def one_number_wide() -> ModularNetwork:
    """Return a network [2, 2, 2] of one input, all layers of width 1 and two classes."""
    network = modular([2, 2, 2], [1, 1], shape=(1, 1, 1), classes=2, hidden=[])
    weights: dict[str, tuple[list[float], list[float]]] = {
        "encoder1.project": ([2], [0]),
        "encoder2.project": ([0], [6]),
        "block2_1": ([1], [1]),
        "block2_2": ([-1], [10]),
        "block3_1": ([1, 2], [0, 1]),
        "block3_2": ([3, -1], [0, 0]),
    }
    with torch.no_grad():
        for name, (weight, bias) in weights.items():
            layer = network.get_submodule(name)
            layer.weight.copy_(torch.tensor(weight).view(-1, 1))
            layer.bias.copy_(torch.tensor(bias))
    return network


def test_outputs_equal_those_by_hand() -> None:
    for decision, expected in (
        # encoders 2 and 6; inputs (2 + 6) / 2 and 6, outputs 5 and 4; input 4.5 and none
        ([1, 0, 1, 1, 1, 0, 1, 0, 1, 1], [4.5, 10]),
        # input 6 for the second block alone, output 4; paths from the first count for nothing
        ([0, 0, 0, 1, 1, 1, 0, 1, 1, 1], [12, -4]),
        # inputs 4 and 4, outputs 5 and 6; inputs 5.5 and 6: (5.5, 12) and (18, -6)
        ([1, 1, 1, 1, 1, 0, 1, 1, 1, 1], [11.75, 3]),
        # the same, one output
        ([1, 1, 1, 1, 1, 0, 1, 1, 0, 1], [18, -6]),
        # nothing reaches the second layer, the third or the output
        ([0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0]),
        ([1, 1, 1, 1, 0, 0, 0, 0, 1, 1], [0, 0]),
        ([1, 1, 1, 1, 1, 1, 1, 1, 0, 0], [0, 0]),
    ):
        network, x = one_number_wide(), torch.ones(1, 1, 1, 1)
        chosen = torch.tensor(decision, dtype=torch.float64)
        assert network(x, chosen).tolist() == [expected]
        assert paths_by_hand(network, x, decision)[0].tolist() == [expected]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_outputs_of_any_decision_equal_a_plain_implementation(sizes: list[int], share: float) -> None:
    network, x = modular(sizes), torch.randn(4, 1, 2, 2, generator=stream(2))
    for decision in random_decisions(sizes, share):
        expected, names = paths_by_hand(network, x, decision.tolist())
        torch.testing.assert_close(network(x, decision), expected, rtol=0, atol=1e-13)
        flags = network.active(decision).tolist()
        assert flags[: sizes[0]] == [True] * sizes[0]
        assert len(flags) == sum(sizes)
        children = [name for name, _ in network.named_children()]
        assert [n for n, f in zip(children, flags, strict=False) if f and n.startswith("block")] == names


@pytest.mark.parametrize("sizes", SIZES)
def test_inactive_blocks_have_a_gradient_of_exactly_zero(sizes: list[int]) -> None:
    network, x = modular(sizes), torch.randn(4, 1, 2, 2, generator=stream(2))
    for decision in random_decisions(sizes, 0.5, count=10):
        network.zero_grad()
        opened = network.opened(decision, decision).requires_grad_()
        network(x, opened).square().sum().backward()
        names = paths_by_hand(network, x, opened.tolist())[1]
        for name, block in network.named_children():
            if name.startswith("block") and name not in names:
                assert all(torch.count_nonzero(p.grad) == 0 for p in block.parameters())
        last = [network.get_submodule(f"block{len(sizes)}_{n + 1}") for n in range(sizes[-1])]
        assert any(torch.count_nonzero(p.grad) for block in last for p in block.parameters())


# Decisions


def test_a_decision_lists_matrices_row_by_row_and_then_the_outputs() -> None:
    for sizes, count in (([1, 1], 2), ([2, 2, 2], 10), ([3, 3, 3], 21), ([1, 2, 3, 4], 24), ([2, 4, 3], 23)):
        assert num_paths(sizes) == count == len(set(path_names(sizes)))
    assert path_names([1, 2]) == ["1.1-2.1", "1.1-2.2", "2.1-out", "2.2-out"]
    parts = modular([2, 3, 1]).split(torch.arange(10))
    assert [part.tolist() for part in parts] == [[[0, 1, 2], [3, 4, 5]], [[6], [7], [8]], [9]]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_opened_decisions_reach_the_output(sizes: list[int], share: float) -> None:
    network = modular(sizes)
    for decision in random_decisions(sizes, share):
        before, logits = decision.clone(), torch.randn(len(decision), generator=stream(4))
        opened = network.opened(decision, logits)
        assert torch.equal(decision, before)
        assert reaches_output(network, opened)
        # at most one path a layer is opened, none is closed
        added = [int(part.sum()) for part in network.split(opened - decision)]
        assert all(number in (0, 1) for number in added)
        assert (opened >= decision).all()
        assert torch.equal(opened, decision) == reaches_output(network, decision)


def test_the_likeliest_path_from_an_active_block_is_opened() -> None:
    decision = torch.tensor([0, 1, 0, 0, 1, 0, 0, 0, 1, 0], dtype=torch.float64)
    logits = torch.tensor([9, 9, 9, 9, 9, 9, -3, -2, 9, -9], dtype=torch.float64)
    # encoder1 feeds block2_2; of its paths the one to block3_2, and of that one's the output
    expected = torch.tensor([0, 1, 0, 0, 1, 0, 0, 1, 1, 1], dtype=torch.float64)
    assert torch.equal(modular([2, 2, 2]).opened(decision, logits), expected)


# Parts


@pytest.mark.parametrize("norm", ["separate", "joint"])
def test_the_router_normalises_each_embedding_or_both_together(norm: Norm) -> None:
    network, x = modular([2, 2, 2], router_norm=norm), torch.randn(4, 1, 2, 2, generator=stream(2))
    router, y = network.get_submodule("router"), torch.tensor([2, 0, 1, 2])
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=stream(3)))
    images = router.images.project(router.images.body(x)).clamp(min=0)
    weight = router.labels.weight
    labels = torch.stack([weight[:, n] - weight.mean(dim=1) + router.labels.bias for n in y.tolist()])
    scaled = [part / part.square().mean(dim=1, keepdim=True).sqrt() for part in (images, labels)]
    both = torch.cat(scaled, dim=1)
    if norm == "joint":
        both = torch.cat([images, labels], dim=1)
        both = both / both.square().sum(dim=1, keepdim=True).sqrt()
    expected = both @ router.paths.weight.T + router.paths.bias
    torch.testing.assert_close(router(x, y), expected, rtol=1e-12, atol=1e-12)


def test_a_new_router_depends_only_on_the_label() -> None:
    network = modular([3, 4, 4], classes=10, router_spread=2.0)
    router, y = network.get_submodule("router"), torch.arange(10)
    logits = router(torch.randn(10, 1, 2, 2, generator=stream(2)), y)
    assert torch.equal(router(torch.randn(10, 1, 2, 2, generator=stream(4)), y), logits)
    assert logits.std().item() == pytest.approx(2, rel=0.15)
    # embeddings of labels point away from each other, so that those of all classes together are nearly none
    assert logits.mean(dim=0).abs().max() < 0.25
    # a client of three classes is far from one half, and from a client of others
    assert logits[:3].mean(dim=0).std() > 0.7
    assert (logits[:3].mean(dim=0) - logits[3:6].mean(dim=0)).std() > 1


def test_without_a_decision_the_classifier_predicts() -> None:
    network, x = modular([2, 2], with_classifier=True), torch.randn(4, 1, 2, 2, generator=stream(2))
    classifier = network.get_submodule("classifier")
    assert torch.equal(network(x), classifier(network.get_submodule("encoder1")(x)))
    assert "classifier" not in dict(modular([2, 2]).named_children())


def test_the_network_of_the_paper_has_the_expected_number_of_parameters() -> None:
    torch.set_default_dtype(torch.float32)
    network = modular([2, 2, 2], [512, 256], model="mobilenetv2", shape=(3, 32, 32), classes=10)
    parts = dict(network.named_children())
    parts |= {f"router.{name}": part for name, part in parts.pop("router").named_children()}
    found = {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
    expected = {"router.images": 2_387_840, "router.labels": 704, "router.paths": 193 * 10}
    for number in (1, 2):
        expected |= {f"encoder{number}": 2_879_744, f"block2_{number}": 131_328, f"block3_{number}": 2570}
    assert found == expected
    assert sum(expected.values()) == 8_417_758
    assert sum(size for name, size in expected.items() if "router" not in name) == 6_027_284
