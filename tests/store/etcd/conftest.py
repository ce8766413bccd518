"""Fixtures: each test of etcd's clients runs over gRPC and over its JSON gateway."""

import pytest


@pytest.fixture(params=["grpc", "http"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)
