"""A real Chromium that tests look at the status page with."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="condition chromium: the browser is not installed")

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 375, "height": 720}


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Chromium without a window; gone afterwards."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only where there is a browser

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM)
        try:
            yield started
        finally:
            started.close()


@contextlib.contextmanager
def opened(chromium: Browser, url: str, **how: Any) -> Iterator[Page]:  # noqa: ANN401 - playwright's own
    """The page at `url` in a window of its own, when `shown` is true of it; fails when the page itself has failed."""
    shown = how.pop("shown", "device.textContent !== ''")
    failed: list[str] = []
    context = chromium.new_context(viewport=how.pop("viewport", DESKTOP), **how)
    context.set_default_timeout(20_000)
    page = context.new_page()
    page.on("pageerror", lambda error: failed.append(str(error)))
    try:
        page.goto(url)
        until(page, shown)
        yield page
    finally:
        context.close()
    assert failed == []


def until(page: Page, expression: str, within_s: float = 20.0) -> None:
    """Wait until a JavaScript expression is true; playwright's own way is one that the page's policy forbids."""
    give_up_at = time.monotonic() + within_s
    while not page.evaluate(expression):
        assert time.monotonic() < give_up_at, (
            f"not within {within_s} s: {expression}; it shows {page.inner_text('body')}"
        )
        page.wait_for_timeout(50)


def drop(page: Page, name: str, kind: str, content: bytes) -> None:
    """Drop a file on the box for pictures, as a hand would."""
    carried = page.evaluate_handle(
        """([name, type, content]) => {
            const carried = new DataTransfer();
            carried.items.add(new File([new Uint8Array(content)], name, { type }));
            return carried;
        }""",
        [name, kind, list(content)],
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": carried})
