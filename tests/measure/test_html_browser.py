"""A report in a real browser without a network: no error, no request, within the width of a phone, dark and light."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretoken.measure.html import html_page
from tests.measure.test_html import REPORT
from tests.server.serving import chromium, opened_browser

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium: run scripts/get_browser.sh")

BACKGROUND = "getComputedStyle(document.body).backgroundColor"
WIDTH = "document.documentElement.scrollWidth"


def test_a_report_opens_offline_without_an_error_and_fits_a_phone(tmp_path: Path) -> None:
    path, errors, requests = tmp_path / "report.html", [], []
    path.write_text(html_page(REPORT), encoding="utf-8")
    colours: dict[str, Any] = {}
    with opened_browser() as browser:
        for scheme in ("light", "dark"):
            with browser.new_context(
                viewport={"width": 390, "height": 844}, color_scheme=scheme, offline=True
            ) as context:
                page = context.new_page()
                page.on("pageerror", lambda error: errors.append(str(error)))
                page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
                page.on("request", lambda request: requests.append(request.url))
                page.goto(path.as_uri())
                assert page.locator("svg").count() >= 2
                assert page.evaluate(WIDTH) <= 390
                colours[scheme] = page.evaluate(BACKGROUND)
    assert errors == []
    assert set(requests) == {path.as_uri()}
    assert colours["light"] != colours["dark"]
