"""Parses and applies the KEY=VALUE and KEY- arguments of `fleetctl label` and `fleetctl annotate`. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import click
from pydantic import TypeAdapter, ValidationError

from fleetctl.cli.errors import FleetctlError
from schemas.meta import ApiObject, LabelKey, LabelValue

_KEY, _VALUE = TypeAdapter(LabelKey), TypeAdapter(LabelValue)
MetadataField: TypeAlias = Literal["labels", "annotations"]

# etcd accepts about 1 MiB for an object, and reads all its annotations with it.
_MAX_BYTES = 256 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataChange:
    """Labels or annotations to set and to remove."""

    put: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


def usage(field_name: MetadataField) -> str:
    """Return the form of the arguments, for errors."""
    return f"write KEY=VALUE to set {_noun(field_name)}, KEY- to remove one"


def is_key_value(word: str) -> bool:
    """Return whether a word is KEY=VALUE or KEY-; names of objects cannot be of that form."""
    return "=" in word or word.endswith("-")


def parse(words: Sequence[str], field_name: MetadataField) -> MetadataChange:
    """Return the change that the words describe.

    Raises:
        click.UsageError: a word is not of the form, or two words contradict each other.

    """
    put: dict[str, str] = {}
    removed: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            if not word.endswith("-"):
                raise click.UsageError(f"{word!r} is not {_noun(field_name)}; {usage(field_name)}")
            key = word.removesuffix("-")
            removed.append(key)
        elif key in put:
            raise click.UsageError(f"{key} is set twice; give one value")
        else:
            put[key] = value
        _check_pair(word, key, value, field_name)
    both = [key for key in removed if key in put]
    if both:
        raise click.UsageError(f"{both[0]} cannot be set and removed at once")
    return MetadataChange(put=put, removed=tuple(removed))


def _check_pair(word: str, key: str, value: str, field_name: MetadataField) -> None:
    if not is_valid_key(key):
        raise click.UsageError(
            f"{word!r}: {key!r} is not a valid key: use letters, digits, '-', '_' and '.', with an optional prefix as "
            "in lab/rack"
        )
    if field_name == "annotations":
        refuse_not_utf8(key, value)
        if len(value.encode()) > _MAX_BYTES:
            raise click.UsageError(f"{key}: the value has more than {_MAX_BYTES:,} bytes")
    elif not is_valid_value(value):
        raise click.UsageError(
            f"{word!r}: {value!r} is not a valid value: use at most 63 letters, digits, '-', '_' and '.'"
        )


def is_valid_key(key: str) -> bool:
    """Return whether a key of a label or a taint has the right form."""
    return _is_valid(_KEY, key)


def is_valid_value(value: str) -> bool:
    """Return whether a value of a label or a taint has the right form."""
    return _is_valid(_VALUE, value)


def _is_valid(adapter: TypeAdapter[str], text: str) -> bool:
    try:
        adapter.validate_python(text)
    except ValidationError:
        return False
    return True


def refuse_not_utf8(what: str, text: str) -> None:
    """Refuse a word of the command line that is not UTF-8: the store keeps text.

    Raises:
        click.UsageError: the text is not UTF-8; `what` names the word.

    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = ascii(text[max(0, error.start - 20) : error.end])
        raise click.UsageError(
            f"{what}: not UTF-8 at {shown}; use a terminal with a UTF-8 locale"
        ) from None


def values_of(obj: ApiObject, field_name: MetadataField) -> dict[str, str]:
    """Return the object's own labels or annotations."""
    return obj.metadata.labels if field_name == "labels" else obj.metadata.annotations


def with_change(
    obj: ApiObject, requested: MetadataChange, field_name: MetadataField, *, overwrite: bool
) -> ApiObject | None:
    """Return the changed object; None if nothing changes. The generation stays, so that nothing restarts.

    Raises:
        FleetctlError: a key has another value, and `overwrite` is false.

    """
    before = values_of(obj, field_name)
    for key, value in requested.put.items():
        if before.get(key, value) != value and not overwrite:
            raise FleetctlError(
                f"{obj.kind.lower()}/{obj.name}: {key!r} already has the value {before[key]}; "
                "change it with --overwrite"
            )
    kept = {key: value for key, value in before.items() if key not in requested.removed}
    after = {**kept, **requested.put}
    if after == before:
        return None
    return obj.model_copy(update={"metadata": obj.metadata.model_copy(update={field_name: after})})


def _noun(field_name: MetadataField) -> str:
    return "a label" if field_name == "labels" else "an annotation"
