"""The models on this machine's disk: files by digest, and a folder of links for each commit of a repository."""

import errno
import fcntl
import os
import shutil
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Final, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from machinery import files as disk
from machinery.clock import Clock
from models import partial_model
from models.hub.digests import BlobDigest
from models.hub.file_selection import path_problem
from models.hub.model_hub import folder_name
from models.model_files import PARTIAL_MARK, ModelUnusableError
from models.model_store.piece_list import PIECE_BYTES, PieceList
from models.partial_model import PartialMark

_MAX_MANIFEST_BYTES: Final = 16 << 20
_FOLDERS: Final = (
    *("sha256", "git-sha1", "pieces"),
    *("incoming", "fetches", "manifests", "pins", "loads"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a stored model."""

    path: str
    size: int
    sha256: str
    """Name of the content in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """One commit of a repository that is verified on this disk: whole, or with the weight files of some layers."""

    repo: str
    commit: str
    folder: Path
    """Folder that `inspect_model` and the engine read."""
    files: tuple[StoredFile, ...]
    patterns: tuple[str, ...]
    """Patterns that chose the files."""
    fetched_at: datetime
    loaded_at: datetime | None
    """Last load by an engine, as far as `record_load` was told."""
    used_at: datetime
    """Last load, or last fetch that found it present."""
    is_pinned: bool
    absent: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the weight files that are not here, by path; empty for a whole model."""

    @property
    def is_partial(self) -> bool:
        return bool(self.absent)

    @property
    def absent_bytes(self) -> int:
        """Return the bytes of the weight files that are not here."""
        return sum(self.absent.values())

    @property
    def name(self) -> str:
        """Return the folder's name, `<organisation>--<name>@<first 12 digits>`."""
        return self.folder.name

    @property
    def size_bytes(self) -> int:
        """Return the sum of its files; a file that another model has too counts for both."""
        return sum(file.size for file in self.files)


class GrowingFile(Protocol):
    """A file that is being written."""

    @property
    def offset(self) -> int:
        """The bytes that may be read."""
        ...


class _ManifestFile(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    path: str
    size: int
    sha256: str


class _Manifest(BaseModel):
    """The record of one model below `blobs/manifests`."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    repo: str
    commit: str
    patterns: tuple[str, ...]
    fetched_at: datetime
    files: tuple[_ManifestFile, ...]
    absent: tuple[_ManifestFile, ...] = ()
    """Weight files of the commit that no rank of this Mac needs."""

    def problem(self, name: str) -> str:
        """Return why the record cannot be that of the folder; "" if it can."""
        try:
            if folder_name(self.repo, self.commit) != name:
                return "it is the record of another model"
            for file in (*self.files, *self.absent):
                BlobDigest("sha256", file.sha256)
                if reason := path_problem(file.path):
                    return f"its path {file.path!r} {reason}"
        except ValueError as error:
            return str(error)
        return ""


class ModelStore:
    """The store below one folder, which may hold other folders as well: it touches only its own.

    `blobs/sha256/<hex>` has the contents; `<organisation>--<name>@<commit>` is a folder of relative links to them.
    All methods block on the disk; those that read whole files say so.
    """

    def __init__(self, root: Path, clock: Clock, *, reserve_bytes: int = 0) -> None:
        """`reserve_bytes` of the disk stay free in any case; nothing is created before the first write."""
        self.root = root
        self.clock = clock
        self.reserve_bytes = reserve_bytes
        self.growing: dict[BlobDigest, GrowingFile] = {}
        """Files that fetches of this process write now: other Macs get their bytes before they are flushed."""

    @property
    def blobs(self) -> Path:
        """Return the folder with everything but the models' folders."""
        return self.root / "blobs"

    @property
    def incoming(self) -> Path:
        """Return the folder of files that are not whole yet."""
        return self.blobs / "incoming"

    @property
    def fetches(self) -> Path:
        """Return the folder that records which contents running fetches need."""
        return self.blobs / "fetches"

    def prepare(self) -> None:
        """Create the folders.

        Raises:
            OSError: the disk is full, or not ours to write to.

        """
        for name in _FOLDERS:
            (self.blobs / name).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store against other processes and threads that publish, admit, remove or collect."""
        self.prepare()
        descriptor = os.open(self.blobs / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def models(self) -> tuple[StoredModel, ...]:
        """Return all models that have what their records name, sorted by name; also partial ones."""
        found = map(self._read, self.manifest_names())
        return tuple(model for model in found if model is not None)

    def find(self, repo: str, commit: str) -> StoredModel | None:
        """Return the model of a commit, which may be partial; None if it is not here, or damaged."""
        model = self._read(folder_name(repo, commit))
        return model if model is not None and model.commit == commit else None

    def find_by_name(self, name: str) -> StoredModel | None:
        """Return the model with this folder name; None if there is none."""
        return next((model for model in self.models() if model.name == name), None)

    def _read(self, name: str) -> StoredModel | None:
        folder = self.root / name
        manifest = self._load_record(name)
        if manifest is None or manifest.problem(name) or not self._is_whole(manifest, folder):
            return None
        wanted_at = _modified(self._manifest_path(name)) or 0.0
        loaded = _modified(self.blobs / "loads" / name)
        used = max(wanted_at, loaded or 0.0)
        return StoredModel(
            repo=manifest.repo,
            commit=manifest.commit,
            folder=folder,
            files=tuple(
                StoredFile(path=file.path, size=file.size, sha256=file.sha256)
                for file in manifest.files
            ),
            patterns=manifest.patterns,
            fetched_at=manifest.fetched_at,
            loaded_at=None if loaded is None else datetime.fromtimestamp(loaded, tz=UTC),
            used_at=datetime.fromtimestamp(used, tz=UTC),
            is_pinned=(self.blobs / "pins" / name).exists(),
            absent={file.path: file.size for file in manifest.absent},
        )

    def _load_record(self, name: str) -> _Manifest | None:
        """Return the record in the file of this name, also that of another model; None if it is unreadable."""
        path = self._manifest_path(name)
        try:
            if path.stat().st_size > _MAX_MANIFEST_BYTES:
                return None
            return _Manifest.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    def _is_whole(self, manifest: _Manifest, folder: Path) -> bool:
        """Return whether each file can be reached through its link and has its size, and a partial model its mark."""
        if manifest.absent and not (folder / PARTIAL_MARK).is_file():
            return False
        try:
            return all((folder / file.path).stat().st_size == file.size for file in manifest.files)
        except OSError:
            return False

    def manifest_names(self) -> tuple[str, ...]:
        """Return the names of all recorded models, damaged ones too."""
        return tuple(sorted(path.stem for path in (self.blobs / "manifests").glob("*.json")))

    def manifest_files(self, name: str) -> tuple[StoredFile, ...]:
        """Return the files that a model's record names, whether they are there or not; () if it is unreadable."""
        manifest = self._load_record(name)
        if manifest is None or manifest.problem(name):
            return ()
        return tuple(StoredFile(path=f.path, size=f.size, sha256=f.sha256) for f in manifest.files)

    def is_recorded_as_partial(self, name: str) -> bool:
        """Return whether the model's record names weight files that are not here."""
        manifest = self._load_record(name)
        return manifest is not None and bool(manifest.absent)

    def has_blob(self, digest: BlobDigest) -> bool:
        """Return whether the content is here, whole and verified when it came."""
        return self.blob_path(digest).is_file()

    def blob_path(self, digest: BlobDigest) -> Path:
        """Return the file that has, or would have, this content."""
        return self.blobs / digest.algorithm / digest.hex

    def sha256_of(self, digest: BlobDigest) -> BlobDigest:
        """Return the SHA-256 of a content that is here.

        Raises:
            FileNotFoundError: it is not.

        """
        return BlobDigest("sha256", self.blob_path(digest).resolve(strict=True).name)

    def part_path(self, digest: BlobDigest) -> Path:
        """Return the file into which the content is fetched."""
        return self.incoming / f"{digest.algorithm}-{digest.hex}.part"

    def add_blob(self, file: Path, named: BlobDigest, sha256: BlobDigest) -> None:
        """Move a whole, verified and flushed file into the store; the caller has compared its digests.

        Raises:
            OSError: the disk failed.

        """
        # The link first: it leads nowhere until the content has its name, so both names appear in one step.
        if named.algorithm != "sha256":
            link = self.blob_path(named)
            with suppress(FileExistsError):
                link.symlink_to(f"../sha256/{sha256.hex}")
                disk.sync_folder(link.parent)
        target = self.blob_path(sha256)
        if target.exists():
            file.unlink()
            return
        if file.stat().st_nlink == 1:  # an imported file may be a hard link of another cache
            file.chmod(0o444)
        file.replace(target)
        disk.sync_folder(target.parent)

    def write_pieces(self, sha256: BlobDigest, hashes: tuple[str, ...]) -> None:
        """Keep the hashes of a large file's pieces, which the caller computed while it verified the file.

        Raises:
            OSError: the disk failed.

        """
        if hashes:
            self.prepare()
            disk.write_atomically(self._pieces_path(sha256.hex), "\n".join(hashes), mode=0o644)

    def piece_list(self, model: StoredModel) -> PieceList:
        """Return the hashes of the pieces of a model's large files, as far as they are known."""
        found: dict[str, tuple[str, ...]] = {}
        for file in model.files:
            if file.size > PIECE_BYTES:
                with suppress(OSError):
                    found[file.sha256] = tuple(self._pieces_path(file.sha256).read_text().split())
        return PieceList(found)

    def _pieces_path(self, sha256: str) -> Path:
        return self.blobs / "pieces" / sha256

    def publish(
        self,
        repo: str,
        commit: str,
        files: Mapping[str, BlobDigest],
        patterns: tuple[str, ...],
        *,
        partial: PartialMark | None = None,
    ) -> StoredModel:
        """Make the folder of a commit appear in one step; all contents must be in the store.

        Files of an earlier publication of the same commit stay. `partial` names the weight files that are left out; the
        model is whole once all of them were published.

        Raises:
            FileExistsError: a folder of this name exists that is not the store's.
            OSError: a content is absent, or the disk failed.

        """
        name = folder_name(repo, commit)
        with self.locked():
            files_of = {file.path: file for file in self.manifest_files(name)}
            earlier = self._read(name)
            if earlier is None:
                files_of.clear()
            for path, digest in files.items():
                sha256 = self.sha256_of(digest)
                size = self.blob_path(sha256).stat().st_size
                files_of[path] = StoredFile(path=path, size=size, sha256=sha256.hex)
            folder = self.root / name
            self.check_owner(repo, commit)
            mark = _remaining(partial or self._earlier_mark(earlier), files_of)
            every = tuple(sorted(files_of.values(), key=lambda one: one.path))
            known = earlier.patterns if earlier is not None else ()
            manifest = _Manifest(
                repo=repo,
                commit=commit,
                patterns=tuple(dict.fromkeys((*known, *patterns))),
                fetched_at=self.clock.now(),
                files=tuple(
                    _ManifestFile(
                        path=stored_file.path, size=stored_file.size, sha256=stored_file.sha256
                    )
                    for stored_file in every
                ),
                absent=tuple(
                    _ManifestFile(path=path, size=one.size, sha256=one.sha256)
                    for path, one in sorted(mark.absent.items() if mark is not None else ())
                ),
            )
            if earlier is None:  # a folder that exists has a record
                self._write_manifest(manifest, name)
                if folder.exists():  # damaged: links to contents that are gone
                    self._trash(folder)
                making = self.incoming / f"{folder.name}.{os.getpid()}.new"
                shutil.rmtree(making, ignore_errors=True)
                self._write_links(making, every)
                _set_mark(making, mark)
                making.replace(folder)
                disk.sync_folder(self.root)
            else:  # a record names only what exists
                self._write_links(folder, every)
                _set_mark(folder, mark)
                self._write_manifest(manifest, name)
            stored_model = self._read(name)
        if stored_model is None:
            raise OSError(errno.EIO, f"{folder} cannot be read back after it was written")
        return stored_model

    def _earlier_mark(self, earlier: StoredModel | None) -> PartialMark | None:
        """Return the mark of a partial model to which files are added."""
        if earlier is None or not earlier.is_partial:
            return None
        try:
            return partial_model.read_mark(earlier.folder)
        except ModelUnusableError as error:
            raise OSError(errno.EIO, str(error)) from error

    def check_owner(self, repo: str, commit: str) -> None:
        """Refuse a folder that a person made, or that is another model's: a Mac's disk ignores case.

        Raises:
            FileExistsError: the model cannot be published.

        """
        folder = self.root / folder_name(repo, commit)
        record = self._load_record(folder.name)
        if folder.exists() and not self._manifest_path(folder.name).exists():
            raise FileExistsError(
                f"{folder} exists and was not made by the store; move it away, or use it as spec.model.path"
            )
        if record is not None and (record.repo, record.commit) != (repo, commit):
            raise FileExistsError(
                f"{folder} holds {record.repo}@{record.commit}; use that, or remove it: "
                f"{repo}@{commit} would have the same folder"
            )

    def _write_manifest(self, manifest: _Manifest, name: str) -> None:
        path = self._manifest_path(name)
        disk.write_atomically(path, manifest.model_dump_json(indent=1), mode=0o644)
        self._touch(path)

    def _write_links(self, folder: Path, files: tuple[StoredFile, ...]) -> None:
        for file in files:
            path = PurePosixPath(file.path)
            link = folder / path
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to("../" * len(path.parts) + f"blobs/sha256/{file.sha256}")

    def record_load(self, name: str) -> bool:
        """Remember that an engine loads the model now, so that a collection keeps it for an hour at least.

        Return False if the model is gone; a model for which True was returned stays for that hour.
        """
        with self.locked():
            if self._read(name) is None:
                return False
            self._touch(self.blobs / "loads" / name)
            return True

    def record_want(self, model: StoredModel) -> bool:
        """Remember that a fetch found the model present; False if it is gone."""
        with self.locked():
            if self._read(model.name) is None:
                return False
            self._touch(self._manifest_path(model.name))
            return True

    def pin(self, name: str) -> bool:
        """Protect a model from collection; False if there is none of this name."""
        with self.locked():
            if self._read(name) is None:
                return False
            (self.blobs / "pins" / name).touch()
            return True

    def unpin(self, name: str) -> bool:
        """Allow collection again; False if the model was not pinned."""
        pin = self.blobs / "pins" / name
        try:
            pin.unlink()
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> int:
        """Remove a model; return the bytes of contents that went with it. Contents of other models stay.

        An engine that has the files open or mapped goes on: the disk gets their bytes back when it ends.

        Raises:
            OSError: the disk failed.

        """
        with self.locked():
            return self.remove_locked(name, keep=frozenset())

    def remove_locked(self, name: str, *, keep: frozenset[str]) -> int:
        """Remove a model within `locked()`, but not the contents named in `keep` (SHA-256)."""
        own = self.manifest_files(name)
        others = {
            file.sha256
            for other in self.manifest_names()
            if other != name
            for file in self.manifest_files(other)
        }
        # The folder first: a crash leaves contents without a model, never a model without contents.
        if own and (self.root / name).exists():
            self._trash(self.root / name)
        for path in (
            self._manifest_path(name),
            *(self.blobs / k / name for k in ("pins", "loads")),
        ):
            path.unlink(missing_ok=True)
        return sum(map(self.drop_blob, {file.sha256 for file in own} - others - keep))

    def drop_blob(self, sha256: str) -> int:
        """Remove a content, within `locked()`; return its bytes. The names by Git's SHA-1 go at the next collection."""
        path = self.blob_path(BlobDigest("sha256", sha256))
        self._pieces_path(sha256).unlink(missing_ok=True)
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        return size

    def _trash(self, folder: Path) -> None:
        """Move a folder of links away in one step, then remove it."""
        away = self.incoming / f"{folder.name}.{os.getpid()}.old"
        shutil.rmtree(away, ignore_errors=True)
        folder.replace(away)
        shutil.rmtree(away)

    def _manifest_path(self, name: str) -> Path:
        return self.blobs / "manifests" / f"{name}.json"

    def _touch(self, path: Path) -> None:
        path.touch()
        now = self.clock.now().timestamp()
        os.utime(path, (now, now))


def _remaining(mark: PartialMark | None, present: Container[str]) -> PartialMark | None:
    """Return the mark without the files that are present; None if all are."""
    if mark is None:
        return None
    absent = {path: one for path, one in mark.absent.items() if path not in present}
    return mark.model_copy(update={"absent": absent}) if absent else None


def _set_mark(folder: Path, mark: PartialMark | None) -> None:
    """Mark the folder, or remove its mark once all files are linked."""
    if mark is None:
        (folder / PARTIAL_MARK).unlink(missing_ok=True)
    else:
        partial_model.write_mark(folder, mark)


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
