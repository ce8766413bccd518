"""A real Prometheus scrapes a real fleet with what `fleetctl export` writes, and every panel of Grafana has data."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from fleetctl.convert.prometheus.alert_rules import ALERTS
from fleetctl.convert.prometheus.grafana import PAGES
from tests.support.fleet import Fleet, fleetctl, running_fleet
from tests.support.ports import free_port
from tests.support.waiting import until_async

# What a machine without a GPU and sensors cannot know, and what is not so in a sound fleet.
EMPTY_HERE = ("gpu_usage_ratio", "power_watts", "temperature_celsius", 'status!="True"')


@pytest.mark.ci
@pytest.mark.fleet
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus on PATH")
async def test_prometheus_sees_the_whole_fleet(tmp_path: Path, smollm2: Path) -> None:
    async with running_fleet(tmp_path, smollm2) as fleet:
        port = free_port()
        fleet.start("dashboard", "dashboard", "--port", str(port))
        await fleet.ctl("apply", "-f", "examples/quickstart")
        await fleet.available("smollm2", limit_s=120)
        await fleet.routed("smollm2", 2)
        config, rules = await _exported(fleet, tmp_path, f"http://127.0.0.1:{port}")
        async with running_prometheus(tmp_path, config, rules) as prometheus:
            up = await until_async(lambda: _all_up(prometheus), limit_s=120, what="all targets up")
            assert sorted(up) == [
                *("agent", "dashboard", "engine", "engine", "gateway", "reconciler")
            ]
            # Every process that uses etcd says how; and no alert about its space is without data.
            for expr in (
                'count by (process) (fleet_store_request_seconds_count{operation="commit"})',
                "max(fleet_store_db_bytes) / min(fleet_store_quota_bytes)",
                "max(fleet_store_alarms)",
                "max(fleet_reconciler_leader) == 1",
                "sum by (kind) (fleet_reconciler_reconcile_seconds_count)",
                "max(fleet_reconciler_watch_lag_seconds)",
                "sum(fleet_reconciler_writes_total)",
                "fleet_reconciler_replicas_unplaced",
                "fleet_reconciler_queue_depth",
            ):
                await until_async(
                    partial(prometheus.values, expr), limit_s=60, what=f"data for {expr}"
                )
            for page in PAGES:
                for panel in page.panels:
                    for query in panel.queries:
                        if any(word in query.expr for word in EMPTY_HERE):
                            continue
                        await until_async(
                            partial(_values_with_load, fleet, prometheus, _concrete(query.expr)),
                            limit_s=180,
                            what=f"data for {page.title}/{panel.title}: {query.expr}",
                        )
            firing = await prometheus.get("/api/v1/alerts")
            assert [one for one in firing["alerts"] if one["state"] == "firing"] == []
            # A Mac that dies is seen through the dashboard within the time of its alert.
            fleet.kill("node-1")
            down = next(alert for alert in ALERTS if alert.name == "FleetNodeDown")
            await until_async(
                lambda: prometheus.values(down.expr), limit_s=180, what="a Mac that is down"
            )


async def _exported(fleet: Fleet, folder: Path, url: str) -> tuple[Path, Path]:
    """Return the scrape config and the rules that fleetctl wrote; the config scrapes each second."""
    config, rules = folder / "prometheus.yml", folder / "alerts.yml"
    # The dashboard has registered itself: no address is given.
    await until_async(lambda: _found(fleet, config, url), limit_s=60, what="the dashboard")
    assert (await fleetctl("export", "alerts", "-o", str(rules))).code == 0
    document = yaml.safe_load(config.read_text())
    for job in document["scrape_configs"]:
        job["scrape_interval"] = job["http_sd_configs"][0]["refresh_interval"] = "1s"
    config.write_text(yaml.safe_dump({**document, "rule_files": [str(rules)]}))
    return config, rules


async def _found(fleet: Fleet, config: Path, url: str) -> bool:
    done = await fleet.ctl("export", "prometheus", "-o", str(config))
    return done.code == 0 and url in config.read_text()


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session

    async def get(self, path: str, **parameters: str) -> Any:
        async with self._session.get(self._url + path, params=parameters) as response:
            body = await response.json()
            assert body["status"] == "success", body
            return body["data"]

    async def values(self, expr: str) -> list[Any]:
        found = await self.get("/api/v1/query", query=expr)
        return [one for one in found["result"] if one["value"][1] != "NaN"]


@asynccontextmanager
async def running_prometheus(folder: Path, config: Path, rules: Path) -> AsyncIterator[Prometheus]:
    port, program = free_port(), shutil.which("prometheus")
    assert program is not None
    assert rules.exists()
    process = await asyncio.create_subprocess_exec(
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as session:
            prometheus = Prometheus(f"http://127.0.0.1:{port}", session)
            await until_async(lambda: _is_ready(prometheus), limit_s=60, what="Prometheus")
            yield prometheus
    finally:
        process.kill()
        await process.wait()


async def _is_ready(prometheus: Prometheus) -> bool:
    try:
        await prometheus.get("/api/v1/status/buildinfo")
    except aiohttp.ClientError:
        return False
    return True


async def _all_up(prometheus: Prometheus) -> list[str]:
    """Return the processes of the targets once every process of the fleet is there and answers."""
    found = (await prometheus.get("/api/v1/targets", state="active"))["activeTargets"]
    is_up = len(found) >= 6 and all(one["health"] == "up" for one in found)
    return [one["labels"]["process"] for one in found] if is_up else []


async def _values_with_load(fleet: Fleet, prometheus: Prometheus, expr: str) -> list[Any]:
    """Return the values of a query; if it has none, send a stream first, and give Prometheus a second to scrape.

    A rate needs two scrapes with a request between them, and on a busy machine scrapes come late.
    """
    if values := await prometheus.values(expr):
        return values
    await _ask(fleet)
    await asyncio.sleep(1)
    return await prometheus.values(expr)


async def _ask(fleet: Fleet) -> None:
    """Send one stream, which has figures of every kind."""
    message = {"role": "user", "content": "Hello!"}
    body = {"model": "smollm2", "messages": [message], "stream": True, "max_tokens": 8}
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{fleet.url}/v1/chat/completions",
            data=json.dumps(body),
            headers={"content-type": "application/json"},
        ) as response,
    ):
        assert response.status == 200
        await response.read()


def _concrete(expr: str) -> str:
    for name, value in (("$__rate_interval", "5m"), ("$model", ".*"), ("$node", ".*")):
        expr = expr.replace(name, value)
    return expr
