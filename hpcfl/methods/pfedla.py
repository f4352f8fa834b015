"""pFedLA. Ma et al., Layer-wised model aggregation for personalized federated learning, CVPR 2022.

    alpha_i      = HN_i(v_i; psi_i),  sum_j alpha_i^{l,j} = 1                       (eq. 3, 4)
    theta_bar_i^l = sum_j alpha_i^{l,j} theta_j^l                                   (eq. 6)
    theta_i      <- E epochs of SGD on L_i from theta_bar_i                         (Algorithm 1)
    Delta_i      = theta_i - theta_bar_i
    v_i, psi_i  <- ascend along (d theta_bar_i / d v_i, psi_i)^T Delta_i            (eq. 10, 11)

With c_i^{l,j} = <theta_j^l, Delta_i^l> the last line is the gradient of -sum alpha c through the small
hypernetwork, so the server needs two products a layer and one batched backward pass.

Differs from the paper:
  step         eq. 10 and 11 are plain steps, and the paper names no learning rate for them. c grows with
               |Delta|^2, so with a rate that suits one network or data set, alpha hardly moves or saturates
               at once with another. `method.optimiser=scaled` divides all c of a client by the largest
               |Delta_i|^2 that it has sent: the layers keep their relative scales, which HeurpFedLA's choice
               needs, and steps shrink as training settles. The gradient of an output has the factor alpha,
               1/N at first; `scaled` gives the heads N times the step, so that weights relative to 1/N move
               as far with any number of clients (`method.heads=low_rank`: min(N, rank) times). Trunk and
               embedding, whose gradients sum over all outputs, need no such factor. Adam removes the scales
               of c: after hundreds of rounds every layer has one-hot weights (`method.optimiser=sgd` is the
               printed rule)
  first time   when a client takes part for the first time, its own model is still the initial one, and its
               products favour whoever has trained. Its hypernetwork waits for the second time, with any
               `method.optimiser`: with participation below 1 and large steps, layers would settle on other
               clients' models. With participation 1 and common initial models, these products are equal and
               move nothing. With `method.optimiser=adam` the wait counts as a step with gradient 0

Choices the paper leaves open:
  sign         Delta points downhill, so the hypernetwork moves along it; a test shows that the loss falls
               (public code moves the other way)
  snapshot     downloads mix the models at the start of the round; theta_j of unsampled clients stays the same
  update       the server keeps the trained theta_i that clients upload, and forms Delta itself
  layer        weight and bias of a module together, a BatchNorm module by itself; `method.layer`
  weights      softmax over clients; relu divided by its sum (public code), own model where all are zero
  start        common initial models and heads as in `head_init`
  buffers      BatchNorm's running statistics stay with the client; `train.buffers=mixed` mixes them with the
               weights of their layer, which is better in the first rounds and worse once weights differ
  evaluated    theta_bar_i of every client, before local training
  unseen       a client that takes no part in training learns weights of its own over the models of those
               that do, which stay as they are (not in the paper). A new hypernetwork knows nothing that
               helps, so its outputs are learnt directly: from 0, by a `scaled` step after each local epoch,
               which starts at the mixture. Softmax makes weights of them, whatever `method.weights` says

With `method.server=sharded` the models are the clients' state (/clients/theta of a checkpoint, not
/server/theta), and rank 0 keeps hypernetworks and a cohort's models. The bits are the same for any number of
ranks; they are not those of `whole`, whose sums run over all clients at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.sharded import ShardedRows
from hpcfl.communication.upload import Upload
from hpcfl.errors import UserError
from hpcfl.methods.base import Context, Method, Params, State, Traits
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.models.hypernetworks import HeadInit, HypernetworkOptimiser, Hypernetworks, HypernetworkState
from hpcfl.parameters import Granularity, Layer, pieces
from hpcfl.training.client_group import ClientGroup

LARGEST_UPDATE = "optimiser/largest_update"
STEP_SIZES = {"scaled": 0.1, "adam": 1e-3, "sgd": 5e-3}
WEIGHTS_AT_ONCE = 2**24
"""Number of weights of all clients' that are computed at once (64 MB)."""


class PFedLAParams(Params):
    weights: Literal["softmax", "relu"] = "softmax"
    """How outputs become weights that sum to one: softmax, or relu divided by the sum (public code)."""
    head_init: HeadInit | None = None
    """Initial heads: `zero` (each weight is exactly 1/N), `default` (PyTorch's), or `uniform` (U(0, 1) with
    zero bias, public code). Default: zero with softmax; uniform with relu, whose gradient is 0 at outputs of
    0."""
    embedding: int = Field(100, ge=1)
    """Length of a client's embedding (public code: 100)."""
    hidden: int = Field(100, ge=1)
    """Width of the hypernetwork's trunk (public code: 100)."""
    hidden_layers: int = Field(3, ge=1)
    """Linear layers with ReLU in the trunk (public code: 3)."""
    heads: Literal["full", "low_rank"] = "full"
    """Whether a hypernetwork has an output of its own for each client (paper), or scores clients by codes
    that all hypernetworks share, so that memory grows with N, not N^2; see `hpcfl.models.hypernetworks`."""
    rank: int = Field(16, ge=1)
    """Length of the codes that clients are scored by with `heads=low_rank`."""
    optimiser: HypernetworkOptimiser = "scaled"
    """Step of the hypernetworks: `sgd` is the plain one of eq. 10 and 11; `scaled` is the same, with products
    divided by the largest |Delta_i|^2 that the client has sent, and N times as long for the heads (low-rank
    ones: min(N, rank) times); `adam` ignores the scale of the products."""
    hypernetwork_lr: float | None = Field(None, ge=0)
    """Learning rate of the hypernetworks; 0 keeps the initial weights; default: 0.1 with scaled, 0.001 with
    adam, 0.005 with sgd (public code)."""
    layer: Granularity = "module"
    """What gets a weight of its own: a module, a block (convolution with its BatchNorm), or a tensor."""
    initial_models: Literal["common", "own"] = "common"
    """Whether clients start from the same weights or each from its own (public code)."""

    server: Literal["whole", "sharded"] = "whole"
    """Where the clients' models are: all on rank 0, or each on the worker of its client, which then does its
    part of mixtures and products. Sums are over blocks of clients then: the last bits are not `whole`'s."""


class PFedLA(Method):
    summary = "each client's hypernetwork weighs all clients' models, layer by layer"
    privacy_units = ("sample",)
    Params: ClassVar[Any] = PFedLAParams
    traits = Traits(buffers=("local", "mixed", "average"))
    diagnostics: tuple[Diagnostic, ...] = (
        Diagnostic(
            "alpha",
            ("client", "layer", "client"),
            "Weights between clients",
            "Weight that a client (row) gives to each client's model (column), layer by layer; a row sums to "
            "1 (figures 5 to 7 of the paper).",
            low=0,
            of_server=lambda method, server: method.alpha(server, range(method.context.num_clients)),
            in_checkpoints=True,
        ),
        Diagnostic(
            "self_weight",
            ("client", "layer"),
            "Weight of each client's own model",
            "Weight that a client gives to its own model, layer by layer; 1 is local training.",
            low=0,
            high=1,
            of_server=lambda method, server: method.self_weights(server),
            in_checkpoints=True,
            instead_of="alpha",
        ),
    )
    params: PFedLAParams

    def __init__(self, context: Context, params: PFedLAParams) -> None:
        super().__init__(context, params)
        self.layers = self.layout.layers(params.layer)
        self.sharded = ShardedRows("theta", self.layers) if params.server == "sharded" else None
        if self.sharded is not None and len(context.num_samples_of_unseen):
            raise UserError(
                "data.unseen_clients does not go with method.server=sharded, where models stay with their "
                "workers, and clients that take no part in training need all; allowed: method.server=whole"
            )
        if params.weights == "relu" and params.head_init == "zero":
            raise UserError(
                "method.head_init=zero with method.weights=relu leaves all hypernetworks without a gradient; "
                "allowed: method.head_init=uniform or default"
            )
        self.hypernetworks = Hypernetworks(
            context.num_clients,
            len(self.layers),
            params.embedding,
            params.hidden,
            params.hidden_layers,
            params.rank if params.heads == "low_rank" else None,
        )
        given = params.hypernetwork_lr
        self.hypernetwork_lr = STEP_SIZES[params.optimiser] if given is None else given
        self.learner = HypernetworkState(self.hypernetworks, params.optimiser, self.hypernetwork_lr)

    def server_state(self) -> State:
        clients = range(self.context.num_clients)
        state = {"theta": self._initial_models(clients)} if self.sharded is None else {}
        if self.buffers.has_policy("mixed"):
            state[BUFFERS] = self.buffers.initial(clients)
        state[LARGEST_UPDATE] = torch.zeros(len(clients), dtype=torch.float64)
        head_init = self.params.head_init or ("zero" if self.params.weights == "softmax" else "uniform")
        return state | self.learner.initial(self.context.seed, head_init)

    def client_state(self, clients: Sequence[int]) -> State:
        return {} if self.sharded is None else {"theta": self._initial_models(clients)}

    def _initial_models(self, clients: Sequence[int]) -> Tensor:
        """Return the initial models [C, P] of some clients."""
        return self.context.initial_parameters(clients, self.params.initial_models == "own")

    def models(self, server: State) -> ShardedRows | WholeRows:
        """Return the clients' models, which this server mixes, compares and replaces."""
        return WholeRows(server["theta"], self.layers) if self.sharded is None else self.sharded

    def download(self, server: State, cohort: Cohort) -> Message:
        alpha = self.sent_weights(self.alpha(server, cohort.clients), cohort.clients)
        rows = {"theta": self.models(server).mix(alpha)}
        if self.buffers.has_policy("mixed"):
            rows[BUFFERS] = self.mix_buffers(alpha, server[BUFFERS])
        return Message(per_client=rows)

    def train(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": clients.sgd(down["theta"]).theta})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        clients, index = cohort.clients, torch.tensor(cohort.clients)
        outputs, leaves = self.learner.outputs_to_differentiate(server, clients)
        alpha = self._normalise(outputs, clients)
        retained = self.retained(alpha.detach(), clients)
        arrived = up.collect()
        assert up.sent is not None
        models, delta = self.models(server), arrived["theta"] - up.sent.per_client["theta"]
        products = models.products(delta)
        before = server[LARGEST_UPDATE][index]
        server[LARGEST_UPDATE][index] = largest = _largest(before, delta)
        if self.params.optimiser == "scaled":
            products = _scaled(products, largest)
        # a retained layer was not mixed, and before its first training a client has no model of its own
        has_no_gradient = retained | (before == 0).unsqueeze(-1)
        products = products.masked_fill(has_no_gradient.unsqueeze(-1), 0.0)
        self.learner.step(server, clients, -(alpha * products).sum(), leaves, retained)
        models.put(clients, arrived["theta"])
        if self.buffers.has_policy("mixed"):
            server[BUFFERS][index] = arrived[BUFFERS]

    def new_client_download(self, server: State, cohort: Cohort) -> Message:
        shared = {"models": server["theta"]}
        if self.buffers.has_policy("mixed"):
            shared["models_buffers"] = server[BUFFERS]
        return Message(shared)

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        """Learn a new client's weights from uniform ones, beside the models as they are."""
        models = WholeRows(down.shared["models"], self.layers)
        count = len(models.rows)
        scaled = self.params.optimiser == "scaled"
        lr = (self.hypernetwork_lr if scaled else STEP_SIZES["scaled"]) * count
        outputs = models.rows.new_zeros(len(clients), len(self.layers), count, requires_grad=True)
        largest = models.rows.new_zeros(len(clients), dtype=torch.float64)
        with self.buffers.keeping_averages(clients):
            for epoch in range(clients.local_epochs):
                alpha = outputs.softmax(dim=-1)
                start = self._mixture(clients, down, models, alpha.detach())
                delta = clients.sgd(start, epochs=1, purpose=f"finetune/{epoch}").theta - start
                largest = _largest(largest, delta)
                products = _scaled(models.products(delta), largest)
                (slope,) = torch.autograd.grad(-(alpha * products).sum(), outputs)
                outputs = (outputs - lr * slope).detach().requires_grad_()
        alpha = outputs.detach().softmax(dim=-1)
        return Message(per_client={"theta": self._mixture(clients, down, models, alpha)})

    def _mixture(self, clients: ClientGroup, down: Message, models: WholeRows, alpha: Tensor) -> Tensor:
        """Mix the models that new clients received, and their running statistics if these are mixed."""
        if self.buffers.has_policy("mixed"):
            clients.buffers = self.mix_buffers(alpha, down.shared["models_buffers"])
        return models.mix(alpha)

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": down["theta"]})

    def self_weights(self, server: State) -> Tensor:
        """Return the weight of each client's own model [N, L]."""
        num_clients = self.context.num_clients
        step = max(1, WEIGHTS_AT_ONCE // (len(self.layers) * num_clients))
        own = [
            self.alpha(server, some.tolist())[:, :, some].diagonal(dim1=0, dim2=2).T
            for some in torch.arange(num_clients).split(step)
        ]
        return torch.cat(own)

    def alpha(self, server: State, clients: Sequence[int]) -> Tensor:
        """Return the weights of some clients [S, L, N]; each (client, layer) sums to one."""
        return self._normalise(self.learner.outputs(server, clients), clients)

    def retained(self, alpha: Tensor, clients: Sequence[int]) -> Tensor:
        """Return which layers clients keep instead of downloading them, bool [S, L]; here none."""
        return torch.zeros(alpha.shape[:2], dtype=torch.bool)

    def sent_weights(self, alpha: Tensor, clients: Sequence[int]) -> Tensor:
        """Return the weights [S, L, N] of the models that are sent; a retained layer is the client's own."""
        return torch.where(self.retained(alpha, clients).unsqueeze(-1), self._own_weights(clients), alpha)

    def mix_buffers(self, alpha: Tensor, buffers: Tensor) -> Tensor:
        """Return running statistics [S, U] mixed with the weights of the layer they belong to."""
        mixed = buffers.new_empty(len(alpha), self.layout.buffer_size)
        for number, layer in enumerate(self.layers):
            part = slice(layer.buffer_start, layer.buffer_stop)
            mixed[:, part] = alpha[:, number] @ buffers[:, part]
        return mixed

    def _normalise(self, outputs: Tensor, clients: Sequence[int]) -> Tensor:
        if self.params.weights == "softmax":
            return outputs.softmax(dim=-1)
        positive = outputs.relu()
        total = positive.sum(dim=-1, keepdim=True)
        return torch.where(
            total > 0, positive / total.clamp(min=torch.finfo(total.dtype).tiny), self._own_weights(clients)
        )

    def _own_weights(self, clients: Sequence[int]) -> Tensor:
        """Return the weights that give each client its own model, [S, 1, N]."""
        own = torch.nn.functional.one_hot(torch.tensor(list(clients)), self.context.num_clients)
        return own.to(torch.get_default_dtype()).unsqueeze(1)


@dataclass(frozen=True)
class WholeRows:
    """All models [N, P] in one tensor, used as `ShardedRows` are."""

    rows: Tensor
    layers: Sequence[Layer]

    def mix(self, weights: Tensor) -> Tensor:
        """Return theta_bar [S, P] from weights [S, L, N] (eq. 6)."""
        mixed = self.rows.new_empty(len(weights), self.rows.shape[1])
        for number, part in pieces(self.layers):
            torch.mm(weights[:, number], self.rows[:, part], out=mixed[:, part])
        return mixed

    def products(self, vectors: Tensor) -> Tensor:
        """Return c_i^{l,j} = <theta_j^l, Delta_i^l>, [S, L, N], of Delta [S, P]: the ascent direction on
        alpha."""
        products = self.rows.new_zeros(len(self.layers), len(vectors), len(self.rows))
        for number, part in pieces(self.layers):
            products[number].addmm_(vectors[:, part].contiguous(), self.rows[:, part].T)
        return products.transpose(0, 1)

    def put(self, clients: Sequence[int], rows: Tensor) -> None:
        """Replace the models of some clients by rows [S, P]."""
        self.rows[list(clients)] = rows


def _largest(before: Tensor, delta: Tensor) -> Tensor:
    """Return the larger one of earlier |Delta|^2, float64 [S], and those of Delta [S, P]."""
    # row by row: all rows in float64, and their squares, would be four times as large as delta
    return torch.maximum(before, torch.stack([row.double().square().sum() for row in delta]))


def _scaled(products: Tensor, largest: Tensor) -> Tensor:
    """Divide products [S, L, N] by the largest |Delta|^2 [S]; a client that never moved has products of 0."""
    return products / largest.where(largest > 0, 1.0).to(products).view(-1, 1, 1)
