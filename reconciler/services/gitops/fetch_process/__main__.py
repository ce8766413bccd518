"""The fetch process: one line in, lines out. It sets its limits before it reads any foreign data."""

import os
import resource
import signal
import socket
import sys
from pathlib import Path
from threading import Thread
from types import TracebackType

from machinery.gc_pause import pause_collection
from machinery.process_secrets import disable_core_dumps
from manifests.documents import Document
from reconciler.services.gitops.fetch_messages import FetchRequest, FetchResponse, line_of
from reconciler.services.gitops.fetch_process import repository
from reconciler.services.gitops.fetch_process.commit_tree import CommitTree
from reconciler.services.gitops.fetch_process.errors import CAUGHT, FetchError, redact, to_failure
from reconciler.services.gitops.fetch_process.repository import SILENCE_S, GitRemote, make_remote

# Address space, which includes what libraries reserve. Linux enforces it; on macOS the leader watches the memory
# (reconciler/services/gitops/fetcher.py).
_MEMORY = 2 * 2**30
_FILE = 512 * 2**20
_REQUEST_BYTES = 64 * 2**10


def main() -> None:
    """Answer one request."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
    disable_core_dumps()
    socket.setdefaulttimeout(SILENCE_S)
    request = FetchRequest.model_validate_json(sys.stdin.buffer.readline(_REQUEST_BYTES))
    signal.alarm(int(request.timeout_s) + 5)
    Thread(target=_end_with_parent, daemon=True).start()
    secrets: list[str] = []
    sys.excepthook = lambda kind, error, trace: _write_error(kind, error, trace, secrets)
    with pause_collection():  # ten thousand manifests are a million objects, which all live on
        answer, documents = _answer(request, secrets)
        out = sys.stdout.buffer
        out.write(answer.model_dump_json(by_alias=True).encode() + b"\n")
        for document in documents:
            out.write(line_of(document).encode() + b"\n")
        out.flush()


def _end_with_parent() -> None:
    """End when stdin closes: a leader that was killed cannot end this process."""
    # Not through sys.stdin: its lock, held while reading, would delay the end of the process by a second.
    while os.read(0, 1):
        pass
    os._exit(0)


def _answer(
    request: FetchRequest, secrets: list[str]
) -> tuple[FetchResponse, tuple[Document, ...]]:
    revision, info = b"", None
    try:
        remote = None if request.offline else make_remote(request)
        secrets.extend(remote.secrets if remote is not None else ())
        folder = Path(request.cache)
        with repository.lock_cache(folder):
            revision = _newest(folder, request, remote)
            if revision.decode() == request.known:
                return FetchResponse(revision=request.known), ()
            with repository.open_repository(folder) as repo:
                commit = repository.commit_of(repo, revision)
                info = repository.describe_commit(commit)
                files = CommitTree(repo, commit, request.repository)
                documents = files.documents(request.path).documents
        answer = FetchResponse(
            revision=revision.decode(),
            commit=info,
            documents=len(documents),
            files=len(files.names),
        )
    except (FetchError, *CAUGHT) as error:
        failure = to_failure(error, request.repository)
        clean = failure.model_copy(update={"message": redact(failure.message, secrets)})
        return FetchResponse(revision=revision.decode(), commit=info, failure=clean), ()
    return answer, documents


def _newest(folder: Path, request: FetchRequest, remote: GitRemote | None) -> bytes:
    if remote is not None:
        return repository.fetch_commit(folder, request, remote)
    assert request.commit is not None
    return request.commit.encode()


def _write_error(
    kind: type[BaseException],
    error: BaseException,
    _trace: TracebackType | None,
    secrets: list[str],
) -> None:
    """Write the reason of the end to stderr, in one line and without secrets."""
    text = " ".join(str(error).split())[:500]
    sys.stderr.write(redact(f"{kind.__name__}: {text}\n", secrets))


if __name__ == "__main__":
    main()
