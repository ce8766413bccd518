"""What a request's client is told, as the bytes of one answer or of a stream. Waits for nothing.

What the client of `/v1/responses` is told, as the bytes of one answer or of a stream. Waits for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from engine.api.generation_stream import ChoiceDelta, GenerationStream
from engine.errors import Refusal
from engine.openai import response_body
from engine.openai.input_processor import GenerationChoice
from engine.openai.response_body import (
    CompleteChoice,
    RequestTiming,
    ResponseFormatter,
    ResponseTotals,
    Usage,
    resume_comment,
    sse_event,
)
from engine.openai.response_events import ResponseEventBuilder
from engine.openai.responses import ResponsesRequest
from engine.text.output_parser import Delta


@dataclass(slots=True)
class CompletionEncoder:
    """Knows how far each choice was told, so that another process can continue from there."""

    envelope: ResponseFormatter
    telling: GenerationStream
    arrived_s: float
    _told: list[int] = field(init=False)
    """Tokens of each choice that its client knows of."""
    _is_introduced: bool = False

    def __post_init__(self) -> None:
        """Begin where another process was lost, if one was."""
        choices = self.telling.choices
        self._told = [len(choice.reading.tokens) for choice in choices]
        for choice, offset in zip(choices, self.envelope.offsets, strict=True):
            for token in choice.reading.tokens:
                offset.take(self.envelope.spell(token))

    def whole(self, told: Sequence[ChoiceDelta]) -> bytes:
        """Return the one body of an answer that is complete."""
        wholes: list[CompleteChoice] = []
        for index, choice in enumerate(self.telling.choices):
            assert choice.reading.finish is not None
            delta = Delta.joined(one.delta for one in told if one.index == index)
            wholes.append(
                CompleteChoice(
                    delta=delta,
                    finish=choice.reading.finish,
                    echo=choice.echo,
                    stopped_by=choice.reading.stops.matched,
                )
            )
        return self.envelope.whole(wholes, self._totals())

    def begin(self) -> bytes:
        """Return what goes before the first tokens; nothing, if another process sent it already."""
        request, out = self.envelope.request, b""
        if request.resumed is not None:
            return self._end(0) if self.telling.is_over and not self.telling.ticket.jobs else b""
        for index, choice in enumerate(self.telling.choices):
            if request.is_chat or choice.echo:
                # The first tokens are read by now, but their text is yet to come.
                mark = self._mark(index, upto=self._told[index])
                out += self.envelope.first(index, echo=choice.echo, mark=mark)
        return out

    def pieces(self, burst: Sequence[ChoiceDelta]) -> bytes:
        """Return what some tokens add, which may be nothing at all."""
        out = b""
        for told in burst:
            if not told.delta.is_empty:
                reading = self.telling.choices[told.index].reading
                # Who continues has to make open tokens again, to know how likely they were.
                mark = self._mark(told.index, upto=len(reading.tokens) - reading.open_tokens)
                out += self.envelope.piece(told.index, told.delta, mark=mark)
            if self.telling.choices[told.index].reading.is_over:
                out += self._end(told.index)
        return out

    def last(self) -> bytes:
        """Return what ends a stream that went well."""
        return self.envelope.last(self._totals())

    def broken(self, refusal: Refusal) -> bytes:
        """Return what ends a stream that did not. No [DONE]: it must not look like the end of the text."""
        return sse_event(refusal.body())

    def _end(self, index: int) -> bytes:
        reading = self.telling.choices[index].reading
        assert reading.finish is not None
        mark = self._mark(index, upto=len(reading.tokens), usage=self.telling.usage)
        return self.envelope.end(index, reading.finish, stopped_by=reading.stops.matched, mark=mark)

    def _mark(self, index: int, *, upto: int, usage: Usage | None = None) -> bytes:
        """Return what makes the chunk that comes now resumable, and note that it was told."""
        if not self.envelope.request.is_resumable:
            return b""
        choice = self.telling.choices[index]
        tokens = choice.reading.tokens[self._told[index] : upto]
        self._told[index] += len(tokens)
        fleet: dict[str, Any] = {"tokens": tokens}
        if not self._is_introduced:
            self._is_introduced = True
            fleet |= self._introduction(choice)
        if usage is not None:
            fleet["usage"] = usage.body()
        return resume_comment(fleet)

    def _introduction(self, choice: GenerationChoice) -> dict[str, Any]:
        """Return what another process needs besides the tokens, and what a gateway counts."""
        usage = self.telling.usage
        return {
            "seed": choice.job.sampling.seed,
            "prompt": choice.digest,
            "id": self.envelope.id,
            "created": self.envelope.created,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
        }

    def _totals(self) -> ResponseTotals:
        usage, ticket = self.telling.usage, self.telling.ticket
        if not self.envelope.request.has_performance:
            return ResponseTotals(usage=usage)
        story = RequestTiming(
            arrived_s=self.arrived_s,
            started_s=ticket.started_s,
            first_s=ticket.first_s,
            last_s=ticket.last_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            made_tokens=ticket.made,
            choices=len(self.telling.choices),
        )
        return ResponseTotals(usage=usage, performance=response_body.performance_body(story))


@dataclass(slots=True)
class ResponsesEncoder:
    """The same methods as `wording.Wording`, for an answer of one choice."""

    event_builder: ResponseEventBuilder
    telling: GenerationStream

    @classmethod
    def of(cls, request: ResponsesRequest, telling: GenerationStream) -> "ResponsesEncoder":
        """Return the wording of a request that has begun."""
        service = telling.service
        made_id = service.response_id(telling.ticket, kind="resp").replace("-", "_", 1)
        created = int(service.clock.now().timestamp())
        return cls(ResponseEventBuilder(id=made_id, created=created, echo=request.echo), telling)

    def whole(self, told: Sequence[ChoiceDelta]) -> bytes:
        """Return the one body of an answer that is complete."""
        for one in told:
            self.event_builder.take(one.delta)
        finish = self.telling.choices[0].reading.finish
        assert finish is not None
        return orjson.dumps(self.event_builder.body(finish, self.telling.usage, now=self._now()))

    def begin(self) -> bytes:
        """Return what goes before the first tokens."""
        return self.event_builder.begin()

    def pieces(self, burst: Sequence[ChoiceDelta]) -> bytes:
        """Return what some tokens add, which may be nothing at all."""
        return b"".join(self.event_builder.take(told.delta) for told in burst)

    def last(self) -> bytes:
        """Return what ends a stream that went well."""
        finish = self.telling.choices[0].reading.finish
        assert finish is not None
        return self.event_builder.end(finish, self.telling.usage, now=self._now())

    def broken(self, refusal: Refusal) -> bytes:
        """Return what ends a stream that did not."""
        return self.event_builder.fail(refusal)

    def _now(self) -> int:
        return int(self.telling.service.clock.now().timestamp())
