"""Sampling sizes: small in `make test`, full in `make test-full`, which sets FLEET_TESTS=full."""

import os

FULL = os.environ.get("FLEET_TESTS") == "full"


def samples(full: int, *, quick: int | None = None) -> int:
    """Return how many samples to draw: `full` in the full tier, else `quick` (a quarter of `full`, at least 10)."""
    if FULL:
        return full
    return quick if quick is not None else min(full, max(10, full // 4))
