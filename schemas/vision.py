"""Vision: the limits of images that clients send to a deployment."""

from typing import Annotated, Final

from pydantic import Field

from schemas.meta import ApiModel

_OF_TEXT_MODELS: Final = ("adapter", "adapters", "draft", "ngram", "mtp")
_OF_TEXT_CACHES: Final = ("bits", "window")


class Vision(ApiModel):
    """Images in requests. Their data comes in the request: engines fetch nothing."""

    max_images: Annotated[int, Field(ge=1, le=32)] = 4
    """Images, frames of videos and recordings of one request, those of earlier messages included."""
    max_image_bytes: Annotated[int, Field(ge=1024, le=64 << 20)] = 4 << 20
    """Bytes of one image, animation or recording as its file has them."""
    max_pixels: Annotated[int, Field(ge=3_136, le=16_777_216)] = 602_112
    """Pixels that the model sees of one image: larger ones are scaled down. 784 pixels take a token of the context; the
    memory for an image grows with it."""


def check_alone(vision: Vision | None, source: ApiModel, kv_cache: ApiModel | None) -> None:
    """Refuse fields of `spec.model` and `spec.kvCache` that models which see images do not have.

    Raises:
        ValueError: there is one.

    """
    if vision is None:  # as of nearly all: this runs for each deployment that is read
        return
    fields = [(f"model.{name}", getattr(source, name)) for name in _OF_TEXT_MODELS]
    fields += [(f"kvCache.{name}", getattr(kv_cache, name, None)) for name in _OF_TEXT_CACHES]
    found = next((name for name, value in fields if value), "")
    if found:
        raise ValueError(
            f"has model.vision and {found}, which is for models that read text only; remove one of them"
        )
