"""Responses of `/v1/responses`: output items that open, grow and close, as stream events and as one body.

Values in, bytes out; nothing here sends or awaits.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import orjson

from engine.openai.response_body import Usage
from engine.openai.response_tools import FreeformInput, ResponseTool
from engine.text.output_parser import Delta, Finish, ToolCallDelta
from schemas.wire.errors import Refusal

Json: TypeAlias = dict[str, Any]
ItemKind: TypeAlias = Literal["reasoning", "message", "function_call", "custom_tool_call"]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]

_ID_PREFIXES = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
_PART_TYPES = {"reasoning": "reasoning_text", "message": "output_text"}
_EVENT_PREFIXES = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
# The field of a call that has its text.
_CALL_FIELDS = {"function_call": "arguments", "custom_tool_call": "input"}


@dataclass(slots=True, kw_only=True)
class _OutputItem:
    """One output item."""

    kind: ItemKind
    id: str
    index: int
    call: ToolCallDelta | None = None
    """The first piece of a call."""
    tool: ResponseTool | None = None
    """The called tool, if the client has another name for it."""
    freeform: FreeformInput | None = None
    """Reads the input of a freeform call from its arguments."""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far, or the arguments of a call."""
        return "".join(self.pieces)

    @property
    def location(self) -> Json:
        """The fields of an event that locate its text."""
        fields: Json = {"item_id": self.id, "output_index": self.index}
        return fields if self.call is not None else {**fields, "content_index": 0}

    def part(self, text: str) -> Json:
        """Return its only content part."""
        extra: Json = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": _PART_TYPES[self.kind], "text": text, **extra}

    def body(self, status: ItemStatus) -> Json:
        """Return the item; without its text while it is in progress."""
        is_open = status == "in_progress"
        head: Json = {"id": self.id, "type": self.kind, "status": status}
        if self.call is not None:
            name: Json = {"name": self.call.name}
            if self.tool is not None and self.tool.namespace is not None:
                name = {"name": self.tool.name, "namespace": self.tool.namespace}
            text = {_CALL_FIELDS[self.kind]: "" if is_open else self.text}
            return {**head, "call_id": self.call.id, **name, **text}
        content = [] if is_open else [self.part(self.text)]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}


@dataclass(slots=True, kw_only=True)
class ResponseEventBuilder:
    """Builds the events and the body of one response. Events are numbered in the order of the calls."""

    id: str
    created: int
    echo: Json
    tools: Mapping[str, ResponseTool] = field(default_factory=dict)
    """By the names that the model sees."""
    _items: list[_OutputItem] = field(default_factory=list)
    _open: _OutputItem | None = None
    _call: int | None = None
    """Index of the open call among the calls."""
    events: int = 0
    """The number of events so far."""

    def begin(self) -> bytes:
        """Return the events before the first token."""
        body = self._body("in_progress", [])
        started = self._event("response.created", response=body)
        return started + self._event("response.in_progress", response=body)

    def replay(self, deltas: Iterable[Delta], *, events: int) -> None:
        """Take the deltas that another engine sent, in so many events with those before the first token."""
        self.begin()
        for delta in deltas:
            self.add(delta)
        self.events = events

    def add(self, delta: Delta) -> bytes:
        """Return the events of a delta; may be empty."""
        out = b""
        if delta.reasoning:
            out += self._grow("reasoning", delta.reasoning)
        if delta.content:
            out += self._grow("message", delta.content)
        for call in delta.tool_calls:
            out += self._grow_call(call)
        return out

    def end(self, finish: Finish, usage: Usage, *, now: int) -> bytes:
        """Return the last events of a complete stream; `now` is in seconds since 1970."""
        closed = self._close_all(finish)
        body = self.body(finish, usage, now=now)
        return closed + self._event(f"response.{body['status']}", response=body)

    def fail(self, refusal: Refusal) -> bytes:
        """Return the last event of a stream that failed."""
        items = [
            item.body("incomplete" if item is self._open else "completed") for item in self._items
        ]
        body = self._body("failed", items)
        # OpenAI's clients know a closed list of codes; this one is the closest.
        body["error"] = {"code": "server_error", "message": refusal.message}
        return self._event("response.failed", response=body)

    def body(self, finish: Finish, usage: Usage, *, now: int) -> Json:
        """Return the body of a complete response; `now` is in seconds since 1970."""
        self._close_all(finish)
        is_cut = finish == "length"
        last = self._items[-1] if self._items else None
        items = [
            item.body("incomplete" if is_cut and item is last else "completed")
            for item in self._items
        ]
        body = self._body("incomplete" if is_cut else "completed", items)
        if is_cut:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body["completed_at"] = now
        return {**body, "usage": _usage_body(usage)}

    def _body(self, status: ItemStatus, items: Sequence[Json]) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(items),
            "usage": None,
            **self.echo,
        }

    def _grow(self, kind: ItemKind, text: str) -> bytes:
        out = b""
        if self._open is None or self._open.kind != kind:
            out = self._close("completed") + self._open_item(kind)
        return out + self._grow_open(text)

    def _grow_call(self, call: ToolCallDelta) -> bytes:
        out = b""
        if self._open is None or self._open.call is None or self._call != call.index:
            tool = self.tools.get(call.name or "")
            is_freeform = tool is not None and tool.is_freeform
            kind: ItemKind = "custom_tool_call" if is_freeform else "function_call"
            out = self._close("completed") + self._open_item(kind, call, tool)
            self._call = call.index
        text, item = call.arguments, self._open
        if item is not None and item.freeform is not None:
            text = item.freeform.take(text)
        return out + (self._grow_open(text) if text else b"")

    def _open_item(
        self, kind: ItemKind, call: ToolCallDelta | None = None, tool: ResponseTool | None = None
    ) -> bytes:
        index = len(self._items)
        item_id = f"{_ID_PREFIXES[kind]}_{self.id.removeprefix('resp_')}{index:02x}"
        item = self._open = _OutputItem(kind=kind, id=item_id, index=index, call=call, tool=tool)
        if kind == "custom_tool_call":
            item.freeform = FreeformInput()
        self._items.append(item)
        body = item.body("in_progress")
        out = self._event("response.output_item.added", output_index=index, item=body)
        if call is None:
            out += self._event("response.content_part.added", **item.location, part=item.part(""))
        return out

    def _grow_open(self, text: str) -> bytes:
        assert self._open is not None
        self._open.pieces.append(text)
        extra: Json = {"logprobs": []} if self._open.kind == "message" else {}
        kind = f"{_EVENT_PREFIXES[self._open.kind]}.delta"
        return self._event(kind, **self._open.location, delta=text, **extra)

    def _close(self, status: ItemStatus) -> bytes:
        item = self._open
        if item is None:
            return b""
        rest = "" if item.freeform is None else item.freeform.end()
        out = self._grow_open(rest) if rest else b""
        self._open = self._call = None
        done = f"{_EVENT_PREFIXES[item.kind]}.done"
        if item.call is not None:
            out += self._event(done, **item.location, **{_CALL_FIELDS[item.kind]: item.text})
        else:
            part = item.part(item.text)
            extra: Json = {"logprobs": []} if item.kind == "message" else {}
            out += self._event(done, **item.location, text=item.text, **extra)
            out += self._event("response.content_part.done", **item.location, part=part)
        body = item.body(status)
        return out + self._event("response.output_item.done", output_index=item.index, item=body)

    def _close_all(self, finish: Finish) -> bytes:
        out = b""
        if not self._items and finish != "length":
            # An answer without text is an empty message, not a missing one.
            out = self._open_item("message")
        return out + self._close("incomplete" if finish == "length" else "completed")

    def _event(self, name: str, /, **fields: Any) -> bytes:
        body = {"type": name, "sequence_number": self.events, **fields}
        self.events += 1
        return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"


def _usage_body(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
