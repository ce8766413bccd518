"""Answers to clients for the errors of routes: the one place that turns an error into a refusal."""

from typing import Final

from dashboard.history.queries import ReadError
from machinery.request_body import RequestRefusedError
from manifests.apply import PlanChangedError
from manifests.errors import ApplyError, InUseError
from schemas.wire.errors import Refusal, RefusedError
from store.errors import ConflictError, EditRefusedError, NotFoundError, StoreError

ERRORS: Final = (
    RefusedError,
    RequestRefusedError,
    ReadError,
    StoreError,
    EditRefusedError,
    InUseError,
    ApplyError,
)
"""The errors that routes leave to it."""


def refusal_of(error: Exception) -> Refusal:
    """Return what a client is told of an error."""
    status, message, code, retry_after_s = 503, str(error), None, None
    match error:
        case RefusedError():
            return error.refusal
        case RequestRefusedError():
            status, retry_after_s = error.status, error.retry_after_s or None
        case ReadError():
            message, retry_after_s = f"The history cannot be read: {error}. See /health.", 5
        case NotFoundError():
            status, message = 404, f"{error}."
        case EditRefusedError() | InUseError():
            status, message, code = 400, f"{error}.", "refused"
        case ConflictError() | PlanChangedError():
            message = f"{message.rstrip('.')}. Look at it again; nothing was overwritten."
            status, code = 409, "changed"
        case StoreError():
            message = f"This needs etcd, which does not answer: {error}"
            code, retry_after_s = "store_unavailable", 2
        case _:
            pass
    return Refusal(status=status, message=message, code=code, retry_after_s=retry_after_s)
