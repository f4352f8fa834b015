"""The papers' networks: parameter counts, initial weights, and comparison with torchvision's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import is_batchnorm
from processes import run_tree
from torch import Tensor, nn

from hpcfl.errors import UserError
from hpcfl.models import MODELS, Network, build_network
from hpcfl.parameters import ParameterLayout
from hpcfl.randomness import stream_seed
from hpcfl.registries import load_config
from hpcfl.samples import SampleType
from hpcfl.torchvision_parts import torchvision_part
from hpcfl.training.batches import Batch
from hpcfl.training.engines import BatchedEngine, LoopEngine
from hpcfl.training.forward import Forward
from hpcfl.training.losses import cross_entropy_loss

Shape = tuple[int, int, int]

CIFAR, MNIST = (3, 32, 32), (1, 28, 28)
SERIES, TEXT = SampleType((9, 128)), SampleType((20,), vocabulary=50)
TORCHVISION = {"resnet18": "resnet18", "mobilenetv2": "mobilenet_v2"}
WIDTH = {"digits_cnn": 64, "lenet": 84, "lenet_small": 84, "fedavgcnn": 512, "femnist_cnn": 2048, "mlp": 256}
WIDTH |= {"resnet18": 512, "mobilenetv2": 1280, "vit": 192}
WIDTH |= {"cnn1d": 128, "textcnn": 192, "lstm": 256, "transformer": 64}
SMALLEST_SIDE = dict.fromkeys(MODELS, 1) | {"digits_cnn": 4, "vit": 4, "cnn1d": 28, "textcnn": 5}
SMALLEST_SIDE |= dict.fromkeys(("lenet", "lenet_small", "fedavgcnn", "femnist_cnn"), 16)


def network_of(
    name: str, sample: Shape | SampleType, classes: int = 10, *, seed: int = 0, client: int = -1, **keys: Any
) -> Network:
    options = MODELS[name].options.model_validate(keys)
    sample = sample if isinstance(sample, SampleType) else SampleType(sample)
    return build_network(name, sample, classes, options, seed, client)


def layout_of(name: str, sample: Shape | SampleType, classes: int = 10, **keys: Any) -> ParameterLayout:
    return ParameterLayout(network_of(name, sample, classes, **keys))


def fitting(name: str) -> SampleType:
    """Return samples that a model takes."""
    return {"images": SampleType(MNIST), "series": SERIES, "tokens": TEXT}[MODELS[name].kinds[0]]


def drawn(sample: SampleType, count: int, seed: int = 0) -> Tensor:
    """Draw samples as a network takes them."""
    stream = torch.Generator().manual_seed(seed)
    if sample.vocabulary is not None:
        return torch.randint(sample.vocabulary, (count, *sample.shape), generator=stream)
    return torch.randn(count, *sample.shape, generator=stream)


BLOCK = 2 * 16 + 4 * 72 + 9 * 32 + 33 * 8
"""Numbers of a transformer's block of width 8: two norms, four products, two layers."""


def test_networks_have_the_expected_number_of_parameters() -> None:
    for name, shape, classes, keys, size in (
        ("lenet", CIFAR, 10, {"groupnorm": 4}, 121_278),
        ("lenet", CIFAR, 100, {}, 128_832),
        ("fedavgcnn", MNIST, 10, {}, 582_026),
        ("femnist_cnn", MNIST, 62, {}, 2_278_334),
        # 64 * 5 + 5 + 5 * 3 + 3 + 3 * 2 + 2
        ("mlp", (1, 8, 8), 2, {"hidden": [5, 3]}, 351),
        ("digits_cnn", (1, 8, 8), 10, {}, 13_706),
        # 9 * 128 inputs
        ("mlp", SERIES, 6, {"hidden": [5]}, 1152 * 5 + 5 + 5 * 6 + 6),
        ("mlp", SampleType((13,)), 3, {"hidden": []}, 42),
        # 128 steps: 120, 60, 52, 26
        ("cnn1d", SERIES, 6, {}, (9 * 9 + 1) * 32 + (32 * 9 + 1) * 64 + (64 * 26 + 1) * 128 + 129 * 6),
        ("textcnn", TEXT, 4, {"embedding": 8, "filters": 2}, 50 * 8 + (3 + 4 + 5) * 8 * 2 + 3 * 2 + 7 * 4),
        # four gates, two biases
        ("lstm", TEXT, 4, {"embedding": 8, "hidden": 5, "layers": 1}, 50 * 8 + 4 * 5 * (8 + 5 + 2) + 6 * 4),
        ("lstm", SERIES, 4, {"hidden": 5, "layers": 2}, 4 * 5 * (9 + 5 + 2) + 4 * 5 * (5 + 5 + 2) + 6 * 4),
        # tokens, positions; a block; a norm, the head
        ("transformer", TEXT, 4, {"width": 8, "heads": 2, "blocks": 1}, 50 * 8 + 20 * 8 + BLOCK + 16 + 9 * 4),
        ("transformer", SERIES, 4, {"width": 8, "blocks": 1}, 10 * 8 + 128 * 8 + BLOCK + 16 + 9 * 4),
    ):
        assert layout_of(name, shape, classes, **keys).size == size


def test_layers_have_the_expected_sizes() -> None:
    for name, shape, sizes in (
        ("lenet", CIFAR, {"conv1": 1216, "conv2": 12_832, "fc1": 96_120, "fc2": 10_164, "fc3": 850}),
        ("lenet", MNIST, {"conv1": 416, "conv2": 12_832, "fc1": 61_560, "fc2": 10_164, "fc3": 850}),
        ("lenet_small", CIFAR, {"conv1": 456, "conv2": 2416, "fc1": 48_120, "fc2": 10_164, "fc3": 850}),
        ("fedavgcnn", CIFAR, {"conv1": 2432, "conv2": 51_264, "fc1": 819_712, "fc2": 5130}),
    ):
        assert {layer.name: layer.size for layer in layout_of(name, shape).layers()} == sizes


@pytest.mark.parametrize("name", ["lenet", "mobilenetv2", "transformer"])
def test_weights_depend_only_on_seed_and_client(name: str) -> None:
    def weights(seed: int, client: int = -1) -> torch.Tensor:
        network = network_of(name, fitting(name), seed=seed, client=client)
        return torch.cat([p.detach().flatten() for p in network.parameters()])

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = weights(5)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(weights(5), first)
    assert not torch.equal(weights(6), first)
    assert not torch.equal(weights(5, client=0), first)
    assert not torch.equal(weights(5, client=0), weights(5, client=1))


def test_pooling_before_relu_equals_relu_before_pooling() -> None:
    network = network_of("lenet", MNIST)
    layers = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
    papers = nn.Sequential(*layers, nn.Linear(84, 10))
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(network.parameters()), papers.parameters())
    x = drawn(SampleType(MNIST), 5)
    assert torch.equal(network(x), papers(x))


@pytest.mark.parametrize("name", MODELS)
def test_body_and_head_make_the_network(name: str) -> None:
    network = network_of(name, fitting(name)).train()
    layout = ParameterLayout(network)
    theta, buffers = layout.flatten(network)
    x = drawn(fitting(name), 3)
    forward = Forward(network, layout, buffers)
    features = forward.features(theta, x)
    assert features.shape == (3, WIDTH[name])
    assert torch.equal(forward.head(theta, features), forward.logits(theta, x))
    assert torch.equal(network.head(network.body(x)), network(x))


@pytest.mark.parametrize("name", MODELS)
def test_samples_below_the_smallest_size_are_refused(name: str) -> None:
    side = SMALLEST_SIDE[name]
    kind, words = MODELS[name].kinds[0], 9 if MODELS[name].kinds[0] == "tokens" else None
    fixed = {"images": (1, side), "series": (1,), "tokens": ()}[kind]
    smallest, less = (SampleType((*fixed, width), vocabulary=words) for width in (side, side - 1))
    assert network_of(name, smallest)(smallest.zeros(2)).shape == (2, 10)
    if side > 1:
        with pytest.raises(UserError, match=f"model.name={name} needs .*{side}.*, and the data are {less}"):
            network_of(name, less)


SMALL = SampleType((1, 15, 20))


def test_samples_of_another_kind_or_size_are_refused() -> None:
    for name, sample, expected in (
        ("lenet_small", SMALL, r"and .* of 1x15x20; allowed: digits_cnn, mlp, resnet18, mobilenetv2, vit$"),
        ("lenet", SMALL, r"vit \(lenet is the default of all data but digits; set model.name=digits_cnn\)$"),
        ("lenet", SampleType((13,)), r"allowed: mlp \(lenet is the default .*; set model\.name=mlp\)$"),
        ("digits_cnn", SampleType((1, 3, 3)), r"model\.name=digits_cnn .*; allowed: mlp, resnet18"),
        ("lenet", TEXT, "takes images, and .* sequences of 20 of 50 tokens; allowed: textcnn, lstm, t"),
        ("mlp", TEXT, "takes images or series or features, and the data are"),
        ("lstm", SampleType((13,)), "takes tokens or series, and the data are 13 features; allowed: mlp$"),
        ("textcnn", SERIES, "the data are series of 9x128; allowed: mlp, cnn1d, lstm, transformer$"),
        ("vit", SampleType((1, 8, 12)), "square images whose side is a multiple of model.patch_size=4, and"),
        ("vit", SampleType((1, 9, 9)), "set another model.patch_size$"),
    ):
        with pytest.raises(UserError, match=expected):
            network_of(name, sample)


@pytest.mark.parametrize(
    ("name", "sample", "keys"),
    [
        ("lenet", SampleType(CIFAR), {"groupnorm": 8}),
        ("transformer", TEXT, {"width": 8}),
        ("transformer", SERIES, {"width": 8}),
        ("vit", SampleType(MNIST), {"width": 6, "layers": 2}),
    ],
)
def test_vmap_gives_each_model_s_gradient(name: str, sample: SampleType, keys: dict[str, Any]) -> None:
    networks = [network_of(name, sample, client=client, **keys).double() for client in range(3)]
    layout = ParameterLayout(networks[0])
    theta, buffers = (torch.stack(tensors) for tensors in zip(*map(layout.flatten, networks), strict=True))
    x = torch.stack([drawn(sample, 5, seed) for seed in range(3)])
    x = x if sample.vocabulary else x.double()
    batch = Batch(slice(None), x, torch.arange(5).expand(3, -1), torch.arange(5).expand(3, -1))
    batched = BatchedEngine(networks[0], layout, 3)
    together, losses = batched.gradient(cross_entropy_loss, {"theta": theta}, buffers.clone(), batch)
    loop = LoopEngine(networks[0], layout)
    for n in range(3):
        alone, own = Batch(slice(None), x[n : n + 1], batch.y[:1], batch.index[:1]), slice(n, n + 1)
        gradient, loss = loop.gradient(cross_entropy_loss, {"theta": theta[own]}, buffers[own], alone)
        torch.testing.assert_close(gradient["theta"][0], together["theta"][n], rtol=0, atol=1e-12)
        torch.testing.assert_close(loss[0], losses[n], rtol=0, atol=1e-12)


def test_lenet_may_have_batchnorm_or_groupnorm() -> None:
    layout = layout_of("lenet", CIFAR, batchnorm=True)
    assert is_batchnorm(layout).sum() == layout.buffer_size == 96
    assert layout.size == 121_278
    assert [layer.name for layer in layout.layers()] == ["conv1", "bn1", "conv2", "bn2", "fc1", "fc2", "fc3"]
    for name, groups in (("lenet", 4), ("mobilenetv2", 8)):
        network = network_of(name, CIFAR, groupnorm=groups)
        norms = {module.num_groups for module in network.modules() if isinstance(module, nn.GroupNorm)}
        assert norms == {groups}
        assert ParameterLayout(network).buffer_size == 0
    with pytest.raises(UserError, match=r"model.groupnorm=3 does not divide a layer's 16 channels; set"):
        network_of("lenet", CIFAR, groupnorm=3)
    with pytest.raises(UserError, match="batchnorm and groupnorm exclude each other; set one of them"):
        load_config(None, ["model.batchnorm=true", "model.groupnorm=4"])


def test_an_lstm_returns_the_output_of_the_last_step() -> None:
    network = network_of("lstm", TEXT)
    x = drawn(TEXT, 3)
    reference = nn.LSTM(8, 256, 2, batch_first=True)
    reference.load_state_dict(network.body.lstm.state_dict())
    last = reference(network.body.embedding(x))[0][:, -1]
    assert torch.equal(network(x), network.head(last))


def test_blocks_of_the_transformer_equal_torch_s() -> None:
    block = network_of("transformer", TEXT).body.block1.double()
    reference = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True).double()
    projections = [block.query, block.key, block.value]
    with torch.no_grad():
        reference.self_attn.in_proj_weight.copy_(torch.cat([layer.weight for layer in projections]))
        reference.self_attn.in_proj_bias.copy_(torch.cat([layer.bias for layer in projections]))
    ours = {"self_attn.out_proj": block.out, "linear1": block.fc1, "linear2": block.fc2}
    for name, layer in (ours | {"norm1": block.norm1, "norm2": block.norm2}).items():
        reference.get_submodule(name).load_state_dict(layer.state_dict())
    x = torch.randn(3, 20, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(block(x), reference(x), rtol=0, atol=1e-12)


def test_vit_equals_torchvision_s() -> None:
    network = network_of("vit", CIFAR).eval()
    reference = torchvision_part("models").VisionTransformer(32, 4, 6, 3, 192, 768, num_classes=10).eval()
    state = {name.removeprefix("body.vit.0."): t for name, t in network.state_dict().items()}
    state |= {f"heads.{name}": state.pop(f"head.{name}") for name in ("head.weight", "head.bias")}
    reference.load_state_dict(state)
    x = drawn(SampleType(CIFAR), 2)
    torch.testing.assert_close(network(x), reference(x), rtol=0, atol=1e-5)


# torchvision's networks


def torchvisions(name: str, seed: int = 0, classes: int = 10) -> nn.Module:
    """Return torchvision's own network, drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: nn.Module = getattr(torchvision_part("models"), TORCHVISION[name])(num_classes=classes)
        return network


@pytest.mark.parametrize("name", TORCHVISION)
def test_networks_compute_the_same_as_torchvision_s(name: str) -> None:
    ours = network_of(name, CIFAR).eval()
    theirs = torchvisions(name, stream_seed(0, "initial weights", 0, -1), classes=1).eval()
    x = drawn(SampleType(CIFAR), 2)
    with torch.no_grad():
        last = ours.head[0]
        assert isinstance(last, nn.Linear)
        if name == "resnet18":
            theirs.fc = last
        else:
            theirs.classifier[1] = last  # type: ignore[index, operator]
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("name", TORCHVISION)
def test_the_first_convolution_accepts_grey_images(name: str) -> None:
    layout, rgb = layout_of(name, MNIST), layout_of(name, CIFAR)
    first, first_rgb = layout.parameters[0], rgb.parameters[0]
    assert (first.name, first.shape) == (first_rgb.name, (first_rgb.shape[0], 1, *first_rgb.shape[2:]))
    assert rgb.size - layout.size == 2 * first.stop
    theta, _ = layout.flatten(network_of(name, MNIST))
    drawn, expected = theta[: first.stop].std(), (2 / (first.stop)) ** 0.5
    assert drawn == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("name", TORCHVISION)
def test_given_weights_fill_the_body_and_do_not_change_the_head(name: str, tmp_path: Path) -> None:
    theirs = torchvisions(name, seed=3, classes=1000)
    for buffer in theirs.buffers():
        buffer.add_(1)
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    filled = network_of(name, CIFAR, weights=str(tmp_path / "weights.pt"))
    plain = network_of(name, CIFAR)
    state = theirs.state_dict()
    body = filled.body.state_dict()
    assert list(body) == [key for key in state if not key.startswith(("fc.", "classifier."))]
    assert all(torch.equal(tensor, state[key]) for key, tensor in body.items())
    assert torch.equal(filled.head[0].weight, plain.head[0].weight)  # type: ignore[arg-type]
    assert not torch.equal(next(filled.body.parameters()), next(plain.body.parameters()))


def test_given_weights_of_grey_images_fill_the_body(tmp_path: Path) -> None:
    state = torchvisions("resnet18", seed=3).state_dict()
    state["conv1.weight"] = state["conv1.weight"][:, :1]
    torch.save(state, tmp_path / "weights.pt")
    filled = network_of("resnet18", MNIST, weights=str(tmp_path / "weights.pt"))
    assert torch.equal(next(filled.body.parameters()), state["conv1.weight"])
    with pytest.raises(UserError, match="is of a network for 1 channels, and the data are images of 3x32x32"):
        network_of("resnet18", CIFAR, weights=str(tmp_path / "weights.pt"))


def test_weights_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    state, file = torchvisions("mobilenetv2").state_dict(), tmp_path / "weights.pt"

    def refusal(content: object, name: str = "mobilenetv2", shape: Shape = CIFAR) -> str:
        """Return the message with which a file is refused: bytes, or what torch.save writes."""
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save(content, file)
        with pytest.raises(UserError, match=f"^model.weights={file} ") as caught:
            network_of(name, shape, weights=str(file))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    how = r"torch.save\(torchvision.models.resnet18\(weights='DEFAULT'\).state_dict\(\), FILE\)"
    with pytest.raises(UserError, match=rf"cannot be read \(No such file or directory\); allowed: .*{how}"):
        network_of("resnet18", CIFAR, weights=str(tmp_path / "no.pt"))
    # code is not run
    for damaged in (b"", b"no weights", b"\x80\x02}q", Path("x")):
        assert "cannot be read (not a file of torch.save" in refusal(damaged)
    assert "weights.pt holds a list; allowed" in refusal([1])
    assert "weights.pt does not fit (RuntimeError: Error(s) in" in refusal({})
    assert 'Missing key(s) in state_dict: "conv1.weight"' in refusal(state, "resnet18")
    extra: dict[str, Tensor] = state | {"layer5.weight": torch.ones(1)}
    assert 'Unexpected key(s) in state_dict: "layer5.weight".' in refusal(extra)
    assert "does not fit" in refusal(state | {0: torch.ones(1)})
    assert "does not fit" in refusal(state | {"features.0.0.weight": 1})
    assert "is of a network for 3 channels, and the data are images of 1" in refusal(state, shape=MNIST)


def test_torchvision_is_imported_only_for_its_networks_and_without_its_compiled_part() -> None:
    program = """
import sys
import torch
def refuse(path): raise OSError("no such library")
torch.ops.load_library = refuse
from hpcfl.setup.experiment import build
from hpcfl.models import MODELS, build_network
from hpcfl.samples import SampleType
from hpcfl.torchvision_parts import torchvision_part
def build_one(name):
    samples = [SampleType((1, 16, 16)), SampleType((1, 30)), SampleType((9,), vocabulary=5)]
    (sample,) = [sample for sample in samples if sample.kind == MODELS[name].kinds[0]]
    build_network(name, sample, 10, MODELS[name].options(), 0)
    return "torchvision" in sys.modules
print(*[name for name in MODELS if build_one(name)], torchvision_part("datasets").MNIST.__name__)
"""
    assert run_tree([sys.executable, "-c", program]).stdout.split() == [*TORCHVISION, "vit", "MNIST"]
