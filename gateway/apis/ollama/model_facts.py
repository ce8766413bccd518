"""Facts about models for Ollama's lists: size, family, parameters, and the memory of running replicas."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gateway.routing.table import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about one model name; zeroes and empty texts are unknown."""

    family: str = ""
    """The architecture, such as "qwen3"."""
    source: str = ""
    """The folder or the repository of the deployment's model."""
    parameters: int = 0
    weights_bytes: int = 0
    loaded_bytes: int = 0
    """The proven memory of all its replicas."""

    @property
    def parameter_size(self) -> str:
        """Return the parameters as Ollama shows them, such as "4.0B"."""
        if self.parameters >= 10**9:
            return f"{self.parameters / 10**9:.1f}B"
        return f"{self.parameters / 10**6:.0f}M" if self.parameters else ""


FactReader: TypeAlias = Callable[[Sequence[ServedModel]], Awaitable[Mapping[str, ModelFacts]]]
"""Returns the facts of models by their names."""
