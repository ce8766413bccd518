"""All translated APIs together, as the gateway takes them in."""

from gateway.apis.adapter import ApiAdapter, ResponseTranslator
from gateway.apis.anthropic import adapter as anthropic
from gateway.apis.anthropic.response_translator import ClientErrorTranslator as AnthropicUnread
from gateway.apis.ollama import adapter as ollama
from gateway.apis.ollama.response_translator import OllamaClientErrorTranslator as OllamaUnread
from gateway.request import RawHeaders
from gateway.state.table_cache import TableCache
from machinery.clock import Clock

PATHS = (*ollama.PATHS, *anthropic.PATHS)
"""Of requests to models."""
# Below `/api`, and yet not Ollama's.
_ADMINS = ("/api/cluster/", "/api/dashboard/")
# Which Anthropic's clients always send, and others never.
VERSION = "anthropic-version"


def translated_adapters(keeper: TableCache, clock: Clock) -> dict[bytes, ApiAdapter]:
    """Return the surfaces by their paths."""
    spoken, messages = ollama.OllamaAdapter(keeper, clock), anthropic.AnthropicAdapter()
    found: dict[bytes, ApiAdapter] = {path.encode(): spoken for path in ollama.PATHS}
    return found | {path.encode(): messages for path in anthropic.PATHS}


def error_translator(path: str, headers: RawHeaders) -> ResponseTranslator | None:
    """Return how refusals are told there, of whatever is no request to a model; None for OpenAI's way."""
    if path.startswith("/api/") and not path.startswith(_ADMINS):
        return OllamaUnread()
    is_anthropics = path == anthropic.MESSAGES or path.startswith(f"{anthropic.MESSAGES}/")
    if is_anthropics or any(name == VERSION.encode() for name, _ in headers):
        return AnthropicUnread()
    return None
