"""Canonical prompts of recorded agents: equal beginnings in every turn and session, and nothing is lost."""

import copy
import json
import random
import re
import time
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from gateway.canonical_prompts import AGENTS, canonicalize
from gateway.request import InferenceRequest
from schemas.routing import Routing
from tests.support.agent_sessions import AgentSession, load_session
from tests.support.gateway_engine_scripts import echo
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import Running, World, deployment
from tests.support.waiting import until

NAMES = {"aider": "aider", "claude": "claude-code", "opencode": "opencode", "qwen": "qwen-code"}


def canonical(
    session: AgentSession, body: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    request = session.read(body)
    rules = canonicalize(request)
    return json.loads(request.body), rules


def chat(system: str, **fields: Any) -> InferenceRequest:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "hi"}]
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    return InferenceRequest(
        path="/v1/chat/completions", model="m", body=body, request_id=b"r",
        prompt=json.dumps(messages).encode(),
    )  # fmt: skip


@pytest.mark.parametrize("agent", NAMES)
def test_two_sessions_of_an_agent_share_system_prompt_and_tools(agent: str) -> None:
    bodies = []
    for number in (1, 2):
        session = load_session(agent, number)
        body, rules = canonical(session, session.bodies[0])
        assert {rule.partition("/")[0] for rule in rules} == {NAMES[agent]}
        bodies.append(body)
    first, second = bodies
    assert first["messages"][0] == second["messages"][0]
    assert first.get("tools") == second.get("tools")


@pytest.mark.parametrize("agent", NAMES)
def test_a_turn_begins_with_all_of_the_turn_before(agent: str) -> None:
    session = load_session(agent, 1)
    turns = [canonical(session, body)[0]["messages"] for body in session.bodies]
    for earlier, later in pairwise(turns):
        # aider sends files and a reminder behind the history.
        count = 9 if agent == "aider" else len(earlier)
        assert later[:count] == earlier[:count]


@pytest.mark.parametrize("agent", NAMES)
def test_only_the_system_prompt_and_the_first_user_message_change(agent: str) -> None:
    session = load_session(agent, 1)
    for given in session.bodies:
        before = json.loads(session.read(given).body)
        after, rules = canonical(session, given)
        user = next(at for at, m in enumerate(before["messages"]) if m["role"] == "user")
        texts = [json.dumps(body["messages"][user]["content"])[1:-1] for body in (before, after)]
        assert texts[1].endswith(texts[0])
        for body in (before, after):
            del body["messages"][user], body["messages"][0]
            body["tools"] = sorted(body.get("tools", []), key=json.dumps)
        assert after == before
        # Every line that left the system prompt is in the user's message, but for the billing line.
        system, moved = (
            body["messages"]
            for body in (json.loads(session.read(given).body), canonical(session, given)[0])
        )
        lines = set(system[0]["content"].splitlines()) - set(moved[0]["content"].splitlines())
        content = moved[user]["content"]
        note = content if isinstance(content, str) else content[0]["text"]
        lost = [line for line in lines if line not in note and not line.startswith("x-anthropic")]
        assert [line for line in lost if "You have a persistent" not in line] == []
        assert len(rules) == len(set(rules))


def test_the_billing_line_is_dropped_and_tools_are_sorted() -> None:
    session = load_session("claude", 1)
    given = copy.deepcopy(session.bodies[3])
    plain, _ = canonical(session, given)
    given["system"][0]["text"] = (
        "x-anthropic-billing-header: cc_version=2.1.198.f00; cc_entrypoint=cli; cch=b4d1e;"
    )
    random.Random(1).shuffle(given["tools"])
    other, rules = canonical(session, given)
    assert other == plain
    assert rules[0] == "claude-code/billing"
    assert rules[-1] == "claude-code/tools"
    assert "billing" not in json.dumps(other)


def test_cline_names_its_folder_and_the_day_behind_its_prompt() -> None:
    systems = set()
    for day, folder in (("11/28/2026", "/home/a/one"), ("11/29/2026", "/home/b/two")):
        env = f"<env>\n1. Platform: linux\n2. Date: {day}\n4. Working Directory: {folder}\n</env>\n"
        request = chat(f"You are Cline, an AI coding agent. Help.\n\n{env}\nRemember: be brief.\n")
        assert canonicalize(request) == ("cline/environment",)
        system, user = json.loads(request.body)["messages"]
        systems.add(system["content"])
        assert day in user["content"]
        assert folder in user["content"]
    assert len(systems) == 1


@pytest.mark.parametrize(
    "system",
    [
        "You are a helpful assistant.\n<env>\n  Working directory: /x\n</env>",
        "Today's date: Sat Nov 28 2026",
        "I met a man who said: You are Claude Code, Anthropic's official CLI for Claude.",
        "",
    ],
)
def test_other_programs_are_not_touched(system: str) -> None:
    request = chat(system, tools=[{"type": "function", "function": {"name": n}} for n in "zab"])
    body = request.body
    assert canonicalize(request) == ()
    assert request.body is body


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"messages":3}', b'{"messages":[]}', b'{"messages":[3]}', b'{"messages":[{"role":"system","content":[3]}]}',
     b'{"messages":[{"role":"system","content":"You are opencode\\n<env>\\n  Working directory: x\\n</env>"},3],"tools":[]}',
     b'{"messages":[{"role":"system","content":"You are opencode\\n"}],"tools":{"a":1}}'],
)  # fmt: skip
def test_what_no_agent_writes_is_left_to_the_engine(body: bytes) -> None:
    request = chat("x")
    request.body, request.prompt = body, b'[{"content":"You are opencode'
    assert canonicalize(request) == ()
    assert request.body is body


def test_without_a_user_message_the_text_stays_behind_the_system_prompt() -> None:
    env = "<env>\n  Working directory: /x\n</env>"
    request = chat("x")
    messages = [{"role": "system", "content": f"You are opencode.\n{env}\nBe brief."}]
    request.body = request.prompt = json.dumps({"messages": messages}).encode()
    assert canonicalize(request) == ("opencode/environment",)
    content = json.loads(request.body)["messages"][0]["content"]
    assert content.index("Be brief.") < content.index("/x")


LINES = [
    " - Primary working directory: x\n", " - a\n", "<env>\n  Working directory: x\n", "<env>\nWorking directory: x\n", "gitStatus: This is the git status at the start of the conversation\n",
    "Recent commits:\n", "- Platform: x\n", "--- Context from: \n", "# auto memory\n", "You have a persistent file-based memory at `", "\n", "x-anthropic-billing-header:", "a",
]  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
@pytest.mark.parametrize("line", LINES)
def test_rules_are_linear(agent: Any, line: str) -> None:
    opening = re.sub(r"\(\?:.*?\)\?", "", agent.opening.pattern)
    opening = {"claude-code": "You are Claude Code, Anthropic's official CLI"}.get(
        agent.name, opening.replace("(?:opencode|OpenCode)", "opencode")
    )
    for size in (8 << 20, 250_000):
        request = chat(opening + "\n" + line * (size // len(line)))
        began = time.process_time()
        canonicalize(request)
        assert time.process_time() - began < 1.0  # 0.1 s; quadratic would be minutes


async def test_a_gateway_canonicalizes_unless_it_is_off(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    session = load_session("opencode", 1)
    body = {**session.bodies[0], "model": "m", "stream": False}

    async def send() -> tuple[str | None, dict[str, Any]]:
        url = f"{gateway.url}/v1/chat/completions"
        async with http.post(url, json=body, headers={"origin": "http://localhost"}) as response:
            assert response.status == 200, await response.text()
            return response.headers.get("x-fleet-canonical"), json.loads(engine.calls[-1].body)

    async with running(FakeEngine("m-0", echo)) as engine:
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
        header, sent = await send()
        assert header == "opencode/environment"
        assert sent == canonical(session, body)[0]
        model = deployment("m")
        off = model.spec.model_copy(update={"routing": Routing(canonical_prompts="Off")})
        await world.put(model.model_copy(update={"spec": off}))
        models = gateway.gateway.table_cache
        await until(
            lambda: models.table.models["m"].routing.canonical_prompts == "Off", what="the change"
        )
        assert await send() == (None, body)
