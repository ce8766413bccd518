"""Did-you-mean suggestions, and values as error messages show them. Pure; imports no pydantic models."""

import difflib
import json
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from manifests.yaml.nodes import YamlNode
from schemas.kinds import Kind


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant."""
    plain_words = {_squeezed(name): name for name in known}
    close = get_close_matches(_squeezed(word), plain_words, n=1, cutoff=0.6)
    return plain_words[close[0]] if close else None


def did_you_mean(word: str, known: Sequence[str], what: str) -> str:
    """Return a hint: the nearest known word, or all of them."""
    close = nearest(word, known)
    if close is not None:
        return f"Did you mean {close}?"
    return f"{what}: {', '.join(known)}" if known else ""


def is_typing_error(word: str, known: str) -> bool:
    """Return whether a word is a known one with one letter added, left out, replaced or swapped with its neighbour.

    Numbers do not count: `mac-1` and `mac-2` are two names.
    """
    if word == known or abs(len(word) - len(known)) > 1:
        return False
    start = 0
    while start < min(len(word), len(known)) and word[start] == known[start]:
        start += 1
    end = 0
    while end < min(len(word), len(known)) - start and word[-1 - end] == known[-1 - end]:
        end += 1
    ours, theirs = word[start : len(word) - end], known[start : len(known) - end]
    if any(sign.isdigit() for sign in ours + theirs):
        return False
    return max(len(ours), len(theirs)) == 1 or (len(ours) == 2 and ours == theirs[::-1])


def describe_node(node: YamlNode | None) -> str:
    """Return the node's value with its type: `"two" (a string)`."""
    content = node.content if node is not None else None
    match content:
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case None:
            return "nothing"
        case str():
            short = content if len(content) <= 60 else f"{content[:57]}..."
            return f"{json.dumps(short, ensure_ascii=False)} (a string)"
        case bool():
            kind = "a boolean"
        case int():
            kind = "an integer"
        case _:
            kind = "a number"
    return f"{node.text if node is not None else content} ({kind})"


def _squeezed(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def not_found_message(kind: Kind, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name, with the nearest known ones and the command that lists all."""
    near = difflib.get_close_matches(name, list(known), n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    return f'{kind.plural} "{name}" not found{hint} `fleetctl get {kind.plural}` lists them'
