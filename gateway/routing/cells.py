"""A map of bounded size from 64-bit keys to marks of engines; the oldest make room. Pure: time arrives.

Built like a processor's cache: eight places for each of the sets that a key may be in, 16 bytes a place. Python's own
dict takes 140 bytes for the same, and doubling one of half a million entries stops the process for tens of milliseconds; here nothing
ever grows, and the pages of what was never used are not there at all.
"""

import mmap

_WAYS = 8
_OWN = 61
"""A key's upper bits say which place of its set is looked at first: mostly it is there."""
_TICKS = 8
"""Ticks a second; 32 bits of them are 17 years."""


class Cells:
    """Keys are never 0; a key that was not seen for long may be forgotten for another of the same set."""

    def __init__(self, sets_log2: int) -> None:
        """`sets_log2`: 18 is two million places, 32 MB once all are used."""
        size = _WAYS * 8 << sets_log2
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._keys = memoryview(mmap.mmap(-1, size, flags=flags)).cast("Q")
        # The upper half is when in ticks, the lower the mark: so the least is the oldest.
        self._values = memoryview(mmap.mmap(-1, size, flags=flags)).cast("Q")
        self._mask = (1 << sets_log2) - 1

    def get(self, key: int, not_before_s: float) -> int:
        """Return the mark under the key; 0 if there is none, or one of before that time."""
        base = (key & self._mask) * _WAYS
        place = base + (key >> _OWN)
        if self._keys[place] != key:
            ways = self._keys[base : base + _WAYS].tolist()
            if key not in ways:
                return 0
            place = base + ways.index(key)
        value = self._values[place]
        return value & 0xFFFFFFFF if value >> 32 >= int(not_before_s * _TICKS) else 0

    def put(self, key: int, mark: int, when_s: float) -> None:
        """Note the mark; `when_s` decides who is forgotten first."""
        base = (key & self._mask) * _WAYS
        place = base + (key >> _OWN)
        if self._keys[place] != key:
            place = base + self._way(base, key)
            self._keys[place] = key
        self._values[place] = int(when_s * _TICKS) << 32 | mark

    def _way(self, base: int, key: int) -> int:
        """Return which place of the set is the key's, or becomes its."""
        ways = self._keys[base : base + _WAYS].tolist()
        if key in ways:
            return ways.index(key)
        if not ways[key >> _OWN]:
            return key >> _OWN
        if 0 in ways:
            return ways.index(0)
        values = self._values[base : base + _WAYS].tolist()
        return values.index(min(values))
