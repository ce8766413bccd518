"""Manifests from flags: `fleetctl create modeldeployment`, `nodepool` and `modelroute`. Pure; writes nothing."""

import re
from collections.abc import Iterator, Mapping, Sequence

import click

from fleetctl import keyvalues
from manifests import yamlio
from manifests.errors import ManifestErrors
from manifests.load import Document, Loaded, read_objects
from manifests.tree import Tree
from schemas.meta import API_VERSION


def loaded(tree: dict[str, Tree], flags: Mapping[str, str]) -> Loaded:
    """Return the object that was declared by flags; `flags` says which flag wrote which field.

    Raises:
        click.UsageError: it is not valid, in words of the flags.

    """
    for path, text in _texts(tree):
        keyvalues.refuse_not_utf8(flag_of(path, flags), text)
    about = f"{tree['kind']}"
    [root] = yamlio.parse(yamlio.dump(tree), about).documents
    try:
        [found] = read_objects([Document(source=about, root=root)])
    except ManifestErrors as errors:
        raise click.UsageError(in_flags(errors, flags)) from None
    return found


def _texts(tree: Tree, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in a tree, keys too, each with the path of its field."""
    match tree:
        case str():
            yield path, tree
        case dict():
            for key, value in tree.items():
                inner = f"{path}.{key}" if path else key
                yield inner, key
                yield from _texts(value, inner)
        case list():
            for number, value in enumerate(tree):
                yield from _texts(value, f"{path}[{number}]")
        case _:
            return


def in_flags(errors: ManifestErrors, flags: Mapping[str, str]) -> str:
    """Return what is wrong, in words of the flags: a line each."""
    said = [
        f"{flag_of(problem.path, flags)}: {problem.message}"
        + (f". {problem.hint}" if problem.hint else "")
        for problem in errors.problems
    ]
    return "\n".join(dict.fromkeys(said))


def flag_of(path: str, flags: Mapping[str, str]) -> str:
    """Return the flag that wrote the field, or the field that it is in; the field itself if none did."""
    for field in sorted(flags, key=len, reverse=True):
        if path == field or path.startswith((f"{field}.", f"{field}[")):
            return flags[field]
    return path


def manifest(
    kind: str, name: str, spec: dict[str, Tree], notes: Mapping[str, dict[str, str]]
) -> dict[str, Tree]:
    """Return the object as a manifest says it: only what was given."""
    given: dict[str, Tree] = {key: dict(texts) for key, texts in notes.items() if texts}
    metadata: dict[str, Tree] = {"name": name, **given}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": pruned(spec)}


def pruned(tree: dict[str, Tree]) -> dict[str, Tree]:
    """Return the tree without what was not given: None, and mappings and lists without anything in them."""
    found: dict[str, Tree] = {}
    for key, value in tree.items():
        kept = pruned(value) if isinstance(value, dict) else value
        if kept is not None and kept not in ({}, []):
            found[key] = kept
    return found


def pairs(words: Sequence[str], flag: str) -> dict[str, str]:
    """Return what `key=value` flags say; each may hold several, with commas between them.

    Raises:
        click.UsageError: one is not of that form.

    """
    found: dict[str, str] = {}
    for part in (part for word in words for part in word.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise click.UsageError(f"{flag}: {part!r} is no pair; write KEY=VALUE")
        if key in found:
            raise click.UsageError(f"{flag}: {key} is given twice; give it one value")
        found[key] = value
    return found


def backends(words: Sequence[str]) -> list[Tree]:
    """Return what `--backend qwen` and `--backend qwen=80` say: deployments and their weights.

    Raises:
        click.UsageError: a weight is no whole number.

    """
    found: list[Tree] = []
    for word in words:
        name, equals, weight = word.partition("=")
        if equals and not re.fullmatch(r"[0-9]{1,6}", weight):
            raise click.UsageError(
                f"--backend: {word!r} has no whole number as its weight; write NAME or NAME=80"
            )
        found.append({"deployment": name, **({"weight": int(weight)} if equals else {})})
    return found
