"""FedFomo. Zhang et al., Personalized federated learning with first order model optimization, ICLR 2021.

    w_n      = (L_i(theta_prev) - L_i(theta_n)) / ||theta_n - theta_prev||, L_i on held-out samples
    theta_i <- sum_n max(w_n, 0) theta_n / sum_n max(w_n, 0)
    theta_i <- E epochs of SGD on L_i

theta_prev is the client's model before its last training. The theta_n are the client's model after that
training and M models of other clients, as those clients last sent them. The server adds the w_n, before the
maximum with 0, to row i of an N x N matrix. It sends client i the models of the M clients with the largest
entries in row i; each of the M is replaced by a random client with probability eps (section 3.2).

Choices: the candidates are the received models and, always, the client's own. A client that never trained has
no model to send, so in the first rounds clients get fewer than M models: all members of a cohort as many as
the one for which there are fewest. If no weight is positive, the client continues from its own model (in the
authors' code, from theta_prev). A share `method.held_out` of the training samples, the same samples in all
rounds, serves only to compute w_n and is never trained on. Clients with equal entries are ranked in random
order. Running statistics stay with the client. The client evaluates all candidates with its own running
statistics, because it would use any candidate, or a mean of candidates, with these statistics. The evaluated
model is the model after the client's last training (PFLlib); the model after a download is the weighted mean
from which the client would start (the authors log both). With M = 0 the method is local training on the
samples not held out. A download holds S x M models at once. A client that takes no part in training gets M
random models, as the row of a new client in the matrix is 0, and the mean of all uploaded models as its own
and as theta_prev; then it does one round (not in the paper).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.errors import UserError
from hpcfl.methods._model_bank import ModelBank
from hpcfl.methods.base import Context, Params, State
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.randomness import torch_stream
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.losses import sample_losses


class FedFomoParams(Params):
    models: int | None = Field(None, ge=0)
    """Number M of models that a client gets (PFLlib: 5); 0 is local training; default: 5, at most N - 1."""
    held_out: float = Field(0.2, gt=0, lt=1)
    """Share of the training samples that models are judged on (authors: 0.2)."""
    epsilon: float = Field(0.3, ge=0, le=1)
    """Probability that one of the M is random in the first round (authors: 0.3); 0 sends the best alone."""
    epsilon_decay: float = Field(0.05, ge=0)
    """Amount by which `epsilon` falls in each round (authors: 0.05)."""


class FedFomo(ModelBank):
    summary = "each client's own model, moved towards other models that do better on its data"
    Params = FedFomoParams
    diagnostics = (
        Diagnostic(
            "affinity",
            ("client", "client"),
            "Weights of other clients' models",
            "Sum of the weights that a client (row) has found for each client's model (column) so far; below "
            "0, it did worse on the client's held-out samples.",
            # as a computed one, it has a limit
            of_server=lambda _, server: server["affinity"],
        ),
    )
    params: FedFomoParams

    def __init__(self, context: Context, params: FedFomoParams) -> None:
        super().__init__(context, params)
        others = context.num_clients - 1
        self.num_received = min(5, others) if params.models is None else params.models
        """M, the models that a client gets."""
        if self.num_received > others:
            raise UserError(
                f"method.models={params.models} is more than the other clients; allowed: 0 to {others}, as "
                f"there are {context.num_clients} clients"
            )
        self._fewest = (1, context.fewest_samples)
        num_samples = torch.cat([context.num_samples, context.num_samples_of_unseen])
        client = int(num_samples.argmin())
        if num_samples[client] < sum(self._fewest):
            raise UserError(
                f"method.name={self.name} holds out training samples, and client {client} has "
                f"{num_samples[client]} of them in all; give each {sum(self._fewest)} or more "
                "(data.per_client, or fewer data.clients)"
            )

    def server_state(self) -> State:
        clients = self.context.num_clients
        return super().server_state() | {"affinity": torch.zeros(clients, clients)}

    def client_state(self, clients: Sequence[int]) -> State:
        return super().client_state(clients) | {"previous": self.context.initial_parameters(clients)}

    def download(self, server: State, cohort: Cohort) -> Message:
        is_known = server["is_known"] == 1
        others = min(int(is_known.sum()) - int(is_known[i]) for i in cohort.clients)
        count = min(self.num_received, others)
        ids = torch.stack(
            [self.chosen(server["affinity"][i], is_known, i, cohort.round)[:count] for i in cohort.clients]
        )
        return Message(per_client={"models": server["models"][ids], "ids": ids})

    def new_client_download(self, server: State, cohort: Cohort) -> Message:
        is_known, affinity = server["is_known"] == 1, torch.zeros(self.context.num_clients)
        ids = torch.stack([self.chosen(affinity, is_known, i, cohort.round) for i in cohort.clients])
        return Message({"mean": self.mean_of_models(server)}, {"models": server["models"][ids]})

    def new_client_model(self, clients: ClientGroup, down: Message) -> Message:
        theta = down["mean"].clone(memory_format=torch.contiguous_format)
        with clients.temporary_state(theta=theta, previous=theta):
            return super().new_client_model(clients, down)

    def train(self, clients: ClientGroup, down: Message) -> Message:
        start, weights = self._start(clients, down)
        clients["previous"] = start
        clients["theta"] = clients.sgd(start, samples=self._parts(clients)[1]).theta
        return Message(per_client={"theta": clients["theta"], "weights": weights[:, 1:]})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        assert up.sent is not None
        ids = up.sent.per_client["ids"]
        for positions, block in up:
            members = cohort.clients[positions]
            self.store(server, members, block)
            for client, chosen, weights in zip(
                members, ids[positions], block.per_client["weights"], strict=True
            ):
                server["affinity"][client, chosen] += weights

    def model_after_download(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": self._start(clients, down)[0]})

    def finetune(self, clients: ClientGroup, down: Message, epochs: int) -> Message:
        _, trained_on = self._parts(clients)
        return self._finetuned(clients, self.eval_model(clients, down), epochs, samples=trained_on)

    def chosen(self, affinity: Tensor, is_known: Tensor, client: int, round: int) -> Tensor:
        """Return the ids [at most M] of known models that a client gets, from its row of the matrix [N]."""
        stream = torch_stream(self.context.seed, "fedfomo", round, client)
        others = torch.randperm(self.context.num_clients, generator=stream)
        others = others[is_known[others] & (others != client)]
        ranking = others[affinity[others].argsort(descending=True, stable=True)].tolist()
        chosen = []
        for _ in range(min(self.num_received, len(ranking))):
            draw, position = torch.rand(2, generator=stream).tolist()
            explores = draw < self.params.epsilon - round * self.params.epsilon_decay
            chosen.append(ranking.pop(int(position * len(ranking)) if explores else 0))
        return torch.tensor(chosen, dtype=torch.int64)

    def weights(self, clients: ClientGroup, candidates: Tensor, held_out: list[Tensor]) -> Tensor:
        """Return w_n [C, 1 + M] of candidates [C, 1 + M, P]; 0 for a model equal to theta_prev."""
        previous = clients["previous"]
        before = self._losses(clients, previous, held_out)
        after = [self._losses(clients, candidates[:, n], held_out) for n in range(candidates.shape[1])]
        distance = (candidates - previous.unsqueeze(1)).norm(dim=2)
        gain = before.unsqueeze(1) - torch.stack(after, dim=1)
        # a diverged model has no weight
        return torch.where(distance > 0, gain / distance, 0.0).nan_to_num(0.0, 0.0, 0.0)

    def _start(self, clients: ClientGroup, down: Message) -> tuple[Tensor, Tensor]:
        """Return the models [C, P] from which clients start after a download, and w_n [C, 1 + models]."""
        candidates = torch.cat([clients["theta"].unsqueeze(1), down["models"]], dim=1)
        weights = self.weights(clients, candidates, self._parts(clients)[0])
        return self.combined(candidates, weights), weights

    def _parts(self, clients: ClientGroup) -> tuple[list[Tensor], list[Tensor]]:
        """Return which training samples are held out, and which are trained on."""
        return clients.divided("held out", self.params.held_out, fewest=self._fewest)

    @staticmethod
    def combined(candidates: Tensor, weights: Tensor) -> Tensor:
        """Return the candidates' weighted mean [C, P]; the first, where no weight is positive."""
        positive = weights.clamp(min=0)
        total = positive.sum(dim=1, keepdim=True)
        shares = torch.where(total > 0, positive / total, torch.eye(1, weights.shape[1]).to(weights))
        chosen = torch.where(shares.unsqueeze(2) > 0, candidates, 0.0)
        return torch.einsum("cn,cnp->cp", shares, chosen)

    @staticmethod
    def _losses(clients: ClientGroup, theta: Tensor, held_out: list[Tensor]) -> Tensor:
        """Return the mean losses [C] of models [C, P] on held-out samples, in evaluation mode."""
        model = {"theta": theta, BUFFERS: clients.buffers}
        losses = clients.over_training_set(model, sample_losses, held_out)
        sizes = torch.tensor([len(samples) for samples in held_out], device=losses.device)
        return losses.sum(dim=1) / sizes
