"""`fleetctl dashboard`: the address of a registered dashboard, one of this machine first."""

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.verbs.dashboard import find_dashboard
from machinery.clock import SystemClock
from schemas.records import DashboardLease
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put


def lease(id_: str, url: str) -> Put:
    key = keys.named(keys.DASHBOARD_LEASE_PREFIX, id_)
    return Put(key=key, value=codec.encode(DashboardLease(url=url, version="1")))


async def test_the_dashboard_of_this_machine_comes_first() -> None:
    store = MemoryTransport(SystemClock())
    with pytest.raises(FleetctlError, match=r"no dashboard is registered.*fleetctl up"):
        await find_dashboard(store)
    await store.commit([], [lease("a", "http://10.0.0.5:4003")])
    assert await find_dashboard(store) == "http://10.0.0.5:4003"
    await store.commit([], [lease("b", "http://127.0.0.1:4003")])
    assert await find_dashboard(store) == "http://127.0.0.1:4003"
