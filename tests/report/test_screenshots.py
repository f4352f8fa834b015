"""The pictures of the README can be made again."""

from __future__ import annotations

from pathlib import Path

import pytest
import screenshots
from browser import browser_program
from PIL import Image
from report.test_report import TINY


@pytest.mark.skipif(
    browser_program() is None, reason="there is no chromium, chromium-browser or google-chrome in PATH"
)
def test_pictures_are_made_of_a_run_and_are_small(tmp_path: Path) -> None:
    screenshots.take(tmp_path, TINY[:-1])
    pictures = sorted(tmp_path.iterdir())
    assert [path.name for path in pictures] == ["report.png", "report_weights.png"]
    for path in (*pictures, *(screenshots.RESULTS / path.name for path in pictures)):
        assert path.stat().st_size < 150_000
        with Image.open(path) as picture:
            assert 900 < picture.width <= screenshots.WIDTH
            # something is drawn
            assert len(picture.convert("RGB").getcolors(10**6) or ()) > 50
