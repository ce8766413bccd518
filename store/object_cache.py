"""Decoded objects in memory by key, with indexes: the data that an informer maintains. Does no I/O."""

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from store.errors import NewerDocumentError, UndecodableError
from store.port import KeyValue

T = TypeVar("T")
_NONE: frozenset[str] = frozenset()


class Index(Generic[T]):
    """Keys of objects by the values that `values_of` (pure) extracts from each object."""

    def __init__(self, values_of: Callable[[T], Iterable[str]]) -> None:
        self._values_of = values_of
        self._values: dict[str, frozenset[str]] = {}
        # Kept sorted: sorting ten thousand keys for each lookup took milliseconds.
        self._keys: dict[str, list[str]] = {}

    def keys(self, value: str) -> list[str]:
        """Return the keys of the objects with the value, in order."""
        return list(self._keys.get(value, ()))

    def count(self, value: str) -> int:
        """Return the number of objects with the value."""
        return len(self._keys.get(value, ()))

    def values(self) -> set[str]:
        """Return the values of all objects."""
        return set(self._keys)

    def set(self, key: str, obj: T) -> None:
        """Index the current state of an object."""
        self._move(key, frozenset(self._values_of(obj)))

    def drop(self, key: str) -> None:
        """Remove an object, or do nothing if it is not indexed."""
        self._move(key, _NONE)

    def _move(self, key: str, after: frozenset[str]) -> None:
        before = self._values.get(key, _NONE)
        if before == after:  # most changes leave an object where it is
            return
        for value in before - after:
            keys = self._keys[value]
            del keys[bisect_left(keys, key)]
            if not keys:
                del self._keys[value]
        for value in after - before:
            insort(self._keys.setdefault(value, []), key)
        if after:
            self._values[key] = after
        else:
            self._values.pop(key, None)


log = logging.getLogger(__name__)


class ObjectCache(Generic[T]):
    """Decoded objects by key, with indexes. Read-only for its users; the informer, a subclass, writes."""

    def __init__(self, decode: Callable[[KeyValue], T]) -> None:
        self._decode = decode
        self._items: dict[str, T] = {}
        self._shown = MappingProxyType(self._items)
        self._versions: dict[str, int] = {}
        self._last_good: dict[str, int] = {}
        self._indexes: dict[str, Index[T]] = {}
        self.undecodable: set[str] = set()
        """Keys whose value cannot be decoded; `items` has the last good value, if there was one."""
        self.newer: set[str] = set()
        """Those of them that a newer mlx-fleet wrote: they must not be overwritten."""

    @property
    def items(self) -> Mapping[str, T]:
        """The objects by key; the last good value where the current one cannot be decoded."""
        return self._shown

    def version(self, key: str) -> int:
        """Return the mod_revision of a cached value; 0 if there is none.

        For a key that cannot be decoded it is that of the last good value: a write based on that value must fail
        against the newer one.
        """
        versions = self._last_good if key in self.undecodable else self._versions
        return versions.get(key, 0)

    def index(self, name: str, values_of: Callable[[T], Iterable[str]]) -> None:
        """Add an index: `values_of` (pure) returns the values under which an object is found."""
        new_index = self._indexes[name] = Index(values_of)
        for key, obj in self._items.items():
            new_index.set(key, obj)

    def by_index(self, name: str, value: str) -> Mapping[str, T]:
        """Return the objects with the value, by key, in order of their keys.

        An object that cannot be decoded is found by its last good value.

        Raises:
            KeyError: there is no such index.

        """
        return {key: self._items[key] for key in self._indexes[name].keys(value)}

    def count(self, name: str, value: str) -> int:
        """Return the number of objects that `by_index` would return; raises as it does."""
        return self._indexes[name].count(value)

    def values(self, name: str) -> set[str]:
        """Return the values of all objects in an index; raises as `by_index` does."""
        return self._indexes[name].values()

    def copy_from(self, other: "ObjectCache[T]") -> None:
        """Take the objects of another cache of the same type; objects are frozen, so both may hold them."""
        for key, obj in other.items.items():
            self._set(key, other.version(key), obj)

    def forget(self, key: str) -> None:
        """Remove an object that the store has, to plan without it; as `Informer.suppose` adds one."""
        self._drop(key)

    def _decoded(self, item: KeyValue) -> T | UndecodableError:
        try:
            return self._decode(item)
        except UndecodableError as error:
            return error

    def _set(self, key: str, version: int, value: T | UndecodableError) -> None:
        before, self._versions[key] = self._versions.get(key, 0), version
        if not isinstance(value, UndecodableError):
            self._items[key] = value
            if self.undecodable:
                self._forget_trouble(key)
            for index in self._indexes.values():
                index.set(key, value)
            return
        # Keep the last good value: treating the object as deleted would stop running replicas.
        if key in self._items and key not in self.undecodable:
            self._last_good[key] = before
        self.undecodable.add(key)
        (self.newer.add if isinstance(value, NewerDocumentError) else self.newer.discard)(key)
        log.error("a document in the store cannot be read", extra={"why": str(value)})

    def _drop(self, key: str) -> None:
        self._items.pop(key, None)
        self._versions.pop(key, None)
        self._forget_trouble(key)
        for index in self._indexes.values():
            index.drop(key)

    def _forget_trouble(self, key: str) -> None:
        self.undecodable.discard(key)
        self.newer.discard(key)
        self._last_good.pop(key, None)
