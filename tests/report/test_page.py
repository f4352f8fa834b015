"""The page in a browser: it draws everything, makes no network requests, and is small for any run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from browser import browser_program, opened_browser, opened_page
from made_runs import LAYERS, make_run, metrics_of_runs, rising

from hpcfl.methods import METHODS
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.report.page import write_report
from hpcfl.results.run import load_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.skipif(
    browser_program() is None, reason="there is no chromium, chromium-browser or google-chrome in PATH"
)

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened_browser() as started:
        yield started


@pytest.fixture(scope="module")
def pfedla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of five clients and six evaluations, with pFedLA's weights."""
    alpha = RNG.dirichlet(np.ones(5), (6, 5, len(LAYERS))).astype(np.float32)
    folder = tmp_path_factory.mktemp("runs") / "pfedla"
    return make_run(folder, rising(6, 5), of_method={"alpha": alpha})


def written(*folders: Path) -> Path:
    """Write the page of runs beside the first one's folder."""
    out = folders[0].parent / f"{folders[0].name}.html"
    write_report([load_run(folder) for folder in folders], out)
    return out


def drawings(page: Page) -> list[tuple[str, float, float]]:
    """Return kind, width and height of every drawing that is visible."""
    found = page.evaluate(
        """() => [...document.querySelectorAll("figure svg[role], figure canvas")].filter(
            (drawing) => !drawing.closest("details:not([open])")).map((drawing) => {
            const box = drawing.getBoundingClientRect();
            return [drawing.closest("figure").dataset.chart, box.width, box.height]; })"""
    )
    return [tuple(one) for one in found]


@contextmanager
def drawn(browser: Browser, path: Path, *kinds: str, width: int = 1200) -> Iterator[Page]:
    """Open a page, which draws these kinds and nothing empty, without a complaint or a request."""
    with opened_page(browser, path, width=width) as opened:
        found = drawings(opened.page)
        assert {kind for kind, *_ in found} == set(kinds)
        assert all(width > 60 and height > 20 for _, width, height in found), found
        assert not opened.page.locator("figure:not(:has(figcaption)):not(details:not([open]) figure)").count()
        assert "NaN" not in opened.page.locator("main").inner_html()
        yield opened.page
        assert (opened.complaints, opened.requests) == ([], [])


def image(page: Page, selector: str) -> str:
    """Return what the first of these canvases shows."""
    return str(page.locator(selector).first.evaluate("canvas => canvas.toDataURL()"))


def caption(page: Page, kind: str) -> str:
    return page.locator(f"[data-chart={kind}] figcaption").first.inner_text()


def rows_of_table(page: Page, kind: str) -> Locator:
    """Open the table under a figure and return its rows, which are there some time after the click."""
    page.locator(f"[data-chart={kind}] summary").click()
    rows = page.locator(f"[data-chart={kind}] tbody tr")
    rows.first.wait_for()
    return rows


KINDS = ("accuracy", "loss", "clients", "picture", "bytes", "seconds", "by-bytes", "by-steps")
NO_PICTURE = [kind for kind in KINDS if kind != "picture"]


@pytest.fixture(scope="module")
def page(browser: Browser, pfedla: Path) -> Iterator[Page]:
    """Return the run's page; tests leave it in light colours, 1,200 pixels wide, without a complaint."""
    with drawn(browser, written(pfedla), *KINDS) as page:
        yield page


def test_the_slider_steps_through_rounds_and_a_client_is_chosen(page: Page) -> None:
    slider, canvas = page.locator("input[type=range]"), page.locator("[data-chart=picture] canvas")
    assert canvas.count() == len(LAYERS) + 1
    newest = image(page, "[data-chart=picture] canvas")
    slider.focus()
    page.keyboard.press("Home")
    assert page.locator("[data-chart=picture] output").inner_text() == "1"
    assert image(page, "[data-chart=picture] canvas") != newest
    of_one = image(page, "[data-chart=picture] .maps:last-of-type canvas")
    page.locator("[data-chart=picture] select").select_option("3")
    assert image(page, "[data-chart=picture] .maps:last-of-type canvas") != of_one


def test_exact_values_are_shown_by_pointer_and_by_keys(page: Page) -> None:
    tooltip = page.locator("#tooltip")
    page.locator("[data-chart=accuracy] svg[role]").focus()
    page.keyboard.press("ArrowRight")
    # the last evaluation: 90 % of what the clients reach, which is 0.8 in the mean
    assert "round: 6" in tooltip.inner_text()
    assert ": 72.00 %" in tooltip.inner_text()
    page.keyboard.press("ArrowLeft")
    assert "round: 5" in tooltip.inner_text()
    page.keyboard.press("Escape")
    assert tooltip.is_hidden()
    page.locator("[data-chart=picture] canvas").first.hover(position={"x": 60, "y": 10})
    assert "conv1: client 0, client" in tooltip.inner_text()


def test_every_control_is_reached_by_keys_and_shows_its_focus(page: Page) -> None:
    reached = set()
    page.locator(".skip").focus()
    for _ in range(32):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "() => [document.activeElement.tagName, getComputedStyle(document.activeElement).outlineWidth]"
        )
        reached.add(name)
        assert name == "BODY" or outline == "3px"
    assert {"BUTTON", "svg", "SUMMARY", "SELECT", "INPUT", "CANVAS"} <= reached


def test_colours_are_light_or_dark_by_preference_and_by_button(page: Page) -> None:
    def looks() -> tuple[str, str]:
        background = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        return background, image(page, "[data-chart=clients] canvas")

    light = looks()
    page.locator("#theme").press("Enter")
    dark = looks()
    page.locator("#theme").press("Enter")
    assert looks() == light
    page.emulate_media(color_scheme="dark")
    # the browser reports it with its next frame
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    assert looks() == dark
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    assert looks() == light
    page.evaluate("() => dispatchEvent(new Event('afterprint'))")
    assert looks() == dark
    page.emulate_media(color_scheme="light")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'light'")


def test_tables_sort_by_number(page: Page) -> None:
    rows_of_table(page, "clients")
    heading = page.locator("[data-chart=clients] th", has_text="accuracy").first
    first = page.locator("[data-chart=clients] tbody th").first
    heading.locator("button").click()
    assert (heading.get_attribute("aria-sort"), first.inner_text()) == ("ascending", "client 0")
    heading.locator("button").click()
    assert (heading.get_attribute("aria-sort"), first.inner_text()) == ("descending", "client 4")


def test_a_narrow_window_has_no_sideways_scroll(page: Page) -> None:
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 380
    assert all(width < 380 for _, width, _ in drawings(page))
    page.set_viewport_size({"width": 1200, "height": 900})


def test_several_runs_are_drawn_when_they_are_opened(browser: Browser, pfedla: Path) -> None:
    shares = RNG.random((4, 5)).astype(np.float32)
    apfl = make_run(pfedla.parent / "apfl", rising(4, 5), ["method.name=apfl"], of_method={"alpha": shares})
    side_by_side = ("accuracy", "loss", "distribution", "bytes", "seconds", "by-bytes", "by-steps")
    with drawn(browser, written(apfl, pfedla), *side_by_side) as page:
        page.locator("details.run > summary").first.click()
        # few clients and one number each: lines
        page.locator("details.run[open] [data-chart=picture] svg[role]").wait_for()
        assert page.locator("details.run[open] [data-chart=picture] .legend button").count() == 5
        assert {kind for kind, *_ in drawings(page)} == {*side_by_side, *KINDS}


def test_unseen_clients_have_a_line_and_a_mark(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "fedavg", rising(4, 5), ["method.name=fedavg"], unseen=np.full((4, 2), 0.5))
    with drawn(browser, written(folder), *NO_PICTURE) as page:
        for kind in ("accuracy", "loss"):
            assert "unseen clients" in page.locator(f"[data-chart={kind}] .legend").inner_text()
        assert "Pale bars: unseen clients" in caption(page, "clients")
        canvas = page.locator("[data-chart=clients] canvas")
        canvas.focus()
        shown = []
        for _ in range(7):
            page.keyboard.press("ArrowDown")
            shown.append(page.locator("#tooltip").inner_text().splitlines()[0])
        assert shown[-2:] == ["client 5, unseen", "client 6, unseen"]
        rows = rows_of_table(page, "clients").locator("th").all_inner_texts()
        assert [row for row in rows if "unseen" in row] == shown[-2:]
    with opened_page(browser, written(make_run(tmp_path / "local", rising(4, 7)))) as opened:
        assert "Pale" not in caption(opened.page, "clients")


def test_the_legend_says_of_which_clients_the_mean_is(browser: Browser, tmp_path: Path) -> None:
    for key in ("clients.step_s=1", "train.participation=0.5", "clients.drop_rate=0.1"):
        folder = make_run(tmp_path / key, rising(4, 5), ["method.name=fedavg", key])
        with opened_page(browser, written(folder)) as opened:
            legend = opened.page.locator("[data-chart=accuracy] .legend").inner_text()
            assert "after training" in legend
            assert ("after training, only the round's clients" in legend) == ("step_s" not in key)
    with drawn(browser, written(tmp_path / "clients.step_s=1"), *NO_PICTURE, "by-simulated") as page:
        assert "Accuracy against simulated time" in caption(page, "by-simulated")


def test_a_confusion_matrix_is_of_all_clients_or_the_chosen_one(browser: Browser, tmp_path: Path) -> None:
    more = {"unseen": np.full((4, 1), 0.5), "added": metrics_of_runs(5)}
    folder = make_run(tmp_path / "fedavg", rising(4, 4), ["method.name=fedavg"], **more)
    with drawn(browser, written(folder), "confusion", *NO_PICTURE, width=360) as page:
        figure = page.locator("[data-chart=confusion]")
        clients = figure.locator("option").all_inner_texts()
        assert clients == ["all clients in training", *(f"client {n}" for n in range(4)), "client 4, unseen"]
        together = image(page, "[data-chart=confusion] canvas")
        figure.locator("select").select_option(label="client 3")
        assert image(page, "[data-chart=confusion] canvas") != together
        figure.locator("canvas").focus()
        for key in ["ArrowDown"] * 3 + ["ArrowRight"] * 3:
            page.keyboard.press(key)
        tooltip = page.locator("#tooltip").inner_text().splitlines()
        assert tooltip == ["client 3", "class 3, predicted as 3", "samples: 3 of 10"]
        lines = rows_of_table(page, "confusion").all_inner_texts()
        assert len(lines) == 4 + 5
        assert lines[3].split("\t") == ["all clients in training", "3", "10", "3", "30.00 %"]
        assert lines[8].split("\t") == ["client 4, unseen", "4", "10", "4", "40.00 %"]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_shows_a_run_of_one_round_and_a_diverged_one(browser: Browser, tmp_path: Path) -> None:
    one = {"alpha": np.ones((1, 1, len(LAYERS), 1), np.float32)}
    with drawn(browser, written(make_run(tmp_path / "one", np.full((1, 1), 0.5), of_method=one)), *KINDS):
        pass
    accuracy = rising(5, 4)
    accuracy[2:] = np.nan
    coefficient = np.where(np.isnan(accuracy), np.nan, 0.5)
    more = {"of_method": {"coefficient": coefficient}}
    path = written(make_run(tmp_path / "fedafk", accuracy, ["method.name=fedafk"], **more))
    with drawn(browser, path, *KINDS):
        pass
    text = path.read_text()
    assert "nan" in text
    # the block of data is JSON, which has no nan
    assert "NaN" not in text.partition('id="data">')[2].partition("</script>")[0]


def test_weights_of_a_thousand_clients_are_thinned(browser: Browser, tmp_path: Path) -> None:
    settings, shape = ["method.name=heurpfedla", "data.per_client=2"], (3, 1000, len(LAYERS))
    of_method = {"self_weight": RNG.random(shape), "retained_rounds": RNG.integers(0, 3, shape)}
    more = {"of_method": of_method, "derived": {"alpha": RNG.random((*shape[1:], 1000), np.float32)}}
    path = written(make_run(tmp_path / "heurpfedla", rising(3, 1000), settings, **more))
    assert path.stat().st_size < 3_000_000
    with drawn(browser, path, *KINDS) as page:
        weights = page.locator("[data-chart=picture]").first
        assert weights.locator("canvas").count() == len(LAYERS) + 1
        assert weights.locator("input").count() == 0
        assert "round 3" in weights.locator(".controls").first.inner_text()
        note = weights.locator(".note").inner_text()
        assert note.startswith("Shown: only the last evaluation: earlier ones are not stored for so many cl")
        assert "; clients 0 to 499 of 1000" in note


def test_a_long_run_of_many_clients_stays_small(browser: Browser, tmp_path: Path) -> None:
    alpha = RNG.random((125, 100, len(LAYERS), 100), np.float32).astype(np.float16)
    folder = make_run(tmp_path / "pfedla", rising(125, 100), of_method={"alpha": alpha}, eval_every=20)
    path = written(folder)
    assert path.stat().st_size < 3_000_000
    with drawn(browser, path, *KINDS) as page:
        note = page.locator("[data-chart=picture] .note").inner_text()
        assert "35 of 125 evaluations; values in 254 steps of 0.0039" in note
        assert page.locator("input[type=range]").get_attribute("max") == "34"


def test_a_constant_line_is_drawn(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unbounded = Diagnostic("coefficient", ("client",), "Coefficient", "")
    monkeypatch.setattr(METHODS["fedafk"], "diagnostics", (unbounded,))
    more = {"of_method": {"coefficient": np.full((3, 4), 0.5)}}
    folder = make_run(tmp_path / "fedafk", rising(3, 4), ["method.name=fedafk"], **more)
    with drawn(browser, written(folder), *KINDS) as page:
        # a line of some length, off the frame: the axis has a height
        lines = page.locator("[data-chart=picture] svg[role] path[fill=none]")
        assert lines.count() == 4
        assert lines.first.evaluate("line => line.getBBox().width > 100 && line.getBBox().y > 20")


def test_no_tick_label_is_cut_off(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "fedavg", rising(4, 3), ["method.name=fedavg"], eval_every=250)
    with drawn(browser, written(folder), *NO_PICTURE) as page:
        outside = page.evaluate(
            """() => [...document.querySelectorAll("figure svg[role] text")].filter((text) =>
                text.getBoundingClientRect().right > text.ownerSVGElement.getBoundingClientRect().right
            ).map((text) => text.textContent)"""
        )
        assert outside == []
        assert "1,000" in page.locator("[data-chart=accuracy] svg[role]").inner_html()
    # a few rounds have a label each
    with drawn(browser, written(make_run(tmp_path / "few", rising(2, 2))), *NO_PICTURE, width=800) as page:
        labels = page.locator("[data-chart=accuracy] svg[role] text").all_text_contents()
        assert labels[: labels.index("round")][-2:] == ["1", "2"]


def test_clusters_of_one_colour_differ(page: Page) -> None:
    assert page.evaluate("new Set(palette(true).slice(0, 3 * NUM_COLOURS).map(String)).size") == 21


def test_captions_mention_bands_and_dots_only_if_some_are_drawn(browser: Browser, tmp_path: Path) -> None:
    made = {
        name: make_run(tmp_path / name, rising(*shape), ["method.name=fedavg", "data.per_client=2"])
        for name, shape in {"two": (2, 3), "one": (1, 3), "many": (1, 201)}.items()
    }
    for names, kind, text, mark, is_drawn in (
        ("two", "accuracy", "Bands:", "polygon", True),
        ("one", "accuracy", "Bands:", "polygon", False),
        ("two one", "accuracy", "Bands:", "polygon", True),
        ("one one", "distribution", "Each dot is a client; the box", "circle", True),
        ("one many", "distribution", "Each dot is a client, of runs with at most 200;", "circle", True),
        ("many many", "distribution", "Each dot", "circle", False),
    ):
        with opened_page(browser, written(*[made[name] for name in names.split()])) as opened:
            assert (text in caption(opened.page, kind)) is is_drawn
            assert bool(opened.page.locator(f"[data-chart={kind}] {mark}").count()) is is_drawn
