"""What of a watch's events is new, for both ways to etcd."""

from store.port import Change, WatchBatch


def news(changes: tuple[Change, ...], after_revision: int, store: str) -> WatchBatch | None:
    """Return the changes after a revision, None without any; `changes` are etcd's events in order.

    Watches are opened at the revision that was seen last, not at the one after it, and what was seen
    is dropped here. Older etcd (3.4.23 does) lets a watch begin at the revision that was compacted
    last, and tells nothing of what was deleted by it (etcd issues 18089 and 19179): a cache would keep
    that key for ever. Begun one earlier, such a watch is refused as compacted.
    """
    fresh = tuple(change for change in changes if change.mod_revision > after_revision)
    return (
        WatchBatch(revision=fresh[-1].mod_revision, changes=fresh, store=store) if fresh else None
    )
