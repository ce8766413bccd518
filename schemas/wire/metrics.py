"""Names and labels of metrics that one process exports and another reads.

A metric that only Prometheus reads is named where it is exported.
"""

from typing import Final, Literal, TypeAlias, get_args

from schemas.wire.errors import invalid

# Exported by gateways; read by the reconciler for autoscaling and canary analysis, and by `fleetctl top`.
DEPLOYMENT_IN_FLIGHT: Final = "fleet_gateway_deployment_in_flight"
DEPLOYMENT_WAITING: Final = "fleet_gateway_deployment_waiting"
DEPLOYMENT_RELEASED: Final = "fleet_gateway_deployment_released"
"""1: a client said that it needs the model no longer, so that it may give way at once; 2: an operator unloads it."""
ON_DEMAND: Final = "fleet_gateway_on_demand"
"""1 for each repository of a hub that clients ask for, and that nothing declares."""
VERSION_REQUESTS: Final = "fleet_gateway_version_requests_total"
VERSION_TTFT: Final = "fleet_gateway_version_first_token_seconds"
"""Time to the first token, a histogram: its samples carry the suffixes `_bucket`, `_sum` and `_count`."""
VERSION_OUTPUT_TOKENS: Final = "fleet_gateway_version_output_tokens_total"
VERSION_OUTPUT_SECONDS: Final = "fleet_gateway_version_output_seconds_total"

BUCKET_SUFFIX: Final = "_bucket"

# Labels of the metrics above.
DEPLOYMENT_LABEL: Final = "deployment"
REPOSITORY_LABEL: Final = "repository"
TEMPLATE_LABEL: Final = "template"
OUTCOME_LABEL: Final = "outcome"
BUCKET_LABEL: Final = "le"

VersionOutcome: TypeAlias = Literal["ok", "error", "refused", "client_gone"]
"""The end of one attempt at an engine, the value of `OUTCOME_LABEL` of `VERSION_REQUESTS`."""
VERSION_OUTCOMES: Final[tuple[VersionOutcome, ...]] = get_args(VersionOutcome)

REQUEST_OUTCOMES: Final = (
    *("ok", "refused", "unavailable", "failed", "interrupted", "client_gone"),
    "cancelled",
)
"""The end of a client's request in the gateway's metrics, journal and admin API.

ok: answered. refused: an error of the client. unavailable: 429 or 503. failed: another 5xx.
interrupted: a stream broke off. client_gone: the client disconnected first. cancelled: an operator ended it.
"""
REQUEST_ERRORS: Final = frozenset({"unavailable", "failed", "interrupted"})
"""The outcomes that the client did not cause."""
_OUTCOME_GROUPS: Final = {
    "success": ("ok",),
    "error": ("unavailable", "failed", "interrupted"),
    "cancelled": ("client_gone", "cancelled"),
}


def parse_outcomes(text: str) -> frozenset[str]:
    """Return the outcomes and groups of outcomes in a query, separated by commas; none for an empty text.

    Raises:
        RefusedError: a word is unknown.

    """
    outcomes: set[str] = set()
    for word in filter(None, text.split(",")):
        if word not in _OUTCOME_GROUPS and word not in REQUEST_OUTCOMES:
            known = ", ".join(dict.fromkeys([*_OUTCOME_GROUPS, *REQUEST_OUTCOMES]))
            raise invalid(f"No request ends as '{word[:50]}'; they end as {known}.", "status")
        outcomes.update(_OUTCOME_GROUPS.get(word, (word,)))
    return frozenset(outcomes)


# Buckets of durations and lengths, equal at engines and gateways: quantiles of the two can be compared.
# OpenTelemetry's GenAI conventions (gen_ai.server.time_to_first_token, .time_per_output_token, .request.duration and
# gen_ai.client.token.usage), with finer or longer ends: a long prompt on a small Mac takes minutes.
FIRST_TOKEN_BOUNDS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0, 120.0, 300.0),
)
PER_TOKEN_BOUNDS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    2.5,
)
REQUEST_BOUNDS_S: Final = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *(163.84, 327.68, 655.36),
)
TOKEN_COUNT_BOUNDS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)

# Exported by engines; read by the agent for `/v1/vitals`.
ENGINE_PREFIX: Final = "fleet_engine_"
ENGINE_SEQUENCES_IN_FLIGHT: Final = f"{ENGINE_PREFIX}num_sequences_in_flight"
ENGINE_REQUESTS_WAITING: Final = f"{ENGINE_PREFIX}num_requests_waiting"
ENGINE_DECODE_TOKENS_PER_SECOND: Final = f"{ENGINE_PREFIX}decode_tokens_per_second"
ENGINE_PREFILL_TOKENS_PER_SECOND: Final = f"{ENGINE_PREFIX}prefill_tokens_per_second"
ENGINE_GENERATION_TOKENS: Final = f"{ENGINE_PREFIX}generation_tokens_total"
ENGINE_PREFILL_TOKENS: Final = f"{ENGINE_PREFIX}prefill_tokens_total"
ENGINE_MEMORY_ACTIVE_BYTES: Final = f"{ENGINE_PREFIX}memory_active_bytes"
ENGINE_MEMORY_LIMIT_BYTES: Final = f"{ENGINE_PREFIX}memory_limit_bytes"
ENGINE_PREFIX_CACHE_BYTES: Final = f"{ENGINE_PREFIX}prefix_cache_bytes"
