"""Exponential backoff with jitter, the waits of one retry loop, and a budget for retries.

Every loop that asks a peer again after a failure uses this module; docs/operations/store.md lists the loops.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from machinery.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays that grow from `first_s` to `limit_s` by `factor`, in seconds. Pure: the jitter is an argument."""

    first_s: float = 0.05
    limit_s: float = 1.0
    factor: float = 2.0

    def delay_s(self, failures: int, *, jitter: float = 1.0) -> float:
        """Return the delay after `failures` consecutive failures; `jitter` from 1 to 0 shortens it by up to half.

        Half of the delay always stays, so that retries spread out and none comes at once
        ("equal jitter", Amazon Builders' Library, Timeouts, retries and backoff with jitter).
        """
        if failures <= 0:
            return 0.0
        full = min(self.limit_s, self.first_s * self.factor ** min(failures - 1, 64))
        return full * (0.5 + 0.5 * jitter)


SLOW_RETRY: Final = Backoff(first_s=300.0, limit_s=300.0)
"""Retries of what failed again and again, or of what only a person can mend: within five minutes, the limit that
Kubernetes has for containers in CrashLoopBackOff."""
REFUSED = Backoff(first_s=1.0, limit_s=30.0)
"""For a peer that refuses credentials: a person must correct them, and each attempt costs the peer work."""


class Retries:
    """The consecutive failures of one loop, and the jittered waits between its attempts."""

    def __init__(
        self,
        backoff: Backoff,
        clock: Clock,
        *,
        refused: Backoff = REFUSED,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`refused` replaces `backoff` for failures that a person must correct."""
        self._backoff = backoff
        self._refused = refused
        self._clock = clock
        self._jitter = jitter
        self.failures = 0

    def reset(self) -> None:
        """Forget the failures, after a success."""
        self.failures = 0

    def next_delay_s(self, *, is_refused: bool = False) -> float:
        """Count a failure; return the wait before the next attempt, in seconds."""
        self.failures += 1
        policy = self._refused if is_refused else self._backoff
        return policy.delay_s(self.failures, jitter=self._jitter())

    async def wait(self, *, is_refused: bool = False) -> None:
        """Count a failure, and wait before the next attempt."""
        await self._clock.sleep(self.next_delay_s(is_refused=is_refused))


class RetryBudget:
    """Limits the immediate retries of failed calls, so that they cannot double the load of a sick peer.

    gRPC's retry throttling (proposal A6): each failure takes a token, each success returns a part of one, and
    retries need more than half of the tokens.
    """

    def __init__(self, *, most: float = 10.0, per_success: float = 0.1) -> None:
        self._most = most
        self._per_success = per_success
        self._tokens = most

    @property
    def allows_retry(self) -> bool:
        """True if a failed call may be repeated at once."""
        return self._tokens > self._most / 2

    def record_success(self) -> None:
        self._tokens = min(self._most, self._tokens + self._per_success)

    def record_failure(self) -> None:
        self._tokens = max(0.0, self._tokens - 1.0)
