"""The process that decodes one upload of audio: mono samples of 16 bits at 16 kHz. Decoders are written in C.

    python -m engine.speech.decoder_process <upload >samples

The first bytes of the question are the longest duration; those of the answer a verdict. See decoder.py.
"""

import struct
import sys
from typing import BinaryIO, Final

from engine.jobs import PcmFile
from machinery import limited_child
from machinery.limited_child import ChildLimits
from schemas.wire.audio_limits import DECODING_BYTES, MAX_AUDIO_S

MODULE: Final = "engine.speech.decoder_process"
QUESTION: Final = struct.Struct("<I")
"""Of a question: the most seconds of audio."""
VERDICT: Final = struct.Struct("<c")
"""Of an answer: one of the verdicts."""
DECODED: Final = b"d"
UNREADABLE: Final = b"u"
TOO_LONG: Final = b"l"
LIMITS: Final = ChildLimits(
    memory_bytes=DECODING_BYTES + (100 << 20 if sys.platform == "linux" else 0),
    cpu_s=60,
    wall_s=120,
    output_bytes=2 * PcmFile.RATE * (MAX_AUDIO_S + 60),
)
_PIECE_SAMPLES: Final = 1 << 16


def answer(question: bytes, output: BinaryIO) -> None:
    """Write the verdict and the samples of an upload."""
    # A library in C, which opens no file and no device here; imported where it is needed.
    import miniaudio  # noqa: PLC0415 - see above

    (most_s,) = QUESTION.unpack_from(question)
    output.write(DECODED)
    left = most_s * PcmFile.RATE
    try:
        pieces = miniaudio.stream_memory(
            question[QUESTION.size :],
            output_format=miniaudio.SampleFormat.SIGNED16,
            nchannels=1,
            sample_rate=PcmFile.RATE,
            frames_to_read=_PIECE_SAMPLES,
        )
        for piece in pieces:
            left -= len(piece)
            if left < 0:
                break
            output.write(piece.tobytes())
    except miniaudio.MiniaudioError:
        left = most_s * PcmFile.RATE
        output.seek(0)
        output.truncate()
        output.write(UNREADABLE)
    if left < 0:
        output.seek(0)
        output.truncate()
        output.write(TOO_LONG)


if __name__ == "__main__":
    limited_child.serve(answer, LIMITS)
