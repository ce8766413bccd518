"""The error envelope: OpenAI's form, written and read."""

import orjson
import pytest

from schemas.wire import errors
from schemas.wire.errors import ErrorBody, Refusal, RefusedError


def test_the_envelope_has_all_four_fields() -> None:
    refusal = Refusal(status=400, message="too «long»", param="messages", code="too_long")
    error = {
        "message": "too «long»",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "too_long",
    }
    assert refusal.envelope() == {"error": error}
    # The same bytes as orjson, which serializes the responses.
    assert refusal.body() == orjson.dumps({"error": error})
    assert refusal.event() == b"data: " + refusal.body() + b"\n\n"


def test_half_a_surrogate_pair_does_not_break_the_body() -> None:
    assert orjson.loads(Refusal(status=400, message="a\ud800b").body())["error"]["message"] == "a?b"


def test_headers_are_in_asgi_form() -> None:
    plain = Refusal(status=400, message="m")
    assert plain.headers() == [(b"content-type", b"application/json")]
    bare = Refusal(status=429, message="m")
    assert bare.headers()[1:] == [(b"retry-after", b"1")]
    more = Refusal(
        status=429,
        message="m",
        retry_after_s=7,
        extra_headers=((b"x-ratelimit-limit-requests", b"5"),),
    )
    assert more.headers() == [
        (b"content-type", b"application/json"),
        (b"retry-after", b"7"),
        (b"x-ratelimit-limit-requests", b"5"),
    ]


@pytest.mark.parametrize(("error", "expected"), [
    pytest.param(errors.invalid("m", "n", "c"), (400, "invalid_request_error", "n", "c", None), id="invalid"),
    pytest.param(errors.body_too_large(5), (413, "invalid_request_error", None, "body_too_large", None), id="body"),
    pytest.param(errors.unavailable("m", "draining", retry_after_s=1), (503, "server_error", None, "draining", 1), id="unavailable"),
    pytest.param(errors.internal("m"), (500, "server_error", None, None, None), id="internal"),
])  # fmt: skip
def test_factories(error: RefusedError, expected: tuple[object, ...]) -> None:
    refusal = error.refusal
    assert (
        refusal.status,
        refusal.type,
        refusal.param,
        refusal.code,
        refusal.retry_after_s,
    ) == expected
    assert str(error) == refusal.message


def test_what_was_written_can_be_read() -> None:
    refusal = errors.unavailable("not now", "loading", retry_after_s=5).refusal
    assert ErrorBody.parse(refusal.body()) == ErrorBody(
        message="not now", type="server_error", code="loading"
    )


@pytest.mark.parametrize("body", [
    b"", b"not JSON", b"[]", b"{}", b'{"error": "text"}', b'{"error": {"code": 1}}', b"\xff",
    b"[" * 100_000,
])  # fmt: skip
def test_other_bodies_are_no_envelope(body: bytes) -> None:
    assert ErrorBody.parse(body) is None


def test_fields_of_other_types_are_left_out() -> None:
    body = b'{"error": {"message": "m", "type": 1, "code": ["c"]}}'
    assert ErrorBody.parse(body) == ErrorBody(message="m", type=None, code=None)
