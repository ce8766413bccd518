"""Writing an export's files into a folder: all or nothing where one stands in the way, each whole or not at all."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

from fleetctl.errors import FleetctlError
from fleetctl.exports.files import ExportFile

Result: TypeAlias = Literal["written", "unchanged"]
_SHOWN = 5


def write(folder: Path, files: Sequence[ExportFile], *, force: bool) -> list[Result]:
    """Write the files; return what became of each. One that is as it should be is not touched.

    Raises:
        FleetctlError: others are in the way, and nothing was written; or the disk refuses.

    """
    try:
        there = {file.path: _read(folder / file.path) for file in files}
        others = [f for f in files if there[f.path] not in (None, f.text)]
        if others and not force:
            raise FleetctlError(_in_the_way(folder, others))
        for file in files:
            if there[file.path] != file.text:
                _write(folder / file.path, file.text)
    except OSError as error:
        where = error.filename or folder
        raise FleetctlError(f"cannot write {where}: {error.strerror}") from error
    return ["unchanged" if there[file.path] == file.text else "written" for file in files]


def present(folder: Path) -> list[PurePosixPath]:
    """Return the files in the folder's folders, relative to it."""
    found = folder.glob("*/*") if folder.is_dir() else ()
    return [PurePosixPath(path.relative_to(folder).as_posix()) for path in found]


def _read(path: Path) -> str | None:
    """Return the file's text; None if it is not there, and something that no text equals if it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        return "\0"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, so that renaming it is one step: whoever reads at that moment gets the old one or the new one.
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _in_the_way(folder: Path, others: Sequence[ExportFile]) -> str:
    shown = ", ".join(str(folder / file.path) for file in others[:_SHOWN])
    rest = len(others) - _SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return (
        f"nothing was written: {shown}{more} {'is' if len(others) == 1 else 'are'} there already, and "
        "not as the fleet has them. --force writes over them (comments in them are lost); or name another folder"
    )
