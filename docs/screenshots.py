"""Pictures of the dashboard for the documentation: `make screenshots` while `make demo` runs."""

import asyncio
import sys
from pathlib import Path

from playwright.async_api import Browser, Page, async_playwright

from tests.support.browser import PROGRAM

IMAGES = Path(__file__).parent / "images"
_WAIT_MS = 60_000
_WIDE, _PHONE = {"width": 1200, "height": 800}, {"width": 390, "height": 844}


async def _shoot(browser: Browser, url: str, name: str, *, theme: str, is_phone: bool) -> None:
    """Write the picture of one screen."""
    path = "/" if name in ("fleet", "phone") else f"/{name}"
    page = await browser.new_page(
        base_url=url,
        viewport=_PHONE if is_phone else _WIDE,  # type: ignore[arg-type]  # a dict is a ViewportSize
        color_scheme="dark" if theme == "dark" else "light",
    )
    page.set_default_timeout(_WAIT_MS)
    await page.goto(path)
    await page.get_by_text("live", exact=True).wait_for()
    if name == "chat":
        await _ask(page)
    await page.screenshot(path=IMAGES / f"dashboard-{name}.png")
    await page.close()


async def _ask(page: Page) -> None:
    await page.locator("option").first.wait_for(state="attached")
    await page.fill("textarea", "What is the capital of France? Answer in one sentence.")
    await page.keyboard.press("Enter")
    await page.get_by_role("button", name="Send").wait_for()


async def main(url: str) -> None:
    """Write the pictures of a dashboard at this URL."""
    IMAGES.mkdir(exist_ok=True)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        for name, theme in (("fleet", "light"), ("models", "dark"), ("chat", "light")):
            await _shoot(browser, url, name, theme=theme, is_phone=False)
        await _shoot(browser, url, "phone", theme="dark", is_phone=True)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:4003"))
