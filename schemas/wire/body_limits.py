"""Largest useful bodies of requests to a model, by which engines and gateways refuse others. Pure."""

from typing import Final

from schemas.vision import Vision

LEAST_LIMIT: Final = 1 << 20
"""Bytes that every model takes: room for options, tools and schemas."""
MOST_LIMIT: Final = 8 << 20
"""Bytes that an engine takes at most, unless its configuration says otherwise; images come on top."""
# The text of a token: most stand for 4 bytes, and few for 64.
_BYTES_PER_TOKEN: Final = 64


def body_limit(
    context_length: int, vision: Vision | None, *, prompts: int = 1, most: int = MOST_LIMIT
) -> int:
    """Return the bytes of `prompts` prompts that fill the context, at most `most`, and of all images of a request."""
    text = min(most, LEAST_LIMIT + _BYTES_PER_TOKEN * context_length * prompts)
    return text if vision is None else text + image_bytes(vision)


def image_bytes(vision: Vision) -> int:
    """Return the bytes of a request's images in its body: base64 has four characters for three bytes."""
    return vision.max_images * (vision.max_image_bytes * 4 // 3 + 128)
