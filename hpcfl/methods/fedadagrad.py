"""FedAdagrad. Reddi et al., Adaptive federated optimization, ICLR 2021.

    Delta = sum_i n_i theta_i / n - w,  m <- beta1 m + (1 - beta1) Delta,  v <- v + Delta^2
    w     <- w + lr m / (sqrt(v) + tau)                                             (Algorithm 2)

This is FedAvg with `server.optimiser=adagrad`, which any method takes whose server averages.

Choices: clients count with their samples, as in FedAvg; v starts at tau^2; beta1 = 0 (the paper's).
"""

from __future__ import annotations

from hpcfl.methods.fedavg import FedAvg


class FedAdagrad(FedAvg):
    summary = "FedAvg whose server steps by Adagrad"
    privacy_units = ("client", "sample")
    traits = FedAvg.traits.replace(server_defaults={"optimiser": "adagrad"})
