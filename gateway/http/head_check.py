"""Check of a request's head before its body is read: host, web page, key, and the size of the body."""

import itertools

from gateway import errors
from gateway.apis import audio
from gateway.auth.access_control import AccessControl
from gateway.http.handler_options import HandlerOptions
from gateway.http.request_context import RequestContext, header_lines
from gateway.routing.table import ServedModel
from gateway.state.table_cache import TableCache
from machinery.http_server import REQUEST_ID
from schemas.wire import headers as wire_headers
from schemas.wire.audio_limits import UPLOAD_BYTES
from schemas.wire.body_limits import LEAST_LIMIT
from schemas.wire.errors import Refusal, RefusedError, body_too_large

_REQUEST_ID = wire_headers.REQUEST_ID.encode()
# Paths of requests with many prompts, whose limit is that of the gateway.
_MANY_PROMPTS = ("/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank", "/api/embed")


class HeadCheck:
    """Checks heads, and gives each request its id."""

    def __init__(
        self, access: AccessControl, table_cache: TableCache, options: HandlerOptions
    ) -> None:
        self._access = access
        self._table_cache = table_cache
        self._hosts, self._origins = options.hosts, options.origins
        self._allowed_host = b""
        """The last `Host` that was allowed."""
        self._id_prefix = options.id_prefix.encode()
        self._count = itertools.count(1)
        self._max_body = options.max_body
        self.usual_body = min(options.max_body, LEAST_LIMIT)
        """Bytes of a body that needs no further check: every model takes as many."""

    def check(self, context: RequestContext) -> Refusal | None:
        """Return a refusal, or None if the body may be read."""
        http_request, access = context.http_request, self._access
        fields = http_request.fields
        id_ = fields.get(_REQUEST_ID)
        if not id_ or not REQUEST_ID.fullmatch(id_):
            id_ = b"%b-%x" % (self._id_prefix, next(self._count))
        http_request.request_id = id_
        if fields.get(b"host", b"") != self._allowed_host or b"origin" in fields:
            refusal = self._source_refusal(context)
            if refusal is not None:
                return refusal
        try:
            principal = access.identify(http_request.headers, fields)
        except RefusedError as error:
            return error.refusal
        if principal is not None:
            context.principal, context.limiter = principal, principal.limiter
        elif access.anonymous is not None:
            peer = context.response.transport.get_extra_info("peername")
            context.limiter = access.anonymous.of(peer[0] if isinstance(peer, tuple) else "")
        context.is_identified = True
        return self._body_refusal(context)

    def _source_refusal(self, context: RequestContext) -> Refusal | None:
        """Return the refusal of a request by its host or its web page; None if both are allowed."""
        fields = context.http_request.fields
        host, origin = fields.get(b"host", b""), fields.get(b"origin")
        if origin:
            context.response.common += header_lines(self._origins.headers(origin))
        if not self._hosts.allows(host):
            return errors.wrong_host(host.decode("latin-1"))
        self._allowed_host = host
        if origin and not self._origins.allows(origin):
            return errors.wrong_origin(origin.decode("latin-1"))
        return None

    def _body_refusal(self, context: RequestContext) -> Refusal | None:
        """Return the refusal of a body by what its headers say; None if it may be read."""
        fields = context.http_request.fields
        coding = fields.get(b"content-encoding")
        if coding and coding.lower() != b"identity":
            return errors.compressed(coding.decode("latin-1"))
        if context.http_request.path in audio.UPLOADS:
            context.body_limit = UPLOAD_BYTES
        else:
            # The model is not known before the body is read.
            largest = self._table_cache.table.body_limit
            is_limited = largest and context.http_request.path not in _MANY_PROMPTS
            context.body_limit = min(largest, self._max_body) if is_limited else self._max_body
        length = int(fields.get(b"content-length", b"0"))
        return body_too_large(context.body_limit).refusal if length > context.body_limit else None


def check_model_body(context: RequestContext, model: ServedModel) -> None:
    """Raise RefusedError if a complete body is larger than any that the model takes."""
    limit, http_request = model.body_limit, context.http_request
    if limit and len(http_request.body) > limit and http_request.path not in _MANY_PROMPTS:
        raise body_too_large(limit, model.name)
