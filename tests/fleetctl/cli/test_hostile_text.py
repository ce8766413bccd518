"""Text that others wrote, at a terminal: nodes, clients of a gateway and the command line itself."""

import aiohttp
import pytest

from machinery.clock import SystemClock
from schemas.meta import Condition, ConditionStatus
from store.memory import MemoryTransport
from store.port import Transport
from tests.support.fleet import Fleet
from tests.support.gateway_calls import CHAT
from tests.support.gateway_world import running_gateway
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.terminal import terminal

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]

TITLE = "\x1b]0;owned\x07"


@pytest.fixture(scope="module")
async def hostile_node(shared: Fleet, transport: Transport) -> Fleet:
    """Return a store with a node whose agent reports escape sequences."""
    trouble = Condition(
        type="MemoryPressure", status=ConditionStatus.TRUE, reason="High", message=f"free{TITLE}"
    )
    status = node_status("mac-1").model_copy(
        update={"chip": f"M4{TITLE}", "conditions": (trouble,)}
    )
    await transport.commit([], [put_node("mac-1", status), put_lease("mac-1")])
    return shared


@pytest.mark.parametrize(
    "words",
    [
        ("describe", "node", "mac-1"),
        pytest.param(
            ("get", "node", "mac-1", "-o", "jsonpath={.status.chip} {..message}"),
            marks=pytest.mark.ci,
        ),
        pytest.param(("doctor",), marks=pytest.mark.ci),
        ("get", "node", f"mac-2{TITLE}"),
    ],
    ids=lambda words: words[0],
)
async def test_a_verb_shows_control_characters_instead_of_sending_them(
    words: tuple[str, ...], hostile_node: Fleet
) -> None:
    async with terminal(*words, "--etcd", str(hostile_node.etcd.address)) as shown:
        await shown.ended()
        await shown.until("owned␇")
        assert TITLE not in shown.seen
        assert "\x07" not in shown.seen


@pytest.mark.ci
async def test_a_model_name_in_a_request_cannot_write_to_the_terminal_of_routes() -> None:
    async with (
        running_gateway(MemoryTransport(SystemClock())) as gateway,
        aiohttp.ClientSession() as http,
    ):
        async with http.post(gateway.url + CHAT, json={"model": f"ti{TITLE}"}) as response:
            await response.read()
        async with terminal("routes", "--gateway", gateway.url) as shown:
            await shown.until("ti␛]0;owned␇")
            assert await shown.ended() == 0
            assert TITLE not in shown.seen
