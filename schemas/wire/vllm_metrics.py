"""Names of vLLM's metrics, which engines and gateways export at `/metrics/vllm`.

Renamed metrics have both names, so that dashboards and routers made for either generation work: names after vLLM 0.10
first, then those before. https://docs.vllm.ai/en/latest/design/metrics/
"""

from typing import Final

PATH: Final = "/metrics/vllm"

MODEL_LABEL: Final = "model_name"
ENGINE_LABEL: Final = "engine"
REASON_LABEL: Final = "finished_reason"
ENGINE_INDEX: Final = "0"
"""The value of ENGINE_LABEL: vLLM counts the engines of one process."""

RUNNING: Final = ("vllm:num_requests_running",)
WAITING: Final = ("vllm:num_requests_waiting",)
KV_USAGE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""From 0 to 1, in spite of the name."""
PROMPT_TOKENS: Final = ("vllm:prompt_tokens_total",)
GENERATION_TOKENS: Final = ("vllm:generation_tokens_total",)
PREFIX_QUERIES: Final = (
    "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries_total",
)
PREFIX_HITS: Final = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
PREEMPTIONS: Final = ("vllm:num_preemptions_total",)
FINISHED: Final = ("vllm:request_success_total",)
FIRST_TOKEN: Final = ("vllm:time_to_first_token_seconds",)
BETWEEN_TOKENS: Final = (
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
)
PER_TOKEN: Final = ("vllm:request_time_per_output_token_seconds",)
WHOLE: Final = ("vllm:e2e_request_latency_seconds",)
QUEUE: Final = ("vllm:request_queue_time_seconds",)
INFERENCE: Final = ("vllm:request_inference_time_seconds",)
PREFILL: Final = ("vllm:request_prefill_time_seconds",)
DECODE: Final = ("vllm:request_decode_time_seconds",)
PROMPT_LENGTHS: Final = ("vllm:request_prompt_tokens",)
GENERATION_LENGTHS: Final = ("vllm:request_generation_tokens",)
CACHE_CONFIG: Final = "vllm:cache_config_info"
LORA: Final = "vllm:lora_requests_info"
