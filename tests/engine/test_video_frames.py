"""Images and frames of videos, decoded with Pillow: their number, their times, and what is refused."""

import base64
import dataclasses
import io

import pytest

from engine.vision import media_reader
from engine.vision.image_reader import ImageRules, MarkerRules
from engine.vision.media_reader import MediaPart
from schemas.vision import Vision
from schemas.wire.errors import RefusedError

image_module = pytest.importorskip("PIL.Image", reason="Pillow is not here: run `make test-vision`")
pytestmark = [pytest.mark.full]

RULES = ImageRules(
    limits=Vision(max_images=2, max_image_bytes=65_536, max_pixels=100_000),
    factor=28,
    min_pixels=3136,
    max_pixels=1_003_520,
    token=7,
    token_text="#",
    marker="<image>",
)


def picture(color: int = 0, size: tuple[int, int] = (56, 56)) -> str:
    held = io.BytesIO()
    image_module.new("RGB", size, (color, 0, 0)).save(held, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(held.getvalue()).decode()


VIDEO = dataclasses.replace(
    RULES,
    limits=Vision(max_images=5, max_image_bytes=65_536, max_pixels=100_000),
    video=MarkerRules(marker="<video>", token=8, token_text="~", around=("[", "]")),
)


def frames(*sizes: tuple[int, int]) -> str:
    files = [picture(at, size).split(",")[1] for at, size in enumerate(sizes)]
    return "data:video/jpeg;base64," + ",".join(files)


def test_frames_come_in_pairs_with_their_times() -> None:
    (video,) = media_reader.read_media([MediaPart("video", frames(*[(56, 56)] * 3), "p")], VIDEO)
    assert video.text == "<0.2 seconds>[~~~~]<1.0 seconds>[~~~~]"
    assert [len(pair.pixels) for pair in video.inputs] == [2 * 56 * 56 * 3, 56 * 56 * 3]
    assert media_reader.write_media("a<video>", [video], VIDEO) == f"a{video.text}"
    media_reader.check_places([8] * 8, video.inputs, VIDEO)
    with pytest.raises(RefusedError, match="places"):
        media_reader.write_media("a<image>", [video], VIDEO)


def test_an_animation_is_sampled_within_the_limit() -> None:
    held = io.BytesIO()
    pages = [image_module.new("RGB", (56, 56), (40 * at, 0, 0)) for at in range(6)]
    pages[0].save(held, "GIF", save_all=True, append_images=pages[1:], duration=1_000)
    url = "data:image/gif;base64," + base64.b64encode(held.getvalue()).decode()
    (video,) = media_reader.read_media([MediaPart("video", url, "p")], VIDEO)
    assert video.text.count("seconds") == 3
    assert sum(len(pair.pixels) for pair in video.inputs) == 5 * 56 * 56 * 3


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (frames(*[(56, 56)] * 6), "has 6 images; the deployment takes at most 5"),
        (frames((56, 56), (112, 56)), "must be of one size"),
        ("data:video/mp4;base64,AAAA", "This is no image in"),
        ("data:video/jpeg;base64,AAAA", "This is no image in"),
        ("https://example.com/v.mp4", "is not fetched"),
    ],
    ids=["many", "sizes", "mp4", "broken", "network"],
)
def test_videos_that_are_refused(url: str, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        media_reader.read_media([MediaPart("video", url, "p")], VIDEO)
    with pytest.raises(RefusedError, match="no videos"):
        media_reader.read_media([MediaPart("video", url, "p")], RULES)


def test_more_images_than_the_deployment_takes() -> None:
    rules = dataclasses.replace(RULES, limits=Vision(max_images=1, max_image_bytes=65_536))
    parts = [MediaPart("image", picture(), name) for name in "abc"]
    with pytest.raises(
        RefusedError, match="has 3 images; the deployment takes at most 1"
    ) as refused:
        media_reader.read_media(parts, rules)
    assert refused.value.refusal.param == "b"
