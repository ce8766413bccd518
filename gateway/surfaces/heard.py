"""One answer as its engine tells it, for translations: what was said, and whether that was all. Does no I/O."""

from collections.abc import Iterable, Iterator
from typing import Final, Literal, TypeAlias

from gateway.surfaces import answers
from gateway.surfaces.answers import Answer, Choice, Fault, Performance, Usage

COMPLETE: Final = "complete"
Piece: TypeAlias = Choice | Fault | Literal["complete"]
"""Something that is said; why there is no more of it; that it was all."""


class Heard:
    """What was heard of one answer so far."""

    def __init__(self) -> None:
        self.id = ""
        self.last = Choice()
        """The one that said why it ended."""
        self.usage = Usage()
        self.performance = Performance()
        self.is_over = False
        """Nothing more is told: it is complete, or will never be."""

    def whole(self, body: bytes) -> Choice | Fault:
        """Return what an answer says that was not streamed."""
        answer = answers.read(body)
        self._note(answer)
        if answer.error is not None or not answer.choices:
            return answer.error or Fault()
        return answer.choices[0]

    def pieces(self, payloads: Iterable[bytes]) -> Iterator[Piece]:
        """Return what the events of a stream say, up to its end."""
        for payload in payloads:
            if self.is_over:
                return
            piece = self._piece(payload)
            if piece is not None:
                yield piece

    def cut(self) -> Fault:
        """Have it be over, although it is not complete."""
        self.is_over = True
        return Fault(message="The engine's stream ended before the answer did.")

    def _piece(self, payload: bytes) -> Piece | None:
        if payload == answers.DONE:
            if self.last.finish_reason is None:
                return self.cut()
            self.is_over = True
            return COMPLETE
        answer = answers.read(payload)
        if answer.error is not None:
            self.is_over = True
            return answer.error
        self._note(answer)
        return answer.choices[0] if answer.choices else None

    def _note(self, answer: Answer) -> None:
        self.id = answer.id or self.id
        self.usage = answer.usage or self.usage
        self.performance = answer.performance or self.performance
        if answer.choices and answer.choices[0].finish_reason is not None:
            self.last = answer.choices[0]
