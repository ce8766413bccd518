"""Reading the store once, by the quick way if it leads there, else by the whole one."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fleetctl.connect import find, opened, refusals, run
from machinery.clock import SystemClock
from store.errors import StoreError
from store.etcd.quick.reads import QuickReads, drive
from store.listing import Reads

T = TypeVar("T")


def read(options: dict[str, Any], main: Callable[[Reads], Coroutine[Any, Any, T]]) -> T:
    """Return what `main` makes of the store; it only reads, and may be called twice.

    The quick way wants etcd's JSON gateway and says little about what is wrong: whatever goes wrong there, the
    whole way (gRPC, several tries) decides, and its words are what the user reads.

    Raises:
        FleetctlError: what `main` raises, or the store's refusal.

    """
    with refusals():
        store = QuickReads(find(options), SystemClock())
        try:
            return drive(main(store))
        except StoreError:
            pass
        finally:
            store.close()
    return run(_wholly(options, main))


async def _wholly(options: dict[str, Any], main: Callable[[Reads], Coroutine[Any, Any, T]]) -> T:
    async with opened(options) as transport:
        return await main(transport)
