"""Which engine served which request, and what became of it: the last few thousand, and on disk if somebody wants them.

Written down in the fewest possible steps when a request ends; made into words when somebody asks.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from gateway.carry.trail import Tried
from gateway.routing.table import Target

Json: TypeAlias = dict[str, object]

# Names are a stranger's, and the ring must stay as small as it says.
_LONGEST = 128


class Entry(NamedTuple):
    """One request to a model. A tuple, for each costs its request time."""

    time_s: float
    """When it was all here: seconds since 1970."""
    request_id: bytes
    path: str
    model: str
    """As the client wrote it, cut off where it is too long."""
    key: str
    """The name of its API key; empty without one."""
    session: str
    """What the conversation sticks by; never shown as it is."""
    is_streamed: bool
    status: int
    """What the client got; 0 if it left before."""
    outcome: str
    strategy: str
    """By which the engine was chosen; empty if none was."""
    served_by: Target | None
    tried: Sequence[Tried]
    resumptions: int
    queued_s: float
    first_s: float
    """From its arrival to the first event of its stream; 0 if it was no stream."""
    whole_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Journal:
    """The last requests. `taker`, if there is one, gets each of them, too."""

    def __init__(self, size: int) -> None:
        self._entries: deque[Entry] = deque(maxlen=size)
        self.add = self._entries.append
        """Note a request that ended."""

    def __len__(self) -> int:
        return len(self._entries)

    def last(
        self,
        count: int,
        *,
        outcomes: frozenset[str] = frozenset(),
        model: str = "",
        node: str = "",
    ) -> list[Entry]:
        """Return so many of the latest, the newest first; an empty filter lets all through."""
        found: list[Entry] = []
        for entry in reversed(self._entries):
            if len(found) >= count:
                break
            if outcomes and entry.outcome not in outcomes:
                continue
            if (not model or entry.model == model) and (not node or node in nodes(entry)):
                found.append(entry)
        return found


def nodes(entry: Entry) -> Iterator[str]:
    """Yield the Macs that were asked, who answered first."""
    if entry.served_by is not None:
        yield entry.served_by.node
    for one in entry.tried:
        yield one.target.node


def short(name: str) -> str:
    """Return a stranger's word in a length that can be kept."""
    return name if len(name) <= _LONGEST else name[:_LONGEST]


def shown(entries: Iterable[Entry], gateway: str) -> list[Json]:
    """Return them as the API and the file have them; `gateway` is who served them."""
    return [_shown(entry, gateway) for entry in entries]


def _shown(entry: Entry, gateway: str) -> Json:
    target = entry.served_by
    return {
        "time": datetime.fromtimestamp(entry.time_s, tz=UTC).isoformat(timespec="milliseconds"),
        "id": entry.request_id.decode("ascii"),
        "gateway": gateway,
        "path": entry.path,
        "model": entry.model,
        "deployment": target.deployment if target is not None else None,
        "replica": target.replica if target is not None else None,
        "worker": target.node if target is not None else None,
        "endpoint": _url(target) if target is not None else None,
        "strategy": entry.strategy or None,
        "attempts": [
            {
                "replica": one.target.replica,
                "worker": one.target.node,
                "outcome": one.outcome,
                "ms": _ms(one.ended_s - one.began_s),
                "why": short(one.why) or None,
            }
            for one in entry.tried
        ],
        "resumptions": entry.resumptions,
        "streamed": entry.is_streamed,
        "status": entry.outcome,
        "httpStatus": entry.status or None,
        "queueMs": _ms(entry.queued_s),
        "firstTokenMs": _ms(entry.first_s) if entry.first_s else None,
        "latencyMs": _ms(entry.whole_s),
        "tokens": {
            "prompt": entry.prompt_tokens,
            "cached": entry.cached_tokens,
            "output": entry.output_tokens,
        },
        "apiKey": entry.key or None,
        "session": digest(entry.session) if entry.session else None,
    }


def _url(target: Target) -> str:
    host, port = target.origin
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def digest(session: str) -> str:
    """Return what tells one conversation from another at every gateway, and nothing of what it is called."""
    return blake2b(session.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
