"""Keep-alive times."""

from schemas.wire import connections


def test_the_client_of_a_connection_closes_it_first() -> None:
    assert connections.POOL_IDLE_S <= connections.SERVER_KEEP_ALIVE_S - 10
