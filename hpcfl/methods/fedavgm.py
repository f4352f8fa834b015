"""FedAvgM. Hsu, Qi, Brown, Measuring the effects of non-identical data distribution for federated visual
classification, arXiv 1909.06335, 2019.

    Delta = sum_i n_i theta_i / n - w,  v <- beta1 v + Delta,  w <- w + lr v

This is FedAvg with `server.optimiser=momentum`, which any method takes whose server averages.

Differs from the paper:
  momentum     is plain, as the paper's formula has it; its experiments have Nesterov's

Choices: beta1 is `server.beta1` (the paper tries 0, 0.7, 0.9, 0.97, 0.99 and 0.997), lr is `server.lr`.
beta1 = 0 with lr = 1 is FedAvg.
"""

from __future__ import annotations

from hpcfl.methods.fedavg import FedAvg


class FedAvgM(FedAvg):
    summary = "FedAvg whose server steps with momentum"
    privacy_units = ("client", "sample")
    traits = FedAvg.traits.replace(server_defaults={"optimiser": "momentum"})
