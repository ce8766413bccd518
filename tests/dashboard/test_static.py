"""Files of the page: what others wrote is byte for byte what was reviewed, and the page stays small and its own."""

import gzip
import hashlib
import re
from pathlib import Path

import dashboard
from dashboard.assets import Assets

STATIC = Path(dashboard.__file__).with_name("static")
# Written down when the files were reviewed; `make vendor` fetches the same.
REVIEWED = {
    "htm-preact.js": "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
    "marked.js": "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
    "uplot.js": "073f022c867cb9c40f0be28f5d680830857a5b3a04082c2473880c8328a12e04",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
LICENSES = {f"LICENSE-{name}" for name in ("htm", "preact", "uplot", "marked")}
MAX_GZIPPED_BYTES = 45_000
MAX_LATER_BYTES = 25_000
MAX_WHOLE_BYTES = 250_000
MAX_VENDORED_BYTES = 150_000


def own_modules() -> list[Path]:
    return [path for path in STATIC.rglob("*.js") if path.parent.name != "vendor"]


def test_vendored_files_are_those_that_were_reviewed() -> None:
    files = [*(STATIC / "vendor").glob("*.js"), *(STATIC / "vendor").glob("*.css")]
    vendored = {path.name: path.read_bytes() for path in files}
    assert {n: hashlib.sha256(raw).hexdigest() for n, raw in vendored.items()} == REVIEWED
    assert sum(map(len, vendored.values())) <= MAX_VENDORED_BYTES
    assert {path.name for path in (STATIC / "vendor").iterdir()} >= LICENSES


def imports_of(path: Path) -> set[Path]:
    """Return a module and all that it imports before it runs."""
    paths, pending = set[Path](), [path]
    while pending:
        one = pending.pop()
        if one not in paths:
            paths.add(one)
            targets = re.findall(
                r'^(?:import|export) .*from "([^"]+)"', one.read_text(), re.MULTILINE
            )
            pending += [(one.parent / target).resolve() for target in targets]
    return paths


def size_of(paths: set[Path]) -> int:
    return sum(len(gzip.compress(path.read_bytes())) for path in paths)


def test_the_first_screen_and_every_later_one_are_small() -> None:
    first = imports_of((STATIC / "main.js").resolve())
    assert size_of(first) <= MAX_GZIPPED_BYTES
    preloaded = re.findall(
        r'modulepreload" href="/static/([^"]+)"', (STATIC / "index.html").read_text()
    )
    assert {(STATIC / one).resolve() for one in preloaded} <= first
    assert len(preloaded) <= 12
    later = re.findall(r'import\("([^"]+)"\)', (STATIC / "main.js").read_text())
    assert len(later) >= 7
    for target in later:
        more = imports_of((STATIC / target).resolve()) - first
        assert size_of(more) <= MAX_LATER_BYTES, target


def test_the_whole_page_is_small() -> None:
    files = Assets.load().files
    served = [asset for name, asset in files.items() if "LICENSE" not in name]
    assert sum(len(asset.packed or asset.body) for asset in served) <= MAX_WHOLE_BYTES


def test_the_version_of_the_page_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text("1")
    before = Assets.load(tmp_path).version
    assert Assets.load(tmp_path).version == before
    (tmp_path / "a.js").write_text("2")
    assert Assets.load(tmp_path).version != before


def test_no_module_writes_markup_or_evaluates_text() -> None:
    for path in own_modules():
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function",
            path.read_text(),
        )
        assert found == [], path.name


def test_modules_import_only_files_of_the_page() -> None:
    for path in own_modules():
        for target in re.findall(r'from "([^"]+)"', path.read_text()):
            assert (path.parent / target).resolve().is_file(), f"{path.name}: {target}"


def test_cells_of_tables_are_closed() -> None:
    """`htm` knows no implied end tags: `<td>a<td>b` would nest."""
    for path in own_modules():
        text = path.read_text()
        for tag in ("td", "th", "tr", "li", "dt", "dd", "p"):
            opened = len(re.findall(rf"<{tag}[ >]", text))
            assert opened == text.count(f"</{tag}>"), f"{path.name}: <{tag}>"
