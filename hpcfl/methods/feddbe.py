"""FedDBE. Zhang et al., Eliminating domain bias for federated learning in representation space, NeurIPS 2023.

    theta_i, z_i <- E epochs of SGD from the received theta and the client's own z_i on
                    CE(h(f(x) + z_i), y) + kappa / (2 F) ||m_i - g||^2,  theta_i = (f, h)
    m_i          <- (1 - mu) m_i + mu (mean of f(x) over the mini-batch), from 0 in each round
    theta        <- weighted mean of theta_i

g, the consensus, is the weighted mean over clients of the mean feature of their training sets. It is found
once, before there is z_i or the term of kappa. F is the number of features.

Choices the paper leaves open:
  consensus   in the first round, clients train as in FedAvg and send the mean feature of their training set
              by the trained model (F numbers). From the second round on, clients get g with the model. The
              paper has an extra round of all clients before, whose models are thrown away; here g is of the
              first round's cohort, and all rounds and bytes count. (The authors' code takes for the mean
              feature m_i after the last mini-batch; with mu = 1 this is the mean of one mini-batch.)
  gradient    earlier mini-batches' part of m_i is a constant
  z_i         starts at 0, has the learning rate of theta and its momentum and weight decay, and stays with
              the client. As heads are linear, the evaluated model is a network whose head's bias is b + W z_i
  BatchNorm   running statistics are averaged like parameters
  unseen      a client that takes no part in training learns z_i alone, beside theta as it is

kappa = 0 leaves the first half of the method, z_i alone. The first round is FedAvg's to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.aggregation import weighted_mean, weighted_means
from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods.base import Context, Params, State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.parameters import Tensors
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.forward import Forward
from hpcfl.training.losses import body_features


class FedDBEParams(Params):
    kappa: float = Field(50.0, ge=0)
    """Strength of the pull of mean features towards the consensus (authors: 50); 0 is without."""
    mean_momentum: float = Field(1.0, gt=0, le=1)
    """Share mu of the newest mini-batch in a client's mean feature (authors: 1); small ones weaken the pull,
    as the mean begins at 0 and only the newest mini-batch has a gradient."""


class FedDBE(FedAvg):
    summary = "FedAvg whose clients add a vector of their own to features that have a common mean"
    Params = FedDBEParams
    traits = FedAvg.traits.replace(linear_head=True)
    params: FedDBEParams

    def __init__(self, context: Context, params: FedDBEParams) -> None:
        super().__init__(context, params)
        self._num_features = context.network.num_features
        self._bias = slice(self.layout.size - context.num_classes, self.layout.size)
        self._weight = slice(self.layout.head.start, self._bias.start)

    def server_state(self) -> State:
        consensus = self.context.initial_parameters().new_zeros(self._num_features)
        return super().server_state() | {"consensus": consensus, "has_consensus": torch.zeros(1)}

    def client_state(self, clients: Sequence[int]) -> State:
        return {"offset": self.context.initial_parameters().new_zeros(len(clients), self._num_features)}

    def download(self, server: State, cohort: Cohort) -> Message:
        names = ["theta", "consensus"] if server["has_consensus"] else ["theta"]
        return Message(shared={name: server[name] for name in names})

    def eval_download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={"theta": server["theta"]})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        if "consensus" not in down:
            theta = clients.sgd(down["theta"]).theta
            trained = {"theta": theta, BUFFERS: clients.buffers}
            mean = clients.over_training_set(trained, body_features).sum(dim=1)
            samples = clients.num_samples.to(mean.device).unsqueeze(1)
            return Message(per_client={"theta": theta, "mean": mean / samples})
        model, own = clients.descent(down["theta"]), clients.descent(clients["offset"])
        mean = torch.zeros_like(clients["offset"])
        for batch in clients.batches():
            members = batch.members
            tensors = {"theta": model.theta[members], "offset": own.theta[members]}
            known = {"consensus": down["consensus"][members], "mean": mean[members]}
            # the derivative by `probe` is how this batch's mean feature comes out of the loss
            known["probe"] = torch.zeros_like(known["mean"])
            gradients, losses = clients.gradient(self._loss, tensors | known, batch)
            model.step(members, gradients["theta"])
            own.step(members, gradients["offset"])
            mean[members] = torch.lerp(mean[members], gradients["probe"], self.params.mean_momentum)
            clients.record(batch, losses)
        clients["offset"] = own.theta
        return Message(per_client={"theta": model.theta})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        if server["has_consensus"]:
            server["theta"] = weighted_mean(up, "theta", cohort.num_samples)
            return
        means = weighted_means(up, dict.fromkeys(("theta", "mean"), cohort.num_samples))
        server["theta"], server["consensus"] = means["theta"], means["mean"]
        server["has_consensus"] = torch.ones(1)

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": self.with_offset(down["theta"], clients["offset"])})

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        theta, own = down["theta"], clients.descent(clients["offset"])
        with self.buffers.keeping_averages(clients):
            for batch in clients.batches("finetune"):
                members = batch.members
                tensors = {"theta": theta[members], "offset": own.theta[members]}
                gradients, losses = clients.gradient(self._loss_of_offset, tensors, batch)
                own.step(members, gradients["offset"])
                clients.record(batch, losses)
        return Message(per_client={"theta": self.with_offset(theta, own.theta)})

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        return Message(per_client={"theta": self.with_offset(up["theta"], clients["offset"])})

    def with_offset(self, theta: Tensor, offset: Tensor) -> Tensor:
        """Return models [C, P] whose head gives h(f(x) + z_i), from theta [C, P] and z_i [C, F]."""
        theta = theta.clone(memory_format=torch.contiguous_format)
        weight = theta[:, self._weight].view(len(theta), -1, self._num_features)
        theta[:, self._bias] += (weight @ offset.unsqueeze(2)).squeeze(2)
        return theta

    def _loss(self, forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
        features = forward.features(tensors["theta"], batch.x)
        logits = forward.head(tensors["theta"], features + tensors["offset"])
        of_batch, share = features.mean(dim=0), self.params.mean_momentum
        mean = (1 - share) * tensors["mean"].detach() + share * of_batch
        away = (mean - tensors["consensus"].detach()).square().mean() / 2
        fit = forward.cross_entropy(logits, batch.y)
        return fit + self.params.kappa * away + tensors["probe"] @ of_batch.detach()

    @staticmethod
    def _loss_of_offset(forward: Forward, tensors: Tensors, batch: Batch) -> Tensor:
        theta = tensors["theta"].detach()
        features = forward.features(theta, batch.x)
        return forward.cross_entropy(forward.head(theta, features + tensors["offset"]), batch.y)
