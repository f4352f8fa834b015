"""`hpcfl claims`: what papers claim, compared with the result files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcfl.commands.arguments import Parser
from hpcfl.communication.communicator import Communicator
from hpcfl.errors import UserError
from hpcfl.formatting import Document, as_markdown, as_text
from hpcfl.tables.claims import document, overview, read_claims

FOLDER = Path("configs/claims")


def judge_claims(arguments: Sequence[str], world: Communicator) -> None:
    """Judge what papers claim by the result files of hpcfl table --write-results.

    A claims file is configs/claims/PAPER.yaml; its tables are files in configs/tables, their results in
    configs/tables/results. A claim is shown, seen, not shown, refuted or not run:
      paper: ...
      claims:
        - sentence: weights that are learnt do better than training alone
          where: table 1
          rule: printed            # or ours: the rows differ from a printed equation
          runs:
            - {table: pfedla_table1, row: pFedLA, above: [Local]}   # also columns, at: after_training
          reason: ...              # if known, with evidence: the result file that it rests on
    """
    options = parser().parse_intermixed_args(list(arguments))
    files = options.files or sorted(FOLDER.glob("*.yaml"))
    if not files:
        raise UserError(f"there is no claims file in {FOLDER}; name one, such as hpcfl claims CLAIMS.yaml")
    many = [read_claims(path) for path in files]
    for claims in many if options.files else ():
        if not claims.has_results:
            raise UserError(
                f"{claims.path}: none of its tables has results; make them with hpcfl table TABLE.yaml "
                "--write-results"
            )
    as_words = as_markdown if options.markdown else as_text
    documents = [document(claims) for claims in many]
    if len(many) > 1:
        documents.append(Document("All claims", [], [overview(many)]))
    print("\n".join(map(as_words, documents)))


def parser() -> Parser:
    """Return what reads the words of `hpcfl claims`."""
    parser = Parser("hpcfl claims", judge_claims.__doc__)
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="CLAIMS.yaml", help=f"default: all of {FOLDER}"
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    return parser
