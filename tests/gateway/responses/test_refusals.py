"""Requests of `/v1/responses` for state that the gateway does not have."""

from typing import Any

import pytest

from tests.support.gateway_calls import error_of
from tests.support.gateway_engine_scripts import echo
from tests.support.gateway_world import Running

RESPONSES = "/v1/responses"


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"previous_response_id": "resp_1"}, "send the whole input"),
        ({"conversation": {"id": "conv_1"}}, "send the whole input"),
        ({"background": True}, "wait for the answer"),
    ],
)
async def test_state_is_refused_with_a_remedy(
    gateway: Running, fields: dict[str, Any], remedy: str
) -> None:
    (engine,) = await gateway.serve(echo)
    body = {"model": "m", "input": "hi"}
    async with gateway.post(RESPONSES, json={**body, **fields}) as response:
        error = await error_of(response)
        assert (response.status, error["param"]) == (400, next(iter(fields)))
        assert remedy in error["message"]
    assert not engine.calls
    unset = {"previous_response_id": None, "conversation": None, "background": False}
    async with gateway.post(RESPONSES, json={**body, **unset}) as response:
        assert response.status == 200
