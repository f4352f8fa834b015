"""Stacked hypernetworks against one torch module per client, and their step against torch's optimisers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from by_hand import OneClient
from torch import Tensor

from hpcfl.models.hypernetworks import Hypernetworks, descend, initial_moments
from hpcfl.parameters import Tensors

SMALL = Hypernetworks(num_clients=4, num_layers=3, embedding=6, hidden=5, hidden_layers=2)
LOW_RANK = replace(SMALL, rank=2)


@pytest.mark.parametrize(
    ("clients", "layers", "rank", "size"),
    [(10, 6, None, 36_460), (100, 5, None, 80_900), (10, 7, 16, 41_607), (1000, 7, 16, 41_607)],
)
def test_a_client_has_the_expected_floats(clients: int, layers: int, rank: int | None, size: int) -> None:
    shape = Hypernetworks(clients, layers, embedding=100, hidden=100, hidden_layers=3, rank=rank)
    state = shape.initial(0, "zero")
    assert sum(tensor[0].numel() for tensor in state.values()) == size
    assert all(len(tensor) == clients for tensor in state.values())
    # heads of zeros give all clients exactly equal weights
    if rank is None:
        assert (shape.outputs(state).softmax(dim=-1) == torch.tensor(1 / clients)).all()


def test_initial_weights_have_pytorchs_bounds_and_embeddings_unit_variance() -> None:
    shape = Hypernetworks(20, 3, embedding=400, hidden=25, hidden_layers=2)
    state = shape.initial(3, "default")
    bounds = {"trunk1": 1 / 20, "trunk2": 1 / 5, "heads": 1 / 5}
    for name, tensor in state.items():
        if name == "embedding":
            assert abs(float(tensor.std()) - 1) < 0.05
            assert abs(float(tensor.mean())) < 0.05
        else:
            bound = bounds[name.split(".")[0]]
            assert 0.95 * bound < tensor.abs().max() <= bound
            assert tensor.min() < -0.9 * bound


def test_the_hypernetwork_of_a_client_depends_only_on_seed_and_client() -> None:
    state = SMALL.initial(3, "default")
    more = Hypernetworks(9, 3, 6, 5, 2).initial(3, "default")
    assert torch.equal(state["trunk2.weight"], more["trunk2.weight"][:4])
    assert not torch.equal(state["embedding"][0], state["embedding"][1])
    assert not torch.equal(state["embedding"], SMALL.initial(4, "default")["embedding"])


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2], [1, 3]])
def test_outputs_equal_those_of_one_module_for_each_client(rows: list[int]) -> None:
    state = SMALL.initial(0, "default")
    outputs = SMALL.outputs({name: tensor[rows] for name, tensor in state.items()})
    expected = torch.stack([OneClient(SMALL, state, client)() for client in rows])
    torch.testing.assert_close(outputs, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_steps_equal_torch_s_optimiser_for_each_client_even_if_it_skips_rounds(optimiser: str) -> None:
    state = {name: tensor.double() for name, tensor in SMALL.initial(2, "default").items()}
    modules = [OneClient(SMALL, state, client) for client in range(4)]
    kind = torch.optim.Adam if optimiser == "adam" else torch.optim.SGD
    optimisers = [kind(module.parameters(), lr=0.01) for module in modules]
    moments = initial_moments(state, optimiser)
    stream = torch.Generator().manual_seed(1)
    cohorts = [[0, 1, 2, 3], [1, 2], [0, 2, 3], [2], [0, 1, 2]]
    for rows in cohorts:
        products = torch.randn(len(rows), 3, 4, dtype=torch.float64, generator=stream)
        gathered: dict[str, list[Tensor]] = {name: [] for name in state}
        for client, product in zip(rows, products, strict=True):
            optimisers[client].zero_grad()
            (modules[client]().softmax(dim=-1) * product).sum().backward()
            for name, gradient in modules[client].tensors(SMALL, gradients=True).items():
                gathered[name].append(gradient.clone())
            optimisers[client].step()
        gradients = {name: torch.stack(parts) for name, parts in gathered.items()}
        frozen = torch.zeros(len(rows), 3, dtype=torch.bool)
        descend(state, moments, gradients, rows, optimiser, 0.01, frozen)
    for client, module in enumerate(modules):
        for name, expected in module.tensors(SMALL).items():
            torch.testing.assert_close(state[name][client], expected, rtol=1e-9, atol=1e-11)
    if optimiser == "adam":
        assert moments["steps"].tolist() == [3, 3, 5, 2]


def test_a_head_that_is_no_longer_frozen_takes_the_step_of_a_new_one() -> None:
    frozen = torch.tensor([[True, False, False]])
    state = SMALL.initial(0, "zero")
    moments = initial_moments(state, "adam")
    gradients = {name: torch.ones_like(tensor[:1]) for name, tensor in state.items()}
    for _ in range(50):
        descend(state, moments, gradients, [0], "adam", 0.1, frozen)
    head = state["heads.weight"][0, 0]
    assert not head.any()
    descend(state, moments, gradients, [0], "adam", 0.1, torch.zeros_like(frozen))
    torch.testing.assert_close(head, torch.full_like(head, -0.1))


# Heads of low rank


def with_full_heads(state: Tensors) -> Tensors:
    """Return the same hypernetworks with their N outputs a layer written out."""
    codes, own = state["codes"][0], torch.eye(len(state["embedding"])).to(state["codes"])
    weight = torch.einsum("lnr,clrh->clnh", codes, state["heads.weight"])
    full = {name: tensor for name, tensor in state.items() if name != "codes"}
    return full | {"heads.weight": weight, "heads.bias": state["heads.bias"] * own.unsqueeze(1)}


def low_rank_state(seed: int) -> Tensors:
    drawn = LOW_RANK.initial(seed, "default") | LOW_RANK.initial_codes(seed, "default")
    return {name: tensor.double() for name, tensor in drawn.items()}


def test_codes_have_variance_one_over_rank_and_are_positive_with_the_heads_of_the_public_code() -> None:
    shape = Hypernetworks(200, 3, embedding=20, hidden=20, hidden_layers=2, rank=16)
    codes = shape.initial_codes(0, "zero")["codes"]
    assert codes.shape == (1, 3, 200, 16)
    assert abs(float(codes.std()) - 1 / 4) < 0.01
    assert not torch.equal(codes, shape.initial_codes(1, "zero")["codes"])
    positive = shape.initial_codes(0, "uniform")
    assert torch.equal(positive["codes"], codes.abs())
    assert shape.outputs(shape.initial(0, "uniform") | positive, range(200)).min() > 0
    assert SMALL.initial_codes(0, "zero") == {}


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2], [1, 3]])
def test_low_rank_outputs_and_gradients_equal_those_of_the_full_heads(rows: list[int]) -> None:
    state = low_rank_state(0)
    products = torch.randn(len(rows), 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, expected = ({name: t.clone().requires_grad_() for name, t in state.items()} for _ in range(2))

    def of(state: Tensors) -> Tensors:
        return {name: tensor if name == "codes" else tensor[rows] for name, tensor in state.items()}

    outputs = LOW_RANK.outputs(of(found), rows)
    full = with_full_heads(expected)
    reference = SMALL.outputs({name: tensor[rows] for name, tensor in full.items()})
    torch.testing.assert_close(outputs, reference, rtol=1e-12, atol=1e-14)
    for raw in (outputs, reference):
        (raw.softmax(dim=-1) * products).sum().backward()
    for name in state:
        ours, theirs = found[name].grad, expected[name].grad
        assert ours is not None
        assert theirs is not None
        assert theirs.abs().max() > 1e-4
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_steps_of_codes_equal_torch_s_optimiser_for_each_layer(optimiser: str) -> None:
    state = {"codes": low_rank_state(0)["codes"]}
    moments = initial_moments(state, optimiser)
    references = [torch.nn.Parameter(layer.clone()) for layer in state["codes"][0]]
    kind = torch.optim.Adam if optimiser == "adam" else torch.optim.SGD
    optimisers = [kind([reference], lr=0.01) for reference in references]
    stream = torch.Generator().manual_seed(1)
    for frozen in ([False] * 3, [True, False, False], [True] * 3, [False, True, False]):
        gradient = torch.randn(1, 3, 4, 2, dtype=torch.float64, generator=stream)
        descend(state, moments, {"codes": gradient}, [0], optimiser, 0.01, torch.tensor([frozen]))
        for layer, is_frozen in enumerate(frozen):
            if not is_frozen:
                references[layer].grad = gradient[0, layer].clone()
                optimisers[layer].step()
    for found, reference in zip(state["codes"][0], references, strict=True):
        torch.testing.assert_close(found, reference.detach(), rtol=1e-9, atol=0)
    if optimiser == "adam":
        assert moments["heads.steps"].tolist() == [[2, 2, 3]]
