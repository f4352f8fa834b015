"""FedMN. Wang et al., Personalized federated learning via heterogeneous modular networks, ICDM 2022.

    Pi_i  = sigmoid(z_i),  z_i = mean over the training set of h([phi_x(x), phi_y(y)])       (eq. 10)
    v_i   = sigmoid((log e - log(1 - e) + z_i) / tau),  e ~ U(0, 1),  V_i = 1[v_i > 0.5]     (eq. 5)
    u_j   = mean of the outputs that open paths lead to block j, else 0                      (eq. 13)
    theta_i <- E epochs of SGD on encoders, active blocks and routing hypernetwork           (Algorithm 1)
    theta^b <- sum_i n_i a_i^b theta_i^b / n,  a_i^b = 1 if block b gets an input at client i  (section II-E)

A round has four messages: the routing hypernetwork goes down, the decision V_i goes up, the encoders and
active blocks go down, and after training the routing hypernetwork, the encoders and active blocks go up.

Differs from the paper, each with the option for the printed rule where there is one:
  mean         of theta^b, it is divided by sum_i n_i a_i^b, not by n: the printed sum shrinks blocks that few
               clients use in every round (`method.aggregation=sum`; differs from section II-E)
  norms        each of the router's two embeddings is divided by its root mean square. The paper normalises
               their concatenation (section IV-B); then all |z| are near 0 and nearly equal
               (`method.router_norm=joint`; the authors' code has a ReLU behind it, the paper has not)
  step         the router has a learning rate of its own, `method.router_lr`; a larger one makes the z_i of
               all clients alike within a few rounds. The paper has one for all, tuned on 0.001 to 0.05
               (differs from Algorithm 1; `method.router_lr` equal to `train.lr`)
  dropout      blocks have none. The paper's have, at a rate that it does not give (section IV-B;
               `method.dropout=0.5` is PyTorch's default)
  pretraining  there is none. The paper's encoders are pretrained by FedAvg, for a number of rounds that it
               does not give (section IV-B; `method.pretrain_rounds`)

Choices the paper leaves open:
  start        projections and blocks that end in ReLU are drawn for it (He et al., 2015), the last layer's
               have PyTorch's default weights. Those are smaller, and the means over blocks shrink the
               signals further: with default weights everywhere, training makes hardly any progress for many
               rounds
  routing      with separate norms, h is a sum of a term of the image and a term of the label, so z_i depends
               on a client's images and on its labels, but not on which label an image has. At the start, z
               depends on the label only and has a mean near 0 over the classes, so z_i is further from 0
               the fewer classes a client has (`method.router_spread`; not in the paper)
  gradient     V_i is drawn once per round. Its derivative is that of v_i (straight-through), where the
               mini-batch estimates the mean in z_i. Eq. 13 is differentiated with its number of open paths:
               if this number were held constant, every path would enlarge the signal, and the router would
               open nearly all paths
  noise        whether v_i > 0.5 does not depend on tau: in all rounds V_i is Bernoulli with probability Pi_i,
               and a smaller tau only sharpens the gradient
  dead ends    a path from a block without input is closed; if no path to the next layer is open, the most
               likely one is opened
  activation   encoders and blocks end in ReLU, the last layer's in logits
  embedding    128 numbers of the image, 64 of the label (its one-hot vector less 1 / classes), concatenated
  temperature  tau_t = tau_1 (tau_T / tau_1)^((t - 1) / (T - 1)), of the rounds after the pretraining
  pretrained   the first `method.pretrain_rounds` rounds train the first encoder and a classifier by FedAvg;
               they count as rounds and bytes of the run. Then the other encoders and the router copy the
               body of the first encoder. The other encoders keep their initial projections, because equal
               copies would compute the same outputs for ever
  order        Algorithm 1's theta_{m-1} can be read as a chain, and the authors' code trains in a chain. With
               `method.order=chain` each client of a round starts from the weights with which the client
               before it ended, and the server averages the weights of all these clients. All decisions are
               made before, by the server's router; bytes are the same
  evaluated    after the download: the newest weights with the decision 1[Pi_i > 0.5], computed on the
               training set, or with `method.scored_paths=sampled` those with the V_i of the client's last
               round, which the authors' program prints. After training: the local weights with the round's
               V_i. The paper says only that it scores on each client's local test data
  unseen       a client that takes no part in training gets its decision from the router, as it is evaluated;
               router and blocks stay as they are (not in the paper)
  kept         a client keeps Pi_i and V_i of its last round; they are zero before its first round

The authors' code has one module per layer in place of all its blocks. Its router has no gradient, and the
router's softmax keeps all paths open, so architecture [1, 1, 1] is the same network. That code trains it in a
chain and with momentum, and does not count its rounds of pretraining.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field, Strict
from torch import Tensor, nn
from torch.nn.functional import pad

from hpcfl.communication.aggregation import layer_means
from hpcfl.communication.messages import BUFFERS, Cohort, Message, packed, unpacked
from hpcfl.communication.upload import Upload
from hpcfl.errors import UserError
from hpcfl.methods.base import Context, Params, State, Traits, TwoPhaseMethod
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.models.modular import (
    CLASSIFIER,
    ROUTER,
    Decisions,
    ModularNetwork,
    Norm,
    Routed,
    Routing,
    num_paths,
    path_names,
)
from hpcfl.parameters import Tensors, columns
from hpcfl.randomness import seeded_generators
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup, GradientOf
from hpcfl.training.forward import Forward

Sizes = list[Annotated[int, Strict(), Field(ge=1, le=2**16)]]


def _of_paths(name: str, title: str, caption: str) -> Diagnostic:
    """Return a diagnostic with a value from 0 to 1 for each client and path."""
    return Diagnostic(
        name,
        ("client", "path"),
        title,
        caption,
        low=0,
        high=1,
        entries=lambda params: path_names(params.architecture),
    )


class FedMNParams(Params):
    architecture: Sizes = Field([2, 2, 2], min_length=2)
    """Encoders, then blocks of each layer (paper: [2, 2, 2] for CIFAR, [3, 3, 3] for EMNIST)."""
    widths: Sizes | None = None
    """Outputs of an encoder, then of a block in each layer but the last. Default: 512, then 256 each (as in
    the authors' code); if the body has F < 512 features, F, then F / 2 each."""
    routing: Routing = "straight"
    """Decisions: `straight` has hard ones, trained straight-through; `soft` has soft ones, v_i, so all blocks
    travel (evaluated with e = 1/2 and the last round's temperature); `open` opens all paths."""
    aggregation: Literal["normalised", "sum"] = "normalised"
    """Mean of a block's weights: `normalised` weighs the clients where the block was active by n_i; `sum` is
    the paper's, with weights n_i a_i / n, which shrinks rarely used blocks."""
    temperature: float = Field(1.0, gt=0)
    """Temperature tau of the first round (paper: 1.0)."""
    final_temperature: float = Field(0.1, gt=0)
    """Temperature tau of the last round (paper: 0.1)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability that training sets an output of a block before the last layer to 0 (the paper has dropout
    and gives no rate; PyTorch's is 0.5); 0 is without."""
    router_norm: Norm = "separate"
    """Norm of the router's embeddings: `separate` gives that of the image and that of the label a root mean
    square of 1 each; `joint` gives both together the length 1 (the paper and the authors' code)."""
    router_lr: float = Field(0.003, gt=0)
    """Learning rate of the routing hypernetwork, with the run's lr_decay and momentum; its weight decay acts
    with `train.lr`, as on all other weights."""
    router_spread: float = Field(3.0, ge=0)
    """Standard deviation over classes of the logits z at the start."""
    order: Literal["parallel", "chain"] = "parallel"
    """Whether each client of a round starts from the server's weights (`parallel`), or from the weights with
    which the client before it ended (`chain`, as in the authors' code), which needs a single worker."""
    scored_paths: Literal["likely", "sampled"] = "likely"
    """Decision of the model after a download: `likely` opens the paths with Pi_i > 0.5; `sampled` takes the
    V_i of the client's last round (authors' code), and `likely`'s of a client without one."""
    pretrain_rounds: int = Field(0, ge=0)
    """Number of rounds at the start that train one encoder by FedAvg (the paper does not count them)."""


class FedMN(TwoPhaseMethod):
    summary = "modular network: each client picks its blocks by a routing hypernetwork"
    Params = FedMNParams
    # means over encoders and blocks reduce the effect of each step, so the default learning rate is larger
    traits = Traits(
        averages=("theta",),
        differences=("theta", "parts"),
        uses_total_rounds=True,
        predicts_by="module",
        train_defaults={"lr": 0.1},
        refuses=dict.fromkeys(
            ("optimiser", "clip"), "which scales the router's gradients by its learning rate"
        ),
    )
    diagnostics = (
        _of_paths(
            "probability",
            "How likely each path is open",
            "Probability of each path (column) for each client (row), from a block to one of the next layer "
            "(eq. 10); 0 before a client's first round.",
        ),
        _of_paths(
            "decision",
            "Which paths each client took",
            "1 where a client's last round had the path open (eq. 5).",
        ),
    )
    params: FedMNParams
    network: ModularNetwork

    def __init__(self, context: Context, params: FedMNParams) -> None:
        _check(params, context.train.rounds)
        super().__init__(context, params)
        self.layers = self.layout.layers("child")
        self.sequential = "method.order=chain" if params.order == "chain" else None
        self._of_router = columns(self.layers, self._named(ROUTER))
        self._steps = torch.where(self._of_router, params.router_lr / context.train.lr, 1.0)
        """Each number's learning rate, in units of `train.lr` [P]."""
        rounds = range(params.pretrain_rounds, context.train.rounds)
        temperatures = params.temperature, params.final_temperature
        self.decisions = Decisions(self.network, params.routing, temperatures, rounds, context.seed)

    def _named(self, *names: str) -> Tensor:
        """Return which layers have one of these names, bool [L]."""
        return torch.tensor([layer.name in names for layer in self.layers])

    def make_network(self) -> ModularNetwork:
        context, params = self.context, self.params
        sizes, widest = params.architecture, min(512, context.network.num_features)
        widths = params.widths or [widest, *[max(1, widest // 2)] * (len(sizes) - 2)]
        with_classifier = params.pretrain_rounds > 0
        router = params.router_spread, params.router_norm
        with seeded_generators(context.seed, "modular network", client=-1):
            networks = [context.build_network(-1 - number) for number in range(sizes[0] + 1)]
            return ModularNetwork(sizes, widths, context.num_classes, networks, with_classifier, *router)

    def server_state(self) -> State:
        return {"theta": self.layout.flatten(self.network)[0]}

    def client_state(self, clients: Sequence[int]) -> State:
        rows = torch.zeros(len(clients), num_paths(self.params.architecture))
        return {"probability": rows, "decision": rows.clone()}

    # a round

    def needs_request(self, round: int) -> bool:
        return round >= self.params.pretrain_rounds

    def download(self, server: State, cohort: Cohort) -> Message:
        names = [ROUTER] if self.needs_request(cohort.round) else ["encoder1", CLASSIFIER]
        return Message(shared={"theta": server["theta"]}, layer_mask={"theta": self._named(*names)})

    def client_request(self, clients: ClientGroup, down: Message) -> Message:
        logits = self.logits(clients, down)
        decision, slope = self.decisions.drawn(logits, clients.round, clients.ids)
        clients["probability"] = logits.sigmoid().to(clients.device)
        clients["decision"] = decision.to(clients.device)
        clients.scratch |= {"decision": clients["decision"], "slope": slope.to(clients.device)}
        return Message(per_client={"paths": packed(decision > 0)})

    def server_response(self, server: State, cohort: Cohort, requests: State) -> Message:
        paths = unpacked(requests["paths"])[:, : num_paths(self.params.architecture)]
        active = self.network.active(paths)
        # the router and the classifier are the last layers
        mask = pad(active, (0, len(self.layers) - active.shape[1]))
        return Message(shared={"parts": server["theta"]}, layer_mask={"parts": mask})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        masks = {name: mask.cpu() for name, mask in down.layer_mask.items()}
        start, gradient = self._joined(down), self._gradient(clients, clients.scratch)
        # a client does not have the weights of blocks that it did not request
        received = masks["theta"] | masks.get("parts", masks["theta"])
        has = columns(self.layers, received.to(clients.device))
        theta = clients.sgd(start.where(has, 0.0), gradient=gradient).theta
        if not self.needs_request(clients.round):
            for statistics in clients.buffers if self.buffers.has_policy("local") else ():
                self._copy_body(self.layout.buffer_views(statistics))
        elif self.params.order == "chain":
            statistics = {BUFFERS: clients.buffers[0]} if self.buffers.has_policy("average") else {}
            clients.handover = Message(dict.fromkeys(masks, theta.where(has, start)[0]) | statistics)
        # under the names of what was received, of which a codec sends the differences
        return Message(per_client=dict.fromkeys(masks, theta), layer_mask=masks)

    def _joined(self, parts: Message | Tensors) -> Tensor:
        """Return weights [..., P] of both messages of a round: `theta` has the router, `parts` the rest."""
        theta = parts["theta"]
        return theta.where(self._of_router.to(theta.device), parts["parts"]) if "parts" in parts else theta

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        decision = {"decision": clients["decision"]} if clients.scratch else {}
        return Message(per_client={"theta": up["theta"]} | decision)

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        assert up.sent is not None
        total, samples = None, cohort.num_samples.unsqueeze(1)
        if self.params.aggregation == "sum" and self.needs_request(cohort.round):
            # where the total is 0, the server's weights stay
            total = samples.sum() * ~self._named(CLASSIFIER)
        weights = {name: mask * samples for name, mask in up.sent.layer_mask.items()}
        old = dict.fromkeys(weights, server["theta"])
        server["theta"] = self._joined(layer_means(up, weights, self.layers, old, total))

    def averages_in(self, down: Message) -> State:
        return {"theta": self._joined(down.shared)}

    # router and loss

    def logits(self, clients: ClientGroup, down: Message) -> Tensor:
        """Return the mean logits z of each client's training set [C, E], on the CPU (eq. 9)."""
        model = {"theta": down["theta"], BUFFERS: clients.buffers}
        found = clients.training_outputs(model, lambda network, x, y: network.router(x, y))
        return torch.stack([logits.mean(dim=0) for logits in found]).cpu()

    def _gradient(self, clients: ClientGroup, fixed: Tensors) -> GradientOf | None:
        """Return the gradient of training; `fixed` has the decisions, and `slope` if the router learns, both
        [C, E]. None without decisions: that of the classifier."""
        if not fixed:
            return None
        steps, rate, uniform = self._steps.to(clients.device), self.params.dropout, clients.uniform("dropout")

        def gradient(theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            tensors = {"theta": theta} | {name: rows[batch.members] for name, rows in fixed.items()}
            if rate:
                tensors["dropout_mask"] = (uniform(batch, self.network.num_hidden) >= rate) / (1 - rate)
            slopes, losses = clients.gradient(self._loss, tensors, batch)
            return slopes["theta"] * steps, losses

        return gradient

    def _loss(self, forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
        theta, decision = tensors["theta"], tensors["decision"].detach()
        if "slope" in tensors and self.params.routing != "open":
            logits = forward.call(ROUTER, theta, batch.x, batch.y).mean(dim=0)
            # the decision itself, with the derivative of v (straight-through)
            decision = decision + tensors["slope"].detach() * (logits - logits.detach())
        mask = tensors["dropout_mask"].detach() if "dropout_mask" in tensors else None
        return forward.cross_entropy(forward.call("", theta, batch.x, decision, mask), batch.y)

    # evaluation

    def eval_download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={"theta": server["theta"]})

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        shared, newest = {"theta": down.shared["theta"]}, clients.round - 1
        if not self.needs_request(newest):
            # a model without a decision is the classifier
            return Message(shared)
        decision = self.decisions.likely(self.logits(clients, down), newest).to(clients.device)
        if self.params.scored_paths == "sampled":
            last = clients["decision"]
            # a decision has an open path at least
            decision = torch.where(last.any(dim=1, keepdim=True), last, decision)
        return Message(shared, {"decision": decision})

    def finetune(self, clients: ClientGroup, down: Message, epochs: int) -> Message:
        model = self.eval_model(clients, down)
        return self._finetuned(clients, model, epochs, gradient=self._gradient(clients, model.per_client))

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        if self.buffers.has_policy("local"):
            fixed = self.eval_model(clients, down).per_client
            if fixed:
                # with a slope, the router too is computed
                fixed["slope"] = torch.zeros_like(fixed["decision"])
            clients.find_statistics(down["theta"], self._gradient(clients, fixed))
        return self.eval_model(clients, down)

    def predict(self, clients: ClientGroup, model: Message, position: int, x: Tensor) -> Tensor:
        decision = model["decision"][position] if "decision" in model else None
        return clients.outputs(model, position, lambda network, x: network(x, decision).softmax(dim=1), x)

    def as_module(self, model: Tensors) -> nn.Module:
        network = super().as_module(model)
        assert isinstance(network, ModularNetwork)
        # a model of the pretraining has no decision, and is the classifier
        return Routed(network, model["decision"]) if "decision" in model else network

    # rounds of pretraining

    def end_round(self, server: State, cohort: Cohort) -> None:
        """Let all encoders begin with the pretrained body after the last round of pretraining."""
        if cohort.round == self.params.pretrain_rounds - 1:
            self._copy_body(self.layout.views(server["theta"]))
            if BUFFERS in server:
                self._copy_body(self.layout.buffer_views(server[BUFFERS]))

    def _copy_body(self, views: Tensors) -> None:
        """Copy the first encoder's body into all others and the router's."""
        for name, tensor in views.items():
            _, is_body, rest = name.partition(".body.")
            if is_body:
                tensor.copy_(views[f"encoder1.body.{rest}"])


def _check(params: FedMNParams, rounds: int) -> None:
    """Raise UserError for hyper-parameters that do not go together."""
    sizes, widths, pretraining = params.architecture, params.widths, params.pretrain_rounds
    if widths is not None and len(widths) != len(sizes) - 1:
        raise UserError(
            f"method.widths={widths} does not go with method.architecture={sizes}; allowed: "
            f"{len(sizes) - 1} widths, one for each layer but the last"
        )
    if pretraining >= rounds:
        raise UserError(
            f"method.pretrain_rounds={pretraining} leaves none of train.rounds={rounds} for the modular "
            f"network; allowed: 0 to {rounds - 1}"
        )
