"""Checks that a built site loads nothing from other hosts: scripts, styles, fonts, images, frames.

    python docs/site_requests.py build/site

Links that a reader may follow are allowed.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_TAG: Final = re.compile(r"<([a-zA-Z][\w-]*)\s+([^>]*)>")
_ATTRIBUTE: Final = re.compile(r"([\w-]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]+))")
_ADDRESS: Final = re.compile(r"(?:https?:)?//", re.IGNORECASE)
# Attributes by which a page loads something by itself.
_LOADING: Final = frozenset({"src", "srcset", "poster", "data", "action"})
# `<link>` relations that load nothing.
_PASSIVE: Final = frozenset({"canonical", "prev", "next", "alternate", "license"})
_IN_STYLES: Final = re.compile(r"(?:@import\s+|url\()\s*[\"']?((?:https?:)?//[^\"')\s]+)")
# Scripts that could be loaded, fetched or imported; a bundle may name addresses in texts and comments.
_IN_SCRIPTS: Final = re.compile(
    r"[\"'`](https?://[^\"'`\s]+?\.(?:m?js|css|json|wasm)|https?://unpkg\.com[^\"'`]*)[\"'`]"
)


def _loads_of_page(text: str) -> Iterator[str]:
    """Yield what one page loads from other hosts."""
    for tag, rest in _TAG.findall(text):
        values = {name.lower(): a or b or c for name, a, b, c in _ATTRIBUTE.findall(rest)}
        for name, value in values.items():
            is_link = tag.lower() == "link" and name == "href" and values.get("rel") not in _PASSIVE
            if (name in _LOADING or is_link) and _ADDRESS.match(value):
                yield f"<{tag} {name}={value}>"
            if name == "style":
                yield from _IN_STYLES.findall(value)


def outside_requests(site: Path) -> list[str]:
    """Return what the site's pages, styles and scripts load from other hosts, with the file of each."""
    found: list[str] = []
    for path in sorted(site.rglob("*")):
        if path.suffix == ".html":
            found += [
                f"{path.relative_to(site)}: {one}" for one in _loads_of_page(path.read_text())
            ]
        elif path.suffix == ".css":
            found += [
                f"{path.relative_to(site)}: {one}" for one in _IN_STYLES.findall(path.read_text())
            ]
        elif path.suffix == ".js":
            found += [
                f"{path.relative_to(site)}: {one}" for one in _IN_SCRIPTS.findall(path.read_text())
            ]
    return found


def main() -> None:
    """Check the site of the command line, and report what it loads."""
    site = Path(sys.argv[1])
    pages = len(list(site.rglob("*.html")))
    found = outside_requests(site)
    for one in found:
        sys.stderr.write(f"{one}\n")
    if found or not pages:
        raise SystemExit(f"{site}: {len(found)} loads from other hosts in {pages} pages")
    sys.stdout.write(f"{site}: {pages} pages, no load from other hosts\n")


if __name__ == "__main__":
    main()
