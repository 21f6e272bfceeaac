"""Prometheus text of the worker's counters and gauges, in base units and under our own prefix."""

from collections.abc import Iterator

from veloxquant.worker.telemetry import Telemetry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "veloxquant_"


def render(telemetry: Telemetry) -> str:
    """All metrics as text."""
    return "\n".join(_lines(telemetry)) + "\n"


def _lines(telemetry: Telemetry) -> Iterator[str]:
    stats, totals = telemetry.stats(), telemetry.totals
    gauges: tuple[tuple[str, str, float], ...] = (
        ("requests_running", "Requests that run.", stats.running),
        ("requests_waiting", "Requests in the queue.", stats.waiting),
        ("kv_claimed_bytes", "Bytes that the caches say they hold.", stats.kv_claimed),
        ("kv_resident_bytes", "Bytes that the caches hold, measured.", stats.kv_resident),
        ("kv_plain_bytes", "Bytes that uncompressed caches would hold.", stats.kv_fp16),
        ("kv_tokens", "Tokens in the caches.", stats.tokens),
        ("weights_bytes", "Bytes of the model's weights.", stats.weights),
        ("footprint_bytes", "Bytes that the system counts for this process.", stats.footprint),
        ("memory_limit_bytes", "Bytes that this process may use.", stats.limit),
        ("mlx_active_bytes", "Bytes that MLX holds.", stats.mlx_active),
        ("mlx_cache_bytes", "Freed bytes that MLX keeps.", stats.mlx_cache),
        ("decode_tokens_per_second", "Speed of generation now.", stats.decode_tps),
        ("prefill_tokens_per_second", "Speed of prompt reading now.", stats.prefill_tps),
    )
    for name, text, value in gauges:
        yield from _metric(name, "gauge", text, value)
    if stats.pool is not None:
        yield from _metric("pool_blocks", "gauge", "Blocks of the pool.", stats.pool.blocks)
        yield from _metric("pool_blocks_used", "gauge", "Blocks in use.", stats.pool.used)
        name, text = "pool_exhausted_total", "Charges that the pool could not meet."
        yield from _metric(name, "counter", text, stats.pool.exhausted)
    counters: tuple[tuple[str, str, float], ...] = (
        ("prompt_tokens_total", "Prompt tokens read.", totals.prompt_tokens),
        ("generation_tokens_total", "Tokens generated.", totals.output_tokens),
        ("requests_failed_total", "Requests that failed.", totals.failed),
        ("requests_cancelled_total", "Requests whose client left.", totals.cancelled),
        ("requests_refused_total", "Requests that were turned away.", totals.refused),
        ("engine_steps_total", "Steps of the engine.", stats.engine_step),
    )
    for name, text, value in counters:
        yield from _metric(name, "counter", text, value)
    yield from _head("requests_done_total", "counter", "Requests answered, by finish reason.")
    for reason in ("stop", "length", "tool_calls"):
        count = totals.finishes[reason]
        yield f'{PREFIX}requests_done_total{{reason="{reason}"}} {count}'
    yield from _head("time_to_first_token_seconds", "summary", "Wait for the first token.")
    name = f"{PREFIX}time_to_first_token_seconds"
    yield f'{name}{{quantile="0.5"}} {stats.ttft_p50:g}'
    yield f'{name}{{quantile="0.95"}} {stats.ttft_p95:g}'
    yield f"{name}_sum {totals.ttft_sum:g}"
    yield f"{name}_count {totals.ttft_count}"


def _metric(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield from _head(name, kind, text)
    yield f"{PREFIX}{name} {value:.15g}"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {text}"
    yield f"# TYPE {PREFIX}{name} {kind}"
