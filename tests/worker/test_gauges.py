"""Bytes that the caches claim against bytes that MLX holds, after every step of a real engine."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import pytest

from veloxquant.cache.table import TABLE
from veloxquant.memory.walker import arrays_in
from veloxquant.worker.jobs import Sampling

LONG, SHORT, ANSWER = 600, 200, 24
EVERY_PIECE = Sampling(
    temperature=0.8, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.1, seed=3,
    logit_bias=tuple((token, 1.0) for token in range(200)),
)  # fmt: skip
"""Settings that make samplers and processors hold arrays of their own."""
PACKED = {"eviction_storage": "affine4"}
KINDS = [
    ("fp16", {}, EVERY_PIECE),
    ("kvquant", {}, None),
    ("minicache", {}, None),
    ("snapkv", {**PACKED, "snap_budget": 256}, None),
    ("tova", {"tova_budget": 256}, None),
]
"""Exact rows, many small packed arrays, layers that share, a prompt cut and packed, and rows that
go at every step with a query kept."""
ON_CPU = mx.default_device() == mx.cpu
PER_ARRAY = 0 if ON_CPU else 48 << 10
"""Metal rounds up to a page of 16 KiB and hands out freed buffers up to two pages larger."""


class Look(NamedTuple):
    """The gauges after a step, and what they may differ by."""

    claimed: int
    resident: int
    tokens: tuple[int, ...]
    slack: int

    @property
    def is_off(self) -> bool:
        return abs(self.resident - self.claimed) > self.slack


def watch(bench: Any) -> list[Look]:
    """Look at the gauges after each step from now on."""
    seen: list[Look] = []

    def note(jobs: list[Any], gauges: Any) -> None:
        arrays = len(arrays_in(bench.engine._batch.cache_lists())) if PER_ARRAY else 0
        slack = 1024 + gauges.kv_claimed // 1000 + PER_ARRAY * arrays
        tokens = tuple(job.output_tokens for job in jobs)
        seen.append(Look(gauges.kv_claimed, gauges.kv_resident, tokens, slack))

    bench.after_each_step(note)
    return seen


def hold_what_they_claim(bench: Any, sampling: Sampling | None) -> None:
    """One conversation to its end, then two of which one outlives the other, then a cancelled one.

    The gauges agree after each step, and with the audit when all is done.
    """
    fields = {} if sampling is None else {"sampling": sampling}
    prompt = bench.serving.tokenizer.encode("The river runs down to the sea at last. ") * LONG
    seen = watch(bench)
    bench.submit(prompt[:LONG], ANSWER, **fields).text()
    two = [
        bench.submit(prompt[:LONG], 2 * ANSWER, **fields),
        bench.submit(prompt[7 : 7 + SHORT], ANSWER, **fields),
    ]
    for asked in two:
        asked.text()
    cancelled = bench.submit(prompt[:SHORT], 200, **fields)
    cancelled.next()
    bench.engine.cancel(cancelled.job.id)
    cancelled.text()
    assert bench.engine.wait_idle(10)
    assert max(look.claimed for look in seen) > 100_000
    assert any(len(look.tokens) == 2 and min(look.tokens) > 0 for look in seen)
    assert [look for look in seen if look.is_off] == []
    counts = bench.engine.audit().result(10)
    assert counts["claimed"] == counts["walked"] == 0
    assert abs(counts["resident"]) <= 1024


@pytest.mark.parametrize(("method", "options", "sampling"), KINDS, ids=[k[0] for k in KINDS])
def test_caches_hold_what_they_claim_after_every_step(
    make_bench: Callable[..., Any], method: str, options: dict[str, Any], sampling: Any
) -> None:
    bench = make_bench(method=method, options=options, context=1024, batch=4)
    hold_what_they_claim(bench, sampling)


@pytest.mark.slow
@pytest.mark.parametrize("method", [row.name for row in TABLE.values() if row.is_ready])
def test_caches_of_every_method_hold_what_they_claim(
    make_bench: Callable[..., Any], method: str
) -> None:
    hold_what_they_claim(make_bench(method=method, context=1024, batch=4), None)
