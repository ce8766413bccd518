"""The reconciler's port: health and metrics of a real process with a real etcd, and who may read them."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from insight.tickets import issue_ticket
from machinery.prometheus import Sample, parse_samples
from reconciler.api import reachable_url
from reconciler.metrics import unplaced_replicas
from schemas.deployment import ModelDeploymentStatus
from schemas.records import ReconcilerLease
from store import codec, keys
from store.etcd.connect import connect
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Transport
from tests.support.dashboards import running_dashboard
from tests.support.etcd import running_etcd
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.ports import free_port
from tests.support.prometheus_tools import check_metrics
from tests.support.reconciler_agents import node_status
from tests.support.waiting import until_async
from tests.support.world import deployment

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]
QUOTA = 64 << 20


@asynccontextmanager
async def reconciler(etcd: EmbeddedEtcd, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "reconciler", "--etcd", str(etcd.address), *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def leases(store: Transport) -> list[ReconcilerLease]:
    items = (await store.list(keys.RECONCILER_LEASE_PREFIX)).items
    return [codec.decode(ReconcilerLease, item) for item in items]


async def scrape(http: aiohttp.ClientSession, url: str) -> list[Sample]:
    async with http.get(f"{url}/metrics") as response:
        assert response.status == 200, await response.text()
        text = await response.read()
    check_metrics(text)
    return list(parse_samples(text.decode()))


def value(found: list[Sample], name: str, **labels: str) -> float:
    """Return the sum of the samples of one name with these labels."""
    matching = [
        sample
        for sample in found
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert matching, name
    return sum(float(sample.value) for sample in matching)


async def test_health_metrics_and_log(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    flags = ("--api-port", "0", "--etcd-quota", str(QUOTA), "--log-level", "debug")
    async with running_etcd(tmp_path) as etcd, reconciler(etcd, *flags) as child:
        store = connect(etcd.address)

        async def announced() -> tuple[str, str] | None:
            items = (await store.list(keys.RECONCILER_LEASE_PREFIX)).items
            urls = {item.key: codec.decode(ReconcilerLease, item).url for item in items}
            return next(((key, url) for key, url in urls.items() if url), None)

        key, url = await until_async(announced, limit_s=60, what="the address in the lease")
        assert url.startswith("http://127.0.0.1:")

        async def leads() -> bool:
            async with http.get(f"{url}/health") as response:
                body = await response.json()
            return response.status == 200 and body["leader"] and body["store"] == "ok"

        await until_async(leads, limit_s=60, what="a leader")
        for path in ("live", "ready"):
            async with http.get(f"{url}/health/{path}") as response:
                assert response.status == 200
        # A deployment that fits nowhere, since there is no node.
        await store.commit([], [codec.put_spec(deployment(name="big", replicas=2))])
        unplaced = "fleet_reconciler_replicas_unplaced"
        needed = {unplaced, "fleet_store_db_bytes", "fleet_reconciler_writes_total"}

        async def is_complete() -> list[Sample] | None:
            samples = await scrape(http, url)
            return samples if needed <= {sample.name for sample in samples} else None

        samples = await until_async(is_complete, limit_s=60, what="metrics of the deployment")
        assert value(samples, unplaced, deployment="big") == 2
        assert value(samples, "fleet_reconciler_leader") == 1
        assert value(samples, "fleet_reconciler_reconciles_total", result="ok") >= 1
        assert value(samples, "fleet_reconciler_reconcile_seconds_count") >= 1
        assert value(samples, "fleet_reconciler_writes_total") >= 1
        assert value(samples, "fleet_reconciler_queue_depth") >= 0
        assert 0 <= value(samples, "fleet_reconciler_watch_lag_seconds") < 60
        assert value(samples, "fleet_store_request_seconds_count", operation="commit") >= 2
        assert value(samples, "fleet_store_watches") >= 5
        assert value(samples, "fleet_store_revision") > 1
        assert value(samples, "fleet_store_quota_bytes") == QUOTA
        size = value(samples, "fleet_store_db_bytes")
        assert 0 < value(samples, "fleet_store_db_in_use_bytes") <= size
        assert value(samples, "fleet_store_alarms") == 0
        assert value(samples, "fleet_build_info", process="reconciler") == 1
        assert child.returncode is None
        await check_log(etcd)
        await check_tickets(store, http, key.removeprefix(keys.RECONCILER_LEASE_PREFIX), url)
        await store.close()


async def check_log(etcd: EmbeddedEtcd) -> None:
    """Check that the lines about one object are found by its name."""
    words = ("logs", "reconciler", "--etcd", str(etcd.address))
    done = await run_fleetctl(*words)
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert {"leading", "replicas cannot be placed"} <= {line["message"] for line in lines}
    done = await run_fleetctl(*words, "--about", "big")
    about = [json.loads(line) for line in done.out.splitlines()]
    assert {line["key"] for line in about} == {"ModelDeployment/big"}
    assert (await run_fleetctl(*words, "--about", "bi")).out == ""
    assert (await run_fleetctl(*words, "--tail", "1")).out.count("\n") == 1


async def check_tickets(store: Transport, http: aiohttp.ClientSession, id_: str, url: str) -> None:
    """Check that the log is shown for a ticket of this process, and in the dashboard."""
    path = f"{url}/v1/logs/reconciler"

    async def log(ticket: str = "", query: str = "") -> tuple[int, str]:
        headers = {"authorization": f"Bearer {ticket}"} if ticket else {}
        async with http.get(f"{path}{query}", headers=headers) as response:
            return response.status, await response.text()

    status, text = await log()
    assert (status, "a ticket is required" in text) == (401, True)
    async with issue_ticket(store, f"Gateway/{id_}") as other:
        assert (await log(other))[0] == 401
    async with (
        issue_ticket(store, f"Reconciler/{id_}") as ticket,
        running_dashboard(store) as dashboard,
    ):
        status, text = await log(ticket, "?lines=1")
        assert (status, "'lines'" in text) == (400, True)
        assert '"process": "reconciler"' in (await log(ticket))[1]
        view = await dashboard.get("/api/v1/snapshot?view=reconcilers")
        (row,) = view["views"]["reconcilers"]
        assert row["name"] == id_
        shown = f"{dashboard.url}/api/v1/logs?of=reconciler/{id_}"
        async with dashboard.http.get(shown) as response:
            assert response.status == 200
            assert '"process": "reconciler"' in await response.text()
        missing = await dashboard.get("/api/v1/logs?of=reconciler/none", 404)
        assert "There is no reconciler/none" in missing["error"]["message"]


@pytest.mark.ci
async def test_without_etcd_it_is_alive_and_not_ready(http: aiohttp.ClientSession) -> None:
    port = free_port()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "reconciler", "--etcd", "http://127.0.0.1:9"),
        *("--api-port", str(port)),
        stderr=asyncio.subprocess.PIPE,
    )
    url = f"http://127.0.0.1:{port}"

    async def status(path: str) -> int:
        try:
            async with http.get(url + path) as response:
                return response.status
        except aiohttp.ClientError:
            return 0

    try:
        await until_async(lambda: status("/health/live"), limit_s=60, what="the port")
        assert await status("/health/live") == 200
        assert await status("/health/ready") == 503
        assert await status("/health") == 503
        assert value(await scrape(http, url), "fleet_reconciler_leader") == 0
    finally:
        child.kill()
        await child.communicate()


@pytest.mark.ci
async def test_beyond_loopback_it_needs_an_identity(tmp_path: Path) -> None:
    """The port stays closed; reconciling goes on."""
    port = free_port()
    flags = ("--api-host", "0.0.0.0", "--api-port", str(port))
    async with running_etcd(tmp_path) as etcd, reconciler(etcd, *flags) as child:
        assert child.stderr is not None
        async with asyncio.timeout(60):
            async for line in child.stderr:
                if b"admin server does not listen" in line:
                    break
        with pytest.raises(OSError, match=r".*"):
            await asyncio.open_connection("127.0.0.1", port)
        store = connect(etcd.address)

        async def leads() -> bool:
            return await store.get(keys.ELECTION_RECONCILER) is not None or bool(
                (await store.list(keys.ELECTION_RECONCILER)).items
            )

        await until_async(leads, limit_s=60, what="a leader")
        assert [lease.url for lease in await leases(store)] == [""]
        await store.close()


def test_replicas_that_fit_nowhere() -> None:
    def status(desired: int, placed: int) -> ModelDeploymentStatus:
        return ModelDeploymentStatus(desired_replicas=desired, replicas=placed)

    found = unplaced_replicas(
        {
            keys.status_key("ModelDeployment", "a"): status(3, 1),
            keys.status_key("ModelDeployment", "b"): status(1, 1),
            # Replicas of the old version are not placed below 0.
            keys.status_key("ModelDeployment", "c"): status(1, 2),
            keys.status_key("Node", "mac-1"): node_status("mac-1"),
        }
    )
    assert found == {"a": 2, "b": 0, "c": 0}


def test_an_address_for_other_processes() -> None:
    assert reachable_url("http://127.0.0.1:4002") == "http://127.0.0.1:4002"
    assert reachable_url("https://mac-1:4002") == "https://mac-1:4002"
    assert "0.0.0.0" not in reachable_url("https://0.0.0.0:4002")
    assert reachable_url("https://[::]:4002").endswith(":4002")
    assert reachable_url("") == ""
