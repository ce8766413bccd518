"""Who of the engines is heard, and who is waited for, by the connections there are. Opens none."""

from collections.abc import Iterable

from gateway.routing.table import Origin
from gateway.upstream.connection import Connection


def heard(connections: Iterable[Connection]) -> set[Origin]:
    """Return who sent anything since this was last asked."""
    found = set()
    for connection in connections:
        if connection.is_heard:
            connection.is_heard = False
            found.add(connection.origin)
    return found


def awaited(connections: Iterable[Connection], since_s: float) -> set[Origin]:
    """Return from whom somebody has been waiting at least since then for a sign of life."""
    return {one.origin for one in connections if one.silent_since <= since_s}


def give_up(connections: Iterable[Connection], origin: Origin, why: str) -> None:
    """Have whoever waits for the engine wait no more."""
    for connection in tuple(connections):
        if connection.origin == origin and connection.silent_since < float("inf"):
            connection.fail(why, is_silence=True)
