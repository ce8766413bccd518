"""The first part of `bench.control_plane`: hollow nodes join until all are there, or this machine can bear no more.

Agents whose machine is too slow to renew their leases in time are taken for dead, all of them in turn, and nothing that
is measured then means anything. So the first nodes show what their leases cost; where all would take too much of the
machine, the crowd holds longer ones (kubelet's live 40 s), and who still does not come in time is left out.
"""

import asyncio
import time

from bench.control_plane_parts import Bench, TooSlowError, used, wait_for
from bench.result import sized
from store import keys
from store.leases import LEASE_TTL_S

NODES, PROCESSES, VICTIMS = sized((1000, 4, 5), smoke=(40, 2, 2))
# No other nodes are waited for when one is gone: what is measured is how soon its replicas are replaced.
RECONCILER = ("reconciler", "--node-grace-period", "0")
_EACH = NODES // PROCESSES
_PACE = ("--load", "0", "--memory", "64Gi", "--chip", "Apple M4 Max")
_LONG_LEASE_S = 20
# What all leases may take of the machine's processors; whoever reconciles needs the rest.
_MOST = 0.35
_JOINS_S, _WATCHED_S = 30.0, 5.0


async def join(bench: Bench) -> None:
    """Wait until all agents are registered and at rest: their start is not measured.

    Raises:
        TooSlowError: not even the first of them can be kept alive.

    """
    begin, crowd, figures = time.perf_counter(), bench.crowd, bench.figures
    crowd.start("reconciler", *RECONCILER)
    victims = ("--count", str(VICTIMS), "--name", "victim")
    crowd.start("victims", "nodeagent.hollow", *victims, *_PACE)
    lease_s = LEASE_TTL_S
    if not await _group(bench, 0, lease_s) or await _share(bench) > _MOST:
        lease_s = _LONG_LEASE_S
        crowd.kill("agents-0")
        print(f"leases of {LEASE_TTL_S} s are too much for this machine: agents hold {lease_s} s")
        if not await _group(bench, 0, lease_s):
            raise TooSlowError(f"{_EACH} nodes did not join in {_JOINS_S:g} s")
    groups = 1
    while groups < PROCESSES and await _group(bench, groups, lease_s):
        groups += 1
    if groups < PROCESSES:
        crowd.kill(f"agents-{groups}")
        print(f"scaled down to {groups * _EACH} nodes: more did not join in {_JOINS_S:g} s")
    figures |= {"nodes": groups * _EACH, "lease_s": lease_s}
    figures["joined_s"] = round(time.perf_counter() - begin, 1)
    await crowd.calm("reconciler", limit_s=bench.within(30))
    await _stay(bench, set[str]().union(*(_leases_of(at) for at in range(groups))))


async def _group(bench: Bench, at: int, lease_s: int) -> bool:
    """Start the nodes of one process; return whether they joined in time.

    Raises:
        TooSlowError: the process ended.

    """
    options = ("--count", str(_EACH), "--first", str(at * _EACH), "--lease", str(lease_s))
    bench.crowd.start(f"agents-{at}", "nodeagent.hollow", *options, *_PACE)
    mine, since = _leases_of(at), time.perf_counter()

    def there() -> bool:
        bench.crowd.check()
        held = mine & bench.leases.values.keys()  # a lease of an earlier run may still live
        return len(held) == _EACH and all(bench.leases.last[key] > since for key in held)

    return await wait_for(there, bench.within(_JOINS_S))


def _leases_of(at: int) -> set[str]:
    """Return the leases' keys of one process."""
    return {keys.node_lease_key(f"hollow-{at * _EACH + number}") for number in range(_EACH)}


async def _share(bench: Bench) -> float:
    """Return which share of the machine all leases will take, by what those of the first nodes do."""
    await asyncio.sleep(2.0)  # whoever just joined still describes itself
    before = bench.crowd.cost()
    await asyncio.sleep(_WATCHED_S)
    taken = used(before, bench.crowd.cost())
    share = PROCESSES * (taken["agents"] + taken["etcd"]) / bench.processors
    bench.figures["leases_take_of_machine"] = round(share, 2)
    return share


async def _stay(bench: Bench, leases: set[str]) -> None:
    """Watch for a while: nobody must be taken for dead who lives.

    Raises:
        TooSlowError: leases are lost though nothing happens.

    """
    lost = 0
    for _ in range(4):
        bench.leases.gone.clear()
        await asyncio.sleep(_WATCHED_S)
        lost = len(leases & bench.leases.gone.keys())
        if not lost:
            return
    raise TooSlowError(
        f"{lost} of {len(leases)} leases were lost in {_WATCHED_S:g} s though nothing happened: "
        "this machine is too slow, or others are at work on it"
    )
