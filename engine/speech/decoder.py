"""Decodes uploads of audio in a process with limits of memory and time. Event loop and threads; no mlx."""

import asyncio
import os
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import Final

from engine.jobs import FileDescriptor, PcmFile
from engine.speech import decoder_process
from engine.speech.decoder_process import LIMITS, QUESTION, VERDICT
from machinery import limited_child
from machinery.limited_child import ChildEnd
from schemas.wire.audio_limits import MAX_AUDIO_S
from schemas.wire.errors import invalid

# Uploads that are decoded at once; the others wait.
_PROCESSES: Final = 2
_FORMATS: Final = "wav, flac, mp3 and ogg (Vorbis)"


@dataclass(slots=True)
class AudioDecoder:
    """Decodes a few uploads at a time."""

    _free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_PROCESSES))

    async def decode(self, upload: bytes | memoryview) -> PcmFile:
        """Return the samples of an upload.

        Raises:
            RefusedError: it is no audio, too long, or takes too much to decode.

        """
        async with self._free:
            return await asyncio.to_thread(_decode, upload)


def _decode(upload: bytes | memoryview) -> PcmFile:
    question = QUESTION.pack(MAX_AUDIO_S) + upload
    with TemporaryFile() as file:
        outcome = limited_child.run(decoder_process.MODULE, question, LIMITS, into=file)
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        _check(outcome.end, file.read(VERDICT.size))
        descriptor = FileDescriptor(os.dup(file.fileno()))
    samples = (size - VERDICT.size) // 2
    if samples == 0:
        raise invalid("The audio has no samples.", param="file", code="audio_empty")
    return PcmFile(descriptor=descriptor, offset=VERDICT.size, samples=samples)


def _check(end: ChildEnd, verdict: bytes) -> None:
    if verdict == decoder_process.TOO_LONG:
        message = f"The audio is longer than {MAX_AUDIO_S} seconds, the most that is taken. Cut it into parts."
        raise invalid(message, param="file", code="audio_too_long")
    if end in (ChildEnd.MEMORY, ChildEnd.TIME):
        raise invalid(
            f"Decoding the audio takes too much {end.value}. Send a shorter file, as wav or flac.",
            param="file",
            code="audio_too_costly",
        )
    if end is not ChildEnd.DONE or verdict != decoder_process.DECODED:
        message = f"The file is no audio that can be read: {_FORMATS} are. ffmpeg converts others: ffmpeg -i IN -ar 16000 -ac 1 OUT.wav"
        raise invalid(message, param="file", code="audio_unreadable")
