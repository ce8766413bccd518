"""Clients that read nothing: their streams give up the engine, then their connection ends."""

from collections.abc import Callable

from gateway.forwarding.forwarder import Forwarder
from gateway.http.request_context import RequestContext
from machinery.clock import NEVER

_CHECK_S = 1.0


async def release_stalled(
    running: Callable[[], tuple[RequestContext, ...]],
    forwarder: Forwarder,
    *,
    yield_s: float,
    timeout_s: float,
) -> None:
    """Free the engines of clients that read nothing. Runs forever; `running` returns the requests in progress.

    After `yield_s` a stream gives up its engine's slot if others wait for it, and continues once its client reads.
    After `timeout_s` its connection is aborted.
    """
    clock = forwarder.clock
    while True:
        await clock.sleep(_CHECK_S)
        now_s = clock.monotonic()
        for context in running():
            if context.blocked_since_s == NEVER:
                continue
            unsent_bytes = context.response.unsent_bytes()
            if unsent_bytes < context.unsent_bytes:
                context.blocked_since_s = now_s  # slow, but reading
            context.unsent_bytes = unsent_bytes
            if context.blocked_since_s < now_s - timeout_s:
                context.response.abort()
            elif context.blocked_since_s < now_s - yield_s and context.stream is not None:
                forwarder.suspend(context.retry_state, context.stream)
