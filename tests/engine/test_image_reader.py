"""Images of requests before they are decoded: their places in messages and prompts, sizes, and refusals."""

import base64
import dataclasses
import io
import wave
from typing import Any

import numpy as np
import orjson
import pytest

from engine.jobs import MediaInput
from engine.openai import messages, request_body
from engine.openai.request_body import Conversation, RequestPolicy
from engine.vision import image_reader, media_reader
from engine.vision.image_reader import ImageRules, MarkerRules, Sizing
from engine.vision.media_reader import MediaPart, Medium
from schemas.vision import Vision
from schemas.wire.body_limits import image_bytes
from schemas.wire.errors import RefusedError

RULES = ImageRules(
    limits=Vision(max_images=2, max_image_bytes=1024, max_pixels=100_000),
    factor=28,
    min_pixels=3136,
    max_pixels=1_003_520,
    token=7,
    token_text="#",
    marker="<image>",
)
URL = "data:image/png;base64," + base64.b64encode(b"x" * 90).decode()


def chat(*parts: Any, sees_images: bool = True, role: str = "user") -> Conversation:
    raw = orjson.dumps({"model": "m", "messages": [{"role": role, "content": list(parts)}]})
    request = request_body.parse_chat(raw, policy=RequestPolicy(sees_images=sees_images))
    assert isinstance(request.prompt, Conversation)
    return request.prompt


def image(url: Any = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


TEXT = {"type": "text", "text": "what is this"}


def test_images_keep_their_places_in_a_message() -> None:
    turns = chat(image(), TEXT, {"type": "image_url", "image_url": "data:x"}).messages
    assert media_reader.media_parts(turns) == [
        ("image", URL, "messages[0].content[0].image_url.url"),
        ("image", "data:x", "messages[0].content[2].image_url.url"),
    ]
    assert media_reader.without_urls(turns) == [
        {"role": "user", "content": [{"type": "image"}, TEXT, {"type": "image"}]}
    ]
    assert messages.text_length(turns) > len(URL)
    assert messages.with_spoken_names([turns[0] | {"name": "Bob"}], "user")[0]["content"][0] == {
        "type": "text",
        "text": "Bob: ",
    }


def test_a_message_without_images_stays_a_text() -> None:
    assert chat(TEXT, TEXT).messages[0]["content"] == "what is thiswhat is this"


@pytest.mark.parametrize(
    ("parts", "sees_images", "words", "param"),
    [
        ([image()], False, "deployed with spec.model.vision", "messages[0].content[0].type"),
        ([TEXT, {"type": "input_file"}], True, "text and image_url", "messages[0].content[1].type"),
        ([{"type": "input_audio"}], False, "text only", "messages[0].content[0].type"),
        (
            [{"type": "image_url", "image_url": {}}],
            True,
            "",
            "messages[0].content[0].image_url.url",
        ),
    ],
)
def test_parts_that_are_not_taken(
    parts: list[Any], sees_images: bool, words: str, param: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        chat(*parts, sees_images=sees_images)
    assert words in refused.value.refusal.message
    assert refused.value.refusal.param == param


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://169.254.169.254/latest/meta-data", "A URL of a network is not fetched"),
        ("/etc/passwd", "This is not fetched"),
        ("data:image/png,xx", "must be base64"),
        ("data:image/png;base64,!!", "is no base64"),
        (
            "data:image/png;base64," + "A" * 1_500,
            "has 1125 bytes; the deployment takes at most 1024",
        ),
    ],
)
def test_urls_that_are_refused_before_anything_is_decoded(url: str, words: str) -> None:
    with pytest.raises(RefusedError) as refused:
        image_reader.decode_url(url, "there", RULES.limits.max_image_bytes)
    assert words in refused.value.refusal.message
    assert refused.value.refusal.param == "there"


@pytest.mark.parametrize("sizing", [sizing for sizing in Sizing if sizing is not Sizing.SQUARE])
@pytest.mark.parametrize("width", [1, 27, 28, 200, 1_000, 4_032, 20_000])
@pytest.mark.parametrize("height", [1, 29, 120, 3_024, 9_999])
def test_the_size_that_a_model_sees(width: int, height: int, sizing: Sizing) -> None:
    """Whole tokens, about the same shape, between the limits."""
    wide, high = dataclasses.replace(RULES, sizing=sizing).size(width, height)
    assert wide % 28 == high % 28 == 0
    assert wide >= 28 <= high
    assert wide * high <= 100_000
    if max(width, height) < 100 * min(width, height):
        if sizing is Sizing.AREA:
            assert wide * high >= 3136
        shape = (wide / high) / (width / height)
        assert 0.3 < shape < 3.4 or min(wide, high) <= 56


def test_a_model_of_one_size_sees_all_images_in_it() -> None:
    rules = dataclasses.replace(RULES, sizing=Sizing.SQUARE, min_pixels=448**2, max_pixels=448**2)
    assert {rules.size(*size) for size in ((1, 1), (900, 30), (5_000, 5_000))} == {(448, 448)}


def made(width: int = 28, height: int = 28) -> MediaInput:
    tokens = (width // 28) * (height // 28)
    return MediaInput(width=width, height=height, pixels=bytes(width * height * 3), tokens=tokens)


def media(*images: MediaInput, rules: ImageRules = RULES) -> list[Medium]:
    return [Medium("image", rules.text(image), (image,)) for image in images]


def test_each_image_gets_its_text() -> None:
    images = (made(56, 56), made())
    text = "a<image>b<image>"
    assert media_reader.write_media(text, media(*images), RULES) == "a####b#"
    rules = dataclasses.replace(RULES, around=("[", "]"), row_end="|")
    written = media_reader.write_media(text, media(*images, rules=rules), rules)
    assert written == "a[##|##]b[#]"


@pytest.mark.parametrize("text", ["none", "<image><image>"])
def test_a_prompt_with_other_places_than_images_is_refused(text: str) -> None:
    with pytest.raises(RefusedError, match="places for 1 images"):
        media_reader.write_media(text, media(made()), RULES)


def test_a_prompt_with_tokens_of_no_image_is_refused() -> None:
    media_reader.check_places([1, 7, 7, 2], (made(56),), RULES)
    with pytest.raises(RefusedError, match="has 3 places for 1 images"):
        media_reader.check_places([1, 7, 7, 2, 7], (made(56),), RULES)


def test_the_cache_tells_images_apart_and_shares_what_is_before_them() -> None:
    other = dataclasses.replace(made(56), pixels=b"\1" * len(made(56).pixels))
    one, two = (
        media_reader.name_media([1, 7, 7, 2, 7, 3], (made(56), image), RULES)
        for image in (made(), dataclasses.replace(other, width=28, tokens=1))
    )
    assert one[:4] == two[:4]
    assert one[4] != two[4]
    assert min(one[1], one[2], one[4]) >= 1 << 31


def test_images_of_one_size_have_digests_of_their_own() -> None:
    other = MediaInput(width=28, height=28, pixels=b"\1" * (28 * 28 * 3), tokens=1)
    turned = MediaInput(width=56, height=14, pixels=made().pixels, tokens=1)
    assert len({made().digest, other.digest, turned.digest}) == 3


def test_a_body_has_room_for_the_images_of_a_request() -> None:
    assert image_bytes(RULES.limits) >= 2 * len(base64.b64encode(bytes(1024)))


AUDIO = dataclasses.replace(
    RULES,
    limits=Vision(max_image_bytes=4 << 20),
    audio=MarkerRules(marker="<audio>", token=9, token_text="~", around=("[", "]")),
)


def recording(seconds: float, *, rate: int = 16_000, channels: int = 1, width: int = 2) -> str:
    held = io.BytesIO()
    wave_form = np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate) / 2
    with wave.open(held, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        whole = np.repeat((wave_form * (2**31 - 1)).astype("<i4"), channels)
        data = whole.view(np.uint8).reshape(-1, 4)[:, 4 - width :]
        file.writeframes((data ^ 0x80 if width == 1 else data).tobytes())
    return "data:audio/wav;base64," + base64.b64encode(held.getvalue()).decode()


@pytest.mark.parametrize(
    ("rate", "channels", "width"), [(16_000, 1, 2), (44_100, 2, 3), (8_000, 1, 1), (48_000, 1, 4)]
)
def test_recordings_become_samples_of_one_rate(rate: int, channels: int, width: int) -> None:
    part = MediaPart("audio", recording(1.0, rate=rate, channels=channels, width=width), "p")
    (audio,) = media_reader.read_media([part], AUDIO)
    (heard,) = audio.inputs
    assert (heard.width, heard.tokens, audio.text) == (16_000, 25, f"[{'~' * 25}]")
    samples = np.frombuffer(heard.pixels, dtype="<i2") / 32_768
    expected = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000) / 2
    assert np.abs(samples - expected)[100:-100].max() < 0.01


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (recording(31, rate=8_000), "up to 30 s"),
        (recording(0), "up to 30 s"),
        (recording(0.1, rate=1_000), "4000 to 192000 Hz"),
        ("data:audio/mp3;base64,AAAA", "no WAV file"),
        ("data:audio/wav;base64," + "A" * 6_000_000, "at most 4194304"),
    ],
    ids=["long", "empty", "rate", "mp3", "bytes"],
)
def test_recordings_that_are_refused(url: str, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        media_reader.read_media([MediaPart("audio", url, "p")], AUDIO)
    with pytest.raises(RefusedError, match="hears no recordings"):
        media_reader.read_media([MediaPart("audio", url, "p")], RULES)
