"""All configuration keys: one class for each group of keys, and `Config`, which holds the groups."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from hpcfl.config.yaml_text import yaml_of
from hpcfl.errors import UserError

ENVIRONMENT = "environment"
"""Group in a run folder's config.yaml that records versions, command and ranks; not read as configuration."""

OWN_KEYS = ("method.path", "model.path", "data.partition.path", "data.reader")
"""Keys that name a Python file of the user's own."""

GROUPS = ("method", "data", "model", "train", "clients", "server", "privacy", "comm", "run")

BufferPolicy = Literal["local", "average", "mixed"]
Precision = Literal["float32", "bfloat16"]
LastBatch = Literal["even", "drop", "keep"]
CodecName = Literal["none", "float16", "int8", "topk"]
Direction = Literal["down", "up"]
Layout = Literal["NHWC", "NCHW", "NCL", "NLC"]
Optimiser = Literal["adam", "adamw"]
Change = Literal["crop", "flip"]
Missing = Literal["mean", "drop"]
ShiftKind = Literal["rotation", "colour", "noise", "blur"]
PrivacyUnit = Literal["client", "sample"]
ServerOptimiserName = Literal["momentum", "adagrad", "adam", "yogi"]
Sampling = Literal["size", "power_of_choice"]

DEFAULT_TOPK_RATIO = 0.1
DEFAULT_DELTA = 1e-5
SHIFT_STRENGTHS: dict[ShiftKind, tuple[float, float]] = {
    "rotation": (45.0, 180.0),
    "colour": (0.5, 1.0),
    "noise": (0.3, math.inf),
    "blur": (1.0, math.inf),
}
"""Default and largest `data.shift_strength` of each shift."""
ADAM_DEFAULTS = (0.9, 0.999, 1e-8)
"""Defaults of `train.beta1`, `train.beta2` and `train.epsilon`."""
SERVER_DEFAULTS: dict[ServerOptimiserName, dict[str, float]] = {
    "momentum": {"lr": 1.0, "beta1": 0.9},
    "adagrad": {"lr": 0.1, "beta1": 0.0, "tau": 1e-3},
    "adam": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
    "yogi": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
}
"""The constants that each optimiser of the server has, with their defaults."""

NO_RESULT: dict[str, Any] = {"changes": "no result"}
"""Marks a key that may differ between a run folder and the command that resumes it."""


def means_null(value: str | int) -> BeforeValidator:
    """Mark a key of which this value is another way to write null."""
    return BeforeValidator(lambda given: None if given == value else given)


class Settings(BaseModel):
    """A group of keys, immutable after validation; unknown keys and infinite values are errors.

    Each key has a docstring below it, which `hpcfl list keys` prints.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OwnOptions(Settings):
    """Options of something that a user's own file may define, with defaults that may be wrong."""

    model_config = ConfigDict(validate_default=True)


class Params(OwnOptions):
    """A method's hyper-parameters: the keys under `method.*` other than the name."""


class PartitionOptions(OwnOptions):
    """Options of a partition: the keys under `data.partition.*` other than the name."""


class NetworkOptions(OwnOptions):
    """A model's options: the keys under `model.*` other than the name."""


class DataConfig(Settings):
    """The keys under `data.*`, without those of the partition."""

    source: str = "digits"
    """Where samples come from; see `hpcfl list`."""
    root: str = Field("data", json_schema_extra=NO_RESULT)
    """Folder of downloaded data sets; changes no result."""
    path: str | None = None
    """File of sources `npz` and `csv`; folder of sources `domains`, `femnist` and `pfllib`."""
    layout: Layout | None = None
    """Axis order of source `npz`, and of npz files of `domains`: of images NHWC or NCHW, of series NCL or NLC
    (channels and steps); other sources know theirs. Without it, x with three axes holds grey images."""
    split: str = "mnist"
    """Split of source `emnist`, such as letters or byclass."""
    target: str | None = None
    """Column of source `csv` with the class; its values, sorted, are the classes 0, 1, ... All other columns
    are features, which must be numbers."""
    categorical: list[str] | None = Field(None, min_length=1)
    """Columns of source `csv`, such as [sex,job], each value of which is a feature, in sorted order: 1 where
    it occurs, else 0. Columns of texts must be listed here."""
    missing: Missing | None = None
    """What is done where source `csv` lacks values. drop: such rows are left out. mean: a missing number is
    the mean of its column over all rows. Default: they are refused."""
    client_column: str | None = None
    """Column of source `csv` with the client of each row, for `data.partition.name=given`; it is not a
    feature."""
    image_size: int | None = Field(None, ge=1)
    """Height and width, in pixels, to which the images of source `domains` are resized; default: they are
    left, and must be of one size."""
    clients: int | None = Field(None, ge=1, le=10**7)
    """Number of clients N; default: 10, or with partition `given` all that the source has, of which a smaller
    number is drawn by `data.seed`. With source `domains`, client c belongs to domain c mod D (domains in
    alphabetical order; with `data.unseen_clients`, before these get the last numbers), and the partition
    divides each domain's samples among its clients; with `given`, each domain is a client."""
    per_client: int | None = Field(None, ge=2)
    """Samples of a client, all splits together; default: the most that is equal for all. Partitions that draw
    the sizes (`dirichlet`, `mixture` and others) refuse it: use `data.subset_fraction` for a small trial."""
    test_fraction: float = Field(0.3, gt=0, lt=1)
    """Share of a client's samples for testing; the number for training is rounded, halves up. A partition by
    classes rounds for each class of a client. With `data.partition.name=given` without effect where the
    source has a split of its own."""
    val_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of a client's training samples cut off for validation."""
    subset_per_class: int | None = Field(None, ge=1)
    """Use a seeded, class-balanced subset of the source."""
    subset_fraction: float | None = Field(None, gt=0, le=1)
    """Use a seeded random share of the source; the class frequencies stay about the same."""
    normalise: str | list[list[float]] = "auto"
    """`auto` (the source's constants; for series and features: `standard`), `standard` (mean 0 and deviation
    1 of each channel or feature over the training samples of the clients in training), `none`, `half`, a
    source's name, or [[means], [deviations]]. Tokens are not normalised."""
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    """Seed of subset, partition, unseen clients, `data.shift` and `data.label_noise`; default: run.seed."""
    unseen_clients: Annotated[float | None, Field(ge=0, lt=1), means_null(0)] = None
    """Share of the N clients, drawn at random, that take no part in training: max(1, floor(share N + 0.5)) of
    them; at least one client must remain for training. They get the last ids. At every evaluation they adapt
    as new clients (`train.unseen_epochs`) and are reported separately. Default, or 0: no such clients."""
    label_noise: Annotated[float | None, Field(ge=0, le=1), means_null(0)] = None
    """Share q of a client's training labels that are wrong: floor(q n + 0.5) of its n labels, drawn at
    random, become another class, each other class equally likely (symmetric noise). Labels for validation and
    testing stay right, and partition.csv counts right ones. Default, or 0: none."""
    label_noise_clients: float | None = Field(None, gt=0, le=1)
    """Share of the N clients whose labels have this noise: max(1, floor(share N + 0.5)) of them, drawn at
    random; default: all."""

    shift: ShiftKind | None = None
    """Change of each client's images, in all splits and before normalisation, so that clients differ in their
    features; over any partition. The change of a client depends on its number and `data.seed` alone. N counts
    all clients; those of `data.unseen_clients` have the last numbers, and so the last changes. Samples for
    `hpcfl predict` and exported models must have their client's change already. Default: none.

    rotation: client c turns its images by an angle, the angles evenly spread from -strength to +strength
    degrees; with `data.shift_groups` by 360 c / G degrees (multiples of 90 degrees move the pixels of square
    images as they are); corners become 0. colour: each channel is multiplied by a number of the client from
    1 - strength to 1 + strength; a grey image too, and a number from -strength/2 to strength/2 is added.
    noise: Gaussian, its standard deviation growing over the clients from 0 to strength. blur: Gaussian, its
    standard deviation growing over the clients from 0 to strength pixels. Values of bytes count from 0 to 1;
    they are not cut off there. `data.normalise=standard` has mean and deviation of the images before."""
    shift_strength: float | None = Field(None, gt=0)
    """Strength of `data.shift`; default: 45 degrees of rotation, 0.5 of colour, 0.3 of noise, 1 pixel of
    blur."""
    shift_groups: int | None = Field(None, ge=2)
    """Number G of different shifts: client c has that of group c mod G; default: each client has its own."""

    @property
    def shift_size(self) -> float:
        """`shift_strength`, or its default, of a `shift`."""
        assert self.shift is not None
        return SHIFT_STRENGTHS[self.shift][0] if self.shift_strength is None else self.shift_strength

    def num_unseen(self, num_clients: int) -> int:
        """Return how many of N clients take no part in training; UserError if no client would remain."""
        if not self.unseen_clients:
            return 0
        if num_clients == 1:
            raise UserError(
                f"data.unseen_clients={self.unseen_clients:g} leaves none of 1 client to train; set "
                "data.clients=2 or more, or data.unseen_clients=0"
            )
        return min(num_clients - 1, max(1, math.floor(self.unseen_clients * num_clients + 0.5)))


class TrainConfig(Settings):
    """The keys under `train.*`: how long and how clients train."""

    rounds: int = Field(30, ge=1)
    """Number of communication rounds."""
    patience: int | None = Field(None, ge=1)
    """The run ends after this many evaluations in a row without a higher mean accuracy on validation samples
    (`data.val_fraction`), which each evaluation then scores too: the column `accuracy_val` of metrics.csv.
    Evaluations are `run.eval_every` rounds apart. Default: all rounds are done."""
    participation: float = Field(1.0, gt=0, le=1)
    """Share p of the N clients in a round: a cohort of max(1, floor(p N + 0.5)). With `privacy.unit=client` a
    round has each client with probability p."""
    local_epochs: int = Field(5, ge=1)
    """Passes over a client's training data in a round."""
    batch_size: int = Field(16, ge=2)
    """Largest number B of samples in a mini-batch; a single left-over sample may make it B + 1 (see
    `train.last_batch`)."""
    last_batch: LastBatch = "even"
    """How n samples are cut into mini-batches of at most B.

    even: ceil(n / B) mini-batches, whose sizes differ by at most one. drop: each epoch leaves out n mod B
    samples; a client with fewer than B samples keeps its only mini-batch. keep: the n mod B samples form
    a smaller last mini-batch, whose step has the same learning rate as the others and is the last one before
    the model is sent or scored. A single sample that is not left out always joins the mini-batch before
    it."""
    lr: float = Field(0.05, gt=0)
    """Learning rate of local training, with a fresh optimiser each round; with adam and adamw, the default is
    0.001, and a method's own learning rates of models, such as `method.head_lr`, need smaller ones, too."""
    lr_decay: float = Field(1.0, gt=0, le=1)
    """Factor on the learning rate after each round, or after those of `train.lr_decay_rounds`; 1 keeps it
    constant."""
    lr_decay_rounds: list[Annotated[int, Field(ge=1)]] | None = Field(None, min_length=1)
    """Numbers of rounds, such as [100, 150], after which `train.lr_decay` acts; default: each round."""
    lr_end: float | None = Field(None, gt=0)
    """Learning rate to which cosine annealing goes from `train.lr` over `train.rounds`; a run with it cannot
    be extended to more rounds. Adaptation before the last evaluation has this learning rate; default: no
    annealing."""
    warmup_rounds: Annotated[int | None, Field(ge=1), means_null(0)] = None
    """Rounds W of a linear warm-up: round k of them has k / (W + 1) of the learning rate that it would have
    without; default, or 0: none."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of local SGD, starting from zero each round."""
    weight_decay: float = Field(0.0, ge=0)
    """L2 penalty's factor in the gradient; with adamw decoupled from it: weights shrink by `train.lr` times
    this factor at each step."""
    optimiser: Annotated[Optimiser | None, means_null("sgd")] = None
    """Local optimiser, whose state starts from zero each round; null or sgd: SGD. adam and adamw step as
    torch.optim's do. What a method moves with a learning rate of its own beside models, such as the mixing
    weight of `apfl`, still moves by plain gradients. Refused by methods that compute with SGD's steps."""
    beta1: float | None = Field(None, ge=0, lt=1)
    """Decay of adam's and adamw's first moment; default: 0.9."""
    beta2: float | None = Field(None, ge=0, lt=1)
    """Decay of adam's and adamw's second moment; default: 0.999."""
    epsilon: float | None = Field(None, gt=0)
    """What adam and adamw add to the root of the second moment; default: 1e-08."""
    precision: Precision = "float32"
    """Number format of products in local training.

    bfloat16: a CPU with AVX-512 BF16 or AMX rounds the factors of convolutions and linear layers to 8 bits
    and adds in 32; weights, gradients and evaluations keep 32. It pays for networks with many channels
    (measure with `hpcfl bench --parts steps`); loop engine only."""
    finetune_epochs: int = Field(0, ge=0)
    """Local epochs of fine-tuning before each evaluation, on a copy that is then discarded; 0: no
    fine-tuning."""
    unseen_epochs: int | None = Field(None, ge=1)
    """Local epochs for which a client of `data.unseen_clients` adapts before it is scored; default:
    `train.local_epochs`."""
    buffers: BufferPolicy | None = None
    """Running statistics of BatchNorm: kept by the client, averaged like parameters, or (pFedLA) mixed with
    the weights of their BatchNorm layer; default: the method's."""

    clip: float | None = Field(None, gt=0)
    """Largest L2 norm of a mini-batch's gradient; a longer one is shortened to it, as torch's clip_grad_norm_
    does. It counts all that a client's optimiser trains and the method's own terms, but not the weight decay
    nor momentum, which act afterwards; default: none. A method that trains two models side by side clips each
    by itself. Refused by methods that scale gradients before the step."""

    label_smoothing: Annotated[float | None, Field(ge=0, lt=1), means_null(0)] = None
    """Share of a sample's label that local training spreads evenly over all classes, as torch's cross_entropy
    does; default, or 0: none. Evaluations score the plain cross-entropy, and so does what a method computes
    outside local training. Refused by methods whose loss gives a class the probability 0, or is a
    likelihood."""

    augment: list[Change] | None = None
    """Random changes of the images in mini-batches of local training, such as [crop,flip]; default, or none:
    none. crop: the image moves by up to an eighth of its height and width, rounded up (4 pixels of 28 or 32),
    and what comes in is of value 0 before normalisation, as with torchvision's RandomCrop. flip: it is
    mirrored left to right with probability 1/2. Evaluations, prototypes and all that methods measure have the
    images themselves. Refused by methods that compare an image's features or logits with a teacher's of the
    image itself."""

    @field_validator("augment", mode="before")
    @classmethod
    def _in_their_order(cls, changes: Any) -> Any:
        if changes in ("none", []):
            return None
        if not isinstance(changes, list) or not set(map(str, changes)) <= set(get_args(Change)):
            return changes
        return [change for change in get_args(Change) if change in changes]

    @field_validator("lr_decay_rounds")
    @classmethod
    def _in_order(cls, rounds: list[int] | None) -> list[int] | None:
        return None if rounds is None else sorted(set(rounds))

    def lr_factor(self, round: int) -> float:
        """Return a round's learning rate as a factor of `lr`; rounds count from 0.

        Cosine annealing: Loshchilov and Hutter, SGDR: stochastic gradient descent with warm restarts, ICLR
        2017, eq. 5 without restarts.
        """
        if self.lr_end is not None:
            end, done = self.lr_end / self.lr, min(1.0, round / self.rounds)
            factor = end + (1 - end) * (1 + math.cos(math.pi * done)) / 2
        elif self.lr_decay_rounds is not None:
            factor = self.lr_decay ** sum(after <= round for after in self.lr_decay_rounds)
        else:
            factor = self.lr_decay**round
        warmup = self.warmup_rounds
        return factor if warmup is None else factor * min(1.0, (round + 1) / (warmup + 1))

    @property
    def adam_constants(self) -> tuple[float, float, float]:
        """beta1, beta2 and epsilon, as adam and adamw use them."""
        given = (self.beta1, self.beta2, self.epsilon)
        return tuple(  # type: ignore[return-value]
            default if value is None else value for value, default in zip(given, ADAM_DEFAULTS, strict=True)
        )

    def of_unseen(self) -> TrainConfig:
        """Return the settings of clients that take no part in the rounds, and adapt before an evaluation."""
        return self.model_copy(update={"local_epochs": self.unseen_epochs or self.local_epochs})

    def cohort_size(self, num_clients: int) -> int:
        """Return how many of N clients take part in a round."""
        return max(1, math.floor(self.participation * num_clients + 0.5))


class ClientsConfig(Settings):
    """The keys under `clients.*`: which clients a round gets, how much they train, and which it loses.

    A lost member of a cohort has received the server's message; it sends nothing, its state is as before the
    round, and the round continues without it, as with `run.on_divergence=skip`.
    """

    sampling: Annotated[Sampling | None, means_null("uniform")] = None
    """How a round's clients are drawn: null or uniform, all are equally likely; size, in proportion to their
    training samples, without replacement; power_of_choice, of `clients.candidates` clients drawn by size,
    those that had the highest training loss in the last round that they completed. Before a client's first
    one, its loss counts as infinite (Cho et al., Towards understanding biased client selection in federated
    learning, AISTATS 2022: the variant rpow-d). The method's weights of clients in means stay."""
    candidates: int | None = Field(None, ge=1)
    """Number d of candidates of power_of_choice, at least the cohort's size; default: twice that size. More
    than N count as N."""
    drop_rate: Annotated[float | None, Field(ge=0, lt=1), means_null(0)] = None
    """Probability that a member of a cohort is lost before it trains, drawn by client and round; default, or
    0: none is lost."""
    step_s: float | None = Field(None, ge=0)
    """Simulated seconds of one training step of a client with factor 1 (`clients.slowness`); default: no
    simulated clock. metrics.csv gets a column `simulated_s`: a round lasts as long as the slowest of the
    members that are not left out."""
    slowness: Annotated[float | None, Field(ge=0), means_null(0)] = None
    """Sigma of the factor exp(sigma z), z from N(0, 1), on `clients.step_s` of each client, drawn once;
    default, or 0: all have factor 1."""
    bytes_per_s: float | None = Field(None, gt=0)
    """Bytes that a client receives, or sends, in a simulated second; default: messages take no time."""
    deadline_s: float | None = Field(None, gt=0)
    """Simulated seconds after which a round ends without the members that need longer; default: none. They
    are lost after their training, and a round that loses a member lasts this long."""
    local_epochs: list[Annotated[int, Field(ge=1)]] | None = None
    """Least and most local epochs, such as [1,5]: each member of each round does a number of them in place of
    `train.local_epochs`, drawn uniformly. Epochs that a method's own key sets stay."""
    batch_size: list[Annotated[int, Field(ge=2)]] | None = Field(None, min_length=1)
    """Sizes such as [8,16,32] of which each client has one in place of `train.batch_size`, drawn once,
    uniformly."""

    @field_validator("local_epochs")
    @classmethod
    def _are_least_and_most(cls, epochs: list[int] | None) -> list[int] | None:
        if epochs is not None and (len(epochs) != 2 or epochs[0] > epochs[1]):
            raise UserError(
                f"clients.local_epochs={epochs} is invalid; allowed: [least, most] with 1 <= least <= most, "
                "such as [1,5]"
            )
        return epochs

    @property
    def has_clock(self) -> bool:
        """Whether there is a simulated clock."""
        return self.step_s is not None

    @property
    def loses_members(self) -> bool:
        """Whether members of a cohort may be lost."""
        return self.drop_rate is not None or self.deadline_s is not None

    def of_unseen(self) -> ClientsConfig:
        """Return the settings of clients that take no part in the rounds, and adapt before an evaluation."""
        return self.model_copy(update={"local_epochs": None})


class ServerConfig(Settings):
    """The keys under `server.*`: the step that the server takes with what it averages.

    Equations: `hpcfl/methods/_server_optimiser.py`.
    """

    optimiser: Annotated[ServerOptimiserName | None, means_null("none")] = None
    """How the server moves the model, or the part of one, that it averages; null or none: to the clients'
    mean. momentum (FedAvgM), adagrad, adam and yogi step along the mean difference of the clients to it
    (paper: Reddi et al., Algorithm 2). Refused by methods whose server averages nothing."""
    lr: float | None = Field(None, gt=0)
    """Learning rate of the server; default: 1 with momentum, 0.1 with adagrad, 0.01 with adam and yogi."""
    beta1: float | None = Field(None, ge=0, lt=1)
    """Decay of the first moment; default: 0.9, or 0 with adagrad (paper)."""
    beta2: float | None = Field(None, ge=0, lt=1)
    """Decay of the second moment, of adam and yogi; default: 0.99 (paper)."""
    tau: float | None = Field(None, gt=0)
    """What is added to the root of the second moment, whose first value is tau^2; default: 0.001 (paper)."""

    def in_use(self) -> dict[str, Any]:
        """Return what affects a run, with the values that the run uses; {} without an optimiser."""
        if self.optimiser is None:
            return {}
        given = {name: value for name, value in self.model_dump().items() if value is not None}
        return SERVER_DEFAULTS[self.optimiser] | given


class PrivacyConfig(Settings):
    """The keys under `privacy.*`: differential privacy of what leaves a client.

    Equations: `hpcfl/privacy.py` and `hpcfl/training/private_gradients.py`.
    """

    unit: Annotated[PrivacyUnit | None, means_null("none")] = None
    """Whose presence is hidden; null: nobody's.

    client: each client clips what it adds to the average, and the server adds noise to it (DP-FedAvg); a
    cohort then has each client with probability `train.participation`, and all clients weigh the same.
    sample: each client clips the gradient of every sample, and adds noise to their mean (DP-SGD); a
    mini-batch then has each sample with the same probability. Refused by methods that send more than what is
    protected."""
    clip: float | None = Field(None, gt=0)
    """Largest L2 norm of a client's update, or of a sample's gradient; longer ones are shortened to it."""
    noise: float | None = Field(None, gt=0)
    """Noise multiplier z: the Gaussian noise on a sum of what is clipped has the standard deviation
    z `privacy.clip`."""
    delta: float | None = Field(None, gt=0, lt=1)
    """The delta for which the column `epsilon` of metrics.csv is computed; default: 1e-05. It should be far
    below 1 / the number of clients, or samples, whose presence is hidden."""

    @property
    def delta_in_use(self) -> float:
        return DEFAULT_DELTA if self.delta is None else self.delta


class CommConfig(Settings):
    """The keys under `comm.*`: how messages between server and clients are compressed."""

    codec: CodecName = "none"
    """How numbers are coded on their way.

    none: they travel as they are. float16: as float16, within its range. int8: as integers from
    -127 to 127 and a scale for each layer; in uploads, the difference to what the client received. topk: in
    uploads, the largest differences to what the client received, with their indices."""
    directions: Literal["both", "up", "down"] | None = None
    """Which messages are compressed; default: both; with topk: up only."""
    topk_ratio: float | None = Field(None, gt=0, le=1)
    """Share of a layer's numbers that topk sends; default: 0.1."""
    error_feedback: bool | None = None
    """Whether clients remember what topk did not send and add it to their next differences (error feedback);
    default: true. pFedLA learns nothing with it."""

    def codes(self, direction: Direction) -> bool:
        """Return whether messages in a direction are compressed."""
        directions = self.directions or ("up" if self.codec == "topk" else "both")
        return self.codec != "none" and directions in ("both", direction)

    @property
    def share(self) -> float:
        """Share of a layer's numbers that topk sends."""
        return DEFAULT_TOPK_RATIO if self.topk_ratio is None else self.topk_ratio

    @property
    def uses_error_feedback(self) -> bool:
        """Whether clients remember what topk did not send."""
        return self.error_feedback is not False


class RunConfig(Settings):
    """The keys under `run.*`."""

    seed: int = Field(0, ge=0, le=2**63 - 1)
    """Seed of everything random; `hpcfl table` has several."""
    eval_every: int = Field(1, ge=1)
    """Rounds between evaluations; the last round always has one. Changes no training result, but with
    `train.patience` it decides when the run ends."""
    eval_split: Literal["test", "val"] = "test"
    """What evaluations score: choose hyper-parameters on val, report on test."""
    checkpoint_every: int = Field(10, ge=1, json_schema_extra=NO_RESULT)
    """Rounds between checkpoints; the last round always has one. Changes no result."""
    metrics: bool = Field(False, json_schema_extra=NO_RESULT)
    """Whether the end of a run also writes each client's balanced accuracy, macro F1, AUC, calibration error
    and confusion matrix, at the cost of one more evaluation; changes no result. A finished run gets them when
    the same command is repeated with this key."""
    engine: Literal["auto", "loop", "batched"] = "auto"
    """Local training client by client (loop), or many clients as one computation (batched); auto: batched on
    CUDA, else loop."""
    clients_at_once: int | None = Field(None, ge=1)
    """Clients in one computation of the batched engine; default: 32, or on CUDA as many as its free memory
    holds. Another number gives other last bits; config.yaml names the one taken on CUDA."""
    placement: Literal["balanced", "home"] = Field("balanced", json_schema_extra=NO_RESULT)
    """Which worker trains a client of a round. home: the one that keeps it. balanced: some clients of a
    round train on a less busy worker, with their samples and state, where clients train one at a time.
    Changes no result."""
    on_divergence: Literal["stop", "skip", "continue"] = Field("stop", json_schema_extra=NO_RESULT)
    """What happens when a client's training loss, or a number that it sends or keeps, is nan or infinite.
    stop: the run ends with exit code 3, and its newest checkpoint stays; it also ends if the loss of a scored
    model is nan. skip: the client's round is undone and left out, as if the client had not been in the
    cohort; the run still stops if the server's own numbers are nan or infinite. continue: these numbers are
    used like any others. A run may be resumed with another value."""
    threads: int = Field(1, ge=1)
    """CPU threads of each rank; another number changes the last bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where workers train; auto: a GPU if there is one."""
    state: Literal["auto", "device", "host"] = Field("auto", json_schema_extra=NO_RESULT)
    """Where a worker with a GPU keeps its clients' state. device: on the GPU for the whole run. host: on the
    CPU, and each group of clients brings its own to the GPU and back in every round. auto: on the GPU if it
    takes at most a quarter of this worker's share of the memory that is free there when the run begins. What
    a codec keeps, and the models of `method.server=sharded`, stay on the CPU. No effect on a CPU; changes no
    result."""
    tf32: bool = False
    """Whether a GPU rounds the factors of float32 products to 10 bits, which is faster; a CPU does not."""
    max_elements: int = Field(2**27, ge=1, lt=2**28, json_schema_extra=NO_RESULT)
    """Numbers in one block of a message; changes no result."""
    timeout: float | None = Field(3600.0, ge=1, json_schema_extra=NO_RESULT)
    """A waiting rank ends the run if another rank sends no heartbeat for this many seconds; the last
    checkpoint stays. A rank sends heartbeats while it waits, and after each group of clients that it trains
    or scores. Choose a time longer than the longest such piece of work, and than writing and verifying a
    checkpoint; null: wait for ever. Changes no result."""
    report: bool = Field(True, json_schema_extra=NO_RESULT)
    """Whether a finished run writes report.html, a page with its results; changes no result."""
    tracker: Literal["mlflow", "tensorboard", "wandb"] | None = Field(None, json_schema_extra=NO_RESULT)
    """Also send the columns of metrics.csv, round by round, to an MLflow server, to a TensorBoard file in the
    run folder, or to Weights & Biases. Needs the extra of that name (`pip install -e ".[wandb]"`); changes
    no result."""


Options = TypeVar("Options", bound=Settings)


def recorded_name(name: str) -> str:
    """Return a name as runs record it, without what tells own files of one name apart (`OwnFile.add_to`)."""
    return name.partition("@")[0]


@dataclass(frozen=True)
class Chosen(Generic[Options]):
    """What a group of keys chooses by its `name`: a method, a partition or a model."""

    name: str
    """Its name in the registry; one read back from a run may be `name@digits` (see `OwnFile.add_to`)."""
    options: Options
    """The keys other than the name."""
    file: Mapping[str, str]
    """For a thing defined in the user's own Python file: `path`, and `code`, a digest of the file; for a
    class given to `hpcfl.run`, `code` alone; else empty. Runs with different digests are different runs."""

    def model_dump(self) -> dict[str, Any]:
        # as YAML gives it back: a tuple of one's own options would differ from the list there
        options = self.options.model_dump(mode="json")
        for name in type(self.options).model_fields:
            if isinstance(getattr(self.options, name), set | frozenset):
                options[name] = sorted(options[name])
        return {"name": recorded_name(self.name), **self.file, **options}


@dataclass(frozen=True)
class Config:
    """A validated configuration."""

    method: Chosen[Params]
    data: DataConfig
    partition: Chosen[PartitionOptions]
    model: Chosen[NetworkOptions]
    train: TrainConfig
    clients: ClientsConfig
    server: ServerConfig
    privacy: PrivacyConfig
    comm: CommConfig
    run: RunConfig
    source_file: Mapping[str, str]
    """For a source defined in the user's own Python file: `reader` and `code`; else empty."""

    @property
    def data_seed(self) -> int:
        return self.run.seed if self.data.seed is None else self.data.seed

    @property
    def own_code(self) -> dict[str, str]:
        """The digests of the user's own Python files by the `key=path` that names each, and that of a class
        given to `hpcfl.run` by its `method.name=name`."""
        flat = flatten(self.tree())
        there = [key for key in OWN_KEYS if digest_key(key) in flat]
        names = [key if key in flat else "method.name" for key in there]
        return {f"{name}={flat[name]}": flat[digest_key(name)] for name in names}

    def tree(self) -> dict[str, Any]:
        """Return the configuration as nested keys, with all defaults."""
        found: dict[str, Any] = {group: getattr(self, group).model_dump() for group in GROUPS}
        found["data"] |= {"source": recorded_name(self.data.source), **self.source_file}
        found["data"] |= {"partition": self.partition.model_dump()}
        return found

    def yaml(self) -> str:
        return yaml_of(self.tree())

    def result_keys(self) -> dict[str, Any]:
        """Return the keys that change results, flat, with their values."""
        return {key: value for key, value in flatten(self.tree()).items() if key not in RESULT_NEUTRAL}

    def sample_keys(self) -> dict[str, Any]:
        """Return the keys that decide which samples each client has, and which are scored, flat."""
        keys = {key: value for key, value in self.result_keys().items() if key.startswith("data.")}
        # which samples a client has, and which labels it is scored by, does not depend on these
        for key in ("data.normalise", "data.label_noise", "data.label_noise_clients"):
            del keys[key]
        return keys | {"data.seed": self.data_seed, "run.eval_split": self.run.eval_split}

    def short_hash(self) -> str:
        """Return 8 hexadecimal digits: a hash of all keys that change results, except `train.rounds`.

        Keys that are null do not count, so a new key with default null does not change the names of runs.
        """
        keys = {k: v for k, v in self.result_keys().items() if v is not None and k != "train.rounds"}
        return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:8]

    def run_name(self) -> str:
        return f"{self.method.name}-{self.data.source}-s{self.run.seed}-{self.short_hash()}"


COMMON: dict[str, type[Settings]] = {
    "data": DataConfig,
    "train": TrainConfig,
    "clients": ClientsConfig,
    "server": ServerConfig,
    "privacy": PrivacyConfig,
    "comm": CommConfig,
    "run": RunConfig,
}
"""The groups of keys that every run has."""

RESULT_NEUTRAL = frozenset(
    f"{group}.{key}"
    for group, kind in COMMON.items()
    for key, field in kind.model_fields.items()
    if field.json_schema_extra == NO_RESULT
).union(OWN_KEYS)
"""Keys that may differ between a run folder and the command that resumes it."""


def digest_key(key: str) -> str:
    """Return the key of the digest of a user's own file or class, given the key that names it."""
    return f"{key.rpartition('.')[0]}.code"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys as `a.b.c: value`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat
