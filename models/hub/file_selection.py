"""The files of a commit that are fetched: chosen by patterns, never code, and never a path that leaves the folder."""

import re
import unicodedata
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

from models.hub.errors import ListingRefusedError
from models.hub.model_hub import RemoteFile
from models.model_files import PARTIAL_MARK

DEFAULT_PATTERNS: Final = (
    "*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt", "*.tiktoken",
)  # fmt: skip
"""Files of an MLX model. A pattern without a slash is matched with a file's name in any folder."""

# Code is never run, so it is never fetched: Python, shell, shared libraries, pickles (which are programs).
_CODE: Final = frozenset({".py", ".pyc", ".sh", ".so", ".dylib", ".pkl", ".pickle", ".exe"})
# Limits of what a list may ask for. The largest published models have 4,000 files and 1.5 TB.
MAX_FILES: Final = 10_000
_MAX_FILE_BYTES: Final = 2 << 40
_MAX_TOTAL_BYTES: Final = 8 << 40
_MAX_PATH_LENGTH: Final = 400
_MAX_NAME_BYTES: Final = 200
_MAX_DEPTH: Final = 8
_MAX_PATTERNS: Final = 100


def select_files(
    files: Iterable[RemoteFile], patterns: tuple[str, ...] = DEFAULT_PATTERNS
) -> tuple[RemoteFile, ...]:
    """Return the files to fetch, sorted by path.

    Every path is checked, also those that no pattern matches: a list with one unsafe path is not trusted at all.

    Raises:
        ListingRefusedError: a path is unsafe, two paths clash, sizes are absurd, or no file matches.
        ValueError: a pattern is malformed.

    """
    check_patterns(patterns)
    listed = tuple(files)
    if len(listed) > MAX_FILES:
        raise ListingRefusedError(f"the repository lists {len(listed)} files; at most {MAX_FILES}")
    for file in listed:
        if problem := path_problem(file.path):
            raise ListingRefusedError(
                f"the repository lists the path {file.path[:80]!r}, which {problem}; nothing of it is fetched"
            )
        if not 0 <= file.size <= _MAX_FILE_BYTES:
            raise ListingRefusedError(
                f"the repository lists {file.path} with {file.size} bytes; at most {_MAX_FILE_BYTES} are fetched"
            )
    _check_clashes(listed)
    chosen = tuple(
        sorted((f for f in listed if is_selected(f.path, patterns)), key=lambda f: f.path)
    )
    if not chosen:
        raise ListingRefusedError(
            f"none of the repository's {len(listed)} files matches {', '.join(patterns)}: "
            "it has no model in MLX's format; look for a converted one, such as those of mlx-community"
        )
    total = sum(file.size for file in chosen)
    if total > _MAX_TOTAL_BYTES:
        raise ListingRefusedError(
            f"the files have {total} bytes; at most {_MAX_TOTAL_BYTES} are fetched"
        )
    return chosen


def is_selected(path: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a pattern matches the file, and it is no code and not named as the mark of a partial model."""
    name = path.rpartition("/")[2]
    if path.casefold() == PARTIAL_MARK:
        return False
    if any(name.lower().endswith(suffix) for suffix in _CODE):
        return False
    return any(fnmatchcase(path if "/" in pattern else name, pattern) for pattern in patterns)


def check_patterns(patterns: tuple[str, ...]) -> None:
    """Refuse patterns that are malformed.

    Raises:
        ValueError: the message says what is expected.

    """
    if not patterns or len(patterns) > _MAX_PATTERNS:
        raise ValueError(f"expected 1 to {_MAX_PATTERNS} file patterns, got {len(patterns)}")
    for pattern in patterns:
        if not pattern or len(pattern) > _MAX_PATH_LENGTH or pattern.count("*") > 8:
            raise ValueError(
                f"{pattern[:80]!r} is no file pattern; expected a short one with at most 8 asterisks, like *.json"
            )


def path_problem(path: str) -> str:
    """Return why a path must not become a file below a folder; "" if it may."""
    parts = path.split("/")
    if not path or len(path) > _MAX_PATH_LENGTH or len(parts) > _MAX_DEPTH:
        return f"is empty, longer than {_MAX_PATH_LENGTH} characters or deeper than {_MAX_DEPTH} folders"
    if path.startswith("/") or "\\" in path or re.match(r"[A-Za-z]:", path):
        return "is absolute, or has a backslash"
    if not path.isprintable():
        return "has control or invisible characters"
    if any(part in ("", ".", "..") for part in parts):
        return "has an empty part, '.' or '..'"
    if any(len(part.encode(errors="replace")) > _MAX_NAME_BYTES for part in parts):
        return f"has a name of more than {_MAX_NAME_BYTES} bytes"
    return ""


def _check_clashes(files: tuple[RemoteFile, ...]) -> None:
    """Refuse names that are one file on a Mac's disk, which ignores case and Unicode's forms, and a file as a folder."""
    seen: dict[str, str] = {}
    for file in files:
        key = unicodedata.normalize("NFC", unicodedata.normalize("NFD", file.path).casefold())
        if key in seen:
            raise ListingRefusedError(
                f"the repository lists {seen[key]!r} and {file.path!r}, which are one file on a Mac's disk"
            )
        seen[key] = file.path
    for key, path in seen.items():
        parts = key.split("/")
        for length in range(1, len(parts)):
            if (parent := "/".join(parts[:length])) in seen:
                raise ListingRefusedError(
                    f"the repository lists {seen[parent]!r} as a file and as the folder of {path!r}"
                )
