"""All translated APIs together, as the gateway takes them in."""

from gateway.clients.surface import Surface
from gateway.known.keeper import TableKeeper
from gateway.surfaces.anthropic import surface as anthropic
from gateway.surfaces.ollama import surface as ollama
from machinery.clock import Clock

PATHS = (*ollama.PATHS, *anthropic.PATHS)
"""Of requests to models."""


def every(keeper: TableKeeper, clock: Clock) -> dict[bytes, Surface]:
    """Return the surfaces by their paths."""
    spoken, messages = ollama.Ollama(keeper, clock), anthropic.Anthropic()
    found: dict[bytes, Surface] = {path.encode(): spoken for path in ollama.PATHS}
    return found | {path.encode(): messages for path in anthropic.PATHS}
