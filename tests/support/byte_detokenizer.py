"""A detokenizer whose tokens are bytes, for tests of the engine."""

import codecs
from dataclasses import dataclass, field


@dataclass(slots=True)
class ByteDetokenizer:
    """Decodes tokens as bytes of UTF-8, so that most characters take several."""

    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    _text: str = ""

    def add_token(self, token: int) -> None:
        self._text += self._decoder.decode(bytes([token]))

    def finalize(self) -> None:
        self._text += self._decoder.decode(b"", final=True)

    @property
    def last_segment(self) -> str:
        segment, self._text = self._text, ""
        return segment
