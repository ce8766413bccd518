"""FastAPI application of the dashboard: its routes, its middleware and the folder of its page."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from compat import routes as compat
from compat.websocket import EventSocket
from dashboard.api.action_routes import MAX_TEXT, ActionRoutes
from dashboard.api.change_routes import ChangeRoutes
from dashboard.api.docs_page import add_docs
from dashboard.api.event_stream import StreamSlots
from dashboard.api.gateway_routes import make_gateway_routes
from dashboard.api.group_routes import GroupRoutes
from dashboard.api.history_routes import HistoryRoutes
from dashboard.api.key_routes import KeyRoutes
from dashboard.api.log_routes import LogRoutes
from dashboard.api.login import make_login
from dashboard.api.metric_routes import MetricRoutes
from dashboard.api.moment_routes import MomentRoutes
from dashboard.api.page import PageRoutes
from dashboard.api.past import PastReader
from dashboard.api.question_routes import QuestionRoutes
from dashboard.api.refusals import ERRORS, refusal_of
from dashboard.api.routes import StateRoutes
from dashboard.api.usage_routes import UsageRoutes
from dashboard.assets import Assets
from dashboard.auth import DashboardAuth, is_navigation, refusal_response
from dashboard.fleet_figures import FleetFigures
from dashboard.fleet_model import FleetModel
from dashboard.history.moments import MomentReader
from dashboard.history.queries import HistoryReader
from dashboard.history.writer import HistoryWriter
from dashboard.objectives import ObjectiveMonitor
from dashboard.record_views import ChangeLog
from dashboard.sessions import Sessions
from gateway.auth.access_control import AccessControl
from identity.dialer import Dialer
from identity.log_access import LogAccess
from machinery.request_body import BodyReader
from machinery.version import version
from schemas.wire.errors import Refusal
from store.metrics import StoreMetrics
from store.port import Transport
from store.tickets import TicketChecker

_LONGEST_PATH: Final = 200
_BODY_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AppContext:
    """Inputs of the application."""

    transport: Transport
    """Read for previews of manifests."""
    model: FleetModel
    views: FleetFigures
    changes: ChangeLog
    access: AccessControl
    sessions: Sessions
    tickets: TicketChecker
    """Checks login links."""
    log: LogAccess
    """The log of this process."""
    dialer: Dialer
    """To gateways, for the page's chat."""
    history: HistoryWriter | None
    """None without a folder for it."""
    objectives: ObjectiveMonitor
    can_write: bool
    """True if routes may change the fleet."""
    store_metrics: StoreMetrics


def make_app(context: AppContext) -> FastAPI:
    """Return the FastAPI application."""
    app = FastAPI(
        title="mlx-fleet dashboard",
        version=version(),
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.router.redirect_slashes = False
    router = APIRouter()
    assets = Assets.load()
    slots = StreamSlots(page=assets.version)
    history, clock = context.history, context.views.clock
    reader = None if history is None else HistoryReader(history.folder, clock, history.opened)
    past = PastReader(None if reader is None else MomentReader(reader, clock), clock)
    StateRoutes(context.model, slots, context.views, history, past).add_to(router)
    metrics = MetricRoutes(
        context.model,
        slots,
        context.views,
        history,
        context.objectives,
        context.store_metrics,
    )
    metrics.add_to(router)
    HistoryRoutes(reader, context.views.traffic, clock).add_to(router)
    MomentRoutes(context.model.caches, past, clock).add_to(router)
    GroupRoutes(context.model.caches, past, clock).add_to(router)
    ChangeRoutes(context.changes, clock).add_to(router)
    LogRoutes(context.model.caches, context.transport, context.dialer, clock, context.log).add_to(
        router
    )
    KeyRoutes(context.transport, reader, clock).add_to(router)
    questions = QuestionRoutes(context.model, past, context.transport, clock)
    questions.add_to(router)
    bodies = BodyReader(limit_bytes=2 * MAX_TEXT, limit_s=_BODY_S, at_once=16)
    ActionRoutes(questions, bodies, context.transport, clock, context.can_write).add_to(router)
    UsageRoutes(context.transport, context.dialer, clock).add_to(router)
    router.include_router(compat.make_router(context.views, clock))
    EventSocket(context.views.traffic, clock).add_to(router)
    login = make_login(
        context.access, context.sessions, context.tickets, clock, can_write=context.can_write
    )
    login.add_to(router)
    make_gateway_routes(context.model.caches, context.dialer, context.sessions).add_to(router)
    page = PageRoutes(assets, context.model, login.describe)
    page.add_to(router)
    app.include_router(router)
    add_docs(app, assets.path_of("dashboard.css"))
    app.add_middleware(
        DashboardAuth,
        access=context.access,
        sessions=context.sessions,
        document=page.document,
    )

    async def on_unknown_path(request: Request, error: Exception) -> Response:
        """Answer a browser with the page, which says that there is no such address; others with JSON."""
        is_unknown = isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND
        if is_unknown and is_navigation(request.scope):
            return page.document(request, HTTPStatus.NOT_FOUND)
        return await on_http_error(request, error)

    app.add_exception_handler(HTTPException, on_unknown_path)
    for kind in ERRORS:
        app.add_exception_handler(kind, on_refused)
    app.add_exception_handler(RequestValidationError, on_wrong_query)
    return app


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer a request with an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    message = (
        f"{error.detail}: {request.method} {request.url.path[:_LONGEST_PATH]}; see /openapi.json"
    )
    return refusal_response(Refusal(status=error.status_code, message=message))


async def on_refused(_request: Request, error: Exception) -> Response:
    """Answer a request that a route refused."""
    return refusal_response(refusal_of(error))


async def on_wrong_query(_request: Request, error: Exception) -> Response:
    """Answer a request whose query parameters are invalid."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return refusal_response(Refusal(status=400, message=f"'{name}': {first['msg']}.", param=name))
