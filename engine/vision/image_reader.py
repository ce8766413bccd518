"""Reads an image of a request, in an input worker: a data URL to pixels of the size that the model sees.

An image is untrusted, and its decoder may take any time and memory: the worker's limits end both. Pillow is
imported when the first image comes; it belongs to the extra `vision`.
"""

import base64
import binascii
import importlib
import io
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from engine.jobs import MediaInput
from schemas.vision import Vision
from schemas.wire import errors
from schemas.wire.errors import RefusedError

# Pixels that are decoded before an image is scaled down: 96 MB with transparency, and 72 MB without. A JPEG is decoded
# at a fraction of its size, so the 48 million of a phone's camera are fine.
MAX_SOURCE_PIXELS: Final = 24_000_000
_MAX_RATIO: Final = 200  # of the longer side to the shorter one, as in Qwen2-VL's own preprocessing
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_NAMES: Final = "PNG, JPEG, WebP or GIF"
_DATA_URL: Final = re.compile(r"data:[\w.+-]*/?[\w.+-]*(;[\w=.+-]*)*,", re.ASCII | re.IGNORECASE)
# Base64 has four characters for three bytes.
_BASE64_GROUP, _BASE64_BYTES = 4, 3
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
class MarkerRules:
    """The text that stands for a video or a recording; can be pickled."""

    marker: str
    """The text that the chat template writes for it."""
    token: int
    token_text: str
    around: tuple[str, str]
    """Text before and behind the tokens of a recording, or of each pair of frames."""


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
    video: MarkerRules | None = None
    """None if the model sees no frames."""
    audio: MarkerRules | None = None
    """None if the model hears nothing."""

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

    def tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of an image that the model sees in this size."""
        return (width // self.factor) * (height // self.factor)

    def text(self, image: MediaInput) -> str:
        """Return what stands for an image in a prompt."""
        columns = image.width // self.factor
        rows = [self.token_text * columns] * (image.height // self.factor)
        return self.around[0] + self.row_end.join(rows) + self.around[1]


def read_image(raw: bytes, param: str, rules: ImageRules) -> MediaInput:
    """Return the image of a file; `param` is its path in the request.

    Raises:
        RefusedError: it is too large, broken, or no image.

    """
    with opening(raw, param) as image:
        _check_ratio(image.width, image.height, param)
        wide, high = rules.size(*_turned_size(image))
        image.draft("RGB", (max(wide, high), max(wide, high)))
        _check_pixels(image, param)
        operations: Any = importlib.import_module("PIL.ImageOps")
        operations.exif_transpose(image, in_place=True)
        return MediaInput(
            width=wide,
            height=high,
            pixels=scaled_pixels(image, wide, high),
            tokens=rules.tokens(wide, high),
        )


def scaled_pixels(image: Any, width: int, height: int) -> bytes:
    """Return the pixels of an image of Pillow's in this size, as RGB."""
    resampling = importlib.import_module("PIL.Image").Resampling.BICUBIC
    colored = image if image.mode == "RGB" else image.convert("RGB")
    pixels: bytes = colored.resize((width, height), resampling).tobytes()
    return pixels


@contextmanager
def opening(raw: bytes, param: str) -> Iterator[Any]:
    """Open the image of a file with Pillow; refuse it if the block cannot decode it.

    Raises:
        RefusedError: it is broken, or no image.

    """
    image_module: Any = importlib.import_module("PIL.Image")
    image_module.MAX_IMAGE_PIXELS = None  # the limit below is ours, with a message of its own
    try:
        with image_module.open(io.BytesIO(raw), formats=_FORMATS) as image:
            yield image
    except image_module.UnidentifiedImageError as error:
        raise errors.invalid(f"This is no image in {_NAMES} format.", param=param) from error
    except (OSError, SyntaxError, ValueError, OverflowError, EOFError) as error:
        raise errors.invalid(
            f"The image is broken: {str(error)[:100] or 'it cannot be decoded'}.", param=param
        ) from error


def _check_pixels(image: Any, param: str) -> None:
    if image.width * image.height > MAX_SOURCE_PIXELS:
        raise errors.invalid(
            f"The image has {image.width} x {image.height} pixels; at most {MAX_SOURCE_PIXELS} are decoded. Scale it down "
            "before you send it.",
            param=param,
        )


def decode_url(url: str, param: str, most: int) -> bytes:
    """Return the bytes of a data URL. Raises RefusedError."""
    head = _DATA_URL.match(url[:200])
    if head is None:
        raise _no_data_url(url, param)
    if not head[0][:-1].casefold().endswith(";base64"):
        raise errors.invalid("The data must be base64: data:image/png;base64,...", param=param)
    size = (len(url) - head.end()) // _BASE64_GROUP * _BASE64_BYTES
    if size > most + _BASE64_BYTES:
        raise errors.invalid(
            f"It has {size} bytes; the deployment takes at most {most} (spec.model.vision.maxImageBytes). "
            "Scale it down before you send it.",
            param=param,
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except binascii.Error as error:
        raise errors.invalid(f"The data is no base64: {error}.", param=param) from error


def _no_data_url(url: str, param: str) -> RefusedError:
    kind = "A URL of a network" if re.match(r"https?:", url, re.IGNORECASE) else "This"
    return errors.invalid(
        f"{kind} is not fetched: send the data itself, as data:image/png;base64,...", param=param
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
