"""Encoders of speech: from samples to the bytes of a file, piece by piece. No mlx."""

import importlib.util
import io
import struct
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from typing_extensions import override

from schemas.wire.errors import invalid

AudioFormat: TypeAlias = Literal["mp3", "opus", "flac", "wav", "pcm"]

MEDIA: Final = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
_PLAIN: Final = ("wav", "pcm")
# libsndfile's names of format and subtype.
_CODECS: Final = {
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "opus": ("OGG", "OPUS"),
    "flac": ("FLAC", "PCM_16"),
}
# Of frames of MPEG audio, layer 3, by the index in their head.
_MPEG1_KBPS: Final = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MPEG2_KBPS: Final = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_MPEG1_RATES: Final = (44_100, 48_000, 32_000)
_LENGTH_FRAME_BYTES: Final = 200
_UNKNOWN_LENGTH: Final = 0xFFFF_FFFF


class AudioEncoder(Protocol):
    """Encodes one stream of mono samples of 16 bits."""

    def encode(self, samples: bytes) -> bytes:
        """Return the bytes of the file that are known after these samples; may be empty."""
        ...

    def end(self) -> bytes:
        """Return the rest of the file."""
        ...


def check_format(name: AudioFormat) -> None:
    """Refuse a format for which this node has no library.

    Raises:
        RefusedError: soundfile is not installed.

    """
    if name not in _PLAIN and importlib.util.find_spec("soundfile") is None:
        raise invalid(
            f"This node cannot make {name}: pip install 'mlx-fleet[audio]' there, or ask for wav or pcm.",
            param="response_format",
        )


def make_encoder(name: AudioFormat, rate: int) -> AudioEncoder:
    """Return an encoder for samples at `rate` a second."""
    return _PlainEncoder(name, rate) if name in _PLAIN else _LibraryEncoder(name, rate)


@dataclass(slots=True)
class _PlainEncoder(AudioEncoder):
    """Samples as they are; a wav file's header precedes them, without the length, which is not known."""

    name: AudioFormat
    rate: int
    _has_begun: bool = False

    @override
    def encode(self, samples: bytes) -> bytes:
        head = b"" if self._has_begun else self._head()
        self._has_begun = True
        return head + samples

    @override
    def end(self) -> bytes:
        return self.encode(b"")

    def _head(self) -> bytes:
        if self.name == "pcm":
            return b""
        layout = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, self.rate, 2 * self.rate, 2, 16)
        whole = struct.pack("<4sI4s", b"RIFF", _UNKNOWN_LENGTH, b"WAVE")
        return whole + layout + struct.pack("<4sI", b"data", _UNKNOWN_LENGTH)


class _LibraryEncoder(AudioEncoder):
    """A format of libsndfile. A flac file comes at the end, because its head has the length; others in pieces."""

    def __init__(self, name: AudioFormat, rate: int) -> None:
        import soundfile  # noqa: PLC0415 - an optional library

        self._file = io.BytesIO()
        self._sent = 0
        self._name = name
        form, subtype = _CODECS[name]
        self._writer: Any = soundfile.SoundFile(
            self._file,
            "w",
            samplerate=rate,
            channels=1,
            format=form,
            subtype=subtype,
            # Players tell the length of a stream by its rate.
            bitrate_mode="CONSTANT" if name == "mp3" else None,
            compression_level=0.5 if name == "mp3" else None,
        )

    @override
    def encode(self, samples: bytes) -> bytes:
        self._writer.buffer_write(samples, dtype="int16")
        return b"" if self._name == "flac" else self._take()

    @override
    def end(self) -> bytes:
        self._writer.close()
        return self._take()

    def _take(self) -> bytes:
        """Return what was added since the last call."""
        with self._file.getbuffer() as view:
            if self._sent == 0 and self._name == "mp3" and len(view):
                self._sent = _length_frame_bytes(bytes(view[:_LENGTH_FRAME_BYTES]))
            data = bytes(view[self._sent :])
        self._sent += len(data)
        return data


def _length_frame_bytes(head: bytes) -> int:
    """Return the size of the frame at an mp3 file's beginning that has the length, 0 if there is none.

    It is written anew at the end, and was sent by then: a player would believe the first length.
    """
    if b"Xing" not in head and b"Info" not in head:
        return 0
    is_half = not head[1] & 0b1000  # MPEG 2: rates up to 24 kHz
    kbps = (_MPEG2_KBPS if is_half else _MPEG1_KBPS)[head[2] >> 4]
    rate = _MPEG1_RATES[head[2] >> 2 & 3] >> (1 if is_half else 0)
    return (72 if is_half else 144) * 1000 * kbps // rate + (head[2] >> 1 & 1)
