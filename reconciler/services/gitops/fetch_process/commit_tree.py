"""Reads the manifests of a commit out of its Git tree. It writes no files, so no path can escape its folder.

A tree is foreign data: it may be as deep, wide and strange as Git can store. Everything here is counted and limited.
"""

import posixpath
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from dulwich.objects import Blob, Commit, ObjectID, Tree
from dulwich.repo import Repo

from manifests import load, overlay, sources
from manifests.documents import ParsedDocuments
from manifests.errors import ManifestError, ManifestErrors
from reconciler.services.gitops.fetch_process.errors import FetchError

# Limits of one source: the members of an ApplySet, and eight times the size of ten thousand deployments.
MAX_DOCUMENTS = 20_000
_MAX_FILES = 20_000
_MAX_BYTES = 32 * 2**20
_MAX_VALUES = 2_000_000
# Names that are read to find them: trees that share subtrees can list an astronomical number of paths.
_MAX_ENTRIES = 200_000
_MAX_DEPTH = 64
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _TreeEntry:
    """One name in a tree."""

    path: str
    mode: int
    sha: ObjectID

    @property
    def name(self) -> str:
        return posixpath.basename(self.path)


class CommitTree:
    """The files of one commit."""

    def __init__(self, repo: Repo, commit: Commit, repository: str) -> None:
        self._repo = repo
        self._root = ObjectID(commit.tree)
        self._repository = repository
        self._entries = 0
        self._bytes = 0
        self.names: set[str] = set()

    def documents(self, path: str) -> ParsedDocuments:
        """Return the documents of the manifests in a folder and below it.

        Raises:
            FetchError: the manifests are broken, too many, or missing.

        """
        folder = posixpath.normpath(path) if path else "."
        start = self._find(folder)
        if start is None or not stat.S_ISDIR(start.mode):
            what = "is not a folder" if start is not None else "does not exist"
            message = f"{path} {what} in this commit of {self._repository}; check spec.path"
            raise FetchError("PathNotFound", message)
        # All files are counted before one is parsed.
        read = load.parse_texts(list(self._texts(start)))
        combined = overlay.combine(read.documents, self._read)
        problems = [*read.problems, *combined.problems]
        if problems:
            raise FetchError("BrokenManifests", ManifestErrors(problems).show(_SHOWN))
        if not combined.documents:
            message = (
                f"{path or 'the repository'} has no manifests: nothing is applied, nothing pruned"
            )
            raise FetchError("PathNotFound", message)
        values = sum(document.root.size for document in combined.documents)
        if len(combined.documents) > MAX_DOCUMENTS or values > _MAX_VALUES:
            raise self._too_large(f"{len(combined.documents):,} objects with {values:,} values")
        return combined

    def _read(self, path: str) -> ParsedDocuments:
        """Return the documents of a base of an overlay."""
        if path.startswith(".."):
            outside = ManifestError(source=path, message="lies outside of the repository")
            return ParsedDocuments(problems=(outside,))
        start = self._find(path)
        if start is None:
            missing = ManifestError(source=path, message="does not exist in this commit")
            return ParsedDocuments(problems=(missing,))
        return load.parse_texts(list(self._texts(start)))

    def _find(self, path: str) -> _TreeEntry | None:
        here = _TreeEntry(path="", mode=stat.S_IFDIR, sha=self._root)
        for name in path.split("/") if path != "." else ():
            if not stat.S_ISDIR(here.mode):
                return None
            entry = next((entry for entry in self._names(here) if entry.name == name), None)
            if entry is None:
                return None
            here = entry
        return here

    def _names(self, folder: _TreeEntry) -> list[_TreeEntry]:
        tree = self._repo[folder.sha]
        if not isinstance(tree, Tree):
            raise FetchError(
                "FetchingFailed", f"{folder.path}: its parent lists it as a tree, but it is none"
            )
        entries: list[_TreeEntry] = []
        for name, mode, sha in tree.items():
            self._entries += 1
            if self._entries > _MAX_ENTRIES:
                raise self._too_large(f"more than {_MAX_ENTRIES:,} names below spec.path")
            text = name.decode("utf-8", "backslashreplace")
            entries.append(_TreeEntry(path=posixpath.join(folder.path, text), mode=mode, sha=sha))
        return sorted(entries, key=lambda entry: entry.name)

    def _texts(self, start: _TreeEntry) -> Iterator[tuple[str, str | ManifestError]]:
        """Yield manifest files and their texts; hidden files are skipped, as on a disk."""
        waiting = [start]
        while waiting:
            here = waiting.pop()
            if not stat.S_ISDIR(here.mode):
                yield here.path, self._text(here)
                continue
            if here.path.count("/") >= _MAX_DEPTH:
                raise self._too_large(f"folders more than {_MAX_DEPTH} deep")
            names = [name for name in self._names(here) if not name.name.startswith(".")]
            waiting.extend(entry for entry in reversed(names) if self._is_manifest(entry))

    def _is_manifest(self, entry: _TreeEntry) -> bool:
        if stat.S_ISDIR(entry.mode) or _is_strange(entry):
            return True
        if entry.name.endswith(sources.SUFFIXES):
            return True
        if not stat.S_ISLNK(entry.mode):
            return False
        # A link to a folder may stand for manifests. It is reported, because a prune would delete their objects.
        target = self._repo[entry.sha].as_raw_string().decode("utf-8", "replace")
        there = self._find(
            posixpath.normpath(posixpath.join(posixpath.dirname(entry.path), target))
        )
        return there is not None and not stat.S_ISREG(there.mode)

    def _text(self, entry: _TreeEntry) -> str | ManifestError:
        """Return the text of a file, or the reason why it is not read."""
        if stat.S_ISLNK(entry.mode):
            hint = "Put the file itself there, or name its folder as a base of an overlay"
            return ManifestError(
                source=entry.path, message="is a symbolic link, which is not followed", hint=hint
            )
        if _is_strange(entry):
            hint = "Copy its files, or choose a spec.path without it"
            return ManifestError(
                source=entry.path, message="is a submodule, which is not fetched", hint=hint
            )
        blob = self._repo[entry.sha]
        if not isinstance(blob, Blob):
            return ManifestError(
                source=entry.path, message="is not a file, though its folder lists it as one"
            )
        data = blob.as_raw_string()
        self.names.add(entry.path)
        self._bytes += len(data)
        if self._bytes > _MAX_BYTES or len(self.names) > _MAX_FILES:
            raise self._too_large(f"{len(self.names):,} manifests with {self._bytes:,} bytes")
        try:
            return sources.decode(entry.path, data)
        except ManifestErrors as errors:
            return errors.problems[0]

    def _too_large(self, what: str) -> FetchError:
        return FetchError(
            "TooLarge", f"{self._repository} has {what}, which is more than one source may have"
        )


def _is_strange(entry: _TreeEntry) -> bool:
    """Return whether an entry is neither folder nor file nor link: a submodule."""
    return not (stat.S_ISDIR(entry.mode) or stat.S_ISREG(entry.mode) or stat.S_ISLNK(entry.mode))
