"""FedCAC: critical weights, collaborators, and rounds by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from by_hand import assert_close, batches_of, gradient, mean_by_samples, method_of, step_size
from harness import MLP, UNEQUAL_FEW, Run, random
from torch import Tensor

from hpcfl.communication.messages import Cohort
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.fedcac import FedCAC, collaborators, critical_numbers, overlaps, packed, unpacked
from hpcfl.parameters import Slot

FEDCAC = "method.name=fedcac"
TWO_TENSORS = (Slot("a", (4,), 0, 4, "layer"), Slot("b", (3,), 4, 7, "layer"))


# Critical numbers


@pytest.mark.quick
@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, [0, 0, 0, 0, 0, 0, 0]),
        (0.3, [0, 1, 0, 0, 0, 0, 0]),
        (0.5, [1, 1, 0, 0, 0, 1, 0]),
        # the third does not move, and the fifth is 0
        (1.0, [1, 1, 0, 1, 1, 1, 1]),
    ],
)
def test_critical_weights_equal_those_by_hand(share: float, expected: list[int]) -> None:
    """Omega is 2, 6, 0, 1 in the first tensor of four numbers, and 0, 8, 3 in the second of three."""
    start = torch.tensor([[0.0, 5.0, 7.0, 2.0, -3.0, 6.0, 4.0]])
    theta = torch.tensor([[2**0.5, 6.0, 7.0, 1.0, 0.0, 2.0, 1.0]])
    found = critical_numbers(start, theta, TWO_TENSORS, share)
    assert found.int().tolist() == [expected]


def test_equal_values_at_the_threshold_are_all_critical() -> None:
    start, theta = torch.zeros(2, 7), torch.ones(2, 7)
    assert critical_numbers(start, theta, TWO_TENSORS, 0.5).all()


def test_a_weight_changed_only_by_rounding_is_not_critical() -> None:
    """The first tensor's largest number is 2, and its rounding error 2.4e-7."""
    theta = torch.tensor([[2.0, 0.001, 0.001, 0.001, 2.0, 0.001, 0.001]])
    start = theta + torch.tensor([[1e-6, 3e-6, 0.0, 5e-6, 1.0, 1.0, 1.0]])
    found = critical_numbers(start, theta, TWO_TENSORS, 1.0)
    assert found.int().tolist() == [[0, 0, 0, 1, 1, 1, 1]]


@pytest.mark.quick
@pytest.mark.parametrize("count", [7, 8, 9])
def test_bits_packed_into_bytes_are_unpacked_unchanged(count: int) -> None:
    bits = random(3, count) > 0
    found = packed(bits)
    assert found.dtype == torch.uint8
    assert found.shape == (3, -(-count // 8))
    assert torch.equal(unpacked(found)[:, :count], bits)
    assert not unpacked(found)[:, count:].any()


# Who collaborates


def test_overlaps_and_collaborators_equal_those_by_hand() -> None:
    """The first two have one of two critical numbers in common, the third has one number, the first's."""
    bits = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 0]]).bool()
    expected = [[1, 1 - 2 / 4, 1 - 1 / 4], [1 - 2 / 4, 1, 1 - 3 / 4], [1 - 1 / 2, 1 - 3 / 2, 1]]
    found = overlaps(packed(bits))
    assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-15)
    # the mean of all pairs is 1/3, and the largest 3/4: the thresholds are 0.33, 0.54 and 0.79
    many, few = [[True] * 3, [True, True, False], [True, False, True]], torch.eye(3).bool()
    assert collaborators(found, 0.0).tolist() == many
    few[0, 2] = True
    assert torch.equal(collaborators(found, 0.5), few)
    assert torch.equal(collaborators(found, 1.1), torch.eye(3).bool())


def test_clients_with_equal_overlaps_and_single_clients_collaborate() -> None:
    """All overlaps are equal, at any time: rounding of their mean separates no clients."""
    third = torch.full((5, 5), 1 / 3, dtype=torch.float64)
    assert all(collaborators(third, progress).all() for progress in (0.0, 0.3, 1.0, 7.0))
    assert collaborators(torch.ones(1, 1), 3.0).tolist() == [[True]]
    # clients that training did not change have nothing critical
    assert overlaps(torch.zeros(3, 2, dtype=torch.uint8)).isfinite().all()


# Rounds


def critical_by_hand(run: Run, start: Tensor, theta: Tensor) -> set[int]:
    """Return the places of critical numbers: of each tensor, those not below the last of the share."""
    found = set()
    for slot in run.method.layout.parameters:
        places = range(slot.start, slot.stop)
        omega = {place: float(((theta - start) * theta)[place].abs()) for place in places}
        count = int(run.config.method.options.share * len(omega))
        if count:
            least = sorted(omega.values(), reverse=True)[count - 1]
            found |= {place for place, value in omega.items() if value >= least}
    return {place for place in found if theta[place] != start[place]}


def mixed_by_hand(
    run: Run, round: int, client: int, known: Sequence[int], models: Tensor, critical: dict[int, set[int]]
) -> Tensor:
    """Return u of one client [P]."""
    mean = mean_by_samples(run, known, models[known])
    if client not in known:
        return mean
    overlap = {
        (i, j): 1 - len(critical[i] ^ critical[j]) / (2 * len(critical[i]))
        for i in known
        for j in known
        if i != j
    }
    average, largest = sum(overlap.values()) / len(overlap), max(overlap.values())
    threshold = average + round / run.config.method.options.beta * (largest - average)
    similar = [j for j in known if j == client or overlap[client, j] >= threshold]
    places = sorted(critical[client])
    mean[places] = models[similar].mean(dim=0)[places]
    return mean


@pytest.mark.parametrize(
    "keys", [("train.participation=0.5", "method.beta=1.5"), ("method.share=0.3", "method.beta=4")], ids=str
)
@pytest.mark.usefixtures("double")
def test_rounds_equal_those_by_hand(keys: tuple[str, ...]) -> None:
    run = Run(FEDCAC, *MLP, *UNEQUAL_FEW, "train.lr_decay=0.8", "train.rounds=4", *keys)
    start = run.method.context.initial_parameters()
    models, known, critical = start.repeat(4, 1), list[int](), dict[int, set[int]]()
    for number in range(4):
        clients, before, masks = run.simulation.cohort(number).clients, models.clone(), dict(critical)
        for client in clients:
            u = mixed_by_hand(run, number, client, known, before, masks) if known else start
            theta = u
            for x, y in batches_of(run, client, number):
                theta = theta - step_size(run, number) * gradient(run, theta, x, y)
            models[client], critical[client] = theta, critical_by_hand(run, u, theta)
        known = sorted({*known, *clients})
    assert_close(run.server["models"], models)
    assert_close(run.evaluated()["theta"], models)
    for client, places in critical.items():
        bits = unpacked(run.server["critical"][[client]])[0]
        assert bits.nonzero().flatten().tolist() == sorted(places)


@pytest.mark.parametrize("clients", [(0, 2), (1, 3)])
def test_a_client_that_uploaded_nothing_or_nan_is_left_out_and_starts_from_the_mean(
    clients: tuple[int, int],
) -> None:
    method = method_of(FedCAC, 4)
    method.context.num_samples = torch.tensor([10, 30, 5, 5])
    server = MethodAdapter(method).initial_server()
    everyone = Cohort(1, (0, 1, 2, 3), method.context.num_samples)
    start = method.context.initial_parameters()
    assert torch.equal(MethodAdapter(method).download(server, everyone)["theta"], start.expand(4, -1))
    sound, lost = list(clients), [client for client in range(4) if client not in clients]
    server["models"][sound] += random(2, method.layout.size)
    server["models"][lost[0]] = torch.nan
    server["is_known"][[*sound, lost[0]]] = 1
    server["critical"][:] = 255
    sent = MethodAdapter(method).download(server, everyone)["theta"]
    weights = method.context.num_samples[sound] / method.context.num_samples[sound].sum()
    mean = weights @ server["models"][sound]
    assert_close(sent[lost], mean.expand(2, -1), atol=1e-6)
    assert_close(sent[sound], server["models"][sound].mean(dim=0).expand(2, -1), atol=1e-6)
    new = MethodAdapter(method).new_client_download(server, Cohort(1, (4, 5), torch.ones(2)))
    assert_close(new["theta"], mean.expand(2, -1), atol=1e-6)
