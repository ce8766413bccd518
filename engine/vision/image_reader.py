"""Reads the images of a request, in an input worker: data URLs to pixels of the size that the model sees.

An image is untrusted, and its decoder may take any time and memory: the worker's limits end both. Pillow is
imported when the first image comes; it belongs to the extra `vision`.
"""

import base64
import binascii
import hashlib
import importlib
import io
import math
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from engine.jobs import ImageInput
from engine.text.interface import Message
from schemas.vision import Vision
from schemas.wire import errors
from schemas.wire.errors import RefusedError

# Pixels that are decoded before an image is scaled down: 96 MB with transparency, and 72 MB without. A JPEG is decoded
# at a fraction of its size, so the 48 million of a phone's camera are fine.
_MAX_SOURCE_PIXELS: Final = 24_000_000
_MAX_RATIO: Final = 200  # of the longer side to the shorter one, as in Qwen2-VL's own preprocessing
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_NAMES: Final = "PNG, JPEG, WebP or GIF"
_DATA_URL: Final = re.compile(r"data:[\w.+-]*/?[\w.+-]*(;[\w=.+-]*)*,", re.ASCII | re.IGNORECASE)
# Base64 has four characters for three bytes.
_BASE64_GROUP, _BASE64_BYTES = 4, 3
# Numbers in the places of an image's tokens have 32 bits, and the highest is set.
_NUMBER_BYTES, _BEYOND = 4, 1 << 31

NO_IMAGES: Final = (
    "This model reads text only here. Models that see images are deployed with spec.model.vision; send the request to one "
    "of them, or leave the image out."
)


class Sizing(StrEnum):
    """The rule by which a family chooses the size of an image."""

    AREA = "area"
    """The image's own size, between two numbers of pixels: Qwen, GLM."""
    SQUARE = "square"
    """One size for all: Gemma 3."""
    EDGE = "edge"
    """The image's own size, below a longest edge: Mistral 3."""
    BUDGET = "budget"
    """As many pixels as fit into a budget, for small images as well: Gemma 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """The images that a model and its deployment take; can be pickled."""

    limits: Vision
    factor: int
    """Width and height are multiples of it; a square of this side is one token."""
    min_pixels: int
    max_pixels: int
    """The model's own limit; the deployment's counts as well."""
    token: int
    """The token that stands for a part of an image in a prompt."""
    token_text: str
    """The same token as text."""
    marker: str
    """The text that the chat template writes for an image."""
    sizing: Sizing = Sizing.AREA
    around: tuple[str, str] = ("", "")
    """Text before and behind the tokens of an image."""
    row_end: str = ""
    """Text between the rows of an image; "" if the model sees no rows."""

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height that the model sees of an image."""
        factor = self.factor
        most = max(self.min_pixels, min(self.max_pixels, self.limits.max_pixels))
        if self.sizing is Sizing.SQUARE:
            return math.isqrt(self.max_pixels), math.isqrt(self.max_pixels)
        whole: Callable[[float], int] = round
        scale = 1.0
        if self.sizing is not Sizing.AREA:
            most = min(self.max_pixels, self.limits.max_pixels)
            scale = math.sqrt(most / (width * height))
            whole = math.floor
        if self.sizing is Sizing.EDGE:
            scale = min(1.0, scale, math.isqrt(self.max_pixels) / max(width, height))
            whole = math.ceil
        sides = (width * scale, height * scale)
        if self.sizing is Sizing.EDGE:
            sides = (math.floor(sides[0]), math.floor(sides[1]))
        wide, high = (max(factor, whole(side / factor) * factor) for side in sides)
        if wide * high > most:
            shrink = math.sqrt(width * height / most)
            # A side beside the shortest one has the rest.
            limit = max(factor, most // factor // factor * factor)
            wide, high = (
                min(limit, max(factor, math.floor(side / shrink / factor) * factor))
                for side in (width, height)
            )
        elif self.sizing is Sizing.AREA and wide * high < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            wide, high = (math.ceil(side * grow / factor) * factor for side in (width, height))
        return wide, high

    def text(self, image: ImageInput) -> str:
        """Return what stands for an image in a prompt."""
        columns = image.width // self.factor
        rows = [self.token_text * columns] * (image.height // self.factor)
        return self.around[0] + self.row_end.join(rows) + self.around[1]


def image_urls(turns: Sequence[Message]) -> list[tuple[str, str]]:
    """Return the URL of each image of a conversation in order, and its path in the request."""
    return [
        (part["url"], part["param"])
        for turn in turns
        if isinstance(turn["content"], list)
        for part in turn["content"]
        if part["type"] == "image"
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
    return {"type": "image"} if part["type"] == "image" else part


def read_images(found: Sequence[tuple[str, str]], rules: ImageRules) -> tuple[ImageInput, ...]:
    """Return the images of these URLs; each comes with its path in the request.

    Raises:
        RefusedError: there are too many, or one is too large, broken, or not in the request.

    """
    most = rules.limits.max_images
    if len(found) > most:
        raise errors.invalid(
            f"This request has {len(found)} images; the deployment takes at most {most}, those of earlier messages "
            "included (spec.model.vision.maxImages).",
            param=found[most][1],
        )
    return tuple(_read_image(url, param, rules) for url, param in found)


def _read_image(url: str, param: str, rules: ImageRules) -> ImageInput:
    raw = _decode_url(url, param, rules.limits.max_image_bytes)
    image_module: Any = importlib.import_module("PIL.Image")
    operations: Any = importlib.import_module("PIL.ImageOps")
    image_module.MAX_IMAGE_PIXELS = None  # the limit below is ours, with a message of its own
    try:
        with image_module.open(io.BytesIO(raw), formats=_FORMATS) as opened:
            _check_ratio(opened.width, opened.height, param)
            wide, high = rules.size(*_turned_size(opened))
            opened.draft("RGB", (max(wide, high), max(wide, high)))
            if opened.width * opened.height > _MAX_SOURCE_PIXELS:
                raise errors.invalid(
                    f"The image has {opened.width} x {opened.height} pixels; at most {_MAX_SOURCE_PIXELS} are decoded. Scale it down before "
                    "you send it.",
                    param=param,
                )
            operations.exif_transpose(opened, in_place=True)
            seen = opened if opened.mode == "RGB" else opened.convert("RGB")
            seen = seen.resize((wide, high), image_module.Resampling.BICUBIC)
    except image_module.UnidentifiedImageError as error:
        raise errors.invalid(f"This is no image in {_NAMES} format.", param=param) from error
    except (OSError, SyntaxError, ValueError, OverflowError, EOFError) as error:
        raise errors.invalid(
            f"The image is broken: {str(error)[:100] or 'it cannot be decoded'}.", param=param
        ) from error
    tokens = (wide // rules.factor) * (high // rules.factor)
    return ImageInput(width=wide, height=high, pixels=seen.tobytes(), tokens=tokens)


def _decode_url(url: str, param: str, most: int) -> bytes:
    head = _DATA_URL.match(url[:200])
    if head is None:
        raise _no_data_url(url, param)
    if not head[0][:-1].casefold().endswith(";base64"):
        raise errors.invalid(
            "The data of an image must be base64: data:image/png;base64,...", param=param
        )
    size = (len(url) - head.end()) // _BASE64_GROUP * _BASE64_BYTES
    if size > most + _BASE64_BYTES:
        raise errors.invalid(
            f"The image has {size} bytes; the deployment takes at most {most} (spec.model.vision.maxImageBytes). "
            "Scale it down before you send it.",
            param=param,
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except binascii.Error as error:
        raise errors.invalid(
            f"The data of the image is no base64: {error}.", param=param
        ) from error


def _no_data_url(url: str, param: str) -> RefusedError:
    kind = "A URL of a network" if re.match(r"https?:", url, re.IGNORECASE) else "This"
    return errors.invalid(
        f"{kind} is not fetched: send the image itself, as data:image/png;base64,...", param=param
    )


def _turned_size(image: Any) -> tuple[int, int]:
    """Return width and height of an image as it is meant to be seen: a camera may have been turned."""
    orientation = 0x0112
    is_turned = image.getexif().get(orientation, 1) in (5, 6, 7, 8)
    return (image.height, image.width) if is_turned else (image.width, image.height)


def _check_ratio(width: int, height: int, param: str) -> None:
    if max(width, height) > _MAX_RATIO * min(width, height):
        raise errors.invalid(
            f"The image has {width} x {height} pixels; its longer side may be {_MAX_RATIO} times the shorter one. Cut "
            "it into parts.",
            param=param,
        )


def write_images(text: str, images: Sequence[ImageInput], rules: ImageRules) -> str:
    """Return a rendered conversation with the text of each image in the place of its marker.

    Raises:
        RefusedError: the conversation has another number of markers.

    """
    parts = text.split(rules.marker)
    if len(parts) - 1 != len(images):
        raise _other_places(len(parts) - 1, len(images))
    texts = [*(rules.text(image) for image in images), ""]
    return "".join(part for pair in zip(parts, texts, strict=True) for part in pair)


def check_places(tokens: Sequence[int], images: Sequence[ImageInput], rules: ImageRules) -> None:
    """Refuse a prompt with tokens of images that no image has.

    Raises:
        RefusedError: a text contains such a token, or the tokenizer does not know it.

    """
    if tokens.count(rules.token) != sum(image.tokens for image in images):
        raise _other_places(tokens.count(rules.token), len(images))


def name_images(tokens: Sequence[int], images: Sequence[ImageInput], token: int) -> tuple[int, ...]:
    """Return a prompt in which each token of an image is a number of the image's content, beyond all vocabularies.

    Prompts that begin with the same texts and images begin alike, whatever follows.
    """
    numbers: list[int] = []
    for image in images:
        data = hashlib.shake_128(image.digest.encode()).digest(_NUMBER_BYTES * image.tokens)
        numbers += array("I", data)
    rest = iter(numbers)
    return tuple(next(rest) | _BEYOND if one == token else one for one in tokens)


def _other_places(places: int, images: int) -> RefusedError:
    return errors.invalid(
        f"The prompt has {places} places for {images} images: a text contains the model's marker of images, or its chat "
        "template knows none in this role.",
        param="messages",
    )
