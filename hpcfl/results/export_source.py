"""Write a network as a Python file that needs only PyTorch."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, fx, nn

from hpcfl import __version__
from hpcfl.errors import one_line
from hpcfl.parameters import Tensors
from hpcfl.storage.snapshot import DataRecord

MODULE = '''"""A network as hpcfl {version} exported it; it needs PyTorch alone.

    from model import load, probabilities

    network = load("client0.pt")  # or .safetensors
    labels = probabilities(network, images).argmax(dim=1)

Images are as the data set stores them: {dtype} [n, {channels}, {height}, {width}].
"""

import torch
from torch import nn

SCALE, MEAN, STD = {scale}, {mean}, {std}


{network}


def load(path):
    """Return the network with the weights of a file, in evaluation mode."""
    if str(path).endswith(".safetensors"):
        from safetensors.torch import load_file

        weights = load_file(path)
    else:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    network = Network()
    network.load_state_dict(weights)
    return network.eval()


def normalised(images):
    """Return what the network takes, (images / SCALE - MEAN) / STD, float32 [n, channels, height, width]."""
    x = torch.as_tensor(images).to(torch.float32)
    mean, std = torch.tensor([MEAN, STD])[:, :, None, None]
    return (x / SCALE - mean) / std


@torch.no_grad()
def probabilities(network, images):
    """Return class probabilities [n, classes] of images as the data set stores them."""
    return network(normalised(images)).softmax(dim=1)
'''

NETWORK = '''class Network(nn.Module):
    """From normalised images [n, channels, height, width] to logits [n, classes]."""

    def __init__(self):
        super().__init__()
        parts = {{
{parts}
        }}
        for path, part in parts.items():
            *places, name = path.split(".")
            module = self
            for place in places:
                if place not in module._modules:
                    module.add_module(place, nn.Module())
                module = module._modules[place]
            if type(part) is torch.Tensor:
                module.register_buffer(name, part)
            else:
                setattr(module, name, part)
{forward}'''


class UntraceableError(Exception):
    """A network cannot be written as source; the message is the reason."""


def written(network: nn.Module, data: DataRecord) -> tuple[str, Tensors]:
    """Return Python source for a network in evaluation mode, and the weights that it loads.

    torch.fx traces the forward pass down to modules of torch.nn, whose `repr` is the source; unused modules
    are left out. The result is tested on two images.

    Raises:
        UntraceableError: the forward pass depends on the values, or uses what is not torch's.
    """
    try:
        text, weights = _class_of(network)
        channels, height, width = data.image_shape
        source = MODULE.format(
            version=__version__,
            **{"dtype": data.dtype, "channels": channels, "height": height, "width": width},
            **{"scale": data.scale, "mean": data.mean, "std": data.std, "network": text},
        )
        _check_difference(network, source, weights, data)
    except UntraceableError:
        raise
    # tracing, or executing a module's text, can raise any exception
    except Exception as error:
        raise UntraceableError(one_line(error)) from error
    return source, weights


def _class_of(network: nn.Module) -> tuple[str, Tensors]:
    """Return the source of a class Network, and its weights."""
    graph = fx.Tracer().trace(network)
    parts: dict[str, str] = {}
    weights: Tensors = {}
    for node in graph.nodes:
        # annotations name types that the source does not import
        node.type = None
        path = str(node.target)
        if node.op == "call_module":
            module = network.get_submodule(path)
            # bias=True is the default; BatchNorm of older versions of torch does not accept it
            parts[path] = f"nn.{module!r}".replace(", bias=True", "")
            weights |= {f"{path}.{name}": tensor for name, tensor in module.state_dict().items()}
        elif node.op == "get_attr":
            tensor = _attribute(network, path)
            empty = f"torch.empty({list(tensor.shape)}, dtype={tensor.dtype})"
            parts[path] = f"nn.Parameter({empty})" if isinstance(tensor, nn.Parameter) else empty
            weights[path] = tensor
    entries = "\n".join(f'            "{path}": {part},' for path, part in parts.items())
    forward = graph.python_code("self").src
    # fx frees each value after its last use
    forward = re.sub(r";  (?:\w+ = )+None", "", forward)
    forward = "\n".join(f"    {line}".rstrip() for line in forward.strip().splitlines())
    kept = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in weights.items()
        if not name.endswith("num_batches_tracked")
    }
    return NETWORK.format(parts=entries, forward=f"\n{forward}"), kept


def _attribute(network: nn.Module, path: str) -> Tensor:
    module, _, name = path.rpartition(".")
    found: Tensor = getattr(network.get_submodule(module), name)
    return found


def _check_difference(network: nn.Module, source: str, weights: Tensors, data: DataRecord) -> None:
    """Raise UntraceableError if the source's network gives other logits than the network."""
    module: dict[str, Any] = {}
    exec(compile(source, "model.py", "exec", dont_inherit=True), module)
    copy = module["Network"]()
    copy.load_state_dict(weights)
    x = torch.randn(2, *data.image_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if not torch.allclose(copy.eval()(x), network(x), rtol=1e-4, atol=1e-5):
            raise UntraceableError("the source gives other logits than the network")
