"""Pictures of every screen of the dashboard, wide and as on a phone, light and dark: `make screenshots`.

Places are taken of a fleet that is well, with one fault, and with many; other screens of the last. All go to the folder
build/screens, as SCREEN-TROUBLE-FORM.png; the best, and a sheet of each place in all states and forms, to docs/images.
`python -m docs.screenshots FOLDER NAME...` makes some.
"""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from playwright.async_api import Browser, Page, async_playwright

from docs.showcase import TROUBLES, Trouble, running_showcase
from tests.support.browser import PROGRAM
from tests.support.dashboard_fleets import MANIFEST

IMAGES: Final = Path(__file__).parent / "images"
SHEETS: Final = IMAGES / "places"
PLACES: Final = {
    "overview": "/",
    "models": "/models",
    "macs": "/macs",
    "requests": "/requests",
    "chat": "/chat",
    "activity": "/activity",
    "settings": "/settings",
    "try": "/try",
    "run": "/run",
}
"""The path of each place."""
SCREENS: Final = PLACES | {
    "model": "/models/qwen-coder",
    "why": "/models/long?why",
    "preview": "/try?repo=mlx-community/Qwen3-30B-A3B-4bit",
    "picture": "/macs?tab=picture",
    "groups": "/macs?tab=groups",
    "add": "/macs?tab=add",
    "mac": "/macs/studio-1",
    "group": "/groups/studios",
    "ended": "/requests?tab=ended",
    "metrics": "/requests?tab=metrics",
    "whatif": "/try?kind=ModelDeployment&name=long&kvBits=4&lost=studio-3",
    "changes": "/activity?tab=changes",
    "git": "/activity?tab=git",
    "logs": "/activity?tab=logs",
    "versions": "/settings?tab=fleet",
    "time": "/macs",
}
"""The path of each screen."""
FORMS: Final = {
    f"{width}-{theme}": (size, theme)
    for width, size in (("wide", (1280, 800)), ("phone", (390, 844)))
    for theme in ("light", "dark")
}
"""The size of the window and the theme, by the name of the form."""
BEST: Final = {
    "overview-none-wide-light": "overview-light",
    "overview-many-wide-dark": "overview-dark",
    "overview-one-phone-dark": "overview-phone",
    "why-many-wide-light": "why-light",
    "whatif-many-wide-dark": "whatif-dark",
    "try-none-wide-light": "apply-light",
    "chat-none-wide-dark": "chat-dark",
    "run-none-wide-light": "run-light",
    "preview-many-wide-light": "preview-light",
}
"""The pictures of the documentation, and their names there."""
PICTURE: Final = "fleet.svg"
"""The picture that the page exports."""
_WAIT_MS: Final = 60_000
_REST_MS: Final = 1_200


async def shoot(browser: Browser, url: str, name: str, form: str, path: Path) -> None:
    """Write the picture of one screen."""
    (width, height), theme = FORMS[form]
    page = await browser.new_page(
        base_url=url,
        viewport={"width": width, "height": height},
        color_scheme="light" if theme == "light" else "dark",
    )
    page.set_default_timeout(_WAIT_MS)
    await page.goto(SCREENS[name])
    await page.locator("[data-state=live]").wait_for()
    await prepare(page, name)
    await page.wait_for_timeout(_REST_MS)
    await page.screenshot(path=path)
    await page.close()


async def prepare(page: Page, name: str) -> None:
    """Bring a screen into the state that is worth a picture."""
    if name == "run":
        await page.locator("tbody tr").first.wait_for()
    if name in ("overview", "picture", "preview", "whatif"):
        await page.locator(".drawing").wait_for()
    if name == "chat":
        await page.locator("option").first.wait_for(state="attached")
        await page.fill("textarea", "What is a fleet of Macs good for?")
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Send").wait_for()
    if name == "ended":
        await page.locator("[data-ended] tbody button").first.click()
    if name == "try":
        await page.get_by_label("Manifest, YAML").fill(MANIFEST)
        await page.locator("[data-plan]").wait_for()
    if name == "logs":
        select = page.locator(".toolbar select").first
        options = await select.locator("option").all_text_contents()
        await select.select_option(
            next(option for option in options if option.startswith("gateway/"))
        )
    if name == "time":
        await page.keyboard.press("[")
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


async def shoot_fleet(
    browser: Browser, trouble: Trouble, names: Sequence[str], folder: Path
) -> None:
    """Write the pictures of some screens, and the exported picture, of a fleet in one state."""
    with tempfile.TemporaryDirectory() as state:
        async with running_showcase(Path(state), trouble) as running:
            for name in names:
                for form in FORMS:
                    path = folder / f"{name}-{trouble}-{form}.png"
                    await shoot(browser, running.url, name, form, path)
            await export(browser, running.url, folder / PICTURE)


async def compose(browser: Browser, name: str, folder: Path) -> None:
    """Write one sheet of a place: a row for each state of the fleet, with the place in all forms."""
    rows = [
        "".join(f'<img src="{name}-{trouble}-{form}.png">' for form in FORMS)
        for trouble in TROUBLES
    ]
    source = folder / f"{name}.html"
    style = "img { height: 400px; margin: 4px } body { background: gray; margin: 0; width: max-content }"
    source.write_text(f"<style>{style}</style>" + "<br>".join(rows))
    page = await browser.new_page(viewport={"width": 1720, "height": 1230})
    await page.goto(source.as_uri())
    await page.locator("body").screenshot(path=folder / f"{name}.png")
    await page.close()


async def main(folder: Path, names: Sequence[str]) -> None:
    """Write the pictures of some screens into a folder; of all screens also the best to docs/images."""
    folder.mkdir(parents=True, exist_ok=True)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        for trouble in TROUBLES:
            shown = SCREENS if trouble == TROUBLES[-1] else PLACES
            chosen = [name for name in shown if not names or name in names]
            await shoot_fleet(browser, trouble, chosen, folder)
        sheets = [name for name in PLACES if not names or name in names]
        for name in sheets:
            await compose(browser, name, folder)
        await browser.close()
    if names:
        return
    SHEETS.mkdir(parents=True, exist_ok=True)
    for name in sheets:
        shutil.copy(folder / f"{name}.png", SHEETS)
    for name, title in BEST.items():
        shutil.copy(folder / f"{name}.png", IMAGES / f"dashboard-{title}.png")
    shutil.copy(folder / PICTURE, IMAGES / PICTURE)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/screens"), sys.argv[2:]))
