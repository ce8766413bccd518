"""The check of stored models against their records: links, sizes and, on request, every byte.

Downloads are verified as they arrive, in `models/hub/blob_download.py`.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from models import partial_model
from models.hub.digests import BlobDigest, hash_file
from models.model_files import PARTIAL_MARK, ModelUnusableError
from models.model_store.store import ModelStore, StoredFile

Defect: TypeAlias = Literal["Missing", "WrongSize", "WrongContent", "Unreadable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDefect:
    """One file of a model that is not what its record says."""

    model: str
    """Name of the model's folder."""
    path: str
    sha256: str
    defect: Defect
    message: str


def check_model(store: ModelStore, name: str, *, hashes: bool = False) -> tuple[FileDefect, ...]:
    """Return the defects of one model. With `hashes` it reads all bytes, which takes minutes for a large model."""
    files = store.manifest_files(name)
    if not files:
        message = "its record cannot be read: fetch the model again"
        return (FileDefect(model=name, path="", sha256="", defect="Unreadable", message=message),)
    defects = [_check_file(store, name, file, hashes=hashes) for file in files]
    defects.append(_check_mark(store, name))
    return tuple(defect for defect in defects if defect is not None)


def _check_mark(store: ModelStore, name: str) -> FileDefect | None:
    """Return the defect of a partial model's mark."""
    try:
        mark = partial_model.read_mark(store.root / name)
    except ModelUnusableError as error:
        defect: Defect = "Unreadable"
        message = str(error)
    else:
        if (mark is not None) == store.is_recorded_as_partial(name):
            return None
        defect, message = (
            "Missing",
            "the mark does not agree with the record: fetch the model again",
        )
    return FileDefect(model=name, path=PARTIAL_MARK, sha256="", defect=defect, message=message)


def _check_file(
    store: ModelStore, name: str, file: StoredFile, *, hashes: bool
) -> FileDefect | None:
    path = store.root / name / file.path
    digest = BlobDigest("sha256", file.sha256)
    defect: Defect
    try:
        size = path.stat().st_size
        if size != file.size:
            defect, message = "WrongSize", f"it has {size} bytes, not {file.size}"
        elif not path.samefile(store.blob_path(digest)):
            defect, message = "WrongContent", "it is no link to the content of its record"
        elif hashes and (actual := hash_file(path).sha256) != digest:
            defect, message = "WrongContent", f"its content is {actual}, not {digest}"
        else:
            return None
    except FileNotFoundError:
        defect, message = "Missing", "it is gone, or its link leads nowhere"
    except OSError as error:
        defect, message = "Unreadable", f"it cannot be read: {error.strerror}"
    return FileDefect(
        model=name, path=file.path, sha256=file.sha256, defect=defect, message=message
    )


def discard_defects(store: ModelStore, defects: tuple[FileDefect, ...]) -> tuple[str, ...]:
    """Remove damaged contents, and the models that have them; return those models' names.

    Sound contents stay, so that the next fetch of a model brings only what was damaged.
    """
    damaged = {defect.sha256 for defect in defects if defect.sha256}
    affected = {defect.model for defect in defects}
    with store.locked():
        for name in store.manifest_names():
            if damaged & {file.sha256 for file in store.manifest_files(name)}:
                affected.add(name)
        for name in sorted(affected):
            kept = frozenset(file.sha256 for file in store.manifest_files(name))
            store.remove_locked(name, keep=kept - damaged)
        for content in damaged:
            store.drop_blob(content)
    return tuple(sorted(affected))
