"""A real browser without a window, driven by Playwright: pages that note what a good page never does."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    async_playwright,
    expect,
)

# A busy machine takes its time.
_TIMEOUT_MS = 60_000
PROGRAM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
needs_browser = pytest.mark.skipif(
    PROGRAM is None,
    reason="no browser on PATH: install chromium-headless-shell (Debian) or chromium",
)


WCAG = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"],
}
"""axe's rules: WCAG 2.2, levels A and AA."""


@dataclass
class Faults:
    """Faults of a page: errors, refused scripts, requests to other origins."""

    origin: str
    found: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        """Note the faults of a page from now on."""
        page.on("pageerror", lambda error: self.found.append(f"error: {error}"))
        page.on("console", self._on_console)
        page.on("request", self._on_request)
        page.on("dialog", lambda dialog: self.found.append(f"dialog: {dialog.message}"))

    def _on_console(self, message: ConsoleMessage) -> None:
        # The browser itself reports each answer that is no success; tests check those.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.found.append(f"console: {message.text}")

    def _on_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if f"{parts.scheme}://{parts.netloc}" != self.origin and parts.scheme != "data":
            self.found.append(f"request to another origin: {request.url}")


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """Run a browser until the block ends."""
    expect.set_options(timeout=_TIMEOUT_MS)
    # Chromium refuses its sandbox to root, as which CI runs.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=PROGRAM, args=arguments)
        yield browser
        await browser.close()


@asynccontextmanager
async def open_page(
    browser: Browser, url: str, *, width: int = 1280, theme: str = "light"
) -> AsyncIterator[tuple[Page, Faults]]:
    """Open a page of its own session. At the end it must have no faults."""
    options: dict[str, Any] = {
        "viewport": {"width": width, "height": 740},
        "color_scheme": theme,
        "base_url": url,
    }
    context: BrowserContext = await browser.new_context(**options)
    context.set_default_timeout(_TIMEOUT_MS)
    page, faults = await context.new_page(), Faults(url)
    faults.watch(page)
    try:
        yield page, faults
        assert faults.found == []
    finally:
        await context.close()


async def check_access(page: Page) -> None:
    """Check what is shown with axe's rules of WCAG 2.2 AA."""
    result = await Axe().run(page, options=WCAG)
    assert result.violations_count == 0, result.generate_report()
