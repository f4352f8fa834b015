"""FedAvg with fine-tuning (FedAvg+): the global model, adapted locally before each evaluation.

Rounds are FedAvg's. To evaluate, each client trains a copy of w for `train.finetune_epochs` epochs on its
training data and throws it away afterwards. 0 epochs is FedAvg.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hpcfl.methods.fedavg import FedAvg


class FedAvgFinetuned(FedAvg):
    name = "fedavg_ft"
    summary = "FedAvg, fine-tuned locally before each evaluation"
    train_defaults: ClassVar[dict[str, Any]] = {"finetune_epochs": 1}
