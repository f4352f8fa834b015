"""pFedLA. Ma et al., Layer-wised model aggregation for personalized federated learning, CVPR 2022.

    alpha_i      = HN_i(v_i; psi_i),  sum_j alpha_i^{l,j} = 1                       (eq. 3, 4)
    theta_bar_i^l = sum_j alpha_i^{l,j} theta_j^l                                   (eq. 6)
    theta_i      <- E epochs of SGD on L_i from theta_bar_i                         (Algorithm 1)
    Delta_i      = theta_i - theta_bar_i
    v_i, psi_i  <- ascend along (d theta_bar_i / d v_i, psi_i)^T Delta_i            (eq. 10, 11)

With c_i^{l,j} = <theta_j^l, Delta_i^l> the last line is the gradient of -sum alpha c through the small
hypernetwork, so the server needs two products a layer and one batched backward pass.

Choices the paper leaves open:
  sign         Delta points downhill, so the hypernetwork moves along it; a test shows that the loss falls
               (public code moves the other way)
  snapshot     downloads mix the models at the start of the round; theta_j of unsampled clients stays the same
  update       the server keeps the trained theta_i that clients upload, and forms Delta itself
  layer        weight and bias of a module together, a BatchNorm module by itself; `method.layer`
  weights      softmax over clients; relu divided by its sum (public code), own model where all are zero
  step         the paper names no learning rate for the hypernetworks. c grows with |Delta|^2, so with a rate
               that suits one network or data set, alpha hardly moves or saturates at once with another.
               `scaled` divides all c of a client by the largest |Delta_i|^2 that it has sent: the layers
               keep their relative scales, which HeurpFedLA's choice needs, and steps shrink as training
               settles. Adam removes both properties: after hundreds of rounds every layer has one-hot
               weights, which is local training
  start        common initial models and heads as in `head_init`
  buffers      BatchNorm's running statistics stay with the client; `train.buffers=mixed` mixes them with the
               weights of their layer, which is better in the first rounds and worse once weights differ
  evaluated    theta_bar_i of every client, before local training
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.channel import Upload
from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.errors import UserError
from hpcfl.methods.base import Context, Method, Params, State
from hpcfl.models.hypernetworks import HeadInit, Hypernetworks, Optimiser, descend, initial_moments
from hpcfl.parameters import COLUMNS_AT_ONCE, Granularity, Layer
from hpcfl.training.clients import Clients

HYPERNETWORKS = "hypernetworks/"
OPTIMISER = "optimiser/"
LARGEST_UPDATE = OPTIMISER + "largest_update"
STEP_SIZES = {"scaled": 1.0, "adam": 1e-3, "sgd": 5e-3}
HISTORY_LIMIT = 10_000
"""Largest number N*L*N of weights that the history records in full (below 100 MB for 2,500 evaluations); with
more weights, it records only the weight that each client gives to its own model."""


class PFedLAParams(Params):
    """Hyper-parameters of pFedLA."""

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
    optimiser: Optimiser = "scaled"
    """Step of the hypernetworks: `sgd` is the plain one of eq. 10 and 11; `scaled` is the same, with products
    divided by the largest |Delta_i|^2 that the client has sent; `adam` ignores the scale of the products."""
    hypernetwork_lr: float | None = Field(None, ge=0)
    """Step size of the hypernetworks; 0 keeps the initial weights; default: 1 with scaled, 0.001 with adam,
    0.005 with sgd (public code)."""
    layer: Granularity = "module"
    """What gets a weight of its own: a module, a block (convolution with its BatchNorm), or a tensor."""
    initial_models: Literal["common", "own"] = "common"
    """Whether clients start from the same weights or each from its own (public code)."""

    def in_use(self) -> dict[str, Any]:
        lr = STEP_SIZES[self.optimiser] if self.hypernetwork_lr is None else self.hypernetwork_lr
        head_init = self.head_init or ("zero" if self.weights == "softmax" else "uniform")
        return super().in_use() | {"hypernetwork_lr": lr, "head_init": head_init}


class PFedLA(Method):
    name = "pfedla"
    summary = "a hypernetwork a client weighs all clients' models layer by layer"
    Params: ClassVar[Any] = PFedLAParams
    buffer_policies = ("local", "mixed", "average")
    history_axes: ClassVar[dict[str, tuple[str, ...]]] = {
        "alpha": ("client", "layer", "client"),
        "self_weight": ("client", "layer"),
    }
    params: PFedLAParams

    def __init__(self, context: Context, params: PFedLAParams) -> None:
        super().__init__(context, params)
        if params.weights == "relu" and params.head_init == "zero":
            raise UserError(
                "method.head_init=zero with method.weights=relu leaves all hypernetworks without a gradient; "
                "allowed: method.head_init=uniform or default"
            )
        self.hypernetwork_lr: float = params.in_use()["hypernetwork_lr"]
        self.hypernetworks = Hypernetworks(
            context.num_clients, len(self.layers), params.embedding, params.hidden, params.hidden_layers
        )

    def make_layers(self) -> tuple[Layer, ...]:
        return self.layout.layers(self.params.layer)

    def server_state(self) -> State:
        clients = range(self.context.num_clients)
        own = self.params.initial_models == "own"
        hypernetworks = self.hypernetworks.initial(self.context.seed, self.params.in_use()["head_init"])
        moments = initial_moments(hypernetworks, self.params.optimiser)
        state = {"theta": self.context.initial_parameters(clients, own)}
        if self._mixes_buffers:
            state[BUFFERS] = self.initial_buffers(clients)
        if self.params.optimiser == "scaled":
            state[LARGEST_UPDATE] = torch.zeros(len(clients), dtype=torch.float64)
        state |= {HYPERNETWORKS + name: tensor for name, tensor in hypernetworks.items()}
        return state | {OPTIMISER + name: tensor for name, tensor in moments.items()}

    def download(self, server: State, cohort: Cohort) -> Message:
        alpha = self.sent_weights(self.alpha(server, cohort.clients), cohort.clients)
        rows = {"theta": self.mix(alpha, server["theta"])}
        if self._mixes_buffers:
            rows[BUFFERS] = self.mix_buffers(alpha, server[BUFFERS])
        return Message(rows=rows)

    def train(self, clients: Clients, down: Message) -> Message:
        return Message(rows={"theta": clients.sgd(down["theta"]).theta})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        clients = cohort.clients
        index = torch.tensor(clients)
        leaves = {
            name: tensor.index_select(0, index).requires_grad_()
            for name, tensor in self._part(server, HYPERNETWORKS).items()
        }
        alpha = self._normalise(self.hypernetworks.outputs(leaves), clients)
        retained = self.retained(alpha.detach(), clients)
        arrived = up.collect()
        assert up.sent is not None
        start = up.sent.rows["theta"]
        products = self.products(arrived["theta"], start, server["theta"])
        if LARGEST_UPDATE in server:
            update = (arrived["theta"] - start).double().square().sum(dim=1)
            largest = torch.maximum(server[LARGEST_UPDATE][index], update)
            server[LARGEST_UPDATE][index] = largest
            # a client that never moved has products of zero
            scale = largest.where(largest > 0, 1.0)
            products = products / scale.to(products).view(-1, 1, 1)
        # a retained layer was not mixed, so it says nothing about the weights
        products = products.masked_fill(retained.unsqueeze(-1), 0.0)
        gradients = torch.autograd.grad(-(alpha * products).sum(), list(leaves.values()))
        descend(
            self._part(server, HYPERNETWORKS),
            self._part(server, OPTIMISER),
            dict(zip(leaves, gradients, strict=True)),
            clients,
            self.params.optimiser,
            self.hypernetwork_lr,
            retained,
        )
        server["theta"][index] = arrived["theta"]
        if self._mixes_buffers:
            server[BUFFERS][index] = arrived[BUFFERS]

    def personalised(self, clients: Clients, down: Message) -> Message:
        return Message(rows={"theta": down["theta"]})

    def derived(self, server: State) -> State:
        return {"alpha": self.alpha(server, range(self.context.num_clients))}

    def history(self, server: State) -> State:
        alpha = self.alpha(server, range(self.context.num_clients))
        if alpha.numel() > HISTORY_LIMIT:
            return {"self_weight": alpha.diagonal(dim1=0, dim2=2).T}
        return {"alpha": alpha}

    def server_bytes(self) -> dict[str, int]:
        clients, item = self.context.num_clients, 4
        numbers = clients * self.hypernetworks.size
        moments = {"adam": 2 * numbers * item, "scaled": clients * 2 * item, "sgd": 0}
        return {
            "theta": clients * self.layout.size * item,
            "hypernetworks": numbers * item,
            "hypernetworks' optimiser": moments[self.params.optimiser],
        }

    def alpha(self, server: State, clients: Sequence[int]) -> Tensor:
        """Return the weights of some clients [S, L, N]; each (client, layer) sums to one."""
        index = torch.tensor(list(clients))
        rows = {name: t.index_select(0, index) for name, t in self._part(server, HYPERNETWORKS).items()}
        return self._normalise(self.hypernetworks.outputs(rows), clients)

    def retained(self, alpha: Tensor, clients: Sequence[int]) -> Tensor:
        """Return which layers clients keep instead of downloading them, bool [S, L]; here none."""
        return torch.zeros(alpha.shape[:2], dtype=torch.bool)

    def sent_weights(self, alpha: Tensor, clients: Sequence[int]) -> Tensor:
        """Return the weights [S, L, N] of the models that are sent; a retained layer is the client's own."""
        return torch.where(self.retained(alpha, clients).unsqueeze(-1), self._own_weights(clients), alpha)

    def mix(self, alpha: Tensor, theta: Tensor) -> Tensor:
        """Return theta_bar [S, P] from weights [S, L, N] and all models [N, P] (eq. 6)."""
        mixed = theta.new_empty(len(alpha), self.layout.size)
        for number, part in self._pieces():
            torch.mm(alpha[:, number], theta[:, part], out=mixed[:, part])
        return mixed

    def mix_buffers(self, alpha: Tensor, buffers: Tensor) -> Tensor:
        """Return running statistics [S, U] mixed with the weights of the layer they belong to."""
        mixed = buffers.new_empty(len(alpha), self.layout.buffer_size)
        for number, layer in enumerate(self.layers):
            part = slice(layer.buffer_start, layer.buffer_stop)
            mixed[:, part] = alpha[:, number] @ buffers[:, part]
        return mixed

    def products(self, trained: Tensor, start: Tensor, theta: Tensor) -> Tensor:
        """Return c_i^{l,j} = <theta_j^l, Delta_i^l>, [S, L, N]: the ascent direction on alpha.

        Delta = trained - start, both [S, P], and theta is [N, P]. While all models are equal, as in the first
        round, alpha has no effect, so the products are set to 0: Adam would amplify their rounding errors.
        """
        products = theta.new_zeros(len(self.layers), len(trained), len(theta))
        if not all(torch.equal(theta[0], model) for model in theta[1:]):
            for number, part in self._pieces():
                delta = trained[:, part] - start[:, part]
                products[number].addmm_(delta, theta[:, part].T)
        return products.transpose(0, 1)

    def _pieces(self) -> Iterator[tuple[int, slice]]:
        """Yield (layer number, columns), in pieces that stay in a processor's cache for all N models."""
        for number, layer in enumerate(self.layers):
            for start in range(layer.start, layer.stop, COLUMNS_AT_ONCE):
                yield number, slice(start, min(start + COLUMNS_AT_ONCE, layer.stop))

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

    @property
    def _mixes_buffers(self) -> bool:
        return self.buffers == "mixed" and self.layout.buffer_size > 0

    @staticmethod
    def _part(server: State, prefix: str) -> State:
        return {n.removeprefix(prefix): tensor for n, tensor in server.items() if n.startswith(prefix)}
