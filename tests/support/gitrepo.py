"""Real bare repositories on the disk, made without the git binary."""

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dulwich.index import commit_tree
from dulwich.objects import Blob, Commit, ObjectID, Tag, Tree
from dulwich.refs import Ref
from dulwich.repo import Repo

_FILE, _LINK, _MODULE = stat.S_IFREG | 0o644, stat.S_IFLNK, 0o160000


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link in a commit."""

    target: str


@dataclass(frozen=True, slots=True)
class Module:
    """A submodule in a commit."""

    commit: str = "1" * 40


Content = str | bytes | Link | Module


class Repository:
    """A bare repository and the files that its newest commit has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.repo = Repo.init_bare(str(path))
        (path / "git-daemon-export-ok").touch()
        self.files: dict[str, Content] = {}

    @property
    def url(self) -> str:
        return f"file://{self.path}"

    def commit(
        self,
        changes: Mapping[str, Content | None],
        *,
        branch: str = "main",
        parents: bool = True,
        clock: int = 0,
        message: str = "a change",
        author: str = "Anna <anna@example.com>",
    ) -> str:
        """Commit files (None removes one); return the hash. Without parents it is a force-push."""
        for path, content in changes.items():
            self.files.pop(path, None)
            if content is not None:
                self.files[path] = content
        store = self.repo.object_store
        blobs = []
        for path, content in self.files.items():
            if isinstance(content, Module):
                blobs.append((path.encode(), ObjectID(content.commit.encode()), _MODULE))
                continue
            is_link = isinstance(content, Link)
            text = content.target if isinstance(content, Link) else content
            blob = Blob.from_string(text.encode() if isinstance(text, str) else text)
            store.add_object(blob)
            blobs.append((path.encode(), blob.id, _LINK if is_link else _FILE))
        tree = commit_tree(store, blobs) if blobs else self._empty()
        how = {"branch": branch, "message": message, "author": author}
        return self.commit_tree(tree, parents=parents, clock=clock, **how)

    def commit_tree(
        self,
        tree: bytes,
        *,
        branch: str = "main",
        parents: bool = True,
        clock: int = 0,
        message: str = "a change",
        author: str = "Anna <anna@example.com>",
    ) -> str:
        """Commit a tree that is in the repository, however strange."""
        ref = Ref(f"refs/heads/{branch}".encode())
        made = Commit()
        made.tree = ObjectID(tree)
        made.author = made.committer = author.encode()
        made.author_time = made.commit_time = 1_700_000_000 + clock
        made.author_timezone = made.commit_timezone = 0
        made.message = message.encode()
        if parents and ref in self.repo.refs:
            made.parents = [self.repo.refs[ref]]
        self.repo.object_store.add_object(made)
        self.repo.refs[ref] = made.id
        return made.id.decode()

    def tag(self, name: str, commit: str, *, annotated: bool = False) -> None:
        sha = ObjectID(commit.encode())
        if annotated:
            made = Tag()
            made.name = name.encode()
            made.object = (Commit, sha)
            made.tagger = b"Anna <anna@example.com>"
            made.tag_time, made.tag_timezone = 1_700_000_000, 0
            made.message = b"a release"
            self.repo.object_store.add_object(made)
            sha = made.id
        self.repo.refs[Ref(f"refs/tags/{name}".encode())] = sha

    def _empty(self) -> bytes:
        tree = Tree()
        self.repo.object_store.add_object(tree)
        return tree.id


def pool(name: str, *, labels: str = "{}", priority: int = 0) -> str:
    """Return the manifest of a NodePool: it runs nothing, and is well at once."""
    return (
        "apiVersion: fleet/v1alpha1\nkind: NodePool\n"
        f"metadata:\n  name: {name}\n  labels: {labels}\n"
        f"spec:\n  selector: {{}}\n  priority: {priority}\n"
    )


def deployment(name: str, *, replicas: int = 1, more: str = "") -> str:
    return (
        "apiVersion: fleet/v1alpha1\nkind: ModelDeployment\n"
        f"metadata:\n  name: {name}\n"
        f"spec:\n  replicas: {replicas}\n  model:\n    path: models/{name}\n{more}"
    )
