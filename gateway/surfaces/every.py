"""All translated APIs together, as the gateway takes them in."""

from gateway.asks import RawHeaders
from gateway.clients.surface import Surface, Telling
from gateway.known.keeper import TableKeeper
from gateway.surfaces.anthropic import surface as anthropic
from gateway.surfaces.anthropic.refusing import Unread as AnthropicUnread
from gateway.surfaces.ollama import surface as ollama
from gateway.surfaces.ollama.refusing import Unread as OllamaUnread
from machinery.clock import Clock

PATHS = (*ollama.PATHS, *anthropic.PATHS)
"""Of requests to models."""
# Below `/api`, and yet not Ollama's.
_ADMINS = ("/api/cluster/", "/api/dashboard/")
# Which Anthropic's clients always send, and others never.
VERSION = "anthropic-version"


def every(keeper: TableKeeper, clock: Clock) -> dict[bytes, Surface]:
    """Return the surfaces by their paths."""
    spoken, messages = ollama.Ollama(keeper, clock), anthropic.Anthropic()
    found: dict[bytes, Surface] = {path.encode(): spoken for path in ollama.PATHS}
    return found | {path.encode(): messages for path in anthropic.PATHS}


def telling(path: str, headers: RawHeaders) -> Telling | None:
    """Return how refusals are told there, of whatever is no request to a model; None for OpenAI's way."""
    if path.startswith("/api/") and not path.startswith(_ADMINS):
        return OllamaUnread()
    is_anthropics = path == anthropic.MESSAGES or path.startswith(f"{anthropic.MESSAGES}/")
    if is_anthropics or any(name == VERSION.encode() for name, _ in headers):
        return AnthropicUnread()
    return None
