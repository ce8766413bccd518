"""Hollow agents, as in kubemark: the real agent (lease, status, planner, reports) with simulated engines.

For simulations and load tests: thousands in one process, cheap when idle. In one event loop:

    clock = SystemClock()                      # or machinery.virtual_time.VirtualClock
    feed = SharedCaches(transport, clock)        # one watch for all agents of the process
    macs = [HollowMac(clock=clock, status=hollow_status(f"mac-{n}"), models=models_on_disk({"qwen": geometry})) for n in range(1000)]
    async with asyncio.TaskGroup() as group:
        group.create_task(feed.run())
        for mac in macs:
            group.create_task(mac.agent(transport, feed).run())

`python -m nodeagent.hollow --etcd ... --count 1000` does that as a process of its own. To inject faults:

- cancel an agent's task: the agent crashes; `mac.lose_power()` also ends its engines;
- `mac.engines.running()[0].end(1)`: an engine crashes; `.is_silent = True`: it hangs; `.is_stuck = True`: no progress;
- `mac.readings.now = ...`: the readings of the machine; `mac.health.answer = ...`: a group's golden answer.

Ranks of a group find each other among the Macs of one `SharedCaches`, and end together. Unlike in a real fleet, all agents
share one connection and two watches. Must not start processes, open sockets or write files.
"""

from nodeagent.hardware.hollow_status import hollow_status
from nodeagent.hollow.engines import HollowEngine, HollowTiming
from nodeagent.hollow.node import (
    HollowMac,
    SharedCaches,
    healthy_reading,
    models_on_disk,
)

__all__ = [
    "HollowEngine",
    "HollowMac",
    "HollowTiming",
    "SharedCaches",
    "healthy_reading",
    "hollow_status",
    "models_on_disk",
]
