"""The docs as a site in a real Chromium: it loads nothing from other servers, has a search, and fits a phone."""

import functools
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from docs_commands import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

SITE = ROOT / "out" / "site"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    if not (SITE / "index.html").exists():
        pytest.skip("there is no site in out/site: make docs")
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_the_site_loads_nothing_from_other_servers_and_has_a_search(site: str, page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.set_viewport_size({"width": 1400, "height": 900})
    page.goto(site)
    page.click("nav >> text=Figures and claims >> visible=true")
    page.wait_for_selector("h1:has-text('Figures and claims')")
    page.click("input.md-search__input")
    page.keyboard.type("deltas")
    page.wait_for_selector(".md-search-result__item >> nth=0")
    assert asked and [url for url in asked if not url.startswith((site, "data:", "blob:"))] == []


def test_every_page_has_one_title_and_leads_to_the_glossary(site: str) -> None:
    for path in sorted(SITE.rglob("*.html")):
        text = path.read_text(encoding="utf-8")
        if path.name != "404.html":
            assert text.count("<h1") == 1, path
        assert "glossary.html" in text, path


def test_a_word_of_the_glossary_is_found_by_the_search(site: str, page: Any) -> None:
    page.set_viewport_size({"width": 1400, "height": 900})
    page.goto(site)
    page.click("input.md-search__input")
    page.keyboard.type("pseudo-gradient")
    page.wait_for_selector(".md-search-result__item >> text=Glossary")


def test_every_page_fits_a_phone(site: str, page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    for path in sorted(SITE.rglob("*.html")):
        page.goto(site + path.relative_to(SITE).as_posix(), wait_until="domcontentloaded")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
