"""The fetching process: one line in, lines out. Its limits are set before it reads anything of anybody's."""

import os
import resource
import signal
import socket
import sys
from pathlib import Path
from threading import Thread
from types import TracebackType

from manifests.overlay import SourceDocument
from reconciler.gitops.fetch_messages import FetchRequest, FetchResponse, line_of
from reconciler.gitops.fetch_process import repository
from reconciler.gitops.fetch_process.commit_tree import CommitTree
from reconciler.gitops.fetch_process.errors import CAUGHT, FetchError, redact, to_failure
from reconciler.gitops.fetch_process.repository import SILENCE_S, GitRemote, make_remote

# Address space; what is really used is less by what libraries reserve. Linux keeps to it, macOS does not: there
# the leader watches (reconciler/gitops/fetcher.py).
_MEMORY = 2 * 2**30
_FILE = 512 * 2**20
_ASK = 64 * 2**10


def main() -> None:
    """Answer one ask."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    socket.setdefaulttimeout(SILENCE_S)
    ask = FetchRequest.model_validate_json(sys.stdin.buffer.readline(_ASK))
    signal.alarm(int(ask.timeout_s) + 5)
    Thread(target=_end_with_parent, daemon=True).start()
    secrets: list[str] = []
    sys.excepthook = lambda kind, error, trace: _last_words(kind, error, trace, secrets)
    answer, documents = _answer(ask, secrets)
    _write(answer, documents)


def _end_with_parent() -> None:
    """End when nobody listens any more: a leader that was killed cannot end us."""
    # Not through sys.stdin: its lock, held while we wait, would hold up our own end for a second.
    while os.read(0, 1):
        pass
    os._exit(0)


def _answer(
    ask: FetchRequest, secrets: list[str]
) -> tuple[FetchResponse, tuple[SourceDocument, ...]]:
    revision = b""
    try:
        remote = None if ask.offline else make_remote(ask)
        secrets.extend(remote.secrets if remote is not None else ())
        folder = Path(ask.cache)
        with repository.lock_cache(folder):
            revision = _newest(folder, ask, remote)
            if revision.decode() == ask.known:
                return FetchResponse(revision=ask.known), ()
            with repository.open_repository(folder) as repo:
                files = CommitTree(repo, repository.commit_of(repo, revision), ask.repository)
                found = files.documents(ask.path).documents
        answer = FetchResponse(
            revision=revision.decode(), documents=len(found), files=len(files.names)
        )
    except (FetchError, *CAUGHT) as error:
        failure = to_failure(error, ask.repository)
        clean = failure.model_copy(update={"message": redact(failure.message, secrets)})
        return FetchResponse(revision=revision.decode(), failure=clean), ()
    return answer, found


def _newest(folder: Path, ask: FetchRequest, remote: GitRemote | None) -> bytes:
    if remote is not None:
        return repository.fetch_commit(folder, ask, remote)
    assert ask.commit is not None
    return ask.commit.encode()


def _write(answer: FetchResponse, documents: tuple[SourceDocument, ...]) -> None:
    out = sys.stdout.buffer
    out.write(answer.model_dump_json(by_alias=True).encode() + b"\n")
    for document in documents:
        out.write(line_of(document).encode() + b"\n")
    out.flush()


def _last_words(
    kind: type[BaseException],
    error: BaseException,
    _trace: TracebackType | None,
    secrets: list[str],
) -> None:
    """Say why we end, in one line and without secrets."""
    text = " ".join(str(error).split())[:500]
    sys.stderr.write(redact(f"{kind.__name__}: {text}\n", secrets))


if __name__ == "__main__":
    main()
