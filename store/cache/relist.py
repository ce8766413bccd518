"""A list on its way into a cache, page by page: says what is to change in it. Changes nothing."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from machinery.garbage import collector_held
from store.codec import UndecodableError
from store.port import KeyValue, Listing

T = TypeVar("T")


class Relist(Generic[T]):
    """What a list says that the cache does not have; holds that, decoded, and no raw value.

    `versions` are the mod_revisions of the cache, or empty if they are not to be relied on.
    """

    def __init__(
        self, versions: Mapping[str, int], decode: Callable[[KeyValue], T | UndecodableError]
    ) -> None:
        self._cached = versions
        self._decode = decode
        self.revision = 0
        self.store = ""
        self.versions: dict[str, int] = {}
        """The mod_revision of every key that was listed."""
        self.changed: dict[str, T | UndecodableError] = {}

    def take(self, page: Listing) -> None:
        """Decode what changed on a page; what did not is not even looked at."""
        self.revision, self.store = page.revision, page.store
        with collector_held():
            for item in page.items:
                self.versions[item.key] = item.mod_revision
                if self._cached.get(item.key) != item.mod_revision:
                    self.changed[item.key] = self._decode(item)

    def renumbered(self, versions: Mapping[str, int], items: Mapping[str, T]) -> bool:
        """Return whether revisions mean other writes than they did in the cache.

        Everything must have been decoded. If it is not so, only what differs stays changed.
        """
        moved_back = any(now < versions.get(key, 0) for key, now in self.versions.items())
        differing = {
            key: value
            for key, value in self.changed.items()
            if self.versions[key] != versions.get(key) or value != items.get(key)
        }
        reused = any(
            self.versions[key] == versions.get(key) and not isinstance(value, UndecodableError)
            for key, value in differing.items()
        )
        if moved_back or reused:
            return True
        self.changed = differing
        return False
