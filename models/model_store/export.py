"""Export of a stored model: a plain folder or a tar file, each byte checked by its digest on the way.

A folder is filled beside its place and appears in one step; a repeated export goes on with the files that are whole there.
"""

import hashlib
import os
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from machinery.files import sync_folder
from models.hub.digests import BlobDigest, hash_file
from models.model_store.store import ModelStore, StoredFile, StoredModel

_READ_BYTES: Final = 4 << 20
_SUFFIX: Final = ".exporting"

Report = Callable[[int], None]
"""Is told how many bytes of the model are written."""


class ExportError(Exception):
    """A model cannot be exported; the message says why."""


class _CheckedReader:
    """Reads a content of the store, and compares its digest at the end of the file."""

    def __init__(self, store: ModelStore, file: StoredFile, report: Report) -> None:
        self._file = file
        self._path = store.blob_path(BlobDigest("sha256", file.sha256))
        self._stream = self._path.open("rb")
        self._hash = hashlib.sha256()
        self._left = file.size
        self._report = report

    def read(self, count: int = -1) -> bytes:
        """Return the next bytes. Raises ExportError if the content is not what its name says."""
        piece = self._stream.read(self._left if count < 0 else min(count, self._left))
        self._hash.update(piece)
        self._left -= len(piece)
        is_damaged = self._left == 0 and self._hash.hexdigest() != self._file.sha256
        if is_damaged or (not piece and self._left):
            raise ExportError(
                f"{self._path} is damaged: {self._file.path} was not exported. `fleetctl models check --local --hash "
                "--discard` removes it, and the next pull fetches it again"
            )
        self._report(len(piece))
        return piece

    def close(self) -> None:
        self._stream.close()


def export_folder(
    store: ModelStore, model: StoredModel, target: Path, report: Report = lambda _: None
) -> None:
    """Write the model's files into a new folder.

    Raises:
        ExportError: the target exists, or a content is damaged.
        OSError: the disk is full or failed; what is whole beside the target is used by the next attempt.

    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"{target} exists already; name a folder that does not, or remove it")
    making = _beside(target)
    making.mkdir(parents=True, exist_ok=True)
    wanted = {file.path for file in model.files}
    for path in sorted(making.rglob("*")):  # of another model, exported to the same place
        if path.is_file() and path.relative_to(making).as_posix() not in wanted:
            path.unlink()
    for file in model.files:
        _copy(store, file, making / file.path, report)
    for folder in {(making / file.path).parent for file in model.files} | {making}:
        sync_folder(folder)
    with suppress(FileNotFoundError):
        target.rmdir()
    making.replace(target)
    sync_folder(target.parent)


def _copy(store: ModelStore, file: StoredFile, target: Path, report: Report) -> None:
    if _is_same(target, file):
        report(file.size)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = _CheckedReader(store, file, report)
    try:
        with target.open("wb") as out:
            while piece := reader.read(_READ_BYTES):
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
    except ExportError:
        target.unlink(missing_ok=True)
        raise
    finally:
        reader.close()


def _is_same(target: Path, file: StoredFile) -> bool:
    is_candidate = target.is_file() and target.stat().st_size == file.size
    return is_candidate and hash_file(target).sha256.hex == file.sha256


def export_tar(
    store: ModelStore, model: StoredModel, target: Path, report: Report = lambda _: None
) -> None:
    """Write the model as a tar file with one folder. It appears whole, or not at all.

    Raises:
        ExportError: the target exists, or a content is damaged.
        OSError: the disk is full or failed.

    """
    if target.exists():
        raise ExportError(f"{target} exists already; name a file that does not, or remove it")
    making = _beside(target)
    making.parent.mkdir(parents=True, exist_ok=True)
    try:
        with making.open("wb") as out:
            with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
                for file in model.files:
                    _add(archive, store, model, file, report)
            out.flush()
            os.fsync(out.fileno())
        making.replace(target)
    except BaseException:
        making.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def _add(
    archive: tarfile.TarFile,
    store: ModelStore,
    model: StoredModel,
    file: StoredFile,
    report: Report,
) -> None:
    info = tarfile.TarInfo(f"{model.name}/{file.path}")
    info.size, info.mode, info.mtime = file.size, 0o644, int(model.fetched_at.timestamp())
    reader = _CheckedReader(store, file, report)
    try:
        archive.addfile(info, reader)
        reader.read()  # an empty file is not read otherwise
    finally:
        reader.close()


def _beside(target: Path) -> Path:
    return target.with_name(f"{target.name}{_SUFFIX}")
