"""Refusals in Anthropic's words. Pure."""

import orjson

# What the engine calls what a client called otherwise.
_NAMES = {
    "'reasoning_effort'": "'thinking'",
    "'response_format'": "'output_config.format'",
    "'stop'": "'stop_sequences'",
}
_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OVERLOADED = 529


def status(given: int) -> int:
    """Return the status that Anthropic's clients know."""
    return _OVERLOADED if given == 503 else given


def renamed(message: str) -> str:
    """Return an engine's words with this API's names in them."""
    for engines, own in _NAMES.items():
        message = message.replace(engines, own)
    return message


def body(given: int, message: str, request_id: str) -> bytes:
    """Return the body of a refusal with that status of ours; `request_id`: empty if it has none."""
    kind = _TYPES.get(given, "api_error" if given >= 500 else "invalid_request_error")
    error = {"type": kind, "message": message}
    return orjson.dumps({"type": "error", "error": error, "request_id": request_id or None})
