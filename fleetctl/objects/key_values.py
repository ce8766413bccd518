"""What `fleetctl label` and `fleetctl annotate` ask for, and what becomes of an object's labels and annotations. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import click
from pydantic import TypeAdapter, ValidationError

from fleetctl.cli.errors import FleetctlError
from schemas.meta import ApiObject, LabelKey, LabelValue

_KEY, _VALUE = TypeAdapter(LabelKey), TypeAdapter(LabelValue)
MetadataField: TypeAlias = Literal["labels", "annotations"]

# etcd takes about 1 MiB an object, and all annotations of one are read with it.
_MOST_BYTES = 256 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataChange:
    """What is to be done to the labels, or annotations, of each object."""

    put: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


def usage(where: MetadataField) -> str:
    """Return how such words are written."""
    return f"write KEY=VALUE to set {_noun(where)}, KEY- to take one away"


def is_key_value(word: str) -> bool:
    """Return whether a word is none of an object's, for no name has such characters."""
    return "=" in word or word.endswith("-")


def parse(words: Sequence[str], where: MetadataField) -> MetadataChange:
    """Return what the words ask for.

    Raises:
        click.UsageError: one of them is not of the form, or two contradict each other.

    """
    put: dict[str, str] = {}
    removed: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            if not word.endswith("-"):
                raise click.UsageError(f"{word!r} is no {where[:-1]}; {usage(where)}")
            key = word.removesuffix("-")
            removed.append(key)
        elif key in put:
            raise click.UsageError(f"{key} is set twice; give it one value")
        else:
            put[key] = value
        _check_pair(word, key, value, where)
    both = [key for key in removed if key in put]
    if both:
        raise click.UsageError(f"{both[0]} cannot be set and taken away at once")
    return MetadataChange(put=put, removed=tuple(removed))


def _check_pair(word: str, key: str, value: str, where: MetadataField) -> None:
    try:
        _KEY.validate_python(key)
    except ValidationError:
        raise click.UsageError(
            f"{word!r}: {key!r} is no key: letters, digits, '-', '_' and '.', if need be after a prefix as in lab/rack"
        ) from None
    if where == "annotations":
        refuse_not_utf8(key, value)
        if len(value.encode()) > _MOST_BYTES:
            raise click.UsageError(f"{key}: its value has more than {_MOST_BYTES:,} bytes")
        return
    try:
        _VALUE.validate_python(value)
    except ValidationError:
        raise click.UsageError(
            f"{word!r}: {value!r} is no value: 63 letters, digits, '-', '_' and '.' at most"
        ) from None


def refuse_not_utf8(what: str, text: str) -> None:
    """Refuse a word of the command line that has other bytes in it: the store keeps text.

    Raises:
        click.UsageError: it is no UTF-8; `what` says which word.

    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = ascii(text[max(0, error.start - 20) : error.end])
        raise click.UsageError(
            f"{what}: not UTF-8 at {shown}; write it in UTF-8, as a terminal of a UTF-8 locale does"
        ) from None


def refuse_writing_flags(options: Mapping[str, Any], *, is_list: bool) -> None:
    """Refuse flags about writing beside --list, which only looks.

    Raises:
        click.UsageError: one of them is given.

    """
    given = [
        flag
        for flag, is_given in (
            ("--overwrite", options["overwrite"]),
            ("--resource-version", options["resource_version"]),
            ("--dry-run", options["dry_run"] != "none"),
            ("-o", options["output"]),
        )
        if is_list and is_given
    ]
    if given:
        raise click.UsageError(f"--list only looks; leave out {' and '.join(given)}")


def values_of(obj: ApiObject, where: MetadataField) -> dict[str, str]:
    """Return the object's own labels, or annotations."""
    return obj.metadata.labels if where == "labels" else obj.metadata.annotations


def with_change(
    obj: ApiObject, wish: MetadataChange, where: MetadataField, *, overwrite: bool
) -> ApiObject | None:
    """Return the object with what is asked for; None if it has that. Its generation stays: nothing restarts.

    Raises:
        FleetctlError: a key has another value already, and it is not to be overwritten.

    """
    there = values_of(obj, where)
    for key, value in wish.put.items():
        if there.get(key, value) != value and not overwrite:
            raise FleetctlError(
                f"{obj.kind.lower()}/{obj.name}: {key!r} already has a value ({there[key]}); "
                "give --overwrite to change it"
            )
    kept = {key: value for key, value in there.items() if key not in wish.removed}
    after = {**kept, **wish.put}
    if after == there:
        return None
    return obj.model_copy(update={"metadata": obj.metadata.model_copy(update={where: after})})


def _noun(where: MetadataField) -> str:
    return "a label" if where == "labels" else "an annotation"
