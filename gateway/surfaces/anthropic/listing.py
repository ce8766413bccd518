"""Models as Anthropic's API lists them. Pure."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from gateway.errors import RefusedError, invalid
from gateway.routing.table import Model

Json: TypeAlias = dict[str, Any]

# Anthropic's own.
_USUAL_LIMIT, _LARGEST_LIMIT = 20, 1000


def one(model: Model) -> Json:
    """Return one model."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "lifecycle": "active",
    }


def page(models: Sequence[Model], query: Mapping[str, str]) -> Json:
    """Return the part of the list that the query asks for: `limit`, `after_id`, `before_id`.

    Raises:
        RefusedError: the limit is none.

    """
    limit = _limit(query.get("limit"))
    names = [model.name for model in models]
    begin, end = 0, len(models)
    if query.get("after_id") in names:
        begin = names.index(query["after_id"]) + 1
    if query.get("before_id") in names:
        end = names.index(query["before_id"])
        begin = max(begin, end - limit)
    shown = models[begin:end][:limit]
    has_more = begin > 0 if "before_id" in query else begin + len(shown) < end
    return {
        "data": [one(model) for model in shown],
        "has_more": has_more,
        "first_id": shown[0].name if shown else None,
        "last_id": shown[-1].name if shown else None,
    }


def _limit(text: str | None) -> int:
    if text is None:
        return _USUAL_LIMIT
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= _LARGEST_LIMIT:
        raise _wrong_limit()
    return int(text)


def _wrong_limit() -> RefusedError:
    return invalid(f"'limit' must be a number from 1 to {_LARGEST_LIMIT}.", param="limit")
