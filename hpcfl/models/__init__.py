"""Networks with a body and a head, by name, and the hypernetworks that mix them."""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from hpcfl.config.registry import DEFAULT_MODEL, DEFAULT_SOURCE
from hpcfl.errors import UserError, one_line
from hpcfl.models.networks import ConvNet, ConvNetOptions, Mlp, Model, Network, NetworkOptions, SeriesConvNet
from hpcfl.models.sequences import Lstm, TextCnn, Transformer
from hpcfl.models.torchvision_networks import MOBILENETV2, RESNET18, Vit
from hpcfl.randomness import seeded_generators
from hpcfl.samples import SampleType

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
    "cnn1d": SeriesConvNet("conv 32/64 of 9 steps, fc 128", (32, 64), 9, 0, (128,)),
    "textcnn": TextCnn("an embedding, convolutions over 3, 4 and 5 tokens"),
    "lstm": Lstm("an LSTM of 2 layers of 256, for tokens after an embedding of width 8"),
    "transformer": Transformer("2 blocks of width 64 with 4 heads, and learnt positions"),
    "resnet18": RESNET18,
    "mobilenetv2": MOBILENETV2,
    "vit": Vit("torchvision's vision transformer, by default 6 layers of width 192 on patches of 4x4"),
}

SEED = 0
"""Of dropout and the like, when a network is checked."""


def build_network(
    name: str, sample: SampleType, num_classes: int, options: NetworkOptions, seed: int, client: int = -1
) -> Network:
    """Build a network whose weights depend on (seed, client) alone; client -1 is the common start.

    Raises UserError for samples of another kind or that are too small, and if a part of the model is not
    available.
    """
    model = MODELS[name]
    fitting = [other for other in MODELS if sample.kind in MODELS[other].kinds]
    if name not in fitting:
        are_tokens = " (whole numbers [n, length] are tokens; give features as floats)"
        raise UserError(
            f"model.name={name} takes {' or '.join(model.kinds)}, and the data are {sample}; allowed: "
            f"{', '.join(fitting)}" + are_tokens * (sample.kind == "tokens") + _default_of(name, fitting)
        )
    shortest = min(sample.shape[1:] or sample.shape)
    if shortest < model.smallest_side:
        allowed = [other for other in fitting if MODELS[other].smallest_side <= shortest]
        side = model.smallest_side
        smallest = (
            f"images of {side}x{side} or larger" if sample.kind == "images" else f"{side} steps or more"
        )
        raise UserError(
            f"model.name={name} needs {smallest}, and the data are {sample}; allowed: {', '.join(allowed)}"
            + _default_of(name, allowed)
        )
    with seeded_generators(seed, "initial weights", client=client):
        return model.build(sample, num_classes, options)


def _default_of(name: str, allowed: Sequence[str]) -> str:
    """Return what to add to an error about the model that a user gets who names none; "" for others."""
    is_default = f" ({name} is the default of all data but {DEFAULT_SOURCE}; set model.name={allowed[0]})"
    return is_default * (name == DEFAULT_MODEL)


def check_network(name: str, network: object, sample: SampleType, num_classes: int) -> None:
    """Raise UserError unless a user's own network is one that methods can divide and engines can train."""
    key = f"model.name={name}"
    if not isinstance(network, Network):
        raise UserError(f"{key}: its build returned a {type(network).__name__}; return Network(body, head)")
    for tensor, parameter in network.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UserError(f"{key}: {tensor} has no shape yet; give its module's sizes, from sample.shape")
        if not parameter.requires_grad:
            raise UserError(
                f"{key}: {tensor} has requires_grad=False, and all parameters are trained here; make it a "
                "buffer (register_buffer)"
            )
        if parameter.dtype != torch.get_default_dtype():
            raise UserError(f"{key}: {tensor} is {parameter.dtype}; expected: {torch.get_default_dtype()}")
    of_head = [tensor.startswith("head.") for tensor, _ in network.named_parameters()]
    if not any(of_head) or of_head != sorted(of_head):
        raise UserError(f"{key}: the head needs parameters that the body does not have, after the body's")
    for tensor, module in network.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.momentum is None:
            raise UserError(f"{key}: {tensor} has momentum=None, which is not supported; allowed: a number")
        if isinstance(module, nn.SyncBatchNorm):
            raise UserError(
                f"{key}: {tensor} is a SyncBatchNorm, but each client trains alone; use BatchNorm"
            )
    for tensor, buffer in network.named_buffers():
        if buffer.is_floating_point() and buffer.dtype != torch.get_default_dtype():
            raise UserError(f"{key}: {tensor} is {buffer.dtype}; expected: {torch.get_default_dtype()}")
        if not buffer.isfinite().all():
            raise UserError(f"{key}: the buffer {tensor} is not finite; make a mask of true and false of it")
    check_outputs(key, network, sample, num_classes)


def check_outputs(key: str, network: nn.Module, sample: SampleType, num_classes: int) -> None:
    """Raise UserError unless a network returns the logits of samples, and keeps nothing that engines lose."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            outputs = _outputs(key, network, sample)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{key}: its network fails on two samples ({sample}): {one_line(error)}") from error
    found = [*outputs.shape] if isinstance(outputs, torch.Tensor) else f"a {type(outputs).__name__}"
    if found != [2, num_classes]:
        raise UserError(
            f"{key}: its network returns {found} for two samples ({sample}); expected: [2, {num_classes}], "
            "the logits of each"
        )
    assert isinstance(outputs, torch.Tensor)
    if outputs.dtype != torch.get_default_dtype():
        raise UserError(f"{key}: its network returns {outputs.dtype}; expected: {torch.get_default_dtype()}")


@torch.no_grad()
def _outputs(key: str, network: nn.Module, sample: SampleType) -> object:
    """Return what a copy of the network returns for two samples; UserError if it keeps what engines lose: a
    buffer that changes otherwise than in place, or is no floating-point number, or any other memory."""
    x, trial = sample.zeros(2), copy.deepcopy(network)
    x = torch.rand_like(x) if x.is_floating_point() else x
    kept = {tensor: (buffer, buffer.clone()) for tensor, buffer in trial.named_buffers()}
    torch.manual_seed(SEED)
    first = trial.train()(x)
    for tensor, buffer in trial.named_buffers():
        if tensor.endswith("num_batches_tracked"):
            continue
        before, value = kept.get(tensor, (None, buffer))
        if buffer is not before:
            raise UserError(f"{key}: it assigns {tensor} in training; change it in place, as by .copy_(...)")
        if not buffer.is_floating_point() and not torch.equal(buffer, value):
            raise UserError(
                f"{key}: it changes {tensor} in training, which is {buffer.dtype}; allowed: buffers of "
                "floating-point numbers"
            )
    outputs, pairs = copy.deepcopy(network).eval()(x), []
    for of_fresh, is_training in ((first, True), (outputs, False)):
        for tensor, buffer in trial.named_buffers():
            buffer.copy_(kept[tensor][1])
        torch.manual_seed(SEED)
        pairs.append((of_fresh, trial.train(is_training)(x)))
    for one, other in pairs:
        if isinstance(one, torch.Tensor) and not torch.allclose(one, other, equal_nan=True):
            raise UserError(
                f"{key}: its outputs depend on what it has computed before, and no client keeps that; keep "
                "it in a buffer (register_buffer)"
            )
    return outputs


__all__ = [
    "MODELS",
    "ConvNetOptions",
    "Model",
    "Network",
    "NetworkOptions",
    "build_network",
    "check_network",
    "check_outputs",
]
