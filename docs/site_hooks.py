"""A hook of MkDocs: removes the addresses from which the theme's script would load more scripts.

It loads a polyfill for browsers before 2020, and Mermaid for pages with such diagrams; there are none.
"""

from pathlib import Path
from typing import Any

_HOST = "https://unpkg.com/"


def on_post_build(config: Any) -> None:
    """Replace the host in every script of the built site by a folder that does not exist."""
    for script in Path(config["site_dir"]).rglob("*.js"):
        text = script.read_text()
        if _HOST in text:
            script.write_text(text.replace(_HOST, "absent/"))
