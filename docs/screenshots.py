"""Pictures of every screen of the dashboard, light, dark and as on a phone: `make screenshots`.

All go to the folder build/screens; the best, to docs/images. `python -m docs.screenshots FOLDER NAME...` makes some.
"""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from playwright.async_api import Browser, Page, async_playwright

from docs.showcase import running_showcase
from tests.support.browser import PROGRAM
from tests.support.dashboard_fleets import MANIFEST

IMAGES: Final = Path(__file__).parent / "images"
SCREENS: Final = {
    "fleet": "/",
    "models": "/models",
    "model": "/models/qwen-coder",
    "why": "/models/long?why",
    "run": "/run",
    "preview": "/run?repo=mlx-community/Qwen3-30B-A3B-4bit",
    "macs": "/macs",
    "picture": "/macs?tab=picture",
    "groups": "/macs?tab=groups",
    "add": "/macs?tab=add",
    "mac": "/macs/studio-1",
    "group": "/groups/studios",
    "requests": "/requests",
    "ended": "/requests?tab=ended",
    "metrics": "/requests?tab=metrics",
    "chat": "/chat",
    "whatif": "/try?kind=ModelDeployment&name=long&kvBits=4&lost=studio-3",
    "apply": "/try",
    "events": "/activity",
    "changes": "/activity?tab=changes",
    "git": "/activity?tab=git",
    "logs": "/activity?tab=logs",
    "keys": "/settings",
    "versions": "/settings?tab=fleet",
    "time": "/macs",
}
"""The path of each screen."""
SHAPES: Final = {"light": (1200, 800), "dark": (1200, 800), "phone": (390, 844)}
BEST: Final = (
    *("fleet-light", "fleet-phone", "why-light", "whatif-dark", "apply-light", "chat-dark"),
    *("run-light", "preview-light"),
)
"""The pictures of the documentation."""
PICTURE: Final = "fleet.svg"
"""The picture that the page exports."""
_WAIT_MS: Final = 60_000
_REST_MS: Final = 1_200


async def shoot(browser: Browser, url: str, name: str, shape: str, folder: Path) -> None:
    """Write the picture of one screen."""
    width, height = SHAPES[shape]
    page = await browser.new_page(
        base_url=url,
        viewport={"width": width, "height": height},
        color_scheme="light" if shape == "light" else "dark",
    )
    page.set_default_timeout(_WAIT_MS)
    await page.goto(SCREENS[name])
    await page.locator("[data-state=live]").wait_for()
    await prepare(page, name)
    await page.wait_for_timeout(_REST_MS)
    await page.screenshot(path=folder / f"{name}-{shape}.png")
    await page.close()


async def prepare(page: Page, name: str) -> None:
    """Bring a screen into the state that is worth a picture."""
    if name == "run":
        await page.locator("tbody tr").first.wait_for()
    if name in ("fleet", "picture", "preview", "whatif"):
        await page.locator(".drawing").wait_for()
    if name == "chat":
        await page.locator("option").first.wait_for(state="attached")
        await page.fill("textarea", "What is a fleet of Macs good for?")
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Send").wait_for()
    if name == "ended":
        await page.locator("[data-ended] tbody button").first.click()
    if name == "apply":
        await page.get_by_label("Manifest, YAML").fill(MANIFEST)
        await page.locator("[data-plan]").wait_for()
    if name == "logs":
        select = page.locator(".toolbar select").first
        options = await select.locator("option").all_text_contents()
        await select.select_option(
            next(option for option in options if option.startswith("gateway/"))
        )
    if name == "time":
        await page.get_by_role("button", name="Time", exact=True).click()
        await page.get_by_role("slider", name="Moment").wait_for()


async def export(browser: Browser, url: str, path: Path) -> None:
    """Write the picture of the Macs as the page exports it: an SVG with both themes."""
    page = await browser.new_page(base_url=url, viewport={"width": 1200, "height": 800})
    page.set_default_timeout(_WAIT_MS)
    await page.goto(SCREENS["picture"])
    await page.locator(".drawing", has_text="GiB").wait_for()
    await page.locator(".drawing", has_text="size unknown").wait_for(state="detached")
    await page.get_by_text("Share", exact=True).click()
    await page.get_by_label("With names").check()
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Download SVG").click()
    await (await download.value).save_as(path)
    await page.close()


async def main(folder: Path, names: Sequence[str]) -> None:
    """Write the pictures of some screens into a folder; of all screens also the best to docs/images."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as state:
        async with running_showcase(Path(state)) as running, async_playwright() as playwright:
            program = await playwright.chromium.launch(
                executable_path=PROGRAM, args=["--no-sandbox"]
            )
            for name in names or SCREENS:
                for shape in SHAPES:
                    await shoot(program, running.url, name, shape, folder)
            await export(program, running.url, folder / PICTURE)
            await program.close()
    if names:
        return
    IMAGES.mkdir(exist_ok=True)
    for name in BEST:
        shutil.copy(folder / f"{name}.png", IMAGES / f"dashboard-{name}.png")
    shutil.copy(folder / PICTURE, IMAGES / PICTURE)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/screens"), sys.argv[2:]))
