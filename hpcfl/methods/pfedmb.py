"""pFedMB. Mori et al., Personalized federated learning with multi-branch architecture, 2022.

    W_l         = sum_b alpha_{b,l} W_{b,l},  alpha_{b,l} >= 0,  sum_b alpha_{b,l} = 1     (eq. 1)
    alpha_i    <- E epochs of SGD on L_i(W, alpha) with W fixed                            (eq. 3)
    W_i        <- E epochs of SGD on L_i(W, alpha_i) from W with alpha_i fixed             (eq. 4)
    W_{b,l}    <- sum_i n_i alpha_i^{b,l} W_{i,b,l} / sum_i n_i alpha_i^{b,l}, i in S      (eq. 5)

All branches go down and up. The client keeps alpha_i and uploads its values; the server sends no alpha back.
Branches are mixed before the forward pass: with g = dL/dW_l, dL/dW_{b,l} = alpha_{b,l} g and
dL/dalpha_{b,l} = <g, W_{b,l}>, so a step costs one ordinary backward pass for any B. With B = 1 the method
equals FedAvg bit for bit; with alpha fixed at 1/B and the default step it is FedAvg for any B.

Differs from the paper:
  step         dL/dW_{b,l} is divided by sum_b alpha_{b,l}^2, so a client's mixture moves as FedAvg's model
               does with the same `train.lr` (differs from eq. 4). Eq. 4 as printed (`method.step=branch`)
               moves the mixture by 1/B of that while weights are equal, and by all of that once one branch
               has all the weight

  cohort       only clients of the cohort S download, and eq. 5 sums over them; the paper samples them, but
               prints sums over all N, and sends the branches to all (Algorithm 1)

Choices the paper leaves open:
  start        W_b = W + D_b, where W is the common initial model (drawn or given) and the differences D_b sum
               to zero, so the uniform mixture is the ordinary network W. The mean of B independent draws has
               weights smaller by a factor of sqrt(B) in every layer, hence logits near zero; equal
               branches would always have equal gradients
  alpha        softmax of logits that start at 0; `method.constraint=simplex` projects after each step
  bias         belongs to its branch
  BatchNorm    one for all branches (the paper's network has none); running statistics are those of
               training the branches
  layers       the weights of any layer are mixed. Of a linear layer, a convolution or an embedding this mixes
               the branches' outputs, too; of an LSTM it does not, and LayerNorm is one more linear layer
  no client    a branch to which no client of the cohort gives weight keeps its value
  alpha's step  `method.alpha_lr`, without momentum or weight decay
  fine-tuning  `train.finetune_epochs` trains alpha, then the branches; `method.finetune=weights` keeps alpha
  evaluated    the mixed model with the newest branches and the client's own alpha (Algorithm 1); the paper's
               accuracies are those after E epochs of fine-tuning (`train.finetune_epochs`)
  unseen       a client that takes no part in training learns alpha alone (eq. 3)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.aggregation import layer_means
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods._simplex import project_to_simplex
from hpcfl.methods.base import Context, Method, Params, State, Traits
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.randomness import torch_stream
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup

FIRST, OTHERS = "theta", "branches"


class PFedMBParams(Params):
    branches: int = Field(5, ge=1)
    """Branches B of each layer (paper: at most 10, tuned; 5 in its pairs experiment); 1 is FedAvg."""
    alpha_lr: float = Field(1.0, ge=0)
    """Learning rate of alpha (of its logits with softmax), with the run's `train.lr_decay` (the paper tunes
    it); 0 keeps all weights at 1/B."""
    step: Literal["mixture", "branch"] = "mixture"
    """Whether the client's mixture, or each branch as in eq. 4, moves by `train.lr` times its gradient; the
    paper is `branch`."""
    difference: float = Field(1.0, gt=0)
    """Standard deviation of D_b at the start, as a factor on that of the same tensor of the common model."""
    constraint: Literal["softmax", "simplex"] = "softmax"
    """How alpha stays on the simplex: softmax of logits, or Euclidean projection after each step."""
    shared_alpha: bool = False
    """One vector alpha for all layers, as in the paper's pairs experiment (section 5.2)."""
    aggregation: Literal["alpha", "plain"] = "alpha"
    """Server's weights: n_i alpha_i (eq. 5) or n_i (eq. 6, the paper's ablation)."""
    finetune: Literal["routine", "weights"] = "routine"
    """What fine-tuning before an evaluation does: alpha, then weights; or weights only."""


class PFedMB(Method):
    summary = "several branches per layer, mixed by each client's own weights"
    Params = PFedMBParams
    traits = Traits(
        averages=("branches",),
        differences=(FIRST, OTHERS),
        refuses=dict.fromkeys(
            ("optimiser", "clip"), "whose branches' steps are shares of the step that SGD makes"
        ),
    )
    diagnostics = (
        Diagnostic(
            "alpha",
            ("client", "layer", "branch"),
            "Which branches each client uses",
            "Weight of each branch (column) for each client (row), layer by layer; a row sums to 1 (figure 3 "
            "of the paper).",
            low=0,
            high=1,
            of_clients=lambda method, clients: method.alpha(clients[method.kept]),
        ),
    )
    params: PFedMBParams

    def __init__(self, context: Context, params: PFedMBParams) -> None:
        super().__init__(context, params)
        batchnorm = self.layout.batchnorm_modules
        self.branched = torch.tensor([layer.name not in batchnorm for layer in self.layers])
        self.kept = "logits" if params.constraint == "softmax" else "alpha"

    def server_state(self) -> State:
        return {"branches": self.context.initial_parameters() + self._differences()}

    def client_state(self, clients: Sequence[int]) -> State:
        start = 0.0 if self.params.constraint == "softmax" else 1 / self.params.branches
        rows = 1 if self.params.shared_alpha else int(self.branched.sum())
        return {self.kept: torch.full((len(clients), rows, self.params.branches), start)}

    def download(self, server: State, cohort: Cohort) -> Message:
        shared, masks = self._apart(server["branches"])
        return Message(shared=shared, layer_mask=masks)

    def train(self, clients: ClientGroup, down: Message) -> Message:
        branches, kept = self._routine(clients, self._together(down))
        clients[self.kept] = kept
        rows, masks = self._apart(branches)
        return Message(per_client=rows | {"alpha": self._on_simplex(kept)}, layer_mask=masks)

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        alpha = up.collect("alpha")["alpha"]
        if self.params.aggregation == "plain":
            alpha = torch.ones_like(alpha)
        samples = cohort.num_samples.double().view(-1, 1, 1)
        # [S, B, L]
        weights, _ = self._apart(samples * self._of_all_layers(alpha).mT)
        old, _ = self._apart(server["branches"])
        means = layer_means(up, weights, self.layers, old)
        server["branches"] = self._together(Message(shared=means))[0]

    def averages_in(self, down: Message) -> State:
        return {"branches": self._together(down.with_clients(1))[0]}

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": self.mix(self.alpha(clients[self.kept]), self._together(down))})

    def finetune(self, clients: ClientGroup, down: Message, epochs: int) -> Message:
        trains_alpha = self.params.finetune == "routine"
        branches, kept = self._routine(clients, self._together(down), epochs, "finetune", trains_alpha)
        return Message(per_client={"theta": self.mix(self.alpha(kept), branches)})

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        branches = self._together(down)
        with self.buffers.keeping_averages(clients):
            kept = self._train_alpha(clients, branches, None, "finetune/alpha")
        return Message(per_client={"theta": self.mix(self.alpha(kept), branches)})

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        return Message(per_client={"theta": self.mix(self.alpha(clients[self.kept]), self._together(up))})

    def alpha(self, kept: Tensor) -> Tensor:
        """Return alpha [C, L, B] from what clients keep: rows for branched layers, or one for all of them."""
        return self._of_all_layers(self._on_simplex(kept))

    def _on_simplex(self, kept: Tensor) -> Tensor:
        return kept.softmax(dim=-1) if self.params.constraint == "softmax" else kept

    def _of_all_layers(self, alpha: Tensor) -> Tensor:
        """Return [C, L, B] from [C, branched layers or 1, B]; BatchNorm uses the first branch."""
        first = torch.eye(1, self.params.branches, dtype=alpha.dtype, device=alpha.device)
        first = first.expand(len(alpha), -1)
        # by index and not by mask: a mask would make a GPU wait for the host
        is_branched = self.branched.tolist()
        rows = iter(alpha.expand(-1, sum(is_branched), -1).unbind(1))
        return torch.stack([next(rows) if branched else first for branched in is_branched], dim=1)

    def mix(self, alpha: Tensor, branches: Tensor) -> Tensor:
        """Return the mixed models [C, P] from alpha [C, L, B] and branches [C, B, P] (eq. 1)."""
        parts = [
            torch.bmm(alpha[:, number : number + 1], branches[..., layer.start : layer.stop])
            for number, layer in enumerate(self.layers)
        ]
        return torch.cat(parts, dim=-1).squeeze(1)

    def spread(self, alpha: Tensor, gradient: Tensor) -> Tensor:
        """Return the branches' gradient [C, B, P] from alpha [C, L, B] and the mixed model's [C, P]."""
        parts = [
            alpha[:, number].unsqueeze(2) * gradient[:, layer.start : layer.stop].unsqueeze(1)
            for number, layer in enumerate(self.layers)
        ]
        return torch.cat(parts, dim=-1)

    def alpha_gradient(self, gradient: Tensor, branches: Tensor) -> Tensor:
        """Return alpha's gradient [C, L, B] from the mixed model's [C, P] and branches [C, B, P]."""
        parts = [
            torch.bmm(
                branches[..., layer.start : layer.stop], gradient[:, layer.start : layer.stop].unsqueeze(2)
            )
            for layer in self.layers
        ]
        return torch.cat(parts, dim=-1).mT

    def _differences(self) -> Tensor:
        """Draw D_b [B, P], which sum to zero over b; none where layers have no branches."""
        count = self.params.branches
        if count == 1:
            return torch.zeros(1, self.layout.size)
        drawn = torch.randn(count, self.layout.size, generator=torch_stream(self.context.seed, "branches"))
        # centring multiplies the variance by (B - 1) / B; the factor undoes this
        centred = (drawn - drawn.mean(dim=0)) * math.sqrt(count / (count - 1))
        common = self.context.initial_parameters()
        for slot in self.layout.parameters:
            part = slice(slot.start, slot.stop)
            is_batchnorm = slot.module in self.layout.batchnorm_modules
            centred[:, part] *= 0.0 if is_batchnorm else common[part].std(correction=0)
        return self.params.difference * centred

    def _routine(
        self,
        clients: ClientGroup,
        branches: Tensor,
        epochs: int | None = None,
        purpose: str = "batches",
        trains_alpha: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Train alpha, then the branches [C, B, P] (Algorithm 1); return branches and what clients keep."""
        kept = clients[self.kept]
        if trains_alpha and self.params.branches > 1 and self.params.alpha_lr > 0:
            with clients.discarding_buffer_updates():
                kept = self._train_alpha(clients, branches, epochs, f"{purpose}/alpha")
        alpha = self.alpha(kept)
        share = alpha
        if self.params.step == "mixture":
            share = alpha / alpha.square().sum(dim=-1, keepdim=True)

        def gradient(weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            mixed = self.mix(alpha[batch.members], weights)
            of_mixed, losses = clients.plain_gradient(mixed, batch)
            return self.spread(share[batch.members], of_mixed), losses

        return clients.sgd(branches, gradient=gradient, epochs=epochs, purpose=purpose).theta, kept

    def _train_alpha(
        self, clients: ClientGroup, branches: Tensor, epochs: int | None, purpose: str
    ) -> Tensor:
        """Train what clients keep of alpha with the branches fixed (eq. 3)."""
        kept = clients[self.kept].clone()
        lr = self.params.alpha_lr * clients.lr_decay
        for batch in clients.batches(purpose, epochs):
            leaf = kept[batch.members].clone().requires_grad_()
            alpha = self.alpha(leaf)
            fixed = branches[batch.members]
            of_mixed, losses = clients.plain_gradient(self.mix(alpha.detach(), fixed), batch)
            towards = (alpha * self.alpha_gradient(of_mixed, fixed)).sum()
            (slope,) = torch.autograd.grad(towards, leaf)
            moved = leaf.detach() - lr * slope
            kept[batch.members] = moved if self.params.constraint == "softmax" else project_to_simplex(moved)
            clients.record(batch, losses)
        return kept

    def _apart(self, branches: Tensor) -> tuple[State, State]:
        """Split branches [..., B, P] into the first, which travels whole, and the others, masked."""
        parts = {FIRST: branches[..., 0, :], OTHERS: branches[..., 1:, :]}
        if self.params.branches == 1:
            return {FIRST: parts[FIRST]}, {}
        return parts, {OTHERS: self.branched}

    def _together(self, message: Message) -> Tensor:
        """Undo `_apart`: branches [C, B, P]."""
        first = message[FIRST].unsqueeze(1)
        return torch.cat([first, message[OTHERS]], dim=1) if OTHERS in message else first
