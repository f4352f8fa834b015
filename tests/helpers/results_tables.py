"""The tables of docs/results.md, docs/papers and the README, made from result files.

    python tests/helpers/results_tables.py        writes them

A table follows a line such as <!-- results/pfedmb_table1_small.csv: accuracy, published -->,
<!-- results/baselines_longer.csv: accuracy by setting -->,
<!-- results/pfedmb_table1_small_differences.csv --> or
<!-- results/pfedla_table3_small_cifar10_diagnostics.csv: retained_rounds -->. The soak test's
are shown as they are: <!-- results/long_run.csv -->, another program's beside ours:
<!-- results/beside_pfllib_theirs.csv -->. The text between <!-- claims/pfedla.yaml --> and
<!-- end of claims --> is what `hpcfl claims` prints of the file; all papers' claims follow <!-- claims -->,
and how many comparisons of each paper have each verdict <!-- claims by paper -->.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean, stdev, variance

from bits import read_csv
from scipy.special import stdtrit

from hpcfl.formatting import Document, markdown
from hpcfl.formatting import as_markdown as document_as_markdown
from hpcfl.tables.claims import VERDICTS, Claims, document, overview, read_claims

REPOSITORY = Path(__file__).resolve().parents[2]
CLAIMS_FOLDER = REPOSITORY / "configs" / "claims"
CLAIMS = sorted(CLAIMS_FOLDER.glob("*.yaml"))
RESULTS = REPOSITORY / "configs" / "tables" / "results"
PAPERS = tuple(REPOSITORY / "docs" / "papers" / f"{path.stem}.md" for path in CLAIMS)
README = REPOSITORY / "README.md"
RESULTS_PAGE = REPOSITORY / "docs" / "results.md"
MARK = re.compile(r"(<!-- results/([\w-]+)\.csv(?:: ([\w ,]+))? -->\n)((?:\|.*\n)*)")

Line = dict[str, str]


def percent(line: Line, name: str) -> str:
    if line[name] in ("", "nan"):
        return ""
    spread = line.get(f"{name.removesuffix('_mean')}_std_over_seeds", "")
    text = f"{100 * float(line[name]):.1f}"
    return f"{text} ± {100 * float(spread):.1f} %" if spread else f"{text} %"


def sent(line: Line, way: str) -> str:
    others = int(line[f"other_bytes_{way}"] or 0)
    numbers = f"{int(line[f'bytes_{way}']):,}" if line[f"bytes_{way}"] else ""
    return f"{numbers} + {others:,}" if others else numbers


CELLS: dict[str, tuple[str, Callable[[Line], str]]] = {
    "accuracy": ("accuracy", lambda line: percent(line, "accuracy_mean")),
    "weighted": ("weighted by samples", lambda line: percent(line, "accuracy_weighted")),
    "best": ("best round", lambda line: percent(line, "best_accuracy")),
    "published": ("paper", lambda line: percent(line, "published_accuracy")),
    "after_download": ("after download", lambda line: percent(line, "accuracy_after_download")),
    "after_training": ("after training", lambda line: percent(line, "accuracy_after_training")),
    "worst_tenth": ("worst tenth", lambda line: percent(line, "worst_tenth_accuracy")),
    "scored": ("scored", lambda line: line["scored"]),
    "seeds": ("seeds", lambda line: line["seeds"]),
    "rounds": ("rounds", lambda line: line["rounds"]),
    "down": ("bytes down", lambda line: sent(line, "down")),
    "up": ("bytes up", lambda line: sent(line, "up")),
}
"""By the name in the marking line: the header, and the cell of a line of the CSV file."""


def made_from(lines: list[Line], names: list[str]) -> str:
    """Return a table of rows by figures."""
    header = ["setting", "method", *(CELLS[name][0] for name in names)]
    rows = [
        [line["column"], line["label"], *(CELLS[name][1](line) for name in names)]
        for line in lines
        if line["seeds"] != "0"
    ]
    return as_markdown(header, rows)


def by_setting(lines: list[Line], name: str) -> str:
    """Return one figure of a table, with a column for each setting and how many seeds it has."""
    lines = [line for line in lines if line["seeds"] != "0"]
    seeds: dict[str, set[int]] = {}
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        seeds.setdefault(line["column"], set()).add(int(line["seeds"]))
        rows.setdefault(line["label"], {})[line["column"]] = CELLS[name][1](line)
    header = [
        f"{column} ({' to '.join(map(str, sorted(of)))} seed{'s' * (of != {1})})"
        for column, of in seeds.items()
    ]
    cells = [["", label, *(figures.get(column, "") for column in seeds)] for label, figures in rows.items()]
    return as_markdown(["", "method", *header], cells)


def beside(theirs: list[Line], ours: list[Line]) -> str:
    """Return mean and deviation over seeds of another program and of ours, and their difference in points.

    Runs are independent, so the 95 % interval is Student's of two samples. `theirs` has a line a run, `ours`
    one a client.
    """
    rows = []
    for label in dict.fromkeys(line["label"] for line in theirs):
        found = [[float(line["accuracy"]) for line in theirs if line["label"] == label]]
        of_label = [line for line in ours if line["label"] == label]
        seeds = dict.fromkeys(line["seed"] for line in of_label)
        found.append(
            [fmean(float(line["accuracy"]) for line in of_label if line["seed"] == seed) for seed in seeds]
        )
        texts = [f"{100 * fmean(of):.1f} ± {100 * stdev(of):.1f} %" for of in found]
        half = stdtrit(sum(map(len, found)) - 2, 0.975) * sum(variance(of) / len(of) for of in found) ** 0.5
        difference = fmean(found[1]) - fmean(found[0])
        low, high = (100 * (difference + sign * half) for sign in (-1, 1))
        rows.append(["", label, *texts, f"{100 * difference:+.1f} [{low:+.1f}, {high:+.1f}]"])
    header = [
        "",
        "method",
        "PFLlib",
        "hpcfl",
        "hpcfl - PFLlib in points, 95 % interval over three seeds each",
    ]
    return as_markdown(header, rows)


def differences_from(lines: list[Line]) -> str:
    """Return paired differences in points, their moment, and their 95 % interval, where there is one: over
    seeds, of a single seed over its clients."""
    rows = []
    for line in lines:
        if not line["difference"]:
            continue
        over = "over_seeds" if line["over_seeds_low"] else "over_clients"
        names = ["difference", *([f"{over}_low", f"{over}_high"] if line[f"{over}_low"] else [])]
        figures = [f"{100 * float(line[name]):+.1f}" for name in names]
        pair = f"{line['first']} - {line['second']}" + ", weighted by samples" * (line.get("weighted") == "1")
        text = figures[0] + (f" [{figures[1]}, {figures[2]}]" if figures[1:] else "")
        if figures[1:] and over == "over_clients":
            text += " over clients"
        elif line.get("partitions") == "1":
            text += " of one partition"
        rows.append([line["column"], pair, line["moment"], line["seeds"], text])
    return as_markdown(
        ["setting", "rows", "scored", "seeds", "difference in points, 95 % interval over seeds"], rows
    )


def diagnostics_from(lines: list[Line], quantity: str) -> str:
    """Return a quantity after the first and the last logged round, the mean over seeds.

    Figures are columns by layer, or, where these distinguish clients, one line for each layer.
    """
    lines = [line for line in lines if line["quantity"] == quantity]
    rounds = sorted({int(line["round"]) for line in lines})
    lines = [line for line in lines if int(line["round"]) in (rounds[0], rounds[-1])]
    by_layer = {line["clients"] for line in lines} == {"all"}
    has_layers = not by_layer and any(line["layer"] for line in lines)
    found: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for line in lines:
        key = (line["column"], line["label"], line["round"], *([line["layer"]] if has_layers else []))
        figures = found.setdefault(key, {})
        figures.setdefault(line["layer" if by_layer else "clients"], []).append(float(line["value"]))
    names = list(dict.fromkeys(name for figures in found.values() for name in figures))
    rows = [
        [*key, *(f"{fmean(figures[name]):.3g}" if name in figures else "" for name in names)]
        for key, figures in found.items()
    ]
    return as_markdown(["setting", "method", "round", *(["layer"] if has_layers else []), *names], rows)


def as_markdown(header: list[str], rows: list[list[str]]) -> str:
    """Return a table; its first column, the setting, is left out where there is only one."""
    first = 0 if len({row[0] for row in rows}) > 1 else 1
    return markdown([line[first:] for line in (header, *rows)])


@cache
def judged_claims(path: Path) -> Claims:
    """Return a file's claims, judged once for all pages that show them."""
    return read_claims(path)


def with_claims(page: str) -> str:
    """Return a page with the claims of each marked file judged anew."""

    def judged(found: re.Match[str]) -> str:
        made = document(judged_claims(CLAIMS_FOLDER / found[2]))
        text = document_as_markdown(Document("", made.notes, made.grids)).removeprefix("# \n")
        return f"{found[1]}{text.strip()}\n\n{found[3]}"

    page = re.sub(
        r"(<!-- claims/(\w+\.yaml) -->\n).*?(<!-- end of claims -->)", judged, page, flags=re.DOTALL
    )
    if not re.search(r"<!-- claims( by paper)? -->", page):
        return page
    all_claims = [judged_claims(path) for path in CLAIMS]
    grid = overview(all_claims)
    rows = [["", f"[{name}](papers/{name}.md)", *rest] for name, *rest in grid.rows]
    page = _with_table(page, "claims", ["", *grid.header], rows)
    by_paper = []
    for claims in all_claims:
        words = [verdict.word for verdicts in claims.by_claim for verdict in verdicts]
        counts = [str(words.count(word)) for word in VERDICTS]
        by_paper.append(["", f"[{claims.paper}](docs/papers/{claims.path.stem}.md)", *counts])
    return _with_table(page, "claims by paper", ["", "paper", *VERDICTS], by_paper)


def _with_table(page: str, mark: str, header: list[str], rows: list[list[str]]) -> str:
    """Return a page with a table after a mark, if it has the mark."""
    return re.sub(
        rf"(<!-- {mark} -->\n)(?:\|.*\n)*", lambda found: found[1] + as_markdown(header, rows), page
    )


def with_tables(page: str) -> str:
    """Return a page with every marked table made anew."""

    def table(found: re.Match[str]) -> str:
        lines = read_csv(RESULTS / f"{found[2]}.csv")
        if found[2].endswith("_theirs"):
            ours = read_csv(RESULTS / f"{found[2].removesuffix('_theirs')}_clients.csv")
            return found[1] + beside(lines, ours)
        if found[2].startswith("long_run"):
            return found[1] + as_markdown(list(lines[0]), [list(line.values()) for line in lines])
        if found[3] and found[3].endswith(" by setting"):
            return found[1] + by_setting(lines, found[3].removesuffix(" by setting"))
        names = [name.strip() for name in (found[3] or "").split(",") if name.strip()]
        if found[2].endswith("_diagnostics"):
            return found[1] + "\n".join(diagnostics_from(lines, name) for name in names)
        return found[1] + (made_from(lines, names) if names else differences_from(lines))

    return MARK.sub(table, page)


if __name__ == "__main__":
    for page in (README, RESULTS_PAGE, *PAPERS):
        page.write_text(with_claims(with_tables(page.read_text())))
