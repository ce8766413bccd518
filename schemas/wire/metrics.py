"""Names and labels of metrics that one process exports and another reads.

A metric that only Prometheus reads is named where it is exported.
"""

from typing import Final, Literal, TypeAlias, get_args

# Exported by gateways; read by the reconciler for autoscaling and canary analysis, and by `fleetctl top`.
DEPLOYMENT_IN_FLIGHT: Final = "fleet_gateway_deployment_in_flight"
DEPLOYMENT_WAITING: Final = "fleet_gateway_deployment_waiting"
VERSION_REQUESTS: Final = "fleet_gateway_version_requests_total"
VERSION_TTFT: Final = "fleet_gateway_version_first_token_seconds"
"""Time to the first token, a histogram: its samples carry the suffixes `_bucket`, `_sum` and `_count`."""
VERSION_OUTPUT_TOKENS: Final = "fleet_gateway_version_output_tokens_total"
VERSION_OUTPUT_SECONDS: Final = "fleet_gateway_version_output_seconds_total"

BUCKET_SUFFIX: Final = "_bucket"

# Labels of the metrics above.
DEPLOYMENT_LABEL: Final = "deployment"
TEMPLATE_LABEL: Final = "template"
OUTCOME_LABEL: Final = "outcome"
BUCKET_LABEL: Final = "le"

VersionOutcome: TypeAlias = Literal["ok", "error", "refused", "client_gone"]
"""The end of one attempt at an engine, the value of `OUTCOME_LABEL` of `VERSION_REQUESTS`."""
VERSION_OUTCOMES: Final[tuple[VersionOutcome, ...]] = get_args(VersionOutcome)

REQUEST_OUTCOMES: Final = ("ok", "refused", "unavailable", "failed", "interrupted", "client_gone")
"""The end of a client's request in the gateway's metrics, journal and admin API.

ok: answered. refused: an error of the client. unavailable: 429 or 503. failed: another 5xx.
interrupted: a stream broke off. client_gone: the client disconnected first.
"""
REQUEST_ERRORS: Final = frozenset({"unavailable", "failed", "interrupted"})
"""The outcomes that the client did not cause."""

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
