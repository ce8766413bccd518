"""Choice of the model for requests that name none."""

from collections.abc import Callable

from gateway import errors
from gateway.routing.table import RoutingTable
from schemas.wire.errors import RefusedError


def choose_default(table: RoutingTable, wanted: str, may_use: Callable[[str], bool]) -> str:
    """Return `wanted`, the gateway's default model, or the only model that the client may use.

    All names of one deployment or route count as one model, and adapters do not count.

    Raises:
        RefusedError: there is no default, and not exactly one model.

    """
    if wanted:
        return wanted
    models = [model for model in table.models.values() if may_use(model.name) and not model.parent]
    sources = {model.routing_source for model in models}
    names = sorted(model.name for model in models)
    if len(sources) != 1:
        raise RefusedError(errors.no_model(names))
    own = sources.pop().partition("/")[2]
    return own if own in names else names[0]
