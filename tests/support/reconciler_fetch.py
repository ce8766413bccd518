"""Fetches through the real fetch process, for tests."""

from pathlib import Path

from machinery.clock import SystemClock
from reconciler.services.gitops.fetch_messages import FetchCredentials, FetchRequest
from reconciler.services.gitops.fetcher import FetchResult, fetch


async def fetched(
    repository: str,
    cache: Path,
    *,
    path: str = "",
    known: str | None = None,
    timeout_s: float = 60.0,
    who: FetchCredentials | None = None,
    trusted_host: str | None = None,
) -> FetchResult:
    ask = FetchRequest(
        repository=repository,
        branch="main",
        path=path,
        cache=str(cache),
        credentials=who or FetchCredentials(),
        trusted_host=trusted_host,
        known=known,
        timeout_s=timeout_s,
    )
    return await fetch(ask, SystemClock())


def reason(found: FetchResult) -> str:
    return "" if found.answer.failure is None else found.answer.failure.reason


def message(found: FetchResult) -> str:
    return "" if found.answer.failure is None else found.answer.failure.message
