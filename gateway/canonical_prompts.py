"""Canonical prompts: the volatile lines of known agents leave the beginning of their prompts. Pure.

An agent writes dates, folders or ids into its system prompt, and most chat templates put the tools behind it: one
changed line, and an engine reads the tools again. A rule drops such text, or moves it to the beginning of the first
user message. That message stays as it is while a conversation grows, which a note in the last one would not.
Prompts of other programs are never changed.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gateway.json_limits import decode_members
from gateway.request import JSON, InferenceRequest
from schemas.wire.errors import RefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRule:
    """One place of an agent's system prompt. Patterns are anchored and without nested repetition, so they are linear."""

    name: str
    pattern: re.Pattern[str]
    """Its first match is replaced."""
    remainder: str = ""
    """The text that takes its place."""
    is_moved: bool = True
    """False drops the text: it says nothing to a model."""
    source: str
    """The version and file in which the place was seen, or a public report of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One known program."""

    name: str
    opening: re.Pattern[str]
    """Matches the beginning of its system prompt."""
    rules: tuple[PromptRule, ...]


TOOLS_RULE: Final = "tools"
"""The tools of a known agent are sorted by name: servers of tools that connect late change their order."""
_BILLING: Final = r"x-anthropic-billing-header:[^\n]{0,500}\n*"
_HERE: Final = "the first message of the user"

AGENTS: Final = (
    Agent(
        name="claude-code",
        opening=re.compile(
            rf"(?:{_BILLING})?You are (?:Claude Code, Anthropic's official CLI|a Claude agent, built on)|{_BILLING}"
        ),
        rules=(
            PromptRule(
                name="billing",
                pattern=re.compile(rf"\A{_BILLING}"),
                is_moved=False,
                source="Claude Code 2.1.197; anthropics/claude-code#68900 (`cch` changes with each request)",
            ),
            PromptRule(
                name="memory",
                pattern=re.compile(
                    r"^You have a persistent file-based memory at `[^`\n]{1,1000}`\.", re.MULTILINE
                ),
                remainder=f"You have a persistent file-based memory in the folder that {_HERE} names.",
                source="Claude Code 2.1.197",
            ),
            PromptRule(
                name="environment",
                pattern=re.compile(
                    r"^ - Primary working directory: [^\n]*\n(?: +- (?!You are powered by)[^\n]*\n){0,40}",
                    re.MULTILINE,
                ),
                remainder=f" - {_HERE.capitalize()} names the folders and the system.\n",
                source="Claude Code 2.1.197",
            ),
            PromptRule(
                name="env",
                pattern=re.compile(
                    r"^<env>\nWorking directory: [^\n]*\n(?:(?!</env>)[^\n]*\n){0,40}</env>\n?",
                    re.MULTILINE,
                ),
                remainder=f"(See {_HERE}.)\n",
                source="Claude Code before 2.1, with `Today's date` in the block",
            ),
            PromptRule(
                name="git-status",
                pattern=re.compile(
                    r"^gitStatus: This is the git status at the start of the conversation[^\n]*\n"
                    r"(?:(?!Recent commits:)[^\n]*\n){0,500}(?:Recent commits:(?:\n[^\n]+){0,50})?",
                    re.MULTILINE,
                ),
                source="Claude Code 2.1.197",
            ),
        ),
    ),
    Agent(
        name="opencode",
        opening=re.compile("You are (?:opencode|OpenCode)"),
        rules=(
            PromptRule(
                name="environment",
                pattern=re.compile(
                    r"^<env>\n  Working directory: [^\n]*\n(?:(?!</env>)[^\n]*\n){0,40}</env>\n?",
                    re.MULTILINE,
                ),
                remainder=f"(See {_HERE}.)\n",
                source="opencode 1.18.33, with `Today's date` in the block",
            ),
        ),
    ),
    Agent(
        name="qwen-code",
        opening=re.compile("You are Qwen Code"),
        rules=(
            PromptRule(
                name="memory",
                # The rest of the prompt: the user's files of context, then paths and content of the memory.
                pattern=re.compile(
                    r"^(?:--- Context from: |# auto memory$).*\Z", re.MULTILINE | re.DOTALL
                ),
                remainder=f"(Context and memory follow in {_HERE}.)",
                source="Qwen Code 0.15.10",
            ),
        ),
    ),
    Agent(
        name="aider",
        opening=re.compile("Act as an expert software developer"),
        rules=(
            PromptRule(
                name="system-info",
                pattern=re.compile(r"^- Platform: [^\n]*\n(?:- [^\n]*\n){0,10}", re.MULTILINE),
                remainder=f"(See {_HERE}.)\n",
                source="aider 0.86.2, with `Current date` in the list",
            ),
        ),
    ),
    Agent(
        name="cline",
        opening=re.compile("You are Cline, an AI coding agent"),
        rules=(
            PromptRule(
                name="environment",
                pattern=re.compile(
                    r"^<env>\n1\. Platform: [^\n]*\n(?:(?!</env>)[^\n]*\n){0,40}</env>\n?",
                    re.MULTILINE,
                ),
                remainder=f"(See {_HERE}.)\n",
                source="Cline CLI 3.0.65, with `Date` and `Working Directory` in the block",
            ),
        ),
    ),
)
# What a raw prompt of any agent has within its first bytes, whatever the order of members in its first message. Looked
# for as literals, in each request: a pattern of all of them takes four times as long.
_YOU_ARE: Final = b"You are "
_NAMES: Final = tuple(
    _YOU_ARE + name
    for name in (
        b"Claude Code,",
        b"a Claude agent,",
        b"opencode",
        b"OpenCode",
        b"Qwen Code",
        b"Cline, an AI coding agent",
    )
)
_BILLING_NAME: Final = b"x-anthropic-billing-header:"
_AIDER: Final = b"Act as an expert software developer"
_LOOKED_AT: Final = 256
# The beginnings of most prompts without a system message.
_USER_FIRST: Final = (b'[{"role":"user"', b'[{"role": "user"')
# Agents' system prompts are below 64 KiB.
_LONGEST_SYSTEM: Final = 256 << 10
_MOVED: Final = "<system-context>\n{}\n</system-context>\n\n"
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])


class _NamedTool(msgspec.Struct):
    name: str = ""
    function: "_NamedTool | None" = None


_TOOL: Final = msgspec.json.Decoder(_NamedTool)


def canonicalize(request: InferenceRequest) -> tuple[str, ...]:
    """Make a request's prompt canonical; return the names of the rules that changed it, as `AGENT/RULE`.

    Only chat requests of known agents are changed. What is not as an agent writes it stays, for the engine to judge.
    """
    if request.content_type != JSON:
        return ()
    start = bytes(memoryview(request.prompt or request.body)[:_LOOKED_AT])
    if start.startswith(_USER_FIRST) or not (
        start.startswith(_NAMES, start.find(_YOU_ARE)) or _BILLING_NAME in start or _AIDER in start
    ):
        return ()
    try:
        members = decode_members(request.body)
        raw_messages = _LIST.decode(members.get("messages", b""))
        first: dict[str, Any] = msgspec.json.decode(raw_messages[0]) if raw_messages else {}
        agent, text, names = _apply(first)
        if agent is None:
            return ()
        if names:
            raw_messages[0] = msgspec.Raw(msgspec.json.encode(first))
        if text:
            _prepend(raw_messages, text)
        if "tools" in members and (tools := _sorted_tools(members["tools"])) is not None:
            members["tools"] = tools
            names.append(TOOLS_RULE)
    except (RefusedError, msgspec.MsgspecError, UnicodeDecodeError, AttributeError, RecursionError):
        return ()  # the engine refuses it
    if names:
        members["messages"] = messages = msgspec.Raw(msgspec.json.encode(raw_messages))
        request.body = msgspec.json.encode(members)
        if request.prompt:
            request.prompt = messages
    return tuple(f"{agent.name}/{name}" for name in names)


def _apply(message: dict[str, Any]) -> tuple[Agent | None, str, list[str]]:
    """Apply the rules of its agent to a system message; return agent, moved text and rules that changed it."""
    content = message.get("content")
    holder, place = message, "content"
    if isinstance(content, list) and content and isinstance(content[0], dict):
        holder, place = content[0], "text"
    system = holder.get(place)
    if message.get("role") not in ("system", "developer") or not isinstance(system, str):
        return None, "", []
    if len(system) > _LONGEST_SYSTEM:
        return None, "", []
    agent = next((agent for agent in AGENTS if agent.opening.match(system)), None)
    moved: list[str] = []
    names: list[str] = []
    for rule in () if agent is None else agent.rules:
        match = rule.pattern.search(system)
        if match is None:
            continue
        names.append(rule.name)
        if rule.is_moved:
            moved.append(match[0].strip("\n"))
        system = f"{system[: match.start()]}{rule.remainder}{system[match.end() :]}"
    holder[place] = system.rstrip("\n") if moved else system
    return agent, "\n".join(moved), names


def _prepend(raw_messages: list[msgspec.Raw], text: str) -> None:
    """Put moved text before the first user message, or behind the system prompt if there is none."""
    note = _MOVED.format(text)
    part = {"type": "text", "text": note}
    for at, raw in enumerate(raw_messages):
        message = msgspec.json.decode(raw)
        if message.get("role") == "user":
            content = message.get("content")
            is_list = isinstance(content, list)
            message["content"] = [part, *content] if is_list else note + (content or "")
            raw_messages[at] = msgspec.Raw(msgspec.json.encode(message))
            return
    message = msgspec.json.decode(raw_messages[0])
    content = message["content"]
    message["content"] = [*content, part] if isinstance(content, list) else f"{content}\n\n{note}"
    raw_messages[0] = msgspec.Raw(msgspec.json.encode(message))


def _sorted_tools(raw: msgspec.Raw) -> msgspec.Raw | None:
    """Return tools in the order of their names; None if they have it already. The sort is stable."""
    tools = _LIST.decode(raw)
    named = [_TOOL.decode(tool) for tool in tools]
    names = [tool.function.name if tool.function is not None else tool.name for tool in named]
    if names == sorted(names):
        return None
    order = sorted(range(len(names)), key=names.__getitem__)
    return msgspec.Raw(msgspec.json.encode([tools[at] for at in order]))
