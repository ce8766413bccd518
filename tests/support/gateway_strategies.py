"""Hypothesis strategies for the gateway's routing."""

from hypothesis import strategies as st

from gateway.routing.table import EndpointHealth
from schemas.wire.engine_address import EngineAddress

origins = st.builds(EngineAddress, st.just("127.0.0.1"), st.integers(1, 6))


endpoint_health = st.builds(
    EndpointHealth,
    in_flight=st.dictionaries(origins, st.integers(1, 9)),
    others_in_flight=st.dictionaries(origins, st.floats(0, 9)),
    headroom=st.dictionaries(origins, st.floats(0, 1)),
    ejected=st.frozensets(origins),
)
