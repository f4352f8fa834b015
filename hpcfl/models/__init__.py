"""Networks with a body and a head, by name, and the hypernetworks that mix them."""

import torch

from hpcfl.config.own_code import run_own_file
from hpcfl.errors import UserError
from hpcfl.machine import free_bytes
from hpcfl.models.networks import ConvNet, ConvNetOptions, ImageShape, Mlp, Model, Network, NetworkOptions
from hpcfl.models.torchvision_networks import MOBILENETV2, RESNET18
from hpcfl.randomness import stream_seed

MODELS: dict[str, Model] = {
    "digits_cnn": ConvNet("small CNN for 8x8 images: conv 16/32 3x3, fc 64", (16, 32), 3, 1, (64,)),
    "lenet": ConvNet(
        "LeNet-16/32 of pFedHN and pFedLA: conv 16/32 5x5, fc 120/84", (16, 32), 5, 0, (120, 84)
    ),
    "lenet_small": ConvNet(
        "LeNet-6/16 of FedFomo and pFedMB: conv 6/16 5x5, fc 120/84", (6, 16), 5, 0, (120, 84)
    ),
    "fedavgcnn": ConvNet("PFLlib's FedAvgCNN: conv 32/64 5x5, fc 512", (32, 64), 5, 0, (512,)),
    "femnist_cnn": ConvNet(
        "FedEM's and FedMN's FemnistCNN: conv 32/64 5x5, fc 2048", (32, 64), 5, 0, (2048,)
    ),
    "mlp": Mlp("fully connected layers of the widths model.hidden"),
    "resnet18": RESNET18,
    "mobilenetv2": MOBILENETV2,
}

_fitting: set[tuple[str, ImageShape, int, str]] = set()
"""Networks known to fit in memory: name, image, classes and options."""


def build_network(
    name: str, shape: ImageShape, num_classes: int, options: NetworkOptions, seed: int, client: int = -1
) -> Network:
    """Build a network whose weights depend on (seed, client) alone; client -1 is the common start.

    Raises UserError for images [C, H, W] that are too small and if a part of the model is not available.
    """
    model, (_, height, width) = MODELS[name], shape
    if min(height, width) < model.smallest_side:
        allowed = [other for other in MODELS if MODELS[other].smallest_side <= min(height, width)]
        raise UserError(
            f"model.name={name} needs images of {model.smallest_side}x{model.smallest_side} or larger, not "
            f"{height}x{width}; allowed: {', '.join(allowed)}"
        )
    options_text = options.model_dump_json()
    if (name, shape, num_classes, options_text) not in _fitting:
        _check_beyond_memory(name, shape, num_classes, options)
        _fitting.add((name, shape, num_classes, options_text))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, "initial weights", 0, client))
        return model.build(shape, num_classes, options)


def _check_beyond_memory(name: str, shape: ImageShape, num_classes: int, options: NetworkOptions) -> None:
    """Raise UserError if a network does not fit in the free memory; allocates nothing."""
    model, chosen = MODELS[name], options
    if getattr(options, "weights", None) is not None:
        chosen = options.model_copy(update={"weights": None})
    try:
        with torch.device("meta"):
            network = model.build(shape, num_classes, chosen)
        count = sum(parameter.numel() for parameter in network.parameters())
    # a user's own model may need tensors with values
    except (NotImplementedError, RuntimeError) as error:
        if "overflow" not in str(error):
            return
        count = 2**63
    free = free_bytes()
    if 4 * count > free:
        raise UserError(
            f"model.name={name} with {options.model_dump_json()} takes {4e-9 * count:.3g} GB for images of "
            f"{list(shape)} and {num_classes} classes, and {free / 1e9:.3g} GB of memory are free; choose a "
            "smaller model"
        )


def add_own_model(path: str, expected: str | None = None) -> tuple[str, str]:
    """Add the one Model that a user's Python file makes, under the file's name.

    Returns the name and a digest of the file; raises UserError (see `run_own_file`).
    """
    file = run_own_file("model.path", path, expected)
    model = file.only(lambda value: isinstance(value, Model), "instances of Model")
    file.check_options(model.options, NetworkOptions)
    file.add_to(MODELS, file.name, model)
    return file.name, file.code


__all__ = ["MODELS", "ConvNetOptions", "Model", "Network", "NetworkOptions", "add_own_model", "build_network"]
