"""FedCAC. Wu et al., Bold but cautious: unlocking the potential of personalized federated learning through
cautiously aggressive collaboration, ICCV 2023.

    theta_i <- E epochs of SGD on L_i from u_i
    Omega_i  = |(theta_i - u_i) theta_i|, element by element
    M_i      = 1 for the share tau of the numbers of each tensor with the largest Omega_i, else 0
    O_ij     = 1 - ||M_i - M_j||_1 / (2 ||M_i||_1)
    C_i      = {i} and all j with O_ij >= mean O + t / beta (max O - mean O),  mean and max over all pairs
    u_i     <- M_i (mean of theta_j over C_i) + (1 - M_i) (mean of theta_j over all clients)

t is the number of finished rounds. So clients share their critical numbers with fewer and fewer others: at
t = beta with those of the largest O_ij alone, and later with none, unless all O_ij are equal.

Differs from PFLlib's code:
  first round  there the clients' critical numbers go back to the initial model after round 1
  evaluated    there u_i is scored, before training

Choices: the mean over C_i is plain, that over all clients weighted by training-set sizes (both as in
PFLlib). A number that moved by no more than rounding errors, such as a bias before BatchNorm, is never
critical. Numbers with equal Omega at the edge are all critical. Clients send M_i, a bit a number, and the
server mixes. Of an unsampled client, theta_j and M_j are those of its last round, as the paper has all
clients in each round. A client that never uploaded has no part in the means, and starts from that over all
clients; so does a client that takes no part in training, and one whose model is nan or infinite. Running
statistics stay with the client. The evaluated model is theta_i after its last training, and before its first
round the initial model; the model after a download is u_i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.messages import Cohort, Message, packed, unpacked
from hpcfl.methods._model_bank import ModelBank, rows_among
from hpcfl.methods.base import Params, State
from hpcfl.parameters import COLUMNS_AT_ONCE, Slot
from hpcfl.training.client_group import ClientGroup

ROUNDING = 16
"""Units of rounding error of a tensor's largest number that a critical number must have moved by."""


class FedCACParams(Params):
    share: float = Field(0.5, ge=0, le=1)
    """Share tau of critical numbers (authors: 0.5); 0 gives all clients the mean over all, which is
    FedAvg's model if all train in each round; 1 makes all O_ij nearly equal."""
    beta: float = Field(100.0, gt=0)
    """Rounds until no client collaborates on critical numbers (authors: 100 to 170); a large one keeps the
    threshold at the mean similarity."""


class FedCAC(ModelBank):
    summary = "each client's own model, whose critical weights only similar clients share"
    Params = FedCACParams
    params: FedCACParams

    def server_state(self) -> State:
        critical = torch.zeros(self.context.num_clients, -(-self.layout.size // 8), dtype=torch.uint8)
        return super().server_state() | {"critical": critical}

    def download(self, server: State, cohort: Cohort) -> Message:
        known = self.known(server)
        if not len(known):
            return Message(shared={"theta": self.context.initial_parameters()})
        read = self.models_of(server, known)
        shares = self.context.num_samples[known].double()
        theta = ((shares / shares.sum()).to(read) @ read).repeat(len(cohort), 1)
        positions, rows = rows_among(known, cohort.clients)
        similar = collaborators(overlaps(server["critical"][known]), cohort.round / self.params.beta)[rows]
        own = similar.to(read) @ read / similar.sum(dim=1, keepdim=True)
        critical = unpacked(server["critical"][known[rows]])[:, : self.layout.size]
        theta[positions] = torch.where(critical, own, theta[positions])
        return Message(per_client={"theta": theta})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        theta = clients["theta"] = clients.sgd(down["theta"]).theta
        critical = critical_numbers(down["theta"], theta, self.layout.parameters, self.params.share)
        return Message(per_client={"theta": theta, "critical": packed(critical)})

    def store(self, server: State, clients: Sequence[int], block: Message) -> None:
        super().store(server, clients, block)
        server["critical"][list(clients)] = block.per_client["critical"]


def critical_numbers(start: Tensor, theta: Tensor, tensors: Sequence[Slot], share: float) -> Tensor:
    """Return M, bool [C, P], of models before and after training [C, P]."""
    critical = torch.zeros_like(theta, dtype=torch.bool)
    for slot in tensors:
        place = slice(slot.start, slot.stop)
        trained, moved = theta[:, place].abs(), (theta[:, place] - start[:, place]).abs()
        count = int(share * trained.shape[1])
        if count:
            sensitivity = moved * trained
            least = sensitivity.kthvalue(trained.shape[1] - count + 1, dim=1, keepdim=True).values
            noise = ROUNDING * torch.finfo(theta.dtype).eps * trained.amax(dim=1, keepdim=True)
            critical[:, place] = (sensitivity >= least) & (moved > noise)
    return critical


def overlaps(critical: Tensor) -> Tensor:
    """Return O, float64 [n, n], of the packed M of n clients."""
    common = torch.zeros(len(critical), len(critical), dtype=torch.float64)
    for part in critical.split(COLUMNS_AT_ONCE // 8, dim=1):
        bits = unpacked(part).float()
        common += bits @ bits.T
    sizes = common.diagonal()
    apart = sizes.unsqueeze(1) + sizes - 2 * common
    return 1 - apart / (2 * sizes.unsqueeze(1)).clamp(min=1)


def collaborators(overlap: Tensor, progress: float) -> Tensor:
    """Return who is in C_i, bool [n, n], row by row, from O [n, n] and t / beta."""
    own = torch.eye(len(overlap), dtype=torch.bool)
    if len(overlap) == 1:
        return own
    pairs = overlap[~own]
    largest = pairs.max()
    # rounding may put the mean of equal numbers above them
    mean = torch.minimum(pairs.mean(), largest)
    return own | (overlap >= mean + progress * (largest - mean))
