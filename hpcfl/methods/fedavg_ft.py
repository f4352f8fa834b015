"""FedAvg with fine-tuning (FedAvg+): the global model, adapted locally before each evaluation.

Rounds are FedAvg's. To evaluate, each client trains a copy of w for `train.finetune_epochs` epochs on its
training data and throws it away afterwards. 0 epochs is FedAvg. After a download w is scored as it is.

Choices: the default is one epoch, as used by FedEM's authors (FedBABU's authors use five). A comparison of
fine-tuned methods should set the same `train.finetune_epochs` for all of them: for clients with few samples,
the number of epochs matters more than the method.
"""

from __future__ import annotations

from hpcfl.methods.fedavg import FedAvg


class FedAvgFinetuned(FedAvg):
    summary = "FedAvg, fine-tuned locally before each evaluation"
    privacy_units = ("client", "sample")
    traits = FedAvg.traits.replace(train_defaults={"finetune_epochs": 1})
