"""FedAvg with fine-tuning (FedAvg+): the global model, adapted locally before each evaluation.

Rounds are FedAvg's. To evaluate, each client trains a copy of w for `train.finetune_epochs` epochs on its
training data and throws it away afterwards. 0 epochs is FedAvg. After a download w is scored as it is.

Choices: one epoch, as FedEM's authors have it, where FedBABU's have five; a comparison of fine-tuned methods
sets `train.finetune_epochs` for all alike, since on small clients epochs count for more than the method.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hpcfl.methods.fedavg import FedAvg


class FedAvgFinetuned(FedAvg):
    name = "fedavg_ft"
    summary = "FedAvg, fine-tuned locally before each evaluation"
    train_defaults: ClassVar[dict[str, Any]] = {"finetune_epochs": 1}
