"""The Replicas that concern one node: its copies below `assignment/<node>/` while the leader keeps them, else all.

docs/adr/0004-one-writer-per-key.md has the rules.
"""

from machinery.backoff import Backoff
from machinery.clock import Clock
from nodeagent.kept_copies import LOOK, KeptCopies, ObjectCache, RenamedCache
from schemas.replica import Replica
from store import codec, keys
from store.informer import Informer
from store.port import Transport


class NodeReplicas(KeptCopies[Replica]):
    """A cache of the Replicas that concern a node (`ObjectCache`), by their spec key."""

    def __init__(
        self, transport: Transport, clock: Clock, node: str, *, look: Backoff = LOOK
    ) -> None:
        """Prepare; `run()` reads. `look`: as of `KeptCopies`."""
        prefix = keys.assignment_prefix(node)

        def copies() -> ObjectCache[Replica]:
            return RenamedCache(
                Informer(transport, prefix, lambda item: codec.decode_copy(Replica, item), clock),
                lambda key: keys.spec_key("Replica", key.removeprefix(prefix)),
            )

        def everything() -> ObjectCache[Replica]:
            prefix_of_all = keys.spec_prefix("Replica")
            return Informer(
                transport, prefix_of_all, lambda item: codec.decode_object(Replica, item), clock
            )

        super().__init__(
            transport,
            clock,
            mark=keys.ASSIGNMENTS_KEPT,
            copies=copies,
            everything=everything,
            look=look,
        )
