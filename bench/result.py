"""Parts that all benches share: the short form for a smoke test, peers that fail, the last line and the exit code.

The last line of a bench is one JSON object: what it compared first, then `failed` (the peers that could not be measured,
with the reason), then other figures. A bench that compared nothing exits with an error.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

T = TypeVar("T")

_FLAG = "--smoke"
SMOKE: Final = _FLAG in sys.argv[1:]
"""True in a smoke test: whether the bench runs and compares, in seconds. Its figures mean nothing."""


def sized(full: T, *, smoke: T) -> T:
    """Return a size of the bench: `full`, or `smoke` in a smoke test."""
    return smoke if SMOKE else full


def arguments() -> Sequence[str]:
    """Return the arguments of the command line without the flag for a smoke test."""
    return [word for word in sys.argv[1:] if word != _FLAG]


class PeerError(Exception):
    """A peer could not be measured; the message says why."""


@contextmanager
def recorded(failed: dict[str, str], peer: str) -> Iterator[None]:
    """Record under the peer's name why it could not be measured; the bench goes on without it."""
    try:
        yield
    except PeerError as error:
        failed[peer] = str(error)
        print(f"{peer}: not measured: {error}", flush=True)


@contextmanager
def of_peer() -> Iterator[None]:
    """Turn whatever a peer raises into a PeerError."""
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        raise PeerError(f"{type(error).__name__}: {error}") from error


def finish(
    bench: str,
    compared: Mapping[str, Any],
    figures: Mapping[str, Any],
    *,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Print the last line, and exit with an error if nothing was compared.

    Raises:
        SystemExit: nothing was compared.

    """
    failed = dict(failed or {})
    assert not {"bench", "failed"} & {*compared, *figures}, "these names are the helper's own"
    print(json.dumps({"bench": bench, **compared, "failed": failed, **figures}), flush=True)
    if not any(value is not None for value in compared.values()):
        why = "; ".join(f"{peer}: {reason}" for peer, reason in failed.items())
        sys.exit(f"bench {bench}: nothing was compared ({why or 'no figures'})")
