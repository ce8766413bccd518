"""Names of OpenTelemetry's GenAI conventions in the spans of gateways and engines.

https://github.com/open-telemetry/semantic-conventions-genai, status Development: renamed attributes change here.
"""

from typing import Final

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"

PROVIDER_NAME: Final = "mlx-fleet"

_OPERATIONS: Final = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"), "chat"),
    **dict.fromkeys(("/v1/completions", "/api/generate", "/infill"), "text_completion"),
    **dict.fromkeys(("/v1/embeddings", "/api/embed", "/api/embeddings"), "embeddings"),
}


def operation_of(path: str) -> str:
    """Return the convention's name of what a request to `path` asks for; empty if it has none."""
    return _OPERATIONS.get(path, "")


def span_name(path: str, model: str) -> str:
    """Return the name of the span of a request: the operation and the model, or the route."""
    operation = operation_of(path)
    if not operation:
        return f"POST {path}"
    return f"{operation} {model}" if model else operation
