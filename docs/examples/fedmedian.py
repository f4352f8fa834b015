"""FedAvg with the median over clients (Yin et al., Byzantine-robust distributed learning, ICML 2018)."""

from __future__ import annotations

from hpcfl.communication.messages import Cohort
from hpcfl.communication.upload import Upload
from hpcfl.methods.base import State
from hpcfl.methods.fedavg import FedAvg


class FedMedian(FedAvg):
    name = "fedmedian"
    summary = "FedAvg with the median of the clients' models, number by number"

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        server["theta"] = up.collect("theta")["theta"].median(dim=0).values
