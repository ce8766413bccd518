"""Which files the running fleet makes: one an object, in a folder for each kind. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from manifests import yamlio
from manifests.clean import clean, is_bare
from manifests.plan import ORDER
from schemas import kinds
from schemas.meta import APPLY_SET, ApiObject


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFile:
    """A file to write."""

    path: PurePosixPath
    """Below the folder, as `modeldeployments/qwen.yaml`."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export writes, and what people should know of it."""

    files: tuple[ExportFile, ...]
    notes: tuple[str, ...]


def exported(objects: Iterable[ApiObject]) -> Exported:
    """Return a file for every object that somebody declared."""
    files: list[ExportFile] = []
    notes: list[str] = []
    bare = 0
    for obj in sorted(objects, key=lambda obj: (ORDER.index(obj.kind), obj.name)):
        if obj.metadata.deletion_timestamp is not None:
            notes.append(f"left out: {_label(obj)}, which is being deleted")
            continue
        if obj.kind == "Node" and is_bare(obj):
            bare += 1
            continue
        source = obj.metadata.annotations.get(APPLY_SET)
        if source is not None:
            notes.append(
                f"{_label(obj)} belongs to {source}; apply it from there, or it is refused"
            )
        path = PurePosixPath(_folder(obj), f"{obj.name}.yaml")
        files.append(ExportFile(path=path, text=yamlio.dump(clean(obj))))
    if bare:
        what = "node, which has" if bare == 1 else "nodes, which have"
        notes.append(f"left out: {bare} {what} no labels, taints or settings of their own")
    return Exported(files=tuple(files), notes=tuple(notes))


def stale(folder: Iterable[PurePosixPath], files: Iterable[ExportFile]) -> list[PurePosixPath]:
    """Return the manifests in the folder that an export of these files would not write again."""
    written = {file.path for file in files}
    ours = {kind.plural for kind in kinds.KINDS}
    return sorted(
        path
        for path in folder
        if path not in written
        and len(path.parts) == 2
        and path.parts[0] in ours
        and path.suffix == ".yaml"
    )


def _folder(obj: ApiObject) -> str:
    kind = kinds.by_name(obj.kind)
    assert kind is not None
    return kind.plural


def _label(obj: ApiObject) -> str:
    return f"{obj.kind.lower()}/{obj.name}"
