"""Explanations of prompts that were read again: a change of any field of a recorded request is named."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from engine.cache.miss_explanation import PromptLineages, PromptParts, read_parts
from tests.support.agent_sessions import AGENTS, load_session

CHATS = [agent for agent in AGENTS if agent != "codex"]  # which uses the Responses API


def body_of(agent: str, turn: int) -> dict[str, Any]:
    session = load_session(agent, 1)
    body: dict[str, Any] = json.loads(session.read(session.bodies[turn]).body)
    return body


def parts(body: dict[str, Any], *, adapter: str = "", salt: str = "") -> PromptParts:
    """Return the parts of a chat whose tokens are the bytes of its JSON, the tools first."""
    tools = body.get("tools", [])
    text = b"".join(json.dumps(value).encode() for value in (*tools, *body["messages"]))
    settings = {"reasoning_effort": body.get("reasoning_effort")}
    text = json.dumps(settings).encode() + text
    return read_parts(body["messages"], tools, settings, list(text), adapter=adapter, salt=salt)


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in items:
            yield from leaves(child, (*path, key))
    elif isinstance(value, str) and value:
        yield path


def spelled(path: tuple[str | int, ...]) -> str:
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else ("." if text else "") + key
    return text


def change(body: dict[str, Any], path: tuple[str | int, ...], at: int) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    *way, last = path
    holder: Any = changed
    for key in way:
        holder = holder[key]
    text = holder[last]
    holder[last] = text[:at] + ("b" if text[at] == "a" else "a") + text[at + 1 :]
    return changed


@pytest.mark.parametrize("agent", CHATS)
def test_a_change_of_any_field_is_named(agent: str) -> None:
    body = body_of(agent, 8)
    draw = random.Random(agent)
    paths = [path for path in leaves(body) if path[0] in ("messages", "tools")]
    for path in draw.sample(paths, min(len(paths), 60)):
        holder: Any = body
        for key in path:
            holder = holder[key]
        at = draw.randrange(len(holder))
        lineages = PromptLineages()
        assert lineages.explain(parts(body), cached_tokens=0, evictions=0).endswith(
            "begins like it"
        )
        changed = change(body, path, at)
        why = lineages.explain(parts(changed), cached_tokens=100, evictions=0)
        where = spelled(path[2:])
        if path[:2] == ("messages", 0):
            assert f": {where} differs at character {at}" in why
        elif path[0] == "messages":
            assert f"message {path[1]} (" in why
            assert f": {where} differs at character {at}" in why or where == "role"
        elif path[2:] == ("function", "name"):
            assert f"tool {changed['tools'][path[1]]['function']['name']} was added" in why
        else:
            name = body["tools"][path[1]]["function"]["name"]
            assert f"tool {name}: " in why
        count = len(parts(changed).tokens) // 4
        assert f"{count - 100:,} of {count:,} tokens were read" in why


def test_other_causes_are_named() -> None:
    body, earlier = body_of("opencode", 9), body_of("opencode", 8)
    count = len(parts(earlier).tokens) // 4
    tools = body["tools"]

    def why(changed: dict[str, Any], cached: int = 0, evictions: int = 0, **scope: str) -> str:
        lineages = PromptLineages()
        lineages.explain(parts(earlier), cached_tokens=count, evictions=0)
        text = lineages.explain(parts(changed, **scope), cached_tokens=cached, evictions=evictions)
        return text.partition(" tokens were ")[2]

    assert why(body, cached=count) == ""
    assert why(body) == "read again: they were not in the cache"
    assert why(body, evictions=1) == "read again: they were evicted"
    assert why(body, adapter="a") == "read again: the adapter differs"
    assert why(body, salt="s") == "read again: the API key or cache_salt differ"
    assert why(body | {"reasoning_effort": "low"}) == "read again: reasoning_effort differs"
    assert why(body | {"tools": tools[::-1]}) == "read again: the tools are in another order"
    assert why(body | {"tools": tools[1:]}) == "read again: tool bash was removed"
    # Another conversation of the same program: what is new was not read again.
    other = copy.deepcopy(earlier)
    other["messages"][1:] = [{"role": "user", "content": "Something else"}]
    assert why(other).startswith("read: message 1 (user): content")


def test_no_text_and_no_line_break_reach_a_header() -> None:
    body = body_of("opencode", 1)
    lineages = PromptLineages()
    lineages.explain(parts(body), cached_tokens=0, evictions=0)
    tool = {"type": "function", "function": {"name": "bad\r\nset-cookie: ü" * 50}}
    why = lineages.explain(parts(body | {"tools": [tool]}), cached_tokens=0, evictions=0)
    assert why.isascii()
    assert why.isprintable()
    assert len(why) < 200


def test_memory_is_bounded() -> None:
    lineages = PromptLineages()
    for number in range(200):
        body = {"messages": [{"role": "user", "content": f"{number}" + "x" * 200_000}]}
        lineages.explain(parts(body), cached_tokens=0, evictions=0)
    prompts = [prompt for prompt, _ in lineages._prompts.values()]
    assert sum(prompt.nbytes for prompt in prompts) == lineages._bytes <= 16 << 20
