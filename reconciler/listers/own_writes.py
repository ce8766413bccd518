"""The leader's own writes: the watch brings them back, and they are no news for the reconcile that made them. Does no I/O."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from schemas.meta import ApiModel
from store.port import KeyValue

# Watches are at most seconds behind, and a process makes hundreds of writes a second.
_REMEMBERED: Final = 16_384


class OwnWrites:
    """The revisions that the reconcile of a deployment wrote, each with the name of the deployment.

    Such a reconcile has planned and computed statuses after its writes, so it need not run again because of them. A write
    whose answer is lost is never an own one: it may have been made, or may be made later.
    """

    def __init__(self) -> None:
        self._owners: dict[int, str] = {}
        self._writing = 0
        """The number of writes that wait for their answer."""
        self._expected: dict[str, tuple[bytes, ApiModel]] = {}
        self._undecided: list[tuple[int, str, Callable[[], None]]] = []

    def report(self, revision: int, deployment: str, notify: Callable[[], None]) -> None:
        """Call `notify` unless the reconcile of the deployment itself made the change of that revision.

        The watch may be faster than the answer to the write. While one is being made, the call waits for it.
        """
        if self._owners.get(revision) == deployment:
            return
        if self._writing:
            self._undecided.append((revision, deployment, notify))
        else:
            notify()

    @contextmanager
    def writing(self, deployment: str) -> Iterator[Callable[[int], None]]:
        """Make a write; call what this yields with its revision. With an empty name it is no own write."""
        self._writing += 1
        try:
            yield lambda revision: self._note(revision, deployment)
        finally:
            self._writing -= 1
            undecided, self._undecided = self._undecided, []
            for one in undecided:
                self.report(*one)

    def expect(self, found: Mapping[str, tuple[bytes, ApiModel]]) -> None:
        """Remember what documents by key were made of; before they are written, because a watch may be fast."""
        if len(self._expected) >= _REMEMBERED:
            self._expected.clear()
        self._expected.update(found)

    def take(self, item: KeyValue) -> ApiModel | None:
        """Return what a document was made of, once; None if this process did not write just this document."""
        found = self._expected.pop(item.key, None)
        return None if found is None or found[0] != item.value else found[1]

    def _note(self, revision: int, deployment: str) -> None:
        if not deployment:
            return
        if len(self._owners) >= _REMEMBERED:
            self._owners.clear()
        self._owners[revision] = deployment
