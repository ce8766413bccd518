"""How long to wait after the n-th failure. Pure: the jitter arrives as an argument."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential waiting, in seconds."""

    first_s: float = 0.05
    limit_s: float = 1.0
    factor: float = 2.0

    def delay_s(self, failures: int, *, jitter: float = 1.0) -> float:
        """Return the wait after `failures` failures; `jitter` in 0..1 takes away up to half.

        Half stays, so that a herd is spread without anybody hammering
        ("equal jitter", Amazon Builders' Library, Timeouts, retries and backoff with jitter).
        """
        if failures <= 0:
            return 0.0
        full = min(self.limit_s, self.first_s * self.factor ** min(failures - 1, 64))
        return full * (0.5 + 0.5 * jitter)
