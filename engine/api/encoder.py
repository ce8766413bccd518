"""Encoders of one response: from deltas of choices to the bytes of a body or of a stream.

`CompletionEncoder` serves chats and completions, `ResponsesEncoder` the Responses API; both have the same methods.
Nothing here awaits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from engine.api.generation_stream import ChoiceDelta, GenerationStream
from engine.openai import response_body
from engine.openai.response_body import (
    CompleteChoice,
    RequestTiming,
    ResponseFormatter,
    ResponseTotals,
    Usage,
    resume_comment,
)
from engine.openai.response_events import ResponseEventBuilder
from engine.openai.responses import ResponsesRequest
from engine.openai.resume_point import ResumePoint
from engine.text.output_parser import Delta
from schemas.wire.errors import Refusal
from schemas.wire.streams import END, RESUME_COMMENT, WAITING

# Of one comment in an interim response, whose head is bounded (machinery.http_server.MAX_HEAD_BYTES).
_MOST_TOKENS = 4096


@dataclass(slots=True)
class CompletionEncoder:
    """Encodes a chat or a completion, with resume comments if the request is resumable."""

    formatter: ResponseFormatter
    stream: GenerationStream
    arrived_s: float
    _sent_tokens: list[int] = field(init=False)
    """Tokens of each choice that are in a resume comment, or were sent by an engine before."""
    _replayed: tuple[int, ...] = field(init=False)
    """Choices that tokens of another engine had ended already."""
    _has_first_comment: bool = False

    def __post_init__(self) -> None:
        """Start where another engine was lost, if the answer is continued."""
        choices = self.stream.choices
        self._replayed = tuple(i for i, choice in enumerate(choices) if choice.parser.is_over)
        self._sent_tokens = [len(choice.parser.tokens) for choice in choices]
        for choice, offset in zip(choices, self.formatter.offsets, strict=True):
            for token in choice.parser.tokens:
                offset.take(self.formatter.spell(token))

    def full_body(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """Return the body of a response that is not streamed; `deltas` are all of it from this engine."""
        choices: list[CompleteChoice] = []
        for index, choice in enumerate(self.stream.choices):
            assert choice.parser.finish is not None
            own = (delta.delta for delta in deltas if delta.index == index)
            choices.append(
                CompleteChoice(
                    delta=Delta.joined((*choice.replayed, *own)),
                    finish=choice.parser.finish,
                    echo=choice.echo,
                    stop_word=choice.parser.stops.matched,
                )
            )
        return self.formatter.full_body(choices, self._totals())

    def begin(self) -> bytes:
        """Return the chunks before the first tokens; none if another engine sent them already."""
        request, out = self.formatter.request, b""
        if request.resumed is not None:
            missing = (i for i in self._replayed if i not in request.resumed.finished)
            return b"".join(map(self._finish, missing))
        for index, choice in enumerate(self.stream.choices):
            if request.is_chat or choice.echo:
                # The first tokens are parsed by now, but their text comes with the next chunk.
                comment = self._comment(index, upto=self._sent_tokens[index])
                out += self.formatter.first_chunk(index, echo=choice.echo, comment=comment)
        return out

    def chunks(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """Return the chunks of some deltas; may be empty."""
        out = b""
        for delta in _one_each(deltas):
            parser = self.stream.choices[delta.index].parser
            if not delta.delta.is_empty:
                # The engine that continues must generate open tokens again, to know their log probabilities.
                comment = self._comment(delta.index, upto=len(parser.tokens) - parser.open_tokens)
                out += self.formatter.delta_chunk(delta.index, delta.delta, comment=comment)
            if parser.is_over:
                out += self._finish(delta.index)
        return out

    def end(self) -> bytes:
        """Return the end of a complete stream."""
        return self.formatter.stream_end(self._totals())

    def interim_comments(self) -> Iterator[bytes]:
        """Yield the resume comments of an answer that is not streamed, as JSON: the tokens since the last ones."""
        for index, choice in enumerate(self.stream.choices):
            while (sent := self._sent_tokens[index]) < len(choice.parser.tokens):
                comment = self._comment(index, upto=sent + _MOST_TOKENS)
                yield comment[len(RESUME_COMMENT) : -1]

    def keep_alive(self) -> bytes:
        """Return what tells a client, in a long pause of its stream, that the answer goes on."""
        return WAITING

    def fail(self, refusal: Refusal) -> bytes:
        """Return the end of a stream that failed. Without `[DONE]`, so that clients see the text is incomplete."""
        return refusal.event()

    def _finish(self, index: int) -> bytes:
        parser = self.stream.choices[index].parser
        assert parser.finish is not None
        comment = self._comment(index, upto=len(parser.tokens), usage=self.stream.usage)
        return self.formatter.finish_chunk(
            index, parser.finish, stop_word=parser.stops.matched, comment=comment
        )

    def _comment(self, index: int, *, upto: int, usage: Usage | None = None) -> bytes:
        """Return the resume comment of the next chunk, and mark its tokens as sent."""
        if not self.formatter.request.is_resumable:
            return b""
        choice = self.stream.choices[index]
        tokens = choice.parser.tokens[self._sent_tokens[index] : upto]
        self._sent_tokens[index] += len(tokens)
        fields: dict[str, Any] = {"tokens": tokens}
        if index:
            fields["choice"] = index
        if not self._has_first_comment:
            self._has_first_comment = True
            fields |= _first_fields(self.stream, self.formatter.id, self.formatter.created)
        if usage is not None:
            fields["usage"] = usage.body()
        return resume_comment(fields)

    def _totals(self) -> ResponseTotals:
        usage, ticket = self.stream.usage, self.stream.ticket
        if not self.formatter.request.has_performance:
            return ResponseTotals(usage=usage)
        timing = RequestTiming(
            arrived_s=self.arrived_s,
            started_s=ticket.started_s,
            first_s=ticket.first_s,
            last_s=ticket.last_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            generated_tokens=ticket.completion_tokens,
            choices=len(self.stream.choices),
        )
        return ResponseTotals(usage=usage, performance=response_body.performance_body(timing))


def _one_each(deltas: Sequence[ChoiceDelta]) -> Sequence[ChoiceDelta]:
    """Return one delta for each choice: a resume comment counts all tokens, so it must precede all of their text."""
    indexes = dict.fromkeys(delta.index for delta in deltas)
    if len(indexes) == len(deltas):
        return deltas
    return [
        ChoiceDelta(index, Delta.joined(delta.delta for delta in deltas if delta.index == index))
        for index in indexes
    ]


def _first_fields(stream: GenerationStream, response_id: str, created: int) -> dict[str, Any]:
    """Return the fields that another engine needs besides the tokens, and those that a gateway counts."""
    choice, usage = stream.choices[0], stream.usage
    return {
        "seed": choice.job.sampling.seed,
        "prompt": choice.digest,
        "id": response_id,
        "created": created,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
    }


@dataclass(slots=True)
class ResponsesEncoder:
    """Encodes a response of the Responses API, which has one choice.

    Several events may belong to one token, so resume comments are blocks behind the events to which their tokens belong.
    """

    event_builder: ResponseEventBuilder
    stream: GenerationStream
    resumed: ResumePoint | None
    is_resumable: bool
    _sent_tokens: int
    """Tokens that are in a resume comment, or were sent by an engine before."""

    @classmethod
    def new(cls, request: ResponsesRequest, stream: GenerationStream) -> "ResponsesEncoder":
        """Return the encoder of a request whose jobs were accepted."""
        service, resumed = stream.service, request.chat.resumed
        if resumed is not None:
            response_id, created = resumed.id, resumed.created
        else:
            response_id = service.response_id(stream.ticket, kind="resp").replace("-", "_", 1)
            created = int(service.clock.now().timestamp())
        builder = ResponseEventBuilder(
            id=response_id, created=created, echo=request.echo, tools=request.tools
        )
        is_resumable, sent = request.chat.is_resumable, len(stream.choices[0].parser.tokens)
        return cls(builder, stream, resumed, is_resumable, sent)

    def full_body(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """Return the body of a response that is not streamed; `deltas` are all of it from this engine."""
        for delta in (
            *self.stream.choices[0].replayed,
            *(choice_delta.delta for choice_delta in deltas),
        ):
            self.event_builder.add(delta)
        finish = self.stream.choices[0].parser.finish
        assert finish is not None
        return orjson.dumps(self.event_builder.body(finish, self.stream.usage, now=self._now()))

    def begin(self) -> bytes:
        """Return the events before the first tokens; none if another engine sent them already."""
        builder, resumed, choice = self.event_builder, self.resumed, self.stream.choices[0]
        first = _first_fields(self.stream, builder.id, builder.created)
        if resumed is None or not resumed.events:
            mark = self._comment({"tokens": []})
            return self._comment({"tokens": [], **first}) + builder.begin() + mark
        builder.replay(choice.replayed, events=resumed.events)
        return self._comment({"tokens": []})

    def chunks(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """Return the events of some deltas; may be empty."""
        events = b"".join(self.event_builder.add(delta.delta) for delta in deltas)
        return events and events + self._comment()

    def end(self) -> bytes:
        """Return the end of a complete stream."""
        finish = self.stream.choices[0].parser.finish
        assert finish is not None
        usage = self.stream.usage
        end = self.event_builder.end(finish, usage, now=self._now())
        return end + self._comment({"tokens": self._new_tokens(), "usage": usage.body()})

    def fail(self, refusal: Refusal) -> bytes:
        """Return the end of a stream that failed. A gateway reads the refusal, its client the event."""
        comment = RESUME_COMMENT + refusal.body() + END if self.is_resumable else b""
        return self.event_builder.fail(refusal) + comment

    def interim_comments(self) -> Iterator[bytes]:
        """Yield the resume comments of an answer that is not streamed, as JSON: the tokens since the last ones."""
        tokens, builder = self.stream.choices[0].parser.tokens, self.event_builder
        while (sent := self._sent_tokens) < len(tokens):
            fields: dict[str, Any] = {"tokens": tokens[sent : sent + _MOST_TOKENS]}
            self._sent_tokens += len(fields["tokens"])
            if not sent:
                fields |= _first_fields(self.stream, builder.id, builder.created)
            yield resume_comment(fields)[len(RESUME_COMMENT) : -1]

    def keep_alive(self) -> bytes:
        """Return what tells a gateway or a client, in a long pause of its stream, that the answer goes on."""
        return self._comment({"tokens": []}) or WAITING

    def _comment(self, fields: dict[str, Any] | None = None) -> bytes:
        """Return a resume comment; without fields, that of the tokens since the last one."""
        if not self.is_resumable:
            return b""
        return resume_comment(fields or {"tokens": self._new_tokens()}) + b"\n"

    def _new_tokens(self) -> list[int]:
        tokens = self.stream.choices[0].parser.tokens[self._sent_tokens :]
        self._sent_tokens += len(tokens)
        return tokens

    def _now(self) -> int:
        return int(self.stream.service.clock.now().timestamp())
