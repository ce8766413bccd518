"""Sessions of real agents, recorded: 20 requests of each, as a gateway got them.

`recorded/sessions/AGENT_N.jsonl.xz` has a line with program, path and headers, then one body a line. A scripted model
answered the agents' requests with calls of their shell tool (aider's with edits). Folders, ids and the system's version
are replaced. Session 2 has another prompt, user and folder, and the date of the next day is written into it. Of Claude
Code, whose texts are not free, the words are replaced by others of the same length.
"""

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway.apis.anthropic.adapter import PATHS as ANTHROPIC_PATHS
from gateway.apis.anthropic.adapter import AnthropicAdapter
from gateway.apis.openai import OpenAiAdapter
from gateway.request import HttpRequest, InferenceRequest

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
