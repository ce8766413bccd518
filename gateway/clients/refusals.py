"""What clients are told of requests that never became one: their HTTP was wrong. Decides nothing."""

from gateway.errors import Refusal


def head_too_large(limit: int) -> Refusal:
    """Return the refusal of headers over the limit."""
    message = f"The request's headers are larger than {limit} bytes."
    return Refusal(status=431, message=message, code="headers_too_large")


def too_many_headers(limit: int) -> Refusal:
    """Return the refusal of more headers than anybody needs."""
    message = f"The request has more than {limit} headers."
    return Refusal(status=431, message=message, code="headers_too_large")


def not_http() -> Refusal:
    """Return what to say to bytes that are no HTTP/1.1."""
    message = "This is not a valid HTTP/1.1 request; the connection is closed."
    return Refusal(status=400, message=message, code="invalid_http")


def wrong_origin(origin: str) -> Refusal:
    """Return the refusal of a web page that may not use the gateway."""
    message = (
        f"Web pages from {origin[:200]} may not use this gateway; its operator can allow them with "
        f"--cors-origin {origin[:200]}."
    )
    return Refusal(status=403, message=message, code="origin_not_allowed")


def compressed(coding: str) -> Refusal:
    """Return the refusal of a body that is not plain."""
    message = (
        f"The body is compressed ('content-encoding: {coding[:50]}'), and compressed bodies are not taken here; "
        "send it plain, and leave that header out."
    )
    return Refusal(status=415, message=message, code="body_compressed")


def too_slow(seconds: float) -> Refusal:
    """Return what to say of a request that does not come."""
    message = f"The request did not arrive within {seconds:g} s."
    return Refusal(status=408, message=message, code="body_timeout")
