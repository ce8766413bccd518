"""What can go wrong with a fetch, in words for people, and never with a secret in them."""

import base64
import errno
import re
import socket
from collections.abc import Iterable

import urllib3.exceptions
from dulwich.client import HTTPProxyUnauthorized, HTTPUnauthorized
from dulwich.errors import (
    ApplyDeltaError,
    ChecksumMismatch,
    GitProtocolError,
    HangupException,
    NotGitRepository,
    ObjectFormatException,
)

from reconciler.gitops.fetch_messages import FailureReason, FetchFailure

_LONGEST = 500
# What a broken pack, or an answer that is no Git, makes dulwich raise. It parses with assertions.
BROKEN = (
    *(ApplyDeltaError, ChecksumMismatch, ObjectFormatException),
    *(AssertionError, ValueError, KeyError, IndexError, EOFError),
)
CAUGHT = (
    *(OSError, MemoryError),
    *(HTTPUnauthorized, HTTPProxyUnauthorized, NotGitRepository, GitProtocolError),
    *(urllib3.exceptions.HTTPError, *BROKEN),
)


class FetchError(Exception):
    """A refusal with its reason."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.failure = FetchFailure(reason=reason, message=message)


def to_failure(error: BaseException, repository: str) -> FetchFailure:
    """Return what an error means."""
    if isinstance(error, FetchError):
        return error.failure
    reason, message = _meaning(error, repository)
    return FetchFailure(reason=reason, message=message)


def _meaning(error: BaseException, repository: str) -> tuple[FailureReason, str]:
    said = short_message(error)
    match error:
        case HTTPUnauthorized() | HTTPProxyUnauthorized():
            who = "the proxy before it" if isinstance(error, HTTPProxyUnauthorized) else repository
            return "AuthenticationFailed", f"{who} does not let us in: {said}. Look at credentials"
        case NotGitRepository():
            return (
                "RepositoryNotFound",
                f"there is no repository at {repository}, or we may not see it",
            )
        case MemoryError():
            return "TooLarge", f"{repository} needs more memory than the fetching process may have"
        case OSError():
            return _of_system(error, repository, said)
        case _:
            return _of_peer(error, repository, said)


def _of_system(error: OSError, repository: str, said: str) -> tuple[FailureReason, str]:
    if isinstance(error, TimeoutError | socket.timeout):
        return "TimedOut", f"{repository} did not answer in time"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or "the cache"
        return "NoSpace", f"the disk of --git-dir is full: {where} cannot be written; make room"
    if error.errno == errno.EFBIG:
        return "TooLarge", f"{repository} sends more than a cache may hold"
    return "Unreachable", f"{repository} cannot be reached: {said}"


def _of_peer(error: BaseException, repository: str, said: str) -> tuple[FailureReason, str]:
    text = f"{said} {error.__cause__ or ''}"
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
        hint = "name who vouches for it in credentials.caFile"
        return "CertificateRefused", f"the certificate of {repository} is not good: {said}; {hint}"
    if isinstance(error, HangupException):
        return "Unreachable", f"{repository} hung up: {said}"
    if re.search(
        r"not found|not exported|no such|does not (appear|exist)|repository", text, re.IGNORECASE
    ):
        return (
            "RepositoryNotFound",
            f"there is no repository at {repository}, or not for us: {said}",
        )
    if isinstance(error, urllib3.exceptions.HTTPError | GitProtocolError):
        return "Unreachable", f"{repository} cannot be reached: {said}"
    return "FetchingFailed", f"{repository} answers what is not Git, or broken: {said}"


def short_message(error: BaseException) -> str:
    """Return what an error says in one line; what a server sent is only text, and cut."""
    cause = error.__cause__
    if isinstance(cause, urllib3.exceptions.MaxRetryError) and cause.reason is not None:
        error = cause.reason  # without the pool and its retries
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text[:_LONGEST] or type(error).__name__


def redact(text: str, secrets: Iterable[str]) -> str:
    """Return the text without the secrets, in whatever form a server may have echoed them."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def secret_forms(username: str, password: str) -> list[str]:
    """Return the forms in which a password travels."""
    basic = base64.b64encode(f"{username}:{password}".encode()).decode()
    return [password, basic] if password else []
