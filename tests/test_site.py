"""The web site of `make site`: it may load nothing from other hosts, its navigation names pages that exist, its lock is sound."""

import re
from pathlib import Path

from docs.site_requests import outside_requests

ROOT = Path(__file__).parent.parent


def test_the_site_may_load_nothing_from_other_hosts(tmp_path: Path) -> None:
    """`make site` checks what it has built; here every way in which a page could load something."""
    (tmp_path / "good.html").write_text(
        '<link rel="canonical" href="https://example.com/"><link rel=stylesheet href="assets/a.css">'
        '<a href="https://example.com/">a link may be followed</a><img src="a.png">'
    )
    assert outside_requests(tmp_path) == []
    bad = (
        '<script src="https://cdn.example.com/a.js"></script>',
        '<link rel="stylesheet" href="//fonts.example.com/css">',
        '<link rel="preconnect" href="https://fonts.example.com">',
        '<img src="https://example.com/a.png">',
        '<div style="background: url(https://example.com/a.png)"></div>',
    )
    for text in bad:
        (tmp_path / "bad.html").write_text(text)
        assert len(outside_requests(tmp_path)) == 1, text
    (tmp_path / "bad.html").unlink()
    (tmp_path / "a.css").write_text(
        '@import "https://example.com/b.css"; .x {background: url(b.png)}'
    )
    (tmp_path / "a.js").write_text('load("https://unpkg.com/mermaid")')
    assert [request.partition(":")[0] for request in outside_requests(tmp_path)] == [
        "a.css",
        "a.js",
    ]


def test_every_page_of_the_site_navigation_exists() -> None:
    """Find what `mkdocs build --strict` refuses, without its environment."""
    named = re.findall(r"([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(named) > 40
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert len(set(named)) == len(named)
    operations = {
        f"docs/operations/{path.name}" for path in (ROOT / "docs/operations").glob("*.md")
    }
    assert operations <= set(named)


def test_the_lock_of_the_site_names_no_host_and_has_hashes() -> None:
    text = (ROOT / "requirements-docs.txt").read_text()
    assert not re.search(r"https?://|index-url|find-links", text)
    pinned = re.findall(r"^[a-z0-9][^\n]*==[^\n]*\\$", text, re.MULTILINE)
    assert len(pinned) > 20
    assert text.count("--hash=sha256:") >= len(pinned)
