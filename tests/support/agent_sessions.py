"""Sessions of real agents, recorded: 20 requests of each, as a gateway got them.

`recorded/sessions/AGENT_N.jsonl.xz` has a line with program, path and headers, then one body a line. A scripted model
answered the agents' requests with calls of their shell tool (aider's with edits). Folders, ids and the system's version
are replaced. Session 2 has another prompt, user and folder, and the date of the next day is written into it. Of Claude
Code, whose texts are not free, the words are replaced by others of the same length.
"""

import copy
import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from engine.openai import responses
from engine.openai.request_body import Conversation
from gateway.apis.anthropic.adapter import PATHS as ANTHROPIC_PATHS
from gateway.apis.anthropic.adapter import AnthropicAdapter
from gateway.apis.openai import OpenAiAdapter
from gateway.canonical_prompts import canonicalize
from gateway.request import HttpRequest, InferenceRequest
from schemas.wire.headers import CACHE_MISS

FOLDER = Path(__file__).parents[1] / "gateway" / "clients" / "recorded" / "sessions"
AGENTS = ("aider", "claude", "codex", "opencode", "qwen")


@dataclass(frozen=True)
class AgentSession:
    """One recorded session."""

    path: str
    headers: dict[str, str]
    bodies: tuple[dict[str, Any], ...]

    def read(self, body: dict[str, Any]) -> InferenceRequest:
        """Return a request as the gateway's adapter reads it."""
        path = self.path.partition("?")[0]
        adapter = AnthropicAdapter() if path in ANTHROPIC_PATHS else OpenAiAdapter()
        fields = {name.encode(): value.encode() for name, value in self.headers.items()}
        data = orjson.dumps(body)
        return adapter.read(HttpRequest(path=path, headers=(), fields=fields, body=data))[0]


def load_session(agent: str, number: int) -> AgentSession:
    """Return the recorded session 1 or 2 of an agent."""
    text = lzma.decompress((FOLDER / f"{agent}_{number}.jsonl.xz").read_bytes()).decode()
    head, *bodies = (json.loads(line) for line in text.splitlines())
    return AgentSession(path=head["path"], headers=head["headers"], bodies=tuple(bodies))


@dataclass(slots=True)
class ReadTokens:
    """Tokens that an engine read of replayed prompts, beside those of a cache that forgets nothing and continues at any token."""

    read: int = 0
    new: int = 0
    prompts: int = 0
    """Tokens of all prompts."""
    misses: list[str] = field(default_factory=list)
    """The engine's explanations."""

    @property
    def ratio(self) -> float:
        """Tokens read, by those that are new."""
        return self.read / self.new


def replay(
    post: Callable[[str, bytes], tuple[Mapping[str, str], Any]],
    session: AgentSession,
    known: list[Sequence[int]],
    *,
    is_canonical: bool = True,
    turns: slice,
    model: str = "tiny",
) -> ReadTokens:
    """Send a session's turns to an engine, one token each. `known`: the prompts before, which grow.

    `post` sends a body to a path and returns the response's headers and JSON.
    """
    result = ReadTokens()
    for given in session.bodies[turns]:
        request = session.read(given)
        if is_canonical:
            canonicalize(request)
        body = {**json.loads(request.body), "model": model, "stream": False}
        body.pop("stream_options", None)
        kind = "input" if "input" in body else "prompt"
        body["max_output_tokens" if kind == "input" else "max_tokens"] = 1
        _, tokenized = post("/tokenize", orjson.dumps(_prompt_of(body)))
        tokens = tokenized["tokens"]
        headers, answer = post(request.path, orjson.dumps(body))
        usage = answer["usage"]
        assert usage[f"{kind}_tokens"] == len(tokens)
        result.prompts += len(tokens)
        result.read += len(tokens) - usage[f"{kind}_tokens_details"]["cached_tokens"]
        # One token is always computed.
        result.new += max(1, len(tokens) - max((_common(tokens, old) for old in known), default=0))
        known.append(tokens)
        if CACHE_MISS in headers:
            result.misses.append(headers[CACHE_MISS])
    return result


def _prompt_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request for the tokens of a body's prompt."""
    if "input" in body:
        chat = responses.parse(orjson.dumps(body)).chat
        assert isinstance(chat.prompt, Conversation)
        tools = () if chat.toolbox is None else chat.toolbox.template_tools
        messages = copy.deepcopy(list(chat.prompt.messages))
        for function in (call["function"] for m in messages for call in m.get("tool_calls", ())):
            function["arguments"] = json.dumps(function["arguments"])
        body = {**body, "messages": messages, "tools": tools}
    names = (
        "model",
        "messages",
        "tools",
        "tool_choice",
        "reasoning_effort",
        "chat_template_kwargs",
    )
    return {name: body[name] for name in names if name in body}


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
