"""The commands of a conversation: lines that begin with a slash. Pure."""

import difflib
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast, get_args

Verb: TypeAlias = Literal["help", "model", "quit", "reset", "stats", "system"]

_SAYS: Final[dict[Verb, tuple[str, str]]] = {
    "help": ("/help", "This list."),
    "model": ("/model [NAME]", "Go on with another model; without a name, which ones there are."),
    "quit": ("/quit", "End the conversation; so does Ctrl-D."),
    "reset": ("/reset", "Forget what was said; model and system prompt stay."),
    "stats": ("/stats", "Tokens, speed, and which replica answered."),
    "system": ("/system [TEXT]", "Set the system prompt; `-` takes it away, nothing shows it."),
}
_ALSO: Final[dict[str, Verb]] = {"bye": "quit", "exit": "quit", "?": "help", "clear": "reset"}
FENCE: Final = '"""'


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What is to be done instead of asking the model."""

    verb: Verb
    rest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A slash, and no command of ours."""

    why: str


def parse(line: str) -> Command | Unknown | str:
    """Return a command, or the line as a message: two slashes at its start are one that is meant."""
    if not line.startswith("/"):
        return line
    if line.startswith("//"):
        return line[1:]
    word, _, rest = line[1:].partition(" ")
    known = (*get_args(Verb), *_ALSO)
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists them"
        return Unknown(why=f"/{word} is no command; {hint} (// begins a message with a slash)")
    return Command(verb=_ALSO.get(word) or cast("Verb", word), rest=rest.strip())


def usage() -> list[str]:
    """Return what /help shows."""
    width = max(len(form) for form, _ in _SAYS.values())
    lines = [f"{form:<{width}}  {says}" for form, says in _SAYS.values()]
    lines.append(f"{FENCE:<{width}}  Begins and ends a message of several lines.")
    lines.append(f"{'Ctrl-C':<{width}}  Stops the answer.")
    return lines


def completions(line: str, models: tuple[str, ...]) -> list[str]:
    """Return what the word at the end of the line may become, as the whole line."""
    if line.startswith("/model "):
        before = line.removeprefix("/model ")
        return [f"/model {name}" for name in models if name.startswith(before)]
    return [f"/{verb}" for verb in get_args(Verb) if line and f"/{verb}".startswith(line)]
