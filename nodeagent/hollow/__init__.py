"""Hollow agents: the real agent (leases, status, planner, reports) on engines that are only times.

For simulations and for load: thousands in one process, cheap when idle. In one event loop:

    clock = SystemClock()                      # or machinery.virtual_time.VirtualClock
    feed = SharedCaches(transport, clock)        # one watch for all agents of the process
    macs = [HollowMac(clock=clock, status=hollow_status(f"mac-{n}"), models=models_on_disk({"qwen": geometry})) for n in range(1000)]
    async with asyncio.TaskGroup() as group:
        group.create_task(feed.run())
        for mac in macs:
            group.create_task(mac.agent(transport, feed).run())

`python -m nodeagent.hollow --etcd ... --count 1000` does that as a process of its own. Cancel an agent's task for a
crash of the agent; `mac.lose_power()` besides ends its engines; `mac.engines.running()[0].end(1)` crashes one, `.is_silent = True`
freezes it, `.is_stuck = True` has it get nowhere; `mac.readings.now` is how the machine is. Ranks of a group find each other among
the Macs of one `SharedCaches`, and end with each other; `mac.health.answer` is what a group answers to the golden question.
What is not like a fleet: all agents share one connection and two watches, where real agents have two watches each.
Must not start processes, open sockets of its own or write files.
"""

from nodeagent.hollow.engines import HollowEngine, HollowTiming
from nodeagent.hollow.node import (
    HollowMac,
    SharedCaches,
    healthy_reading,
    hollow_status,
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
