"""Errors of a fetch as messages for people, without secrets."""

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

from reconciler.services.gitops.fetch_messages import FailureReason, FetchFailure

_LONGEST = 500
# Exceptions of dulwich for a broken pack or an answer that is not Git. It parses with assertions.
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
    """A failure with its reason."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.failure = FetchFailure(reason=reason, message=message)


def to_failure(error: BaseException, repository: str) -> FetchFailure:
    """Return the failure that an error means."""
    if isinstance(error, FetchError):
        return error.failure
    reason, message = _meaning(error, repository)
    return FetchFailure(reason=reason, message=message)


def _meaning(error: BaseException, repository: str) -> tuple[FailureReason, str]:
    text = short_message(error)
    match error:
        case HTTPUnauthorized() | HTTPProxyUnauthorized():
            server = "the HTTP proxy" if isinstance(error, HTTPProxyUnauthorized) else repository
            return (
                "AuthenticationFailed",
                f"{server} refuses the credentials: {text}. Check spec.credentials",
            )
        case NotGitRepository():
            return (
                "RepositoryNotFound",
                f"there is no repository at {repository}, or the credentials may not read it",
            )
        case MemoryError():
            return "TooLarge", f"{repository} needs more memory than the fetch process may use"
        case OSError():
            return _of_system(error, repository, text)
        case _:
            return _of_peer(error, repository, text)


def _of_system(error: OSError, repository: str, text: str) -> tuple[FailureReason, str]:
    if isinstance(error, TimeoutError | socket.timeout):
        return "TimedOut", f"{repository} did not answer in time"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        path = error.filename or "the cache"
        return (
            "NoSpace",
            f"the disk of --git-dir is full: {path} cannot be written; free some space",
        )
    if error.errno == errno.EFBIG:
        return "TooLarge", f"{repository} sends more than the cache may hold"
    return "Unreachable", f"{repository} cannot be reached: {text}"


def _of_peer(error: BaseException, repository: str, text: str) -> tuple[FailureReason, str]:
    detail = f"{text} {error.__cause__ or ''}"
    if "CERTIFICATE_VERIFY_FAILED" in detail or "certificate verify failed" in detail:
        hint = "name the file of its certificate authority in credentials.caFile"
        return (
            "CertificateRefused",
            f"the certificate of {repository} is not trusted: {text}; {hint}",
        )
    if isinstance(error, HangupException):
        return "Unreachable", f"{repository} closed the connection: {text}"
    if re.search(
        r"not found|not exported|no such|does not (appear|exist)|repository", detail, re.IGNORECASE
    ):
        return (
            "RepositoryNotFound",
            f"there is no repository at {repository}, or the credentials may not read it: {text}",
        )
    if isinstance(error, urllib3.exceptions.HTTPError | GitProtocolError):
        return "Unreachable", f"{repository} cannot be reached: {text}"
    return "FetchingFailed", f"{repository} sends data that is not Git, or broken: {text}"


def short_message(error: BaseException) -> str:
    """Return an error's message as one line of printable text, cut to 500 characters."""
    cause = error.__cause__
    if isinstance(cause, urllib3.exceptions.MaxRetryError) and cause.reason is not None:
        error = cause.reason  # without the pool and its retries
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return printable(text, _LONGEST) or type(error).__name__


def printable(text: str, limit: int) -> str:
    """Return a text of others as one line that is safe on a terminal, cut to `limit` characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:limit]


def redact(text: str, secrets: Iterable[str]) -> str:
    """Remove secrets from a text, in every form in which a server may have echoed them."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def secret_forms(username: str, password: str) -> list[str]:
    """Return the forms in which a password travels."""
    basic = base64.b64encode(f"{username}:{password}".encode()).decode()
    return [password, basic] if password else []
