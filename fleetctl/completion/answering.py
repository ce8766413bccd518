"""What may stand at the end of a command line, told as the scripts want to hear it."""

from collections.abc import Iterator, Sequence

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

from fleetctl.completion import candidates

# Verbs that take kinds and names as `get` does, or names of one kind: `get` imports the least, and completes for all
# of them while no flag was typed.
_LIKE_GET: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("annotate", "delete", "describe", "edit", "label", "patch", "scale", "wait"), ()
    ),
    **dict.fromkeys(("cordon", "drain", "uncordon"), ("nodes",)),
    "chat": ("modeldeployments",),
    "sync": ("gitsources",),
}
# Behind these something must follow, so that no blank does.
_OPEN = ("/", "=", ".", ",", ":")


def answers(root: click.Command, shell: str, line: str) -> Iterator[str]:
    """Yield a line for each candidate."""
    words, incomplete = split(line)
    for found in complete(root, words, incomplete):
        kind = found.type
        if kind == "plain" and not found.value.endswith(_OPEN):
            kind = "whole"
        value = _of_last_word(found.value, incomplete) if shell == "bash" else found.value
        meaning = " ".join((found.help or "").split())
        yield f"{kind}\t{value}\t{meaning}\n"


def split(line: str) -> tuple[list[str], str]:
    """Return the whole words behind the command's name, and the one that is being typed ("" at a blank)."""
    words = split_arg_string(line)[1:]
    is_between = not words or (line[-1:].isspace() and not line.endswith("\\ "))
    return (words, "") if is_between else (words[:-1], words[-1])


def complete(
    root: click.Command, words: Sequence[str], incomplete: str
) -> list[CompletionItem[str]]:
    """Return the candidates for the word behind whole words."""
    words = list(words)
    flag, equals, typed = incomplete.partition("=")
    joined = f"{flag}=" if equals and flag.startswith("--") else ""
    if joined:
        words, incomplete = [*words, flag], typed
    meant = next((word for word in words if not word.startswith("-")), "")
    if not any(word.startswith("-") for word in (*words, incomplete)):
        words = _as_get(words)
    if not candidates.dress(root, words):
        return []
    found = ShellComplete(root, {"obj": meant}, "fleetctl", "").get_completions(words, incomplete)
    for item in found:
        if joined and item.type == "plain":
            item.value = joined + item.value
    return found


def _as_get(words: list[str]) -> list[str]:
    """Return a line of `get` that is completed in the same way, if there is one."""
    if words[:1] == ["rollout"] and len(words) > 1:
        return ["get", "modeldeployments", *words[2:]]
    kind = _LIKE_GET.get(words[0]) if words else None
    return words if kind is None else ["get", *kind, *words[1:]]


def _of_last_word(value: str, incomplete: str) -> str:
    """Return what bash takes for the word: it begins a new one behind '=' and ':' (COMP_WORDBREAKS)."""
    cut = max(incomplete.rfind("="), incomplete.rfind(":")) + 1
    return value[cut:] if value.startswith(incomplete[:cut]) else value
