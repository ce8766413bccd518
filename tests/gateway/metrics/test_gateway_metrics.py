"""`/metrics`: correct, bounded, and as documented."""

import asyncio
import re
from pathlib import Path

from typing_extensions import override

from gateway.metrics.gateway_metrics import ConnectionCounts, GatewayMetrics, ProcessMetrics
from machinery.clock import SystemClock
from machinery.version import version
from store import keys
from tests.support.gateway_calls import send_chats, streams_three_tokens
from tests.support.gateway_engine_scripts import chat, dies_at_once
from tests.support.gateway_world import Running, journal_entry
from tests.support.waiting import until, until_async

DOCS = Path(__file__).parents[3] / "docs" / "operations" / "monitoring.md"
SAMPLE = re.compile(r'([a-z0-9_]+)(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? [0-9.e+-]+(inf)?')


async def shown(gateway: Running) -> str:
    async with gateway.get("/metrics") as response:
        assert response.status == 200
        return str(await response.text())


def families(text: str) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


async def test_what_requests_leave(gateway: Running) -> None:
    await gateway.serve(dies_at_once, streams_three_tokens)
    await send_chats(gateway.http, gateway, 1, stream=True)
    async with gateway.post(json={"model": "x" * 1000}) as response:
        assert response.status == 404
    text = await shown(gateway)
    where = 'model="m",replica="m-1"'
    for line in (
        'fleet_gateway_requests_total{model="m",outcome="ok"} 1',
        'fleet_gateway_requests_total{model="unknown",outcome="refused"} 1',
        'fleet_gateway_attempts_total{outcome="broken"} 1',
        'fleet_gateway_attempts_total{outcome="answered"} 1',
        "fleet_gateway_in_flight 0",
        "fleet_gateway_endpoints 2",
        'fleet_gateway_retries_total{model="m"} 1',
        f'fleet_gateway_e2e_request_latency_seconds_count{{{where},outcome="ok"}} 1',
        f"fleet_gateway_time_to_first_token_seconds_count{{{where}}} 1",
        f"fleet_gateway_time_per_output_token_seconds_count{{{where}}} 1",
        f"fleet_gateway_inter_token_latency_seconds_count{{{where}}} 2",
        'fleet_gateway_request_queue_time_seconds_count{model="m"} 1',
        f"fleet_gateway_prompt_tokens_total{{{where}}} 3",
        f"fleet_gateway_output_tokens_total{{{where}}} 3",
    ):
        assert f"{line}\n" in text, line


async def test_every_line_is_prometheus_text(gateway: Running) -> None:
    await gateway.serve(chat)
    await send_chats(gateway.http, gateway, 1)
    text = await shown(gateway)
    found = families(text)
    assert len(found) == text.count("# TYPE "), "a family is there twice"
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        name = re.sub("_(bucket|sum|count)$", "", match[1])
        assert name in found or match[1] in found, line


async def test_the_documentation_has_every_family_and_no_other(gateway: Running) -> None:
    section = DOCS.read_text().split("\n## Metrics of a gateway\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z0-9_]+)` \| (\w+) \|", section, re.MULTILINE)
    documented = dict(rows)
    assert len(documented) == len(rows)
    # Only there with --journal-file, --state-dir or --identity-dir.
    expected = families(await shown(gateway)) | {
        "fleet_gateway_journal_lost_total": "counter",
        "fleet_gateway_journal_unsaved_total": "counter",
        "fleet_identity_certificate_expiry_timestamp_seconds": "gauge",
        "fleet_identity_renewal_failing": "gauge",
    }
    assert documented == expected


async def test_what_is_gone_is_not_shown_for_ever(gateway: Running) -> None:
    """Otherwise a fleet with daily rollouts would show every replica it ever had."""
    await gateway.serve(chat)
    await send_chats(gateway.http, gateway, 1)
    recorder = gateway.gateway.recorder
    before = recorder.sweep(frozenset())
    assert before == {"m-0"}
    assert 'replica="m-0"' in await shown(gateway)
    await gateway.world.delete(
        keys.endpoint_key("mac-1", "m-0"), keys.spec_key("ModelDeployment", "m")
    )
    table = gateway.gateway.table_cache
    await until(lambda: "m" not in table.table.models, what="the model to be gone")

    async def is_gone() -> bool:
        recorder.sweep(recorder.sweep(before))
        text = await shown(gateway)
        return 'replica="m-0"' not in text and 'requests_total{model="m"' not in text

    await until_async(is_gone, what="the metrics to be gone")


def test_a_child_that_was_dropped_is_counted_anew() -> None:
    metrics = GatewayMetrics(in_flight=lambda: 0, endpoints=lambda: 0, refused=lambda: 0)
    for _ in range(2):
        metrics.served.count("m", journal_entry())
        metrics.drop_gone(frozenset({"m"}), frozenset())
        assert "m-0" not in metrics.text()
    metrics.served.count("m", journal_entry())
    assert 'latency_seconds_count{model="m",replica="m-0",outcome="ok"} 1\n' in metrics.text()


async def test_the_process(gateway: Running) -> None:
    lag = gateway.gateway.recorder.process.lag.child()
    await until(lambda: sum(lag.counts), what="the event loop's lag to be measured")
    text = await shown(gateway)
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values[f'fleet_build_info{{process="gateway",version="{version()}"}}'] == "1"
    assert float(values["process_resident_memory_bytes"]) > 1 << 20
    assert float(values["process_cpu_seconds_total"]) > 0
    assert float(values["process_open_fds"]) > 3
    assert float(values["fleet_gateway_client_connections"]) >= 1


async def test_a_loop_that_is_blocked_is_late() -> None:
    """The probe asks for 0.25 s; what it gets later than that is the lag."""

    class Late(SystemClock):
        now_s = 0.0

        @override
        def monotonic(self) -> float:
            return self.now_s

        @override
        async def sleep(self, seconds: float) -> None:
            self.now_s += seconds + 0.03
            await asyncio.sleep(0)

    process = ProcessMetrics(Late(), ConnectionCounts(clients=lambda: 0, engines=lambda: 0))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(process.run())
        await until(lambda: sum(process.lag.child().counts), what="a probe")
        task.cancel()
    at = process.lag.child().bounds.index(0.05)
    assert process.lag.child().counts[at] >= 1
