"""Pages in a real headless browser: Chromium or Chrome, where one is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Opened:
    """A page, and what it complained of or asked from anywhere but its file."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def browser_program() -> str | None:
    """Return the first browser in PATH."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


@contextmanager
def opened_browser() -> Iterator[Browser]:
    """Start the browser of `browser_program`, which must be there."""
    from playwright.sync_api import sync_playwright

    flags = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_program(), args=flags)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened_page(browser: Browser, path: Path, *, width: int = 1200) -> Iterator[Opened]:
    """Open an HTML file in a fresh window of so many pixels, in light colours."""
    context = browser.new_context(color_scheme="light", viewport={"width": width, "height": 900})
    opened = Opened(context.new_page())
    page, address = opened.page, path.resolve().as_uri()
    page.on("console", lambda message: opened.complaints.append(message.text))
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    page.on(
        "request",
        lambda asked: (
            None
            if asked.url == address or asked.url.startswith("data:")
            else opened.requests.append(asked.url)
        ),
    )
    try:
        page.goto(address)
        yield opened
    finally:
        context.close()
