"""The pictures of the README, from the page of the quickstart's run in a browser.

python tests/helpers/screenshots.py [OUT]

runs the quickstart serially (half a minute), which gives the same bits as any number of ranks, and writes
report.png, the top of its page, and report_weights.png, the weights between the clients, into the folder OUT
(default: configs/tables/results).
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from browser import browser_program, opened_browser, opened_page
from PIL import Image

from hpcfl.errors import FINISHED
from hpcfl.main import main
from hpcfl.registries import load_config
from hpcfl.report.page import REPORT_NAME

RESULTS = Path(__file__).resolve().parents[2] / "configs" / "tables" / "results"
WIDTH = 1000
"""Of the browser's window and of the first picture, in pixels."""
MAX_BYTES = 100_000
"""Of a picture with all its colours."""


def take(out: Path, settings: Sequence[str] = ()) -> None:
    """Write the pictures of the quickstart's run, with these settings changed."""
    with tempfile.TemporaryDirectory() as folder:
        # the page is called so; not by the whole name, whose end changes with the keys that there are
        run = Path(folder) / load_config(None, []).run_name().rpartition("-")[0]
        if main(["--quiet", "--out", str(run), *settings]) != FINISHED:
            sys.exit("the run failed")
        with opened_browser() as browser, opened_page(browser, run / REPORT_NAME, width=WIDTH) as opened:
            page = opened.page
            clients = page.get_by_role("region", name="Clients", exact=True).bounding_box()
            assert clients is not None
            top = {"x": 0, "y": 0, "width": WIDTH, "height": clients["y"] + clients["height"]}
            weights = page.locator("[data-chart=picture]").first
            save(page.screenshot(full_page=True, clip=top), out / "report.png")
            save(weights.screenshot(), out / "report_weights.png")


def save(picture: bytes, path: Path) -> None:
    """Write a PNG, of 256 colours where it would be large: they make steps of a ramp."""
    if len(picture) > MAX_BYTES:
        image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        image.save(path, optimize=True)
    else:
        path.write_bytes(picture)


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    if browser_program() is None:
        sys.exit("there is no chromium, chromium-browser or google-chrome in PATH")
    take(Path(sys.argv[1]) if sys.argv[1:] else RESULTS)
