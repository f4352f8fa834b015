"""`hpcfl predict`: label samples with a run's model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from hpcfl.commands.arguments import Parser, add_own_code, client_of
from hpcfl.communication.communicator import Communicator
from hpcfl.config.keys import Layout
from hpcfl.data.npz import read_arrays
from hpcfl.errors import UserError
from hpcfl.results.models import GLOBAL
from hpcfl.results.run import load_run
from hpcfl.storage.atomic import csv_text, replace_file, writing


def predict_samples(arguments: Sequence[str], world: Communicator) -> None:
    """Label samples with a client's model: array x of SAMPLES.npz, as the run's data set stores them.

    Writes one line per sample, with its label and the probability of each class.
    """
    options = parser().parse_args(arguments)
    client = client_of(options.client, GLOBAL)
    out: Path = options.out
    if out.suffix != ".csv":
        raise UserError(f"--out {out} is invalid; give a FILE.csv")
    if (out.resolve().parent / "config.yaml").exists():
        raise UserError(f"--out {out} is in a run folder, which must not change; give another FILE")
    where = str(options.samples)
    x = read_arrays(where, where, ["x"])["x"]
    models = load_run(options.run).models
    probabilities = models.probabilities(client, x, options.layout, where)
    if num_unknown := int(np.isnan(probabilities).any(axis=1).sum()):
        raise UserError(
            f"the model of --client {options.client} has no probabilities (nan) for {num_unknown} of "
            f"{len(x)} samples: its training has diverged (see diverged in the run's clients.csv), or the "
            "samples are not as the run's data set stores them; nothing is written"
        )
    labels = probabilities.argmax(axis=1)
    header = ["label", *(f"probability_{number}" for number in range(probabilities.shape[1]))]
    rows = ([label, *row] for label, row in zip(labels, probabilities.tolist(), strict=True))
    with writing(out, "give another --out FILE"):
        replace_file(out, csv_text([header, *rows]))
    if (shift := models.config.data.shift) is not None:
        print(f"data.shift={shift} is not applied here: samples of a client must have its change already")
    print(f"labels and probabilities of {len(labels)} samples are in {out}")


def parser() -> Parser:
    parser = Parser("hpcfl predict", predict_samples.__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, such as runs/NAME")
    parser.add_argument("samples", type=Path, metavar="SAMPLES.npz")
    parser.add_argument("--client", required=True, help="a client's number, or global (the server's model)")
    parser.add_argument(
        "--layout",
        choices=get_args(Layout),
        help="axis order of x (default: the one that fits; if both fit, the run's data.layout)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("predictions.csv"), metavar="FILE", help="(default: predictions.csv)"
    )
    add_own_code(parser)
    return parser
