"""A conversation as values: slash commands, messages, answers and their statistics. Pure."""

import difflib
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, cast, get_args

CommandName: TypeAlias = Literal["help", "model", "quit", "reset", "stats", "system"]

_COMMAND_HELP: Final[dict[CommandName, tuple[str, str]]] = {
    "help": ("/help", "Show this list."),
    "model": ("/model [NAME]", "Switch to another model; without a name, list the models."),
    "quit": ("/quit", "End the conversation; so does Ctrl-D."),
    "reset": ("/reset", "Forget all messages; the model and the system prompt stay."),
    "stats": ("/stats", "Show tokens, speed, and the replica of the last answer."),
    "system": ("/system [TEXT]", "Set the system prompt; `-` removes it, no text shows it."),
}
_ALIASES: Final[dict[str, CommandName]] = {
    "bye": "quit",
    "exit": "quit",
    "?": "help",
    "clear": "reset",
}
FENCE: Final = '"""'


@dataclass(frozen=True, slots=True, kw_only=True)
class SlashCommand:
    """A command to carry out instead of a message to the model."""

    verb: CommandName
    rest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownCommand:
    """A line that starts with a slash but is no known command."""

    why: str


def parse_line(line: str) -> SlashCommand | UnknownCommand | str:
    """Parse a line: a command, or a message. `//` at the start stands for a literal slash."""
    if not line.startswith("/"):
        return line
    if line.startswith("//"):
        return line[1:]
    word, _, rest = line[1:].partition(" ")
    known = (*get_args(CommandName), *_ALIASES)
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists the commands"
        return UnknownCommand(
            why=f"/{word} is not a command; {hint} (start the line with // to send a slash)"
        )
    return SlashCommand(verb=_ALIASES.get(word) or cast("CommandName", word), rest=rest.strip())


def help_lines() -> list[str]:
    """Return the text of /help, by line."""
    width = max(len(form) for form, _ in _COMMAND_HELP.values())
    lines = [f"{form:<{width}}  {text}" for form, text in _COMMAND_HELP.values()]
    lines.append(f"{FENCE:<{width}}  Starts and ends a message of several lines.")
    lines.append(f"{'Ctrl-C':<{width}}  Stops the answer.")
    return lines


def complete_line(line: str, models: tuple[str, ...]) -> list[str]:
    """Return the possible completions of the whole line."""
    if line.startswith("/model "):
        before = line.removeprefix("/model ")
        return [f"/model {name}" for name in models if name.startswith(before)]
    return [f"/{verb}" for verb in get_args(CommandName) if line and f"/{verb}".startswith(line)]


Role: TypeAlias = Literal["system", "user", "assistant"]
Json: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """A message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Request settings of all answers; None leaves the choice to the engine."""

    model: str
    system: str = ""
    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """An answer, possibly incomplete."""

    text: str = ""
    finish: str = ""
    """Finish reason: `stop` or `length`; empty if the answer is incomplete."""
    first_s: float | None = None
    """Seconds from the request to the first text."""
    total_s: float = 0.0
    prompt_tokens: int | None = None
    """None if the engine did not report usage."""
    cached_tokens: int = 0
    output_tokens: int | None = None
    replica: str = ""
    node: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """Return the generation speed after the first token; None if unknown."""
        if self.first_s is None or not self.output_tokens or self.output_tokens < 2:
            return None
        generation_s = self.total_s - self.first_s
        return (self.output_tokens - 1) / generation_s if generation_s > 0 else None


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Messages so far. A question without an answer is not part of them."""

    settings: ChatSettings
    session: str
    """Session id; the gateway routes requests with the same id to the same engine."""
    messages: list[ChatMessage] = field(default_factory=list)
    answers: list[ChatAnswer] = field(default_factory=list)
    """All answers, for `/stats`; a reset keeps them."""

    def request(self, question: str) -> Json:
        """Return the request body for a question."""
        settings = self.settings
        system = [ChatMessage(role="system", content=settings.system)] if settings.system else []
        messages = [*system, *self.messages, ChatMessage(role="user", content=question)]
        body: Json = {
            "model": settings.model,
            "messages": [
                {"role": message.role, "content": message.content} for message in messages
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "session_id": self.session,
        }
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        if settings.max_tokens is not None:
            body["max_tokens"] = settings.max_tokens
        return body

    def record(self, question: str, answer: ChatAnswer) -> None:
        """Add a question and its answer; of an interrupted answer, the part that arrived."""
        self.answers.append(answer)
        if answer.text:
            self.messages.append(ChatMessage(role="user", content=question))
            self.messages.append(ChatMessage(role="assistant", content=answer.text))

    def reset(self, session: str) -> None:
        """Forget the messages and start a new session; the settings stay."""
        self.messages.clear()
        self.session = session


def answer_figures(answer: ChatAnswer) -> str:
    """Return the statistics of an answer in one line."""
    parts = []
    if answer.prompt_tokens is not None:
        cached = f" ({answer.cached_tokens} cached)" if answer.cached_tokens else ""
        parts.append(f"{answer.prompt_tokens} prompt tokens{cached}")
        parts.append(f"{answer.output_tokens} output tokens")
    if answer.first_s is not None:
        parts.append(f"first text after {answer.first_s:.2f} s")
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    if answer.replica:
        parts.append(f"{answer.replica} on {answer.node}")
    return ", ".join(parts) or "no statistics"


def conversation_summary(conversation: Conversation) -> list[str]:
    """Return the text of /stats, by line."""
    answers = conversation.answers
    if not answers:
        return ["no question has been asked yet"]
    prompt = sum(answer.prompt_tokens or 0 for answer in answers)
    output = sum(answer.output_tokens or 0 for answer in answers)
    count = len(answers)
    return [
        f"last answer: {answer_figures(answers[-1])}",
        f"all {count} answers: {prompt} prompt tokens, {output} output tokens"
        if count > 1
        else f"the conversation has {len(conversation.messages)} messages",
    ]
