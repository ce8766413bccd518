"""`fleetctl delete` of a node."""

import pytest

from store import keys
from store.port import Put
from tests.support.fleetctl_runner import MemoryFleet

pytestmark = pytest.mark.timeout(120)


async def test_deleting_a_node_says_that_its_agent_registers_it_again(fleet: MemoryFleet) -> None:
    await fleet.store.commit([], [Put(key=keys.status_key("Node", "mac-9"), value=b"{}")])
    done = await fleet.ctl("delete", "node", "mac-9")
    assert (done.code, done.out) == (0, "node/mac-9 deleted\n")
    assert "registers the node again" in done.err
    assert "`fleetctl cordon mac-9`" in done.err
