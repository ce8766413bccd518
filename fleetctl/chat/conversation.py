"""The commands of a conversation: lines that begin with a slash. Pure.

A conversation as values: what is sent, what came back, what it took. Pure; the network is `stream`'s.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, cast, get_args

CommandName: TypeAlias = Literal["help", "model", "quit", "reset", "stats", "system"]

_SAYS: Final[dict[CommandName, tuple[str, str]]] = {
    "help": ("/help", "This list."),
    "model": ("/model [NAME]", "Go on with another model; without a name, which ones there are."),
    "quit": ("/quit", "End the conversation; so does Ctrl-D."),
    "reset": ("/reset", "Forget what was said; model and system prompt stay."),
    "stats": ("/stats", "Tokens, speed, and which replica answered."),
    "system": ("/system [TEXT]", "Set the system prompt; `-` takes it away, nothing shows it."),
}
_ALSO: Final[dict[str, CommandName]] = {
    "bye": "quit",
    "exit": "quit",
    "?": "help",
    "clear": "reset",
}
FENCE: Final = '"""'


@dataclass(frozen=True, slots=True, kw_only=True)
class SlashCommand:
    """What is to be done instead of asking the model."""

    verb: CommandName
    rest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownCommand:
    """A slash, and no command of ours."""

    why: str


def parse_line(line: str) -> SlashCommand | UnknownCommand | str:
    """Return a command, or the line as a message: two slashes at its start are one that is meant."""
    if not line.startswith("/"):
        return line
    if line.startswith("//"):
        return line[1:]
    word, _, rest = line[1:].partition(" ")
    known = (*get_args(CommandName), *_ALSO)
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists them"
        return UnknownCommand(
            why=f"/{word} is no command; {hint} (// begins a message with a slash)"
        )
    return SlashCommand(verb=_ALSO.get(word) or cast("CommandName", word), rest=rest.strip())


def help_lines() -> list[str]:
    """Return what /help shows."""
    width = max(len(form) for form, _ in _SAYS.values())
    lines = [f"{form:<{width}}  {says}" for form, says in _SAYS.values()]
    lines.append(f"{FENCE:<{width}}  Begins and ends a message of several lines.")
    lines.append(f"{'Ctrl-C':<{width}}  Stops the answer.")
    return lines


def complete_line(line: str, models: tuple[str, ...]) -> list[str]:
    """Return what the word at the end of the line may become, as the whole line."""
    if line.startswith("/model "):
        before = line.removeprefix("/model ")
        return [f"/model {name}" for name in models if name.startswith(before)]
    return [f"/{verb}" for verb in get_args(CommandName) if line and f"/{verb}".startswith(line)]


Role: TypeAlias = Literal["system", "user", "assistant"]
Json: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """What somebody said."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """What is the same for all answers; None is the engine's own choice."""

    model: str
    system: str = ""
    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """One answer, as far as it came."""

    text: str = ""
    finish: str = ""
    """Why it ended: `stop`, `length`; empty if it did not come to its end."""
    first_s: float | None = None
    """From the question to the first words."""
    whole_s: float = 0.0
    prompt_tokens: int | None = None
    """None if the engine did not say."""
    cached_tokens: int = 0
    output_tokens: int | None = None
    replica: str = ""
    node: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """Return how fast it came once it came."""
        if self.first_s is None or not self.output_tokens or self.output_tokens < 2:
            return None
        spent_s = self.whole_s - self.first_s
        return (self.output_tokens - 1) / spent_s if spent_s > 0 else None


@dataclass(slots=True, kw_only=True)
class Conversation:
    """What was said so far. A question without an answer is not part of it."""

    wishes: ChatSettings
    session: str
    """Names the conversation, so that a gateway keeps it at the engine that knows it."""
    said: list[ChatMessage] = field(default_factory=list)
    answers: list[ChatAnswer] = field(default_factory=list)
    """For `/stats`; not forgotten by a reset."""

    def request(self, question: str) -> Json:
        """Return the body of the request that asks the question."""
        wishes = self.wishes
        system = [ChatMessage(role="system", content=wishes.system)] if wishes.system else []
        told = [*system, *self.said, ChatMessage(role="user", content=question)]
        body: Json = {
            "model": wishes.model,
            "messages": [{"role": one.role, "content": one.content} for one in told],
            "stream": True,
            "stream_options": {"include_usage": True},
            "session_id": self.session,
        }
        if wishes.temperature is not None:
            body["temperature"] = wishes.temperature
        if wishes.max_tokens is not None:
            body["max_tokens"] = wishes.max_tokens
        return body

    def note(self, question: str, told: ChatAnswer) -> None:
        """Remember question and answer; of an answer that was stopped what there is of it."""
        self.answers.append(told)
        if told.text:
            self.said.append(ChatMessage(role="user", content=question))
            self.said.append(ChatMessage(role="assistant", content=told.text))

    def reset(self, session: str) -> None:
        """Begin anew; the model and the system prompt stay."""
        self.said.clear()
        self.session = session


def answer_figures(told: ChatAnswer) -> str:
    """Return what one answer took, in a line."""
    parts = []
    if told.prompt_tokens is not None:
        cached = f" ({told.cached_tokens} cached)" if told.cached_tokens else ""
        parts.append(f"{told.prompt_tokens} prompt tokens{cached}")
        parts.append(f"{told.output_tokens} output tokens")
    if told.first_s is not None:
        parts.append(f"first words after {told.first_s:.2f} s")
    if told.tokens_per_second is not None:
        parts.append(f"{told.tokens_per_second:.1f} tokens/s")
    if told.replica:
        parts.append(f"{told.replica} on {told.node}")
    return ", ".join(parts) or "nothing was measured"


def conversation_summary(talk: Conversation) -> list[str]:
    """Return what `/stats` shows."""
    if not talk.answers:
        return ["nothing was asked yet"]
    last = talk.answers[-1]
    prompt = sum(told.prompt_tokens or 0 for told in talk.answers)
    output = sum(told.output_tokens or 0 for told in talk.answers)
    many = len(talk.answers)
    return [
        f"last answer: {answer_figures(last)}",
        f"all {many} answers: {prompt} prompt tokens, {output} output tokens"
        if many > 1
        else f"the conversation has {len(talk.said)} messages",
    ]


def make_printable(text: str) -> str:
    """Return a model's words as a terminal may have them: a model must not move its cursor or rename its window."""
    return text.translate(_HARMLESS)


# C0 and C1 but for tab and newline, and DEL: shown as Unicode's pictures of them, or its replacement.
_HARMLESS: Mapping[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)},
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
}
