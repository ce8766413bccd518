"""Import of models that huggingface_hub or LM Studio keeps: hashed, then cloned or linked into the store, never moved."""

import ctypes
import fcntl
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from models.hub.digests import BlobDigest, hash_file
from models.hub.file_selection import DEFAULT_PATTERNS, is_selected, path_problem
from models.hub.model_hub import check_repo, contents_version, is_commit
from models.model_store.admission import disk_shortfall
from models.model_store.store import ModelStore, StoredModel

_MAX_FILES: Final = 10_000
_FICLONE: Final = 0x40049409  # ioctl_ficlone(2)
_CLONE_NOFOLLOW: Final = 1  # clonefile(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedSnapshot:
    """One commit in a cache of huggingface_hub, or one model in a folder of LM Studio."""

    repo: str
    commit: str
    """Commit of the hub; empty if the program does not record it, as LM Studio does not."""
    folder: Path


class ImportRefusedError(Exception):
    """A snapshot cannot be imported; the message says why."""


def find_snapshots(cache: Path) -> tuple[CachedSnapshot, ...]:
    """Return the models of a cache, sorted by repository.

    huggingface_hub has `models--ORG--NAME/snapshots/COMMIT`, LM Studio `ORG/NAME`.
    """
    snapshots = (*_iterate_snapshots(cache), *_iterate_model_folders(cache))
    return tuple(sorted(snapshots, key=lambda snapshot: (snapshot.repo, snapshot.commit)))


def _iterate_snapshots(cache: Path) -> Iterator[CachedSnapshot]:
    for folder in cache.glob("models--*/snapshots/*"):
        found = re.fullmatch(r"models--(.+?)--(.+)", folder.parent.parent.name)
        if found is None or not is_commit(folder.name) or not folder.is_dir():
            continue
        repo = f"{found[1]}/{found[2]}"
        try:
            check_repo(repo)
        except ValueError:
            continue
        yield CachedSnapshot(repo=repo, commit=folder.name, folder=folder)


def _iterate_model_folders(cache: Path) -> Iterator[CachedSnapshot]:
    for folder in cache.glob("*/*"):
        repo = f"{folder.parent.name}/{folder.name}"
        try:
            check_repo(repo)
        except ValueError:
            continue
        if any(True for kind in ("*.safetensors", "*.gguf") for _ in folder.glob(kind)):
            yield CachedSnapshot(repo=repo, commit="", folder=folder)


def snapshot_size(snapshot: CachedSnapshot) -> int:
    """Return the bytes of the files that an import takes. Raises ImportRefusedError, as the import would."""
    return sum(source.stat().st_size for _, source in _chosen_files(snapshot))


def snapshot_problem(snapshot: CachedSnapshot) -> str:
    """Return why an import would refuse a snapshot, as far as is known before a byte is read; "" if nothing is."""
    try:
        paths = [path for path, _ in _chosen_files(snapshot)]
    except ImportRefusedError as error:
        return str(error)
    is_model = any(path.endswith(".safetensors") for path in paths)
    return "" if is_model else _unusable(snapshot)


def import_snapshot(store: ModelStore, snapshot: CachedSnapshot) -> StoredModel:
    """Import one snapshot; return the model. Reads every byte, and writes none where the disk can share them.

    A content is named by what was read. Where the cache names a file by its own digest, both must agree: huggingface_hub
    does not check that.

    Raises:
        ImportRefusedError: a file is damaged, unsafe or absent, or the snapshot has no model.
        FileExistsError: the store's folder exists and is not the store's.
        OSError: the disk failed.

    """
    store.prepare()
    files: dict[str, BlobDigest] = {}
    for path, source in _chosen_files(snapshot):
        files[path] = _import_file(store, source, path)
    if not any(path.endswith(".safetensors") for path in files):
        raise ImportRefusedError(_unusable(snapshot))
    commit = snapshot.commit or contents_version(files)
    return store.publish(snapshot.repo, commit, files, DEFAULT_PATTERNS)


def _unusable(snapshot: CachedSnapshot) -> str:
    return f"{snapshot.folder} has no *.safetensors: the download was not finished, or it is no MLX model"


def _chosen_files(snapshot: CachedSnapshot) -> Iterator[tuple[str, Path]]:
    count = 0
    for folder, _, names in os.walk(snapshot.folder):
        for name in sorted(names):
            count += 1
            if count > _MAX_FILES:
                raise ImportRefusedError(f"{snapshot.folder} has more than {_MAX_FILES} files")
            source = Path(folder, name)
            path = source.relative_to(snapshot.folder).as_posix()
            if not is_selected(path, DEFAULT_PATTERNS):
                continue
            if problem := path_problem(path):
                raise ImportRefusedError(f"{source} {problem}")
            if not source.is_file():
                raise ImportRefusedError(
                    f"{source} is a link to nothing: finish its download first"
                )
            yield path, source.resolve()


def _import_file(store: ModelStore, source: Path, path: str) -> BlobDigest:
    stated = _stated_digest(source.name)
    content_hash = hash_file(source, stated.algorithm if stated else "sha256")
    if stated is not None and content_hash.named != stated:
        raise ImportRefusedError(
            f"{path} is damaged: its content is {content_hash.named}, the cache names it {stated}; download it again"
        )
    named = stated or content_hash.sha256
    if store.has_blob(content_hash.sha256) and store.has_blob(named):
        return named
    _check_room(store, source)
    copy = store.incoming / f"{content_hash.sha256.hex}.{os.getpid()}.import"
    copy.unlink(missing_ok=True)
    share_file(source, copy)
    store.add_blob(copy, named, content_hash.sha256)
    return named


def _check_room(store: ModelStore, source: Path) -> None:
    """Refuse a copy for which another disk has no room."""
    state = source.stat()
    if state.st_dev == store.incoming.stat().st_dev:
        return
    shortfall = disk_shortfall(
        free_bytes=shutil.disk_usage(store.root).free,
        reserve_bytes=store.reserve_bytes,
        missing_bytes=state.st_size,
    )
    if shortfall:
        raise ImportRefusedError(
            f"{source} is on another disk and must be copied; the disk of {store.root} lacks {shortfall} bytes for it"
        )


def _stated_digest(name: str) -> BlobDigest | None:
    """Return the digest that a cache's file name is; None for a file of another name."""
    if re.fullmatch(r"[0-9a-f]{64}", name):
        return BlobDigest("sha256", name)
    if re.fullmatch(r"[0-9a-f]{40}", name):
        return BlobDigest("git-sha1", name)
    return None


def share_file(source: Path, target: Path) -> None:
    """Make `target` the same content without a copy: a clone, else a hard link, else a copy.

    A clone comes first, because a program that writes into the source would change a hard link, too.

    Raises:
        OSError: the disk is full or failed.

    """
    if _clone(source, target):
        return
    try:
        os.link(source, target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def _clone(source: Path, target: Path) -> bool:
    """Clone a file where the file system can; APFS: clonefile(2), not tested on a Mac. Linux: FICLONE."""
    if sys.platform == "darwin":
        system = ctypes.CDLL(None, use_errno=True)
        return bool(
            system.clonefile(os.fsencode(source), os.fsencode(target), _CLONE_NOFOLLOW) == 0
        )
    else:  # noqa: RET505 - mypy checks each branch for its own system only
        try:
            with source.open("rb") as original, target.open("xb") as clone:
                fcntl.ioctl(clone.fileno(), _FICLONE, original.fileno())
        except OSError:
            target.unlink(missing_ok=True)
            return False
        return True
