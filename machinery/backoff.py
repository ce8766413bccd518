"""Exponential backoff. Pure: the jitter is an argument."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays that grow from `first_s` to `limit_s` by `factor`, in seconds."""

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
