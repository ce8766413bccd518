"""Import of a report of `fleetctl mac-report` as captures: `python -m tests.mac_captures.import_report mac.tar.gz`.

The archive comes from a stranger: it may hold only the two files of a report, and its texts only become files whose
names are known commands.
"""

import argparse
import gzip
import json
import re
import sys
import tarfile
from pathlib import Path
from typing import Any, Final

from fleetctl.mac_report.parsers import parse
from fleetctl.mac_report.readings import RunContext
from fleetctl.mac_report.report import FILE, FORMAT
from machinery.macos_commands import COMMANDS

ROOT: Final = Path(__file__).parent
NAMES: Final = (f"mac-report/{FILE}", "mac-report/README.txt")
_MAX_BYTES: Final = 64 << 20
_PIECE: Final = 1 << 20


class BadArchiveError(Exception):
    """The archive is no report."""


def read_report(path: Path) -> dict[str, Any]:
    """Return the report in an archive. Raises BadArchiveError."""
    try:
        with gzip.open(path) as packed:
            raw = packed.read(_MAX_BYTES + 1)
    except (OSError, EOFError) as error:
        raise BadArchiveError(f"{path.name} is not a readable .tar.gz: {error}") from error
    if len(raw) > _MAX_BYTES:
        raise BadArchiveError(f"{path.name} holds more than {_MAX_BYTES} bytes")
    spool = ROOT / ".import.tar"
    try:
        spool.write_bytes(raw)
        with tarfile.open(spool, "r:") as archive:
            members = [archive.next() for _ in range(len(NAMES) + 1)]
            found = {member.name for member in members if member}
            if (
                found - set(NAMES)
                or members[-1] is not None
                or not all(m.isreg() for m in members if m)
            ):
                raise BadArchiveError(f"it must hold the files {', '.join(NAMES)} and nothing else")
            content = archive.extractfile(NAMES[0])
            tree = json.loads(content.read(_MAX_BYTES)) if content else None
    except (tarfile.TarError, KeyError, ValueError, RecursionError, EOFError) as error:
        raise BadArchiveError(f"{path.name} holds no report: {error}") from error
    finally:
        spool.unlink(missing_ok=True)
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise BadArchiveError(f"{path.name} has not the format {FORMAT}")
    return tree


def texts(tree: dict[str, Any]) -> dict[str, str]:
    """Return the outputs by the name of their file; another kind of process only where its output differs."""
    runs = tree.get("runs")
    result: dict[str, str] = {}
    for context in RunContext:
        by_command = runs.get(context.value) if isinstance(runs, dict) else None
        for name, run in by_command.items() if isinstance(by_command, dict) else ():
            text = run.get("out") if isinstance(run, dict) else None
            if name not in COMMANDS or not isinstance(text, str) or not text.strip():
                continue
            if context is RunContext.USER:
                result[name] = text
            elif parse(COMMANDS[name], text) != parse(COMMANDS[name], result.get(name, "")):
                result[f"{name}@{context}"] = text
    return result


def import_report(path: Path, root: Path = ROOT) -> Path:
    """Write the captures of a report, and return their folder. Raises BadArchiveError."""
    tree = read_report(path)
    name = f"{tree.get('model')}-{tree.get('build')}"
    if not re.fullmatch(r"[A-Za-z]{1,20}\d{1,3},\d{1,3}-[0-9A-Za-z]{3,12}", name):
        raise BadArchiveError(f"model and build are {name[:60]!r}; expected such as Mac16,11-25C56")
    outputs = texts(tree)
    if not outputs:
        raise BadArchiveError(f"{path.name} holds no output of a known command")
    folder = root / name
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise BadArchiveError(f"{folder} exists; move it away to import {path.name}") from error
    for file, text in outputs.items():
        (folder / f"{file}.txt").write_text(text, encoding="utf-8")
    (folder / "SOURCE").write_text(
        f"*: fleetctl mac-report of {tree.get('fleet')}\n", encoding="utf-8"
    )
    write_expected(folder)
    return folder


def expected(folder: Path) -> dict[str, Any]:
    """Return what our parsers read in the captures of a folder."""
    return {
        path.stem: parse(COMMANDS[path.stem.partition("@")[0]], path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.txt"))
    }


def write_expected(folder: Path) -> None:
    """Record what our parsers read."""
    text = json.dumps(expected(folder), indent=1, ensure_ascii=False)
    (folder / "expected.json").write_text(f"{text}\n", encoding="utf-8")


def main() -> int:
    """Import an archive, or record what the parsers read now."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("archive", type=Path, nargs="?")
    parser.add_argument("--expect", action="store_true", help="write every expected.json anew")
    options = parser.parse_args()
    if options.expect:
        for folder in sorted(path.parent for path in ROOT.glob("*/SOURCE")):
            write_expected(folder)
        return 0
    try:
        folder = import_report(options.archive)
    except (BadArchiveError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{folder}: read expected.json against the outputs before you commit\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
