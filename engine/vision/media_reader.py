"""Reads what a conversation has beside text, in an input worker: images, frames of videos, recordings.

All of it is in the request, and counts against one limit. A frame of a video counts as an image.
"""

import hashlib
import io
import re
import wave
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from engine.jobs import MediaInput
from engine.text.interface import Message
from engine.vision import image_reader
from engine.vision.image_reader import ImageRules
from schemas.wire import errors
from schemas.wire.errors import RefusedError

Kind: TypeAlias = Literal["image", "video", "audio"]
_KINDS: Final = ("image", "video", "audio")
_FRAME_SECONDS: Final = 0.5  # of one frame to the next, as in Qwen3-VL's own preprocessing
# Frames of an animation are decoded one after the other, also those between the chosen ones.
_MAX_FRAMES: Final = 512
_MAX_FRAME_PIXELS: Final = 10 * image_reader.MAX_SOURCE_PIXELS
_FRAMES_URL: Final = re.compile(r"data:video/jpeg;base64,", re.IGNORECASE)
# Gemma's limits: 30 s, of which 40 ms take a token.
_SAMPLE_RATE, _MAX_SECONDS, _TOKEN_SAMPLES = 16_000, 30, 640
_MIN_RATE, _MAX_RATE, _MAX_CHANNELS = 4_000, 192_000, 8
# Numbers in the places of an image's tokens have 32 bits, and the highest is set.
_NUMBER_BYTES, _BEYOND = 4, 1 << 31


class MediaPart(NamedTuple):
    """A part of a message, with its path in the request."""

    kind: Kind
    url: str
    param: str


@dataclass(frozen=True, slots=True)
class Medium:
    """An image, a video or a recording, and the text that stands for it in a prompt."""

    kind: Kind
    text: str
    inputs: tuple[MediaInput, ...]


def media_parts(turns: Sequence[Message]) -> list[MediaPart]:
    """Return the parts of a conversation that are no text, in order."""
    return [
        MediaPart(part["type"], part["url"], part["param"])
        for turn in turns
        if isinstance(turn["content"], list)
        for part in turn["content"]
        if part["type"] in _KINDS
    ]


def without_urls(turns: Sequence[Message]) -> list[Message]:
    """Return the turns as chat templates take them: they write a marker for an image, and need no URL."""
    return [
        turn | {"content": [_bare(part) for part in turn["content"]]}
        if isinstance(turn["content"], list)
        else turn
        for turn in turns
    ]


def _bare(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": part["type"]} if part["type"] in _KINDS else part


def read_media(parts: Sequence[MediaPart], rules: ImageRules) -> tuple[Medium, ...]:
    """Return what these parts contain.

    Raises:
        RefusedError: there are too many, or one is too large, broken, or not taken by the model.

    """
    media: list[Medium] = []
    room = rules.limits.max_images
    for part in parts:
        if not room:
            raise _too_many(sum(1 for _ in parts), rules, part.param)
        medium = _read(part, rules, room)
        room -= sum(_frames(one) for one in medium.inputs)
        media.append(medium)
    return tuple(media)


def _too_many(count: int, rules: ImageRules, param: str) -> RefusedError:
    return errors.invalid(
        f"This request has {count} images; the deployment takes at most {rules.limits.max_images}, those of earlier messages "
        "and frames of videos included (spec.model.vision.maxImages).",
        param=param,
    )


def _frames(medium: MediaInput) -> int:
    if medium.kind == "audio":
        return 1
    return len(medium.pixels) // (3 * medium.width * medium.height)


def _read(part: MediaPart, rules: ImageRules, room: int) -> Medium:
    if part.kind == "video" and rules.video is None:
        raise errors.invalid("This model sees images, and no videos.", param=part.param)
    if part.kind == "audio" and rules.audio is None:
        raise errors.invalid("This model hears no recordings.", param=part.param)
    if part.kind == "video":
        return _read_video(part, rules, room)
    raw = image_reader.decode_url(part.url, part.param, rules.limits.max_image_bytes)
    if part.kind == "audio":
        return _read_audio(raw, part.param, rules)
    image = image_reader.read_image(raw, part.param, rules)
    return Medium("image", rules.text(image), (image,))


def _read_video(part: MediaPart, rules: ImageRules, room: int) -> Medium:
    """Read frames: JPEGs of one URL, as vLLM takes them, or those of an animation."""
    most = rules.limits.max_image_bytes
    head = _FRAMES_URL.match(part.url[:100])
    if head is None:
        raw = image_reader.decode_url(part.url, part.param, most)
        frames, seconds = _animation_frames(raw, part.param, rules, room)
    else:
        files = part.url[head.end() :].split(",", room)
        if len(files) > room:
            raise _too_many(part.url.count(",", head.end()) + 1, rules, part.param)
        urls = (f"data:image/jpeg;base64,{file}" for file in files)
        images = [
            image_reader.read_image(
                image_reader.decode_url(url, part.param, most), part.param, rules
            )
            for url in urls
        ]
        if len({(image.width, image.height) for image in images}) > 1:
            raise errors.invalid("The frames of a video must be of one size.", param=part.param)
        frames, seconds = images, [at * _FRAME_SECONDS for at in range(len(images))]
    assert rules.video is not None
    inputs, texts = [], []
    timed = list(zip(frames, seconds, strict=True))
    for pair in (timed[at : at + 2] for at in range(0, len(timed), 2)):
        pixels = b"".join(frame.pixels for frame, _ in pair)
        first, last = pair[0][1], pair[-1][1]
        image = pair[0][0]
        inputs.append(
            MediaInput(
                width=image.width,
                height=image.height,
                pixels=pixels,
                tokens=image.tokens,
                kind="frames",
            )
        )
        opening, closing = rules.video.around
        words = rules.video.token_text * image.tokens
        texts.append(f"<{(first + last) / 2:.1f} seconds>{opening}{words}{closing}")
    return Medium("video", "".join(texts), tuple(inputs))


def _animation_frames(
    raw: bytes, param: str, rules: ImageRules, room: int
) -> tuple[list[MediaInput], list[float]]:
    """Return at most `room` frames of an animated image, half a second apart or more, and their times in seconds."""
    with image_reader.opening(raw, param) as image:
        count = getattr(image, "n_frames", 1)
        if count > _MAX_FRAMES or count * image.width * image.height > _MAX_FRAME_PIXELS:
            raise errors.invalid(
                f"The video has {count} frames of {image.width} x {image.height} pixels; at most {_MAX_FRAMES} frames, and "
                f"{_MAX_FRAME_PIXELS} pixels, are decoded. Cut it, or scale it down.",
                param=param,
            )
        times, now = [], 0.0
        for at in range(count):
            image.seek(at)
            times.append(now)
            now += float(image.info.get("duration") or 100) / 1000
        wanted = _evenly(times, room)
        wide, high = rules.size(image.width, image.height)
        frames = []
        for at in wanted:
            image.seek(at)
            pixels = image_reader.scaled_pixels(image, wide, high)
            tokens = rules.tokens(wide, high)
            frames.append(MediaInput(width=wide, height=high, pixels=pixels, tokens=tokens))
    return frames, [times[at] for at in wanted]


def _evenly(times: Sequence[float], room: int) -> list[int]:
    """Return the indices of frames that are half a second apart, or further if there would be more than `room`."""
    chosen: list[int] = []
    for at, time in enumerate(times):
        if not chosen or time >= times[chosen[-1]] + _FRAME_SECONDS - 0.01:
            chosen.append(at)
    if len(chosen) <= room:
        return chosen
    return [chosen[round(at * (len(chosen) - 1) / max(1, room - 1))] for at in range(room)]


def _read_audio(raw: bytes, param: str, rules: ImageRules) -> Medium:
    """Read a WAV file, in one channel and at the model's rate."""
    try:
        with wave.open(io.BytesIO(raw)) as file:
            rate, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            data = file.readframes(min(rate, _MAX_RATE) * _MAX_SECONDS + 1)
    except (wave.Error, EOFError) as error:
        raise errors.invalid(
            f"This is no WAV file of integers: {error}. Convert it: ffmpeg -i IN -ar 16000 -ac 1 OUT.wav",
            param=param,
        ) from error
    whole = len(data) // (width * channels) * (width * channels)
    is_usual = _MIN_RATE <= rate <= _MAX_RATE and channels <= _MAX_CHANNELS and whole > 0
    if not is_usual or whole // (width * channels) > rate * _MAX_SECONDS:
        raise errors.invalid(
            f"A recording has up to {_MAX_SECONDS} s of sound, {_MIN_RATE} to {_MAX_RATE} Hz and up to {_MAX_CHANNELS} "
            "channels. Cut it into parts, or convert it: ffmpeg -i IN -ar 16000 -ac 1 -t 30 OUT.wav",
            param=param,
        )
    mono = _samples(data[:whole], width).reshape(-1, channels).mean(axis=1)
    mono = _resample(mono, rate)
    pcm = np.clip(np.round(mono * 32_767), -32_768, 32_767).astype("<i2").tobytes()
    tokens = -(-len(mono) // _TOKEN_SAMPLES)
    audio = MediaInput(width=len(mono), height=1, pixels=pcm, tokens=tokens, kind="audio")
    assert rules.audio is not None
    opening, closing = rules.audio.around
    return Medium("audio", f"{opening}{rules.audio.token_text * tokens}{closing}", (audio,))


def _samples(data: bytes, width: int) -> np.ndarray[Any, Any]:
    """Return samples between -1 and 1; those of 8 bits have no sign."""
    if width == 1:
        return (np.frombuffer(data, dtype=np.uint8).astype(np.float32) - 128) / 128
    parts = np.frombuffer(data, dtype=np.uint8).reshape(-1, width)
    whole = np.zeros((len(parts), 4), dtype=np.uint8)
    whole[:, 4 - width :] = parts
    return whole.view("<i4")[:, 0].astype(np.float32) / 2**31


def _resample(samples: np.ndarray[Any, Any], rate: int) -> np.ndarray[Any, Any]:
    """Return the samples at the model's rate, without the frequencies that it has no room for."""
    if rate == _SAMPLE_RATE:
        return samples
    count = max(1, round(len(samples) * _SAMPLE_RATE / rate))
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return np.fft.irfft(spectrum, n=count) * (count / len(samples))


def write_media(text: str, media: Sequence[Medium], rules: ImageRules) -> str:
    """Return a rendered conversation with the text of each medium in the place of its marker.

    Raises:
        RefusedError: the conversation has other markers.

    """
    markers: dict[str, Kind] = {rules.marker: "image"}
    if rules.video is not None:
        markers[rules.video.marker] = "video"
    if rules.audio is not None:
        markers[rules.audio.marker] = "audio"
    pieces = re.split(f"({'|'.join(map(re.escape, markers))})", text)
    kinds = [markers[piece] for piece in pieces[1::2]]
    if kinds != [medium.kind for medium in media]:
        raise _other_places(len(kinds), len(media))
    pieces[1::2] = [medium.text for medium in media]
    return "".join(pieces)


def media_tokens(rules: ImageRules) -> frozenset[int]:
    """Return the tokens that stand for parts of images, frames and recordings."""
    others = (rules.video, rules.audio)
    return frozenset({rules.token, *(marker.token for marker in others if marker is not None)})


def check_places(tokens: Sequence[int], images: Sequence[MediaInput], rules: ImageRules) -> None:
    """Refuse a prompt with tokens of images that no image has.

    Raises:
        RefusedError: a text contains such a token, or the tokenizer does not know it.

    """
    known = media_tokens(rules)
    places = sum(token in known for token in tokens)
    if places != sum(image.tokens for image in images):
        raise _other_places(places, len(images))


def _other_places(places: int, images: int) -> RefusedError:
    return errors.invalid(
        f"The prompt has {places} places for {images} images: a text contains the model's marker of images, or its chat "
        "template knows none in this role.",
        param="messages",
    )


def name_media(
    tokens: Sequence[int], images: Sequence[MediaInput], rules: ImageRules
) -> tuple[int, ...]:
    """Return a prompt in which each token of an image is a number of the image's content, beyond all vocabularies.

    Prompts that begin with the same texts and images begin alike, whatever follows.
    """
    known, rest = media_tokens(rules), _content_numbers(images)
    return tuple(next(rest) | _BEYOND if token in known else token for token in tokens)


def _content_numbers(images: Sequence[MediaInput]) -> Iterator[int]:
    for image in images:
        data = hashlib.shake_128(image.digest.encode()).digest(_NUMBER_BYTES * image.tokens)
        yield from array("I", data)
