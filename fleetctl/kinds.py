"""What users type for kinds and objects: `md`, `nodes`, `modeldeployment/qwen`."""

import difflib
from dataclasses import dataclass

import click

from schemas import kinds
from schemas.kinds import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind, and the names asked for; none means all."""

    kind: Kind
    names: tuple[str, ...]


def kind_of(word: str) -> Kind:
    """Return the kind that the word means.

    Raises:
        click.UsageError: there is none; with the nearest.

    """
    found = kinds.by_alias(word)
    if found is not None:
        return found
    known = [alias for kind in kinds.KINDS for alias in (kind.plural, kind.short)]
    near = difflib.get_close_matches(word.lower(), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
    raise click.UsageError(f"there is no kind of object called {word!r}; {hint}")


def target_of(words: tuple[str, ...]) -> Target:
    """Return what `KIND`, `KIND NAME...` or `KIND/NAME` mean."""
    first, slash, name = words[0].partition("/")
    if not slash:
        return Target(kind=kind_of(first), names=words[1:])
    if len(words) > 1:
        raise click.UsageError("write KIND NAME NAME..., or one KIND/NAME")
    return Target(kind=kind_of(first), names=(name,))


def one_of(words: tuple[str, ...]) -> tuple[Kind, str]:
    """Return the one object that the words mean."""
    target = target_of(words)
    if len(target.names) != 1:
        raise click.UsageError("which one? Write KIND NAME or KIND/NAME")
    return target.kind, target.names[0]
