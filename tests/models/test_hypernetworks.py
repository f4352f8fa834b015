"""Sizes and initial weights of stacked hypernetworks, and steps of codes against torch's optimisers.

methods/test_pfedla.py compares outputs, steps and heads of low rank with one torch module for each client.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hpcfl.models.hypernetworks import Hypernetworks, descend, initial_moments

SMALL = Hypernetworks(num_clients=4, num_layers=3, embedding=6, hidden=5, hidden_layers=2)


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


def test_steps_of_codes_equal_those_of_an_adam_for_each_layer() -> None:
    shape = replace(SMALL, rank=2)
    state = {"codes": shape.initial_codes(0, "default")["codes"].double()}
    moments = initial_moments(state, "adam")
    references = [torch.nn.Parameter(layer.clone()) for layer in state["codes"][0]]
    optimisers = [torch.optim.Adam([reference], lr=0.01) for reference in references]
    stream = torch.Generator().manual_seed(1)
    for frozen in ([False] * 3, [True, False, False], [True] * 3, [False, True, False]):
        gradient = torch.randn(1, 3, 4, 2, dtype=torch.float64, generator=stream)
        descend(state, moments, {"codes": gradient}, [0], "adam", 0.01, torch.tensor([frozen]))
        for layer, is_frozen in enumerate(frozen):
            if not is_frozen:
                references[layer].grad = gradient[0, layer].clone()
                optimisers[layer].step()
    for found, reference in zip(state["codes"][0], references, strict=True):
        torch.testing.assert_close(found, reference.detach(), rtol=1e-9, atol=0)
    assert moments["heads.steps"].tolist() == [[2, 2, 3]]
