"""Parses kinds and object names on the command line: `md`, `nodes`, `modeldeployment/qwen`."""

import difflib
from collections.abc import Sequence
from typing import NamedTuple

import click

from fleetctl.cli.spellings import KIND_SYNONYMS
from schemas import kinds
from schemas.kinds import Kind

API_KEYS = Kind(
    name="ApiKey",
    module="schemas.records",
    plural="apikeys",
    short="ak",
    written_by_users=False,
)
"""API keys as a kind for reading. They are not API objects, so `kind_of` does not accept them."""

WITH_API_KEYS = (*kinds.KINDS, API_KEYS)
WRITABLE = tuple(kind for kind in kinds.KINDS if kind.written_by_users)

# `fleetctl get all` leaves these out: they describe the past or a moment.
_EXCLUDED_FROM_ALL = ("Revision", "Event", "FabricTest")


class Target(NamedTuple):
    """A kind and the requested names; no names means all."""

    kind: Kind
    names: tuple[str, ...]


def kind_of(word: str, among: Sequence[Kind] = kinds.KINDS, *, may_be_name: bool = False) -> Kind:
    """Return the kind with this name or alias; the error lists the kinds of `among`.

    With `may_be_name` the error also says how to write an object of that name.

    Raises:
        click.UsageError: no kind has this name; the message has the nearest.

    """
    if not word.strip():
        raise click.UsageError("the kind is empty; write KIND, or KIND,KIND such as md,np")
    found = kinds.by_alias(word)
    if found is not None:
        return found
    known = {
        alias: kind.plural
        for kind in among
        for alias in (kind.plural, kind.short, kind.name.lower())
    }
    synonym = KIND_SYNONYMS.get(word.lower(), "")
    near = [synonym] if synonym in known else difflib.get_close_matches(word.lower(), known, n=1)
    available = ", ".join(sorted(kind.plural for kind in among))
    hint = f"did you mean {known[near[0]]}?" if near else f"available: {available}"
    if may_be_name and not near:
        hint += f". For an object named {word} write its kind, too, such as md/{word}"
    raise click.UsageError(f"unknown kind {word!r}; {hint}")


def parse_target(words: tuple[str, ...], among: Sequence[Kind] = kinds.KINDS) -> Target:
    """Return the target of `KIND`, `KIND NAME...` or `KIND/NAME`; an unknown kind's error lists those of `among`."""
    first, slash, name = words[0].partition("/")
    if not slash:
        return Target(kind=kind_of(first, among), names=words[1:])
    if len(words) > 1:
        raise click.UsageError("write KIND NAME NAME..., or one KIND/NAME")
    return Target(kind=kind_of(first, among), names=(name,))


def parse_targets(words: tuple[str, ...]) -> tuple[Target, ...]:
    """Return the targets of `KIND[,KIND...] [NAME...]`, `KIND/NAME...` or `all`; API keys are accepted.

    Raises:
        click.UsageError: the words are not of one of these forms.

    """
    if not all(words[1:]):
        raise click.UsageError(f"a name is empty; `fleetctl get {words[0]}` lists all names")
    slashed = [word for word in words if "/" in word]
    if not slashed:
        is_alone = len(words) == 1 and "," not in words[0]
        kinds_ = [kind for word in words[0].split(",") for kind in _kinds_of(word, is_alone)]
        if len(kinds_) > 1 and len(words) > 1 and "all" in words[0].split(","):
            raise click.UsageError("`all` takes no names; give a kind, or KIND/NAME")
        return tuple(Target(kind=kind, names=words[1:]) for kind in dict.fromkeys(kinds_))
    if len(slashed) < len(words):
        raise click.UsageError("write KIND NAME NAME..., or KIND/NAME KIND/NAME..., but not both")
    names: dict[Kind, list[str]] = {}
    for word in words:
        first, _, name = word.partition("/")
        if not name:
            raise click.UsageError(f"{word} has no name; write KIND/NAME")
        names.setdefault(_readable_kind(first), []).append(name)
    return tuple(Target(kind=kind, names=tuple(found)) for kind, found in names.items())


def _kinds_of(word: str, is_alone: bool) -> tuple[Kind, ...]:
    if word == "all":
        return tuple(kind for kind in kinds.KINDS if kind.name not in _EXCLUDED_FROM_ALL)
    return (_readable_kind(word, may_be_name=is_alone),)


def _readable_kind(word: str, *, may_be_name: bool = False) -> Kind:
    return API_KEYS if is_api_keys(word) else kind_of(word, WITH_API_KEYS, may_be_name=may_be_name)


def is_api_keys(word: str) -> bool:
    """Return whether the word means API keys, which `kind_of` does not accept."""
    return word.lower() in (API_KEYS.plural, API_KEYS.short, API_KEYS.name.lower())


def parse_one(words: tuple[str, ...]) -> tuple[Kind, str]:
    """Return the kind and name of the one object that the words mean."""
    target = parse_target(words)
    if len(target.names) != 1:
        raise click.UsageError("name one object: KIND NAME or KIND/NAME")
    return target.kind, target.names[0]


def parse_names(words: Sequence[str], kind: Kind, *, otherwise: str = "") -> list[str]:
    """Return the names in `NAME...`, `KIND NAME...` or `KIND/NAME...`, for verbs that know only one kind.

    `otherwise` is the end of the error for another kind, after its plural.

    Raises:
        click.UsageError: a word names another kind.

    """
    otherwise = otherwise or f"are not {kind.plural}; write NAME or {kind.name.lower()}/NAME"
    first, *rest = words
    # The first word is a kind if names follow; alone, it is a name.
    has_kind = bool(rest) and "/" not in first and kinds.by_alias(first) is not None
    if has_kind:
        _check_kind(first, kind, otherwise)
    names = []
    for word in rest if has_kind else words:
        before, slash, name = word.partition("/")
        if slash:
            _check_kind(before, kind, otherwise)
        names.append(name if slash else word)
    return names


def _check_kind(word: str, kind: Kind, otherwise: str) -> None:
    found = kind_of(word, (kind,))
    if found is not kind:
        raise click.UsageError(f"{found.plural} {otherwise}")
