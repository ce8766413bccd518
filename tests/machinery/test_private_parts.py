"""The private parts of uvicorn, starlette and dulwich that our code uses, by name.

They may change in any release, so pyproject.toml pins these packages to one minor version. Before a new minor version is
allowed there, this test must pass with it, and the tests of the modules that are named here.
"""

import asyncio
import inspect

import pytest
import uvicorn
from dulwich import client
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import flow_control, httptools_impl
from uvicorn.server import ServerState

# Attributes of one connection. Overridden or read in machinery/http_server.py and gateway/http/.
PROTOCOL_ATTRIBUTES = (
    "app", "connections", "cycle", "expect_100_continue", "flow", "headers", "loop", "parser",
    "pipeline", "scope", "server_state", "tasks", "transport",
)  # fmt: skip
PROTOCOL_METHODS = (
    "_start_asgi_task", "connection_lost", "connection_made", "data_received", "on_body",
    "on_header", "on_headers_complete", "on_message_begin", "on_message_complete",
    "on_response_complete", "pause_writing", "resume_writing",
)  # fmt: skip
# Attributes of one request and its response. Read and set in gateway/http/protocol.py.
CYCLE_ATTRIBUTES = (
    "disconnected", "keep_alive", "message_event", "response_complete", "response_started",
)  # fmt: skip
FLOW_METHODS = ("pause_reading", "pause_writing", "resume_reading", "resume_writing")
# machinery/http_server.py, gateway/server.py, engine/process.py.
SERVER_METHODS = ("capture_signals", "handle_exit", "serve", "shutdown", "startup")
SERVER_ATTRIBUTES = ("config", "server_state", "should_exit", "started")
SERVER_STATE = ("connections", "default_headers", "tasks", "total_requests")


@pytest.fixture
async def protocol() -> httptools_impl.HttpToolsProtocol:
    config = uvicorn.Config(app=StreamingResponse([b""]), log_config=None, lifespan="off")
    config.load()
    return httptools_impl.HttpToolsProtocol(config, ServerState(), {})


async def test_attributes_of_a_connection(protocol: httptools_impl.HttpToolsProtocol) -> None:
    missing = [name for name in PROTOCOL_ATTRIBUTES if not hasattr(protocol, name)]
    assert missing == []
    # Set at the beginning of each request.
    assert "self.url" in inspect.getsource(httptools_impl.HttpToolsProtocol.on_message_begin)


@pytest.mark.parametrize(("owner", "names"), [
    pytest.param(httptools_impl.HttpToolsProtocol, PROTOCOL_METHODS, id="protocol"),
    pytest.param(flow_control.FlowControl, FLOW_METHODS, id="flow-control"),
    pytest.param(uvicorn.Server, SERVER_METHODS, id="server"),
])  # fmt: skip
def test_methods(owner: type, names: tuple[str, ...]) -> None:
    assert [name for name in names if not callable(getattr(owner, name, None))] == []


def test_attributes_of_a_request() -> None:
    source = inspect.getsource(httptools_impl.RequestResponseCycle)
    assert [name for name in CYCLE_ATTRIBUTES if f"self.{name}" not in source] == []


def test_the_flow_control_knows_whether_reading_is_paused() -> None:
    assert not flow_control.FlowControl(asyncio.Transport()).read_paused


def test_attributes_of_a_server() -> None:
    server = uvicorn.Server(uvicorn.Config(app=StreamingResponse([b""]), log_config=None))
    assert [name for name in SERVER_ATTRIBUTES if not hasattr(server, name)] == []
    assert [name for name in SERVER_STATE if not hasattr(server.server_state, name)] == []
    # Set by startup(); AdminServer closes them.
    assert "self.servers" in inspect.getsource(uvicorn.Server)


def test_status_lines_by_code() -> None:
    """gateway/http/request_context.py writes them itself."""
    assert httptools_impl.STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"


def test_the_signature_of_a_connection() -> None:
    """gateway/http/protocol.py passes these positionally."""
    names = list(inspect.signature(httptools_impl.HttpToolsProtocol.__init__).parameters)
    assert names == ["self", "config", "server_state", "app_state", "_loop"]


def test_a_response_is_an_asgi_application() -> None:
    """machinery.http_server.LogResponse overrides it to count readers."""
    names = list(inspect.signature(StreamingResponse.__call__).parameters)
    assert names == ["self", "scope", "receive", "send"]
    assert None not in (Scope, Receive, Send)


def test_the_ssh_vendor_of_dulwich() -> None:
    """reconciler.services.gitops.fetch_process.ssh implements it."""
    parameters = inspect.signature(client.SSHVendor.run_command).parameters
    expected = {"host", "command", "username", "port", "password", "key_filename"}
    assert expected <= parameters.keys()
    assert "vendor" in inspect.signature(client.SSHGitClient.__init__).parameters
