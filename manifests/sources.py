"""Sources of manifests: files, folders, standard input. Does not parse YAML."""

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from manifests.errors import ManifestError, ManifestErrors

# Ten thousand deployments of 400 bytes; a larger file is a mistake.
MAX_BYTES = 4 * 2**20
STDIN = "-"
STDIN_NAME = "standard input"
SUFFIXES = (".yaml", ".yml", ".json")
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,7})")


def read_all(
    sources: Sequence[str], *, recursive: bool, stdin: BinaryIO | None
) -> Iterator[tuple[str, str | ManifestError]]:
    """Yield every file's name with its text, or with the problem of reading it.

    A file that is named twice (directly, and by its folder) is read once.
    """
    seen: set[Path] = set()
    for source in dict.fromkeys(sources):
        if source == STDIN:
            yield STDIN_NAME, _caught(lambda: _read_stdin(stdin))
            continue
        if source.startswith(("https://", "http://")):
            yield source, _url(source)
            continue
        try:
            paths = _expand(Path(source), recursive=recursive)
        except ManifestErrors as errors:
            yield source, errors.problems[0]
            continue
        for path in paths:
            if path.absolute() not in seen:
                seen.add(path.absolute())
                yield str(path), _caught(partial(_read_file, path))


def _url(source: str) -> ManifestError:
    hint = f"Pipe it: curl -fsSL {source} | fleetctl ... -f {STDIN}"
    return ManifestError(source=source, message="is a URL, not a file", hint=hint)


def _caught(read: Callable[[], str]) -> str | ManifestError:
    try:
        return read()
    except ManifestErrors as errors:
        return errors.problems[0]


def _expand(path: Path, *, recursive: bool) -> list[Path]:
    """Return the file itself, or the manifests in the folder, sorted; hidden files are skipped."""
    if not path.is_dir():
        return [path]
    paths: list[Path] = []
    try:
        for folder, folders, files in os.walk(path, onerror=_raise):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if not recursive:
                folders.clear()
            names = (n for n in files if n.endswith(SUFFIXES) and not n.startswith("."))
            paths.extend(Path(folder) / name for name in names)
    except OSError as error:
        raise _failed(str(path), f"cannot be read: {error.strerror}") from error
    if not paths:
        hint = "" if recursive else "Folders inside it are read with --recursive"
        raise _failed(str(path), "is a folder without *.yaml, *.yml or *.json files", hint)
    return sorted(paths)


def _raise(error: OSError) -> None:
    raise error


def _read_file(path: Path) -> str:
    name = str(path)
    try:
        result = path.stat()
        # Unlike a FIFO it needs no opening, which could block; it ends as standard input does.
        match = _DESCRIPTOR.fullmatch(name)
        passed = int(match[1]) if match is not None and stat.S_ISFIFO(result.st_mode) else None
        if passed is None:
            # Refuse special files before opening them: opening a FIFO waits for a writer, possibly
            # forever.
            if not stat.S_ISREG(result.st_mode):
                kind = "a FIFO" if stat.S_ISFIFO(result.st_mode) else "a device or socket"
                raise _failed(
                    name,
                    f"is {kind}, not a file",
                    f"Pipe it, and write {STDIN} instead of its name",
                )
            if result.st_size > MAX_BYTES:
                raise _too_large(name, f"{result.st_size:,} bytes; the limit is")
        with path.open("rb") if passed is None else os.fdopen(os.dup(passed), "rb") as file:
            raw = file.read(MAX_BYTES + 1)  # it may have grown since the check
    except FileNotFoundError as error:
        missing = "is a link to a missing file" if path.is_symlink() else "does not exist"
        raise _failed(name, missing) from error
    except PermissionError as error:
        raise _failed(name, "cannot be read: permission denied", f"See: ls -l {name}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _failed(name, f"cannot be read: {_reason(error)}") from error
    return decode(name, raw)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _read_stdin(stdin: BinaryIO | None) -> str:
    if stdin is None:
        raise _failed(STDIN_NAME, "is not open")
    try:
        raw = stdin.read(MAX_BYTES + 1)
    except OSError as error:
        raise _failed(STDIN_NAME, f"cannot be read: {_reason(error)}") from error
    return decode(STDIN_NAME, raw)


def decode(name: str, raw: bytes) -> str:
    """Decode the text of a file.

    Raises:
        ManifestErrors: it is too large, or not UTF-8.

    """
    if len(raw) > MAX_BYTES:
        raise _too_large(name, "more than")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _failed(name, "is UTF-16, not UTF-8", "Save it as UTF-8")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = raw[error.start]
        raise _failed(
            name, f"is not UTF-8: byte 0x{byte:02x} in line {line}", "Save it as UTF-8"
        ) from error


def _too_large(name: str, size: str) -> ManifestErrors:
    message = f"is too large for a manifest: {size} {MAX_BYTES:,} bytes"
    return _failed(name, message, "Split it into files")


def _failed(name: str, message: str, hint: str = "") -> ManifestErrors:
    return ManifestErrors([ManifestError(source=name, message=message, hint=hint)])
