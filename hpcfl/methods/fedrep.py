"""FedRep. Collins et al., Exploiting shared representations for personalized federated learning, ICML 2021.

    h_i   <- epochs of SGD on L_i(phi, h_i) from h_i, phi frozen
    phi_i <- epochs of SGD on L_i(phi_i, h_i) from phi, h_i frozen              (Algorithm 1)
    phi   <- weighted mean of phi_i

Choices: momentum and weight decay do not act on frozen weights. Running statistics are updated in both phases
and averaged with the body, as in FedPer. The weights of the mean are training-set sizes (the paper uses
uniform weights). The final round that trains heads only, and the augmentation, both in the authors' script,
are left out. The evaluated model is the newest phi with the client's head after its last training. A client
that takes no part in training learns a head under phi as it is, as in the paper's experiment on new clients.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from hpcfl.errors import UserError
from hpcfl.methods.base import Context, Params
from hpcfl.methods.fedper import FedPer
from hpcfl.training.client_group import ClientGroup


class FedRepParams(Params):
    head_epochs: int | None = Field(None, ge=0)
    """Epochs of the head alone (authors: 10); 0 never trains it, default: as many as `train.local_epochs`."""
    body_epochs: int | None = Field(1, ge=0)
    """Epochs of the body after the head's (authors: 1 for CIFAR-10, 5 for CIFAR-100); 0 never trains it,
    null: what `head_epochs` leaves of `train.local_epochs`, so that both have as many as other methods."""


class FedRep(FedPer):
    summary = "a shared body under each client's own head, trained in turn"
    privacy_units = ("client", "sample")
    Params = FedRepParams
    params: FedRepParams

    def __init__(self, context: Context, params: FedRepParams) -> None:
        super().__init__(context, params)
        self._body_epochs = params.body_epochs
        if params.body_epochs is not None:
            return
        if context.clients.local_epochs is not None:
            raise UserError(
                "method.body_epochs=null does not go with clients.local_epochs, which draws the epochs of "
                "each client; set method.body_epochs=1, or clients.local_epochs=null"
            )
        epochs = context.train.local_epochs
        self._body_epochs = epochs - (epochs if params.head_epochs is None else params.head_epochs)
        if self._body_epochs < 1:
            raise UserError(
                f"method.body_epochs=null: train.local_epochs={epochs} leaves the body {self._body_epochs} "
                "epochs; raise train.local_epochs or set method.head_epochs=1"
            )

    def local_training(self, clients: ClientGroup, theta: Tensor) -> Tensor:
        body, head = self.layout.body, self.layout.head
        theta = clients.sgd(theta, epochs=self.params.head_epochs, trained=head, purpose="head").theta
        return clients.sgd(theta, epochs=self._body_epochs, trained=body).theta
