"""One self-contained HTML page of runs: it contains style, script and data, and needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hpcfl import __version__
from hpcfl.report.content import page_content
from hpcfl.results.run import Run, folder_names
from hpcfl.storage.atomic import replace_file, writing

HERE = Path(__file__).parent
REPORT_NAME = "report.html"


def write_report(runs: Sequence[Run], out: Path) -> None:
    """Write the page of runs to a file, atomically.

    Raises:
        UserError: a run cannot be shown, runs cannot be compared, or the file cannot be written.
        StorageError: there is no room.
    """
    content = page_content(runs, labels_of(runs))
    # the template prints these; a value may be infinite, which JSON does not have
    written_out = ("configuration", "environment")
    shown = [{key: value for key, value in run.items() if key not in written_out} for run in content["runs"]]
    data = json.dumps(content | {"runs": shown}, separators=(",", ":"), allow_nan=False)
    pages = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = pages.get_template("page.html").render(
        **content,
        title=content["runs"][0]["label"] if len(runs) == 1 else f"{len(runs)} runs",
        version=__version__,
        # a name that contains "</script>" must not end the block of data
        data=Markup(data.replace("<", "\\u003c")),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
    )
    with writing(out, "name another file with --out FILE"):
        replace_file(out, text)


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Return names for the runs: method and folder."""
    return [
        name if run.config.method.name in re.split("[-/. ]", name) else f"{run.config.method.name} ({name})"
        for run, name in zip(runs, folder_names(runs), strict=True)
    ]
