"""The control plane under load: `make bench-control-plane`, under five minutes on two cores.

A real etcd with fsync, as `fleetctl up` starts it; a real fleet-reconciler; 1,000 hollow agents (the real agent
on engines that are only times) in four processes; 10,000 replicas of 250 deployments. On a machine that is too slow for
that there are fewer, and agents hold longer leases (`control_plane_join`); it says so. All share the machine: what hollow
agents, and whoever else is at work, take is taken from the control plane. CPU seconds per replica are the figures to trust.
The last line is one JSON object, ratios first, also of a run that came to nothing: then with `error`, which is said in one line.

kube-scheduler's figures are the thresholds that its own benchmark expects, on its own machines: quoted, not measured.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from bench.control_plane_join import NODES, RECONCILER, VICTIMS, join
from bench.control_plane_parts import (
    Bench,
    Crowd,
    Heard,
    TooSlowError,
    leader,
    others,
    spent,
    used,
    wait_for,
)
from bench.result import finish, sized
from machinery.clock import SystemClock
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource, Resources
from schemas.meta import ObjectMeta
from schemas.replica import Replica
from store import codec, keys
from store.errors import StoreError
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import KeyValue

# kubernetes/test/integration/scheduler_perf: SchedulingBasic, 5,000 nodes; with device claims.
KUBE_SCHEDULER_PODS_PER_S, KUBE_SCHEDULER_CLAIMS_PER_S = 680, 180
PROCESSORS = os.cpu_count() or 1
DEPLOYMENTS, PER_DEPLOYMENT, PROBED = sized((250, 40, 10), smoke=(4, 5, 2))
CONVERGE_S, IDLE_S, TAKE_OVERS = sized((100.0, 20.0, 5), smoke=(100.0, 2.0, 1))
# A hollow agent looks at each of its engines all the time: 10,000 of them keep four processors busy by themselves.
REPLICAS_A_PROCESSOR = 1000
REPLICAS_PREFIX = keys.spec_prefix("Replica")


def deployment(name: str, replicas: int) -> ModelDeployment:
    return ModelDeployment(
        metadata=ObjectMeta(name=name, uid=f"uid-{name}", generation=1),
        spec=ModelDeploymentSpec(
            model=ModelSource(path="model"),
            replicas=replicas,
            context_length=2048,
            concurrency=1,
            resources=Resources(memory="1Gi"),
        ),
    )


async def apply(bench: Bench, numbers: range) -> None:
    """Apply these deployments at once."""
    puts = [codec.put_spec(deployment(f"d{at:03}", PER_DEPLOYMENT)) for at in numbers]
    for at in range(0, len(puts), 50):
        await bench.transport.commit([], puts[at : at + 50])


async def probe(bench: Bench) -> None:
    """Find out what this machine can do now, with a few."""
    begin = time.perf_counter()
    await apply(bench, range(PROBED))
    number = PROBED * PER_DEPLOYMENT
    await wait_for(lambda: len(bench.endpoints.first) >= number, bench.within(40))
    rate = len(bench.endpoints.first) / (time.perf_counter() - begin)
    # What follows is slower: more to watch, more to renew.
    in_time = int(0.5 * rate * CONVERGE_S / PER_DEPLOYMENT)
    at_once = REPLICAS_A_PROCESSOR * PROCESSORS // PER_DEPLOYMENT
    bench.figures["probed_ready_per_s"] = round(rate)
    bench.figures["deployments"] = min(DEPLOYMENTS, max(2 * PROBED, in_time), at_once)
    if bench.figures["deployments"] != DEPLOYMENTS:
        print(
            f"scaled down to what this machine takes: {in_time} deployments by what a first few "
            f"took, {at_once} by its processors"
        )


async def converge(bench: Bench) -> None:
    """Apply the rest at once, and wait until all of it is Ready."""
    deployments = bench.figures["deployments"]
    assert isinstance(deployments, int)
    before, first = bench.crowd.cost(), await bench.transport.status()
    begin, had = time.perf_counter(), len(bench.replicas.first)
    await apply(bench, range(PROBED, deployments))
    wanted = deployments * PER_DEPLOYMENT
    await wait_for(lambda: len(bench.endpoints.first) >= wanted, bench.within(CONVERGE_S))
    after, last = bench.crowd.cost(), await bench.transport.status()
    bound = sorted(at for at in bench.replicas.first.values() if at > begin)
    ready = sorted(at for at in bench.endpoints.first.values() if at > begin)
    if not bound or not ready:
        raise TooSlowError(f"{len(bound)} replicas were assigned and {len(ready)} became Ready")
    figures, writes = bench.figures, last.revision - first.revision
    figures |= {
        "replicas_wanted": wanted,
        "replicas_bound": had + len(bound),
        "replicas_ready": len(bench.endpoints.first),
        "binds_per_s": round(len(bound) / (bound[-1] - begin)),
        "bound_s": round(bound[-1] - begin, 1),
        "ready_s": round(ready[-1] - begin, 1),
        "leases_lost": len(bench.leases.gone),
        "revisions_per_replica": round(writes / len(bound), 2),
        "cpu_ms_per_replica": spent(before, after, len(bound)),
        "cpu_converging": used(before, after),
        "cpu_of_others": others(before, after),
        "memory_mib": {name: rss // 2**20 for name, rss in after.rss.items()},
    }


async def idle(bench: Bench) -> None:
    """Count what is written while nothing happens, and what that costs."""
    transport = bench.transport
    begin, revision = time.perf_counter(), 0

    async def stands() -> bool:
        nonlocal revision
        before, revision = revision, (await transport.status()).revision
        await asyncio.sleep(2.0)
        return before == revision

    rests = await wait_for(stands, bench.within(40))
    bench.figures["at_rest_after_s"] = round(time.perf_counter() - begin, 1) if rests else None
    lost = len(bench.leases.gone)
    before, first = bench.crowd.cost(), await transport.status()
    await asyncio.sleep(IDLE_S)
    after, last = bench.crowd.cost(), await transport.status()
    figures = bench.figures
    figures |= {
        "idle_revisions_in_20_s": last.revision - first.revision,
        "idle_leases_lost": len(bench.leases.gone) - lost,
        "cpu_idle": used(before, after),
    }


def on_victims(bench: Bench) -> dict[str, str]:
    """Return the replicas that are on victims, with their nodes."""
    found = {}
    for key, value in bench.replicas.values.items():
        if b'"node":"victim-' in value:
            item = KeyValue(key=key, value=value, create_revision=1, mod_revision=1)
            found[key] = codec.decode_object(Replica, item).spec.ranks[0].node
    return found


async def node_death(bench: Bench) -> None:
    """Kill the agents of some nodes; the time counts from the moment at which their leases are gone."""
    victims = on_victims(bench)
    bench.crowd.kill("victims")
    killed_at = time.perf_counter()
    leases = {keys.node_lease_key(f"victim-{at}") for at in range(VICTIMS)}
    if not await wait_for(lambda: leases <= bench.leases.gone.keys(), bench.within(15)):
        raise TooSlowError("the leases of dead agents do not end")
    gone_at = max(bench.leases.gone[key] for key in leases)

    def moved() -> bool:
        return not on_victims(bench)

    names = [key.removeprefix(REPLICAS_PREFIX) for key in victims]
    all_moved = await wait_for(moved, bench.within(30))
    bound = [
        bench.replicas.last[key] - bench.leases.gone[keys.node_lease_key(node)]
        for key, node in victims.items()
    ]

    def served() -> bool:
        there = {key.rpartition("/")[2] for key in bench.endpoints.values}
        return there.issuperset(names)

    all_served = all_moved and await wait_for(served, bench.within(30))
    figures = bench.figures
    figures |= {
        "lost_replicas": len(victims),
        "lease_gone_after_s": round(gone_at - killed_at, 1),
        "first_replaced_after_s": round(min(bound), 3) if all_moved and bound else None,
        "all_replaced_after_s": round(max(bound), 3) if all_moved and bound else None,
        "all_serve_after_s": round(time.perf_counter() - gone_at, 1) if all_served else None,
    }


async def take_over(bench: Bench) -> None:
    """Kill the leader again and again; the time counts to the first replica that its heir assigns."""
    times = []
    for at in range(TAKE_OVERS):
        if bench.within(10) < 10:
            break
        heir = f"heir-{at}"
        bench.crowd.start(heir, *RECONCILER)
        await asyncio.sleep(3.0)
        await bench.crowd.calm(heir, limit_s=bench.within(30))
        await wait_for(lambda: _is_led(bench), bench.within(15))
        lead = (await leader(bench.transport)).rpartition("/")[2]
        named = {str(pid): name for name, pid in bench.crowd.pids.items()}
        if lead not in named:
            continue  # starved of processor, nobody leads
        bench.crowd.kill(named[lead])
        begin = time.perf_counter()
        made = deployment(f"after-{at}", 1)
        await bench.transport.commit([], [codec.put_spec(made)])
        key = keys.spec_key("Replica", f"after-{at}-0")
        done = await wait_for(partial(bench.replicas.first.__contains__, key), bench.within(20))
        if done:
            times.append(bench.replicas.first[key] - begin)
    figures = bench.figures
    figures |= {
        "take_over_s": round(statistics.median(times), 2) if times else None,
        "take_over_worst_s": round(max(times), 2) if times else None,
        "take_overs": len(times),
    }


async def _is_led(bench: Bench) -> bool:
    try:
        return bool(await leader(bench.transport))
    except StoreError:
        return False


# When each phase must have ended, in seconds from the beginning; one that ends early leaves its time to the next.
PHASES: dict[Callable[[Bench], Awaitable[None]], float] = {
    join: 80.0,
    probe: 120.0,
    converge: 210.0,
    idle: 240.0,
    node_death: 265.0,
    take_over: 285.0,
}


async def measure(folder: Path, figures: dict[str, object]) -> None:
    """Run every phase; what is found is in the figures at once.

    Raises:
        TooSlowError: this machine cannot do it.
        StoreError: etcd is away for too long.

    """
    async with AsyncExitStack() as stack:
        etcd = EmbeddedEtcd(locate(None), folder / "etcd", SystemClock())
        await etcd.start()
        stack.push_async_callback(etcd.supervisor.stop)
        transport = connect(etcd.address)
        stack.push_async_callback(transport.close)
        crowd = Crowd(etcd_flag=f"unix:{etcd.address.socket}", folder=folder)
        stack.callback(crowd.kill_all)
        crowd.pids["etcd"] = int(json.loads((folder / "etcd" / "etcd.pid").read_text())["pid"])
        bench = Bench(
            transport=transport,
            crowd=crowd,
            replicas=Heard(),
            endpoints=Heard(),
            leases=Heard(),
            figures=figures,
            processors=PROCESSORS,
        )
        async with asyncio.TaskGroup() as group:
            ears = [
                group.create_task(heard.listen(transport, prefix))
                for heard, prefix in (
                    (bench.replicas, REPLICAS_PREFIX),
                    (bench.endpoints, keys.ENDPOINT_PREFIX),
                    (bench.leases, keys.NODE_LEASE_PREFIX),
                )
            ]
            await _phases(bench)
            for ear in ears:
                ear.cancel()


async def _phases(bench: Bench) -> None:
    figures, began = bench.figures, time.perf_counter()
    for phase, ends_s in PHASES.items():
        before = dict(figures)
        bench.ends_at = began + ends_s
        try:
            await phase(bench)
        except (TooSlowError, StoreError) as error:
            figures["error"] = f"{phase.__name__}: {error}"
            return
        finally:
            figures["seconds"] = round(time.perf_counter() - began)
            news = {k: v for k, v in figures.items() if k not in before and k != "seconds"}
            show(phase.__name__, news)


def show(phase: str, figures: dict[str, object]) -> None:
    print(f"\n{phase.replace('_', ' ')}")
    for name, value in figures.items():
        print(f"  {name:28} {value}", flush=True)


def main() -> None:
    """Measure and print; the exit code says whether all of it could be measured."""
    print(
        f"{NODES} hollow nodes, up to {DEPLOYMENTS} deployments of {PER_DEPLOYMENT} replicas each"
    )
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        asyncio.run(measure(Path(root), figures))
    per_s = figures.get("binds_per_s")
    ratios = {
        name: round(per_s / theirs, 2) if isinstance(per_s, int) else None
        for name, theirs in (
            ("ratio_to_kube_scheduler_680_per_s_quoted", KUBE_SCHEDULER_PODS_PER_S),
            ("ratio_to_kube_scheduler_claims_180_per_s_quoted", KUBE_SCHEDULER_CLAIMS_PER_S),
        )
    }
    print(f"\n{figures['seconds']} s in all")
    if "error" in figures:
        print(f"control plane: not measured to the end: {figures['error']}", file=sys.stderr)
    finish("control_plane", ratios, figures)
    sys.exit("error" in figures)


if __name__ == "__main__":
    main()
