"""pFedMB: invariants, numbers worked out, and a plain implementation of Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from by_hand import assert_close, batches_of, is_batchnorm, loss, torchs_optimiser, work
from harness import UNEQUAL_FEW, Run
from torch import Tensor
from uploads import upload_of

from hpcfl.communication.messages import Cohort
from hpcfl.errors import FINISHED
from hpcfl.main import main
from hpcfl.methods._simplex import project_to_simplex
from hpcfl.methods.pfedmb import FIRST, OTHERS

OURS = "method.name=pfedmb"
DIGITS_CNN, LAYERS = 13_706, 4


def aggregate(run: Run, num_samples: Sequence[int], branches: Tensor, alpha: Tensor) -> Tensor:
    """Answer with trained branches [S, B, P] and alpha [S, L, B]; return the server's new branches."""
    rows = {FIRST: branches[:, 0], OTHERS: branches[:, 1:], "alpha": alpha}
    size = len(num_samples)
    cohort = Cohort(0, tuple(range(size)), torch.tensor(num_samples))
    server = {"branches": run.server["branches"].clone()}
    run.method.aggregate(server, cohort, upload_of(rows))
    return server["branches"]


def alpha_of(run: Run) -> Tensor:
    """Return the clients' weights now, [N, L, B]."""
    return run.method.alpha(run.clients[run.method.kept])


# Algorithm 1, one client at a time


def nearest_on_simplex(point: Tensor) -> Tensor:
    """Project one point [B] by trying every set of entries that may be positive."""
    best = torch.zeros_like(point)
    distance = torch.inf
    for size in range(1, len(point) + 1):
        for support in combinations(range(len(point)), size):
            chosen = list(support)
            candidate = torch.zeros_like(point)
            candidate[chosen] = point[chosen] - (point[chosen].sum() - 1) / size
            if candidate.min() >= 0 and (candidate - point).norm() < distance:
                best, distance = candidate, float((candidate - point).norm())
    return best


class Reference:
    """pFedMB with torch's SGD and autograd through the sum over branches; no BatchNorm."""

    def __init__(self, run: Run) -> None:
        self.run, self.params, self.train = run, run.config.method.options, run.config.train
        self.branches = run.adapter.initial_server()["branches"]
        rows = 1 if self.params.shared_alpha else LAYERS
        start = 0.0 if self.params.constraint == "softmax" else 1 / self.params.branches
        self.kept = [torch.full((rows, self.params.branches), start) for _ in range(run.num_clients)]

    def alpha(self, kept: Tensor) -> Tensor:
        alpha = kept.exp() / kept.exp().sum(dim=-1, keepdim=True)
        return (alpha if self.params.constraint == "softmax" else kept).expand(LAYERS, -1)

    def mixed(self, kept: Tensor, branches: Tensor) -> Tensor:
        layers = zip(self.alpha(kept), self.run.method.layers, strict=True)
        return torch.cat([weights @ branches[:, layer.start : layer.stop] for weights, layer in layers])

    def sgd(self, client: int, round: int, purpose: str, kept: Tensor, branches: Tensor) -> Tensor:
        """Train alpha or the branches, whichever wants a gradient, and return it."""
        of_alpha = kept.requires_grad
        leaf = kept if of_alpha else branches
        alpha_lr = self.params.alpha_lr * self.train.lr_decay**round
        optimiser = (
            torch.optim.SGD([leaf], alpha_lr) if of_alpha else torchs_optimiser(self.run, [leaf], round)
        )
        for x, y in batches_of(self.run, client, round, purpose):
            optimiser.zero_grad()
            loss(self.run, self.mixed(kept, branches), x, y).backward()
            if not of_alpha and self.params.step == "mixture":
                for layer, alpha in zip(self.run.method.layers, self.alpha(kept), strict=True):
                    leaf.grad[:, layer.start : layer.stop] /= (alpha**2).sum()
            optimiser.step()
            if of_alpha and self.params.constraint == "simplex":
                leaf.data = torch.stack([nearest_on_simplex(row) for row in leaf.detach()])
        return leaf.detach()

    def routine(
        self, client: int, round: int, purpose: str, trains_alpha: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return a client's alpha and branches after its training."""
        kept = self.kept[client]
        if trains_alpha:
            kept = self.sgd(client, round, f"{purpose}/alpha", kept.clone().requires_grad_(), self.branches)
        return kept, self.sgd(client, round, purpose, kept, self.branches.clone().requires_grad_())

    def evaluated(self, client: int) -> Tensor:
        kept, branches = self.kept[client], self.branches
        if self.train.finetune_epochs:
            kept, branches = self.routine(client, 2, "finetune", self.params.finetune == "routine")
        return self.mixed(kept, branches)

    def round(self, number: int) -> None:
        above, below = torch.zeros_like(self.branches), torch.zeros_like(self.branches)
        for client in self.run.simulation.cohort(number).clients:
            kept, trained = self.routine(client, number, "batches")
            self.kept[client] = kept
            for layer, alpha in zip(self.run.method.layers, self.alpha(kept), strict=True):
                part, shares = slice(layer.start, layer.stop), alpha.unsqueeze(1)
                shares = shares if self.params.aggregation == "alpha" else torch.ones_like(shares)
                weights = self.run.method.context.num_samples[client] * shares
                above[:, part] += weights * trained[:, part]
                below[:, part] += weights
        self.branches = torch.where(below > 0, above / below, self.branches)


WEIGHTS_ALONE = ("train.finetune_epochs=1", "method.finetune=weights")


@pytest.mark.parametrize(
    "keys",
    [
        ("train.finetune_epochs=1", *UNEQUAL_FEW),
        ("method.constraint=simplex", "train.momentum=0.9", "method.alpha_lr=0.3"),
        ("method.shared_alpha=true", "train.participation=0.5", "train.lr_decay=0.5", *WEIGHTS_ALONE),
        ("method.step=branch", "train.lr=0.1", "train.momentum=0.9", *UNEQUAL_FEW),
        ("method.aggregation=plain", "method.branches=2", "train.weight_decay=0.01", *UNEQUAL_FEW),
    ],
)
@pytest.mark.usefixtures("double")
def test_rounds_equal_a_plain_implementation_with_autograd_through_the_sum(keys: tuple[str, ...]) -> None:
    run = Run(OURS, "method.branches=3", "train.rounds=2", *keys)
    reference = Reference(run)
    for number in range(2):
        reference.round(number)
    assert_close(run.server["branches"], reference.branches)
    kept = torch.stack(reference.kept)
    assert_close(run.clients[run.method.kept], kept)
    # beside the branches, a client sends its weights in float64
    sent = sum(len(run.simulation.cohort(number)) for number in range(2))
    of_weights = run.bytes_by_client[:, 1] - run.bytes_by_client[:, 0]
    assert of_weights.sum() == 8 * sent * kept[0].numel()
    mixed = torch.stack([reference.evaluated(client) for client in range(4)])
    assert_close(run.evaluated()["theta"], mixed)
    assert (alpha_of(run) - 1 / run.config.method.options.branches).abs().max() > 0.01


# The server's mean


def test_equation_5_equals_that_by_hand_and_an_empty_branch_keeps_its_value() -> None:
    run = Run(OURS, "method.branches=3", "train.rounds=1")
    trained = torch.tensor([[1.0, 2.0, 9.0], [5.0, 6.0, 9.0]]).unsqueeze(2).expand(-1, -1, DIGITS_CNN)
    alpha = torch.tensor(
        [
            [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.25, 0.25]],
            [[0.25, 0.75, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]],
        ]
    )
    mean = aggregate(run, [10, 30], trained, alpha)
    # (10 * 0.5 * 1 + 30 * 0.25 * 5) / (10 * 0.5 + 30 * 0.25), and so on
    expected = [[3.4, 145 / 27.5, None], [1.0, None, 9.0], [None, 5.0, None], [4.0, 5.428571, 9.0]]
    for layer, values in zip(run.method.layers, expected, strict=True):
        part = slice(layer.start, layer.stop)
        for branch, value in enumerate(values):
            numbers = mean[branch, part]
            if value is None:
                assert torch.equal(numbers, run.server["branches"][branch, part])
            else:
                torch.testing.assert_close(numbers, torch.full_like(numbers, value))


# Clients' weights


def test_branches_differ_by_as_much_as_the_common_model_varies_which_is_their_mean() -> None:
    run, other = (
        Run(OURS, "train.rounds=1", "model.batchnorm=true", "method.difference=2", f"run.seed={seed}")
        for seed in (0, 1)
    )
    start, layout = run.adapter.initial_server()["branches"], run.method.layout
    common, mask = run.method.context.initial_parameters(), is_batchnorm(layout)
    assert torch.equal(start[:, mask], common[mask].expand(5, -1))
    torch.testing.assert_close(start.mean(dim=0), common, rtol=0, atol=1e-6)
    for slot in layout.parameters:
        part = slice(slot.start, slot.stop)
        if slot.stop - slot.start > 500:
            apart = (start - common)[:, part]
            assert float(apart.std() / common[part].std()) == pytest.approx(2, rel=0.1)
            assert np.corrcoef(apart.numpy())[~np.eye(5, dtype=bool)] == pytest.approx(-1 / 4, abs=0.15)
    of_other = other.adapter.initial_server()["branches"] - other.method.context.initial_parameters()
    assert (of_other != start - common)[:, ~mask].any()


@pytest.mark.usefixtures("double")
def test_with_fixed_weights_pfedmb_is_fedavg() -> None:
    keys = (*UNEQUAL_FEW, "train.momentum=0.9", "train.weight_decay=0.01", "train.participation=0.5")
    fedavg = Run(*keys, "method.name=fedavg").server["theta"]
    run = Run(*keys, OURS, "method.branches=3", "method.alpha_lr=0")
    assert_close(run.server["branches"].mean(dim=0), fedavg)


# Projection


@pytest.mark.parametrize(
    ("point", "nearest"),
    [
        ([0.2, 0.1, -1.0], [0.55, 0.45, 0.0]),
        ([-3.0, -3.0, -3.0, -3.0], [0.25, 0.25, 0.25, 0.25]),
        ([1e9], [1.0]),
        ([0.0, 1e9, -1e9], [0.0, 1.0, 0.0]),
    ],
)
def test_projections_equal_known_ones(point: list[float], nearest: list[float]) -> None:
    found = project_to_simplex(torch.tensor(point))
    torch.testing.assert_close(found, torch.tensor(nearest), rtol=0, atol=1e-6)
    assert [value == 0 for value in found.tolist()] == [value == 0 for value in nearest]


def test_a_diverged_run_has_nan_weights_and_no_error() -> None:
    found = project_to_simplex(torch.tensor([[torch.nan, 0.5], [1.0, 0.5]]))
    assert found.isnan().any(dim=1).tolist() == [True, False]


# BatchNorm


def test_all_branches_share_batchnorm_which_is_averaged_as_in_fedavg() -> None:
    run = Run(OURS, *UNEQUAL_FEW, "model.batchnorm=true", "train.rounds=1", "method.branches=3")
    mask, start = is_batchnorm(run.method.layout), run.adapter.initial_server()
    samples = run.method.context.num_samples
    run.worker.state["logits"].zero_()
    after, run.server = run.server, start
    uploads = [work(run, client)[0].per_client for client in range(4)]
    run.server = after
    weights = (samples / samples.sum()).unsqueeze(1)
    own = torch.cat([rows[FIRST] for rows in uploads])[:, mask]
    torch.testing.assert_close(
        run.server["branches"][0, mask], (weights * own).sum(dim=0), rtol=1e-5, atol=1e-6
    )
    statistics = torch.cat([rows["buffers"] for rows in uploads])
    torch.testing.assert_close(run.server["buffers"], (weights * statistics).sum(dim=0), rtol=1e-5, atol=1e-6)
    assert all(not rows[OTHERS][..., mask].any() for rows in uploads)
    assert torch.equal(run.evaluated()["theta"][:, mask], run.server["branches"][:1, mask].expand(4, -1))
    assert (run.server["branches"][0] != start["branches"][0])[mask].all()


def test_the_step_of_the_weights_does_not_change_running_statistics() -> None:
    # steps that are taken, but do not move the weights
    keys = (OURS, "model.batchnorm=true", "train.rounds=1", "train.finetune_epochs=1")
    routine, weights = (
        Run(*keys, "method.alpha_lr=1e-30", f"method.finetune={kind}") for kind in ("routine", "weights")
    )
    assert torch.equal(routine.evaluated()["buffers"], weights.evaluated()["buffers"])


# History


def test_a_checkpoint_contains_the_weights_of_every_evaluation(tmp_path: Path) -> None:
    words = [OURS, "data.clients=4", "data.per_client=20", "train.local_epochs=1", "train.rounds=3"]
    assert main([*words, "run.eval_every=2", "--quiet", "--out", str(tmp_path / "run")]) == FINISHED
    with h5py.File(tmp_path / "run" / "checkpoint.h5") as file:
        history, logits = file["history/alpha"][()], file["clients/logits"][()]
    assert history.shape == (2, 4, LAYERS, 5)
    np.testing.assert_allclose(history.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_array_equal(history[-1], torch.from_numpy(logits).softmax(dim=-1).numpy())
    assert (history[0] != history[1]).any()
