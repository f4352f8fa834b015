"""`hpcfl report`: one page with one run or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcfl.commands.arguments import Parser, add_own_code
from hpcfl.communication.communicator import Communicator
from hpcfl.errors import UserError
from hpcfl.report.page import REPORT_NAME, write_report
from hpcfl.results.run import finished_runs

PAGE_SUFFIX = ".html"
"""Ending of a page's name, so that a page never overwrites a run's other files."""


def make_report(arguments: Sequence[str], world: Communicator) -> None:
    """Write one self-contained HTML page of a run, or of several side by side.

    A run may still be running; from a folder of runs, such as a table's, all finished runs are shown.
    For example:
      hpcfl report runs/pfedla-digits-s0-633675fa runs/fedavg-digits-s0-ce500986 --out both.html
    """
    options = parser().parse_args(arguments)
    if options.out and options.out.suffix != PAGE_SUFFIX:
        page = options.out / REPORT_NAME if options.out.is_dir() else options.out.with_suffix(PAGE_SUFFIX)
        raise UserError(f"--out {options.out} does not end in {PAGE_SUFFIX}; name a page, such as {page}")
    folders = list({folder.resolve(): folder for folder in options.folders}.values())
    runs = {run.path.resolve(): run for folder in folders for run in finished_runs(folder)}
    out = options.out or (folders[0] if len(folders) == 1 else Path()) / REPORT_NAME
    write_report(list(runs.values()), out)
    print(f"the report of {len(runs)} run{'s' * (len(runs) > 1)} is in {out}")


def parser() -> Parser:
    parser = Parser("hpcfl report", make_report.__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of runs")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the page, NAME.html (default: {REPORT_NAME} in the folder; of several folders, in this one)",
    )
    add_own_code(parser)
    return parser
