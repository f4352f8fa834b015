"""FedGH. Yi et al., FedGH: heterogeneous federated learning with generalized global header, ACM MM 2023.

    (phi_i, h_i) <- E epochs of SGD on L_i from (phi_i, h), body and head together       (Algorithm 1)
    C_i,c = mean of phi_i(x) over the client's samples of class c
    h     <- SGD on CE(h(C_i,c), c) over all C_i,c of the round's cohort

The head h goes down and the prototypes C_i,c go up; the body stays with the client.

Choices the paper leaves open:
  steps        the server does `method.server_epochs` over the prototypes of the round, in mini-batches of
               `train.batch_size` in random order. It has neither momentum nor weight decay, and its learning
               rate does not decay. Each prototype counts the same, whatever its number of samples. (The
               authors' code passes over single prototypes; its optimiser lacks h, which so never moves.)
  prototypes   are computed after the local epochs, over the training set, in evaluation mode
  upload       it has K rows, with zeros for classes that the client does not hold, and a byte for each class.
               (The paper's has rows only for the classes that the client holds.)
  evaluated    the own body after its last training under the newest h; after training, the client's own head
               (which the authors' code evaluates).
               Running statistics stay with the client
  unseen       a client that takes no part in training trains the initial body and a copy of h
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.methods._own_model import OwnModel
from hpcfl.methods._prototypes import prototypes, trained_on_prototypes
from hpcfl.methods.base import Params, State
from hpcfl.parameters import Tensors, under
from hpcfl.training.client_group import ClientGroup


class FedGHParams(Params):
    server_lr: float = Field(0.01, ge=0)
    """Learning rate of the server's head (HtFLlib: 0.01); 0 keeps the initial head, to which bodies adapt."""
    server_epochs: int = Field(1, ge=0)
    """Passes of the server over the prototypes of a round (PFLlib: 1)."""


class FedGH(OwnModel):
    summary = "own bodies under one head, which the server trains on the class means of their features"
    Params = FedGHParams
    traits = OwnModel.traits.replace(eval_after="download", needs_body=True)
    params: FedGHParams

    def server_state(self) -> State:
        return {"head": self.context.initial_parameters()[self.layout.head]}

    def download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={"head": server["head"]})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        theta = clients.sgd(self.layout.with_head(clients["theta"], down["head"])).theta
        clients["theta"] = theta
        found = prototypes(clients, theta, self.context.num_classes)
        return Message(per_client={"prototypes": found.means, "is_known": found.is_held})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        rows = up.collect("prototypes", "is_known")
        held = rows["is_known"] == 1  # [S, K]
        module = self.network.get_submodule("head")

        def loss(weights: Tensors, features: Tensor, y: Tensor) -> Tensor:
            views = self.layout.views(weights["head"], self.layout.head.start)
            return cross_entropy(functional_call(module, under(views, "head."), features), y)

        found, y = rows["prototypes"][held], held.nonzero()[:, 1]
        server |= trained_on_prototypes(self, cohort.round, {"head": server["head"]}, loss, found, y)

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": self.layout.with_head(clients["theta"], down["head"])})

    def model_after_training(self, clients: ClientGroup, down: Message, up: Message) -> Message:
        return Message(per_client={"theta": clients["theta"]})
