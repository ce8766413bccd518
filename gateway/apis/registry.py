"""Registry of the translated APIs and of speech: adapters by path, and translators of errors."""

from gateway.apis import audio, llama_cpp
from gateway.apis.adapter import ApiAdapter, ResponseTranslator
from gateway.apis.anthropic import adapter as anthropic
from gateway.apis.anthropic.response_translator import ClientErrorTranslator as AnthropicUnread
from gateway.apis.ollama import adapter as ollama
from gateway.apis.ollama.response_translator import OllamaClientErrorTranslator as OllamaUnread
from gateway.request import RawHeaders
from gateway.state.table_cache import TableCache
from machinery.clock import Clock

PATHS = (*ollama.PATHS, *anthropic.PATHS, llama_cpp.INFILL, *audio.PATHS)
"""Paths of requests to models."""
# Paths below `/api` that are not Ollama's.
_ADMINS = ("/api/cluster/", "/api/dashboard/", "/api/requests/", "/api/v1/")
# A header that Anthropic's clients always send, and others never.
VERSION = "anthropic-version"


def translated_adapters(table_cache: TableCache, clock: Clock) -> dict[bytes, ApiAdapter]:
    """Return the adapters by path."""
    spoken, messages = ollama.OllamaAdapter(table_cache, clock), anthropic.AnthropicAdapter()
    api_adapters: dict[bytes, ApiAdapter] = {path.encode(): spoken for path in ollama.PATHS}
    speech = audio.AudioAdapter()
    api_adapters |= {path.encode(): speech for path in audio.PATHS}
    api_adapters[llama_cpp.INFILL.encode()] = llama_cpp.LlamaCppAdapter()
    return api_adapters | {path.encode(): messages for path in anthropic.PATHS}


def error_translator(path: str, headers: RawHeaders) -> ResponseTranslator | None:
    """Return the translator of errors for requests outside the model paths; None for OpenAI's format."""
    if path.startswith("/api/") and not path.startswith(_ADMINS):
        return OllamaUnread()
    is_anthropics = path == anthropic.MESSAGES or path.startswith(f"{anthropic.MESSAGES}/")
    if is_anthropics or any(name == VERSION.encode() for name, _ in headers):
        return AnthropicUnread()
    return None
