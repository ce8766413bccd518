"""Files of the page, read once: each is served below a digest of all of them, so that a browser keeps it for ever.

The digest also says whether an open page is of this release. A file that changes on disk is served after a restart.
"""

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

STATIC: Final = Path(__file__).parent / "static"
PREFIX: Final = "/static/"
_SHELL: Final = "index.html"
_TYPES: Final = MappingProxyType(
    {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", "": "text/plain"}
)
"""Types of the files that are served, by suffix; licences have none."""
_LEAST_PACKED_BYTES: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One file: its type and its bytes, as they are and packed by gzip."""

    media_type: str
    body: bytes
    packed: bytes | None
    """None where packing gains nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """All files of one release of the page."""

    version: str
    """A short digest of the files."""
    shell: str
    """The HTML document; its links lead to this version."""
    files: MappingProxyType[str, Asset]
    """By path below the folder."""

    @classmethod
    def load(cls, folder: Path = STATIC) -> Self:
        """Read a folder."""
        digest, files = hashlib.sha256(), dict[str, Asset]()
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name, body = path.relative_to(folder).as_posix(), path.read_bytes()
                digest.update(name.encode() + b"\0" + body)
                if path.suffix in _TYPES:
                    packed = (
                        gzip.compress(body, mtime=0) if len(body) >= _LEAST_PACKED_BYTES else None
                    )
                    files[name] = Asset(
                        media_type=_TYPES[path.suffix] + "; charset=utf-8",
                        body=body,
                        packed=packed,
                    )
        version = digest.hexdigest()[:12]
        shell = folder / _SHELL
        text = shell.read_text() if shell.is_file() else ""
        return cls(
            version=version,
            shell=text.replace(f'"{PREFIX}', f'"{PREFIX}{version}/'),
            files=MappingProxyType(files),
        )

    def path_of(self, name: str) -> str:
        """Return the path of a file in URLs."""
        return f"{PREFIX}{self.version}/{name}"
