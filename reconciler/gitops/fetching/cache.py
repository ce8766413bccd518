"""The bare repository in which what was fetched is kept: opened, filled, and thrown away when it is broken or grown.

A cache, never the truth: whatever is wrong with it, it is removed and made again from the other side.
"""

import fcntl
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dulwich.errors import GitProtocolError
from dulwich.objects import Commit, ObjectID, Tag
from dulwich.refs import Ref
from dulwich.repo import Repo

from machinery.files import make_private
from manifests import words
from reconciler.gitops.asking import Ask
from reconciler.gitops.fetching.failing import BROKEN, FetchError, short
from reconciler.gitops.fetching.remote import Remote

# Each fetch adds a pack. What nobody needs any more is not searched for: the whole is fetched again.
_MOST_PACKS = 24
# What we have, for the other side to leave out.
_HELD = Ref(b"refs/heads/held")
_MOST_TAGS = 5


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the cache alone: a leader that is being replaced may still fetch. Raises OSError."""
    make_private(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def opened(folder: Path) -> Iterator[Repo]:
    """Yield the repository in a folder that is locked, made if it has to be."""
    where = folder / "repository.git"
    packs = where / "objects" / "pack"
    if len(list(packs.glob("*.pack"))) > _MOST_PACKS:
        shutil.rmtree(where)
    repo = _open(where)
    try:
        yield repo
    finally:
        repo.close()


def _open(where: Path) -> Repo:
    for left in (*where.glob("objects/incoming-*"), *where.glob("objects/tmp_pack_*")):
        left.unlink(missing_ok=True)  # of a fetch that was killed
    if not where.is_dir():
        # Half of a repository is none, so it gets its name when it is whole.
        fresh = where.with_name("new.git")
        shutil.rmtree(fresh, ignore_errors=True)
        Repo.init_bare(str(fresh), mkdir=True).close()
        fresh.rename(where)
    return Repo(str(where), bare=True)


def fetched(folder: Path, ask: Ask, remote: Remote) -> bytes:
    """Return the newest commit of what is asked for, which is in the cache then.

    Raises:
        FetchError: there is no such branch, tag or commit.
        Exception: what `failing.CAUGHT` lists.

    """
    try:
        return _fetched(folder, ask, remote)
    except BROKEN:
        # Whose fault it is cannot be told: from nothing, it must work.
        shutil.rmtree(folder / "repository.git", ignore_errors=True)
        return _fetched(folder, ask, remote)


def _fetched(folder: Path, ask: Ask, remote: Remote) -> bytes:
    with opened(folder) as repo:
        pinned = None if ask.commit is None else ObjectID(ask.commit.encode())
        if pinned is not None and pinned in repo.object_store:
            return pinned
        chosen: list[ObjectID] = []

        def wants(refs: Mapping[Ref, ObjectID], depth: int | None = None) -> list[ObjectID]:
            assert depth in (None, 1)  # as asked below
            sha = _choose(ask, refs)
            chosen.append(sha)
            return [] if sha in repo.object_store else [sha]

        prefix = b"refs/tags/" if ask.tag is not None else b"refs/heads/"
        try:
            remote.client.fetch(
                remote.path, repo, determine_wants=wants, depth=1, ref_prefix=[prefix]
            )
        except GitProtocolError as error:
            if ask.commit is None or not chosen:
                raise
            # Some say "not our ref", others just hang up.
            message = f"{ask.repository} does not give us commit {ask.commit}: {short(error)}"
            raise FetchError("ReferenceNotFound", message) from error
        if not chosen:
            raise FetchError(
                "ReferenceNotFound", f"{ask.repository} is empty: it has no commit yet"
            )
        commit = commit_of(repo, chosen[0])
        repo.refs[_HELD] = ObjectID(commit.id)
        return commit.id


def commit_of(repo: Repo, sha: bytes) -> Commit:
    """Return the commit under a hash, which may be that of a tag.

    Raises:
        FetchError: it is no commit.
        KeyError: it is not there.

    """
    found = repo[ObjectID(sha)]
    for _ in range(_MOST_TAGS):
        if not isinstance(found, Tag):
            break
        found = repo[found.object[1]]
    if not isinstance(found, Commit):
        message = f"{sha.decode()} is no commit but a {found.type_name.decode()}"
        raise FetchError("ReferenceNotFound", message)
    return found


def _choose(ask: Ask, refs: Mapping[Ref, ObjectID]) -> ObjectID:
    if ask.commit is not None:
        return ObjectID(ask.commit.encode())
    kind, name = ("tag", ask.tag) if ask.tag is not None else ("branch", ask.branch or "")
    prefix = b"refs/tags/" if kind == "tag" else b"refs/heads/"
    found = refs.get(Ref(prefix + name.encode()))
    if found is not None:
        return found
    there = sorted(
        ref.removeprefix(prefix).decode("utf-8", "replace")
        for ref in refs
        if ref.startswith(prefix) and not ref.endswith(b"^{}")
    )
    hint = words.did_you_mean(name, there[:20], "There are") or f"It has no {kind} at all"
    raise FetchError("ReferenceNotFound", f"{ask.repository} has no {kind} {name}. {hint}")
