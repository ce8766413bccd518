"""Encoders of one response: from deltas of choices to the bytes of a body or of a stream.

`CompletionEncoder` serves chats and completions, `ResponsesEncoder` the Responses API; both have the same methods.
Nothing here awaits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import orjson

from engine.api.generation_stream import ChoiceDelta, GenerationStream
from engine.openai import response_body
from engine.openai.response_body import (
    CompleteChoice,
    RequestTiming,
    ResponseFormatter,
    ResponseTotals,
)
from engine.openai.response_events import ResponseEventBuilder
from engine.openai.responses import ResponsesRequest
from engine.openai.resume_point import ResumePoint
from engine.text.output_parser import Delta
from machinery.engine_link import ResumeRecord, ResumeStart, encode_head
from schemas.wire.errors import Refusal

# Of one record in a sign of progress, which keeps those small.
_MOST_TOKENS = 4096


@dataclass(slots=True)
class ResumeRecorder:
    """Makes the resume records of one answer: the tokens of the events that are sent."""

    stream: GenerationStream
    id: str
    created: int
    _sent: list[int] = field(init=False)
    """Tokens of each choice that are in a record, or were sent by an engine before."""
    _shown: list[int] = field(init=False)
    """Tokens of each choice whose events are made."""
    _finished: list[int] = field(default_factory=list)
    """Choices that ended since the last record."""
    _has_start: bool = False

    def __post_init__(self) -> None:
        """Start where another engine was lost, if the answer is continued."""
        self._sent = [len(choice.parser.tokens) for choice in self.stream.choices]
        self._shown = self._sent.copy()

    def show(self, index: int) -> None:
        """Record that events of a choice are made. They count all of its tokens but those that are not decided yet."""
        parser = self.stream.choices[index].parser
        # The engine that continues must generate open tokens again, to know their log probabilities.
        self._shown[index] = len(parser.tokens) - parser.open_tokens

    def finish(self, index: int) -> None:
        """Record that the end of a choice is made."""
        self._shown[index] = len(self.stream.choices[index].parser.tokens)
        self._finished.append(index)

    def take(self, events: int = 0) -> bytes:
        """Return the record of the events that were made since the last one; empty if they add nothing."""
        tokens = {}
        for index, shown in enumerate(self._shown):
            if shown > (sent := self._sent[index]):
                tokens[index] = self.stream.choices[index].parser.tokens[sent:shown]
                self._sent[index] = shown
        finished, self._finished = self._finished, []
        if self._has_start and not tokens and not finished:
            return b""
        output = self.stream.usage.completion_tokens if finished else None
        return encode_head(ResumeRecord(tokens, self._start(), finished, output, events))

    def interim(self) -> Iterator[bytes]:
        """Yield the records of an answer that is not streamed: the tokens since the last ones."""
        for index, choice in enumerate(self.stream.choices):
            while (sent := self._sent[index]) < len(choice.parser.tokens):
                tokens = choice.parser.tokens[sent : sent + _MOST_TOKENS]
                self._sent[index] += len(tokens)
                yield encode_head(ResumeRecord({index: tokens}, self._start()))

    def _start(self) -> ResumeStart | None:
        """Return what the first record begins with."""
        if self._has_start:
            return None
        self._has_start = True
        choice, usage = self.stream.choices[0], self.stream.usage
        seed = choice.job.sampling.seed
        return ResumeStart(
            seed, choice.digest, self.id, self.created, usage.prompt_tokens, usage.cached_tokens
        )


@dataclass(slots=True)
class CompletionEncoder:
    """Encodes a chat or a completion."""

    formatter: ResponseFormatter
    stream: GenerationStream
    arrived_s: float
    recorder: ResumeRecorder | None = field(init=False, default=None)
    """Set if the request is resumable."""
    _replayed: tuple[int, ...] = field(init=False)
    """Choices that tokens of another engine had ended already."""

    def __post_init__(self) -> None:
        """Start where another engine was lost, if the answer is continued."""
        choices, formatter = self.stream.choices, self.formatter
        if formatter.request.is_resumable:
            self.recorder = ResumeRecorder(self.stream, formatter.id, formatter.created)
        self._replayed = tuple(i for i, choice in enumerate(choices) if choice.parser.is_over)
        for choice, offset in zip(choices, formatter.offsets, strict=True):
            for token in choice.parser.tokens:
                offset.take(formatter.spell(token))

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
                out += self.formatter.first_chunk(index, echo=choice.echo)
        return out

    def chunks(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """Return the chunks of some deltas; may be empty."""
        out = b""
        ended: dict[int, None] = {}
        for choice in deltas:
            index, delta = choice.index, choice.delta
            if not delta.is_empty:
                if self.recorder is not None:
                    self.recorder.show(index)
                out += self.formatter.delta_chunk(index, delta)
            if self.stream.choices[index].parser.finish is not None:
                ended[index] = None
        for index in ended:
            out += self._finish(index)
        return out

    def end(self) -> bytes:
        """Return the end of a complete stream."""
        return self.formatter.stream_end(self._totals())

    def record(self) -> bytes | None:
        """Return the resume record of the chunks since the last one, empty if they add nothing; None without records."""
        return None if self.recorder is None else self.recorder.take()

    def fail(self, refusal: Refusal) -> bytes:
        """Return the end of a stream that failed. Without `[DONE]`, so that clients see the text is incomplete."""
        return refusal.event()

    def _finish(self, index: int) -> bytes:
        parser = self.stream.choices[index].parser
        assert parser.finish is not None
        if self.recorder is not None:
            self.recorder.finish(index)
        return self.formatter.finish_chunk(index, parser.finish, stop_word=parser.stops.matched)

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


@dataclass(slots=True)
class ResponsesEncoder:
    """Encodes a response of the Responses API, which has one choice."""

    event_builder: ResponseEventBuilder
    stream: GenerationStream
    resumed: ResumePoint | None
    recorder: ResumeRecorder | None
    """Set if the request is resumable."""

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
        is_resumable = request.chat.is_resumable
        recorder = ResumeRecorder(stream, response_id, created) if is_resumable else None
        return cls(builder, stream, resumed, recorder)

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
        if resumed is None or not resumed.events:
            return builder.begin()
        builder.replay(choice.replayed, events=resumed.events)
        return b""

    def chunks(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """Return the events of some deltas; may be empty."""
        events = b"".join(self.event_builder.add(delta.delta) for delta in deltas)
        if events and self.recorder is not None:
            self.recorder.show(0)
        return events

    def end(self) -> bytes:
        """Return the end of a complete stream."""
        finish = self.stream.choices[0].parser.finish
        assert finish is not None
        if self.recorder is not None:
            self.recorder.finish(0)
        return self.event_builder.end(finish, self.stream.usage, now=self._now())

    def record(self) -> bytes | None:
        """Return the resume record of the events since the last one, empty if they add nothing; None without records."""
        return None if self.recorder is None else self.recorder.take(self.event_builder.events)

    def fail(self, refusal: Refusal) -> bytes:
        """Return the end of a stream that failed."""
        return self.event_builder.fail(refusal)

    def _now(self) -> int:
        return int(self.stream.service.clock.now().timestamp())
