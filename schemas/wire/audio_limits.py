"""Speech tasks and limits of uploads, which gateways, engines and the memory proof share. Imports nothing."""

from typing import Final, Literal, TypeAlias

SpeechTask: TypeAlias = Literal["Transcribe", "Speak"]

UPLOAD_BYTES: Final = (25 << 20) + (64 << 10)
"""Bytes of a body with an upload: a file of 25 MiB as at OpenAI, and the other fields of its form."""
UPLOADS: Final = 2
"""Largest uploads that an engine holds at once."""
MAX_AUDIO_S: Final = 7200
"""Seconds of audio that an engine takes."""
DECODING_BYTES: Final = 256 << 20
"""Bytes that the process which decodes an upload may have."""
