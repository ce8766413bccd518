"""The metrics and the log of a serving engine, requested from its agent with a real ticket."""

import asyncio
import signal

import pytest

from insight import process_client
from insight.errors import ProcessUnreachableError
from insight.tickets import issue_ticket
from nodeagent.engines import engine_processes
from store import keys
from tests.support.nodeagent_agents import NODE, AgentProcess, Desk, answers
from tests.support.waiting import until_async

pytestmark = [pytest.mark.etcd, pytest.mark.mlx, pytest.mark.timeout(240)]


@pytest.mark.ci
async def test_figures_and_logs_of_a_rank(desk: Desk, agent: AgentProcess) -> None:
    await desk.assign("tiny-0", uid="first")
    endpoint = await desk.until_published("tiny-0")
    assert await answers(endpoint.spec.url)
    holder = await process_client.find_agent(desk.store, NODE)
    async with asyncio.timeout(120), issue_ticket(desk.store, holder.key) as bearer:
        vitals = await process_client.fetch_json(holder, "/v1/vitals", bearer=bearer)
        (rank,) = vitals["ranks"]
        engine = await agent.engine()
        assert (rank["replica"], rank["replicaUid"], rank["rank"]) == ("tiny-0", "first", 0)
        assert (rank["pid"], rank["state"], rank["why"]) == (engine.child.record.pid, "Ready", "")
        assert (rank["provenBytes"], rank["inFlight"], rank["waiting"]) == (2**30, 0, 0)
        # The first token by which the agent finds out that it serves, and the answer above.
        assert rank["tokens"] >= 2
        assert rank["tokensPerSecond"] > 0
        assert 0 < rank["activeBytes"] < rank["footprintBytes"] < 2**31
        metrics = (await process_client.fetch(holder, "/metrics")).decode()
        assert 'fleet_agent_engine_ready{replica="tiny-0"} 1\n' in metrics

        path = "/v1/logs/replicas/tiny-0"
        first = await process_client.fetch(holder, path, bearer=bearer, params={"rank": "0"})
        assert b'"process": "engine"' in first
        engine_processes.kill(engine)

        async def is_another() -> bool:
            found = agent.engines()
            return bool(found) and found[0].child.record.pid != engine.child.record.pid

        await until_async(is_another, limit_s=60, what="another engine")
        before = await process_client.fetch(
            holder, path, bearer=bearer, params={"previous": "true"}
        )
        assert before.startswith(first)

        agent.send(signal.SIGSTOP)
        with pytest.raises(
            ProcessUnreachableError, match=r"node/node-1 does not answer .* within 1 s"
        ):
            await process_client.fetch(holder, "/health", limit_s=1.0)
        agent.send(signal.SIGCONT)
    assert (await desk.store.list(keys.TICKET_PREFIX)).items == ()
    await desk.remove("tiny-0")
