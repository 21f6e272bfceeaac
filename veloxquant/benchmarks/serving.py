"""Decode speed of a whole model through mlx-lm's continuous batching, as the worker runs it.

One generator for each method holds one row of a long context. They take turns in blocks of steps,
each block timed until its last step is computed, so that what else the machine does hits all alike.
The context is made of random keys and values: time does not depend on what is in them.
"""

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.benchmarks.demo import load
from veloxquant.benchmarks.rivals import held_bytes
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.probe import ModelPlan, native_caches
from veloxquant.config.kv_cache import BASELINE, KVCacheConfig

CONTEXT = 4096
FILL_CHUNK = 512
BLOCK = 8
TARGET = ("kivi 4 bit", 0.8)
"""Tokens a second that kivi at 4 bits must reach, as a share of the uncompressed cache's."""

METHODS: dict[str, tuple[str, int]] = {
    BASELINE: (BASELINE, 16),
    "kivi 4 bit": ("kivi", 4),
    "kivi 2 bit": ("kivi", 2),
    "turboquant_rvq 2 bit": ("turboquant_rvq", 2),
    "turboquant_rvq 4 bit": ("turboquant_rvq", 4),
    "snapkv 512": ("snapkv", 2),
    "streaming_llm 516": ("streaming_llm", 2),
}


@contextmanager
def _wired_limit_untouched() -> Iterator[None]:
    """Keep the generator from raising the wired limit of the machine, as the worker does."""
    module: Any = importlib.import_module("mlx_lm.generate")
    original = module.maybe_set_recommended_wired_limit
    module.maybe_set_recommended_wired_limit = lambda: None
    try:
        yield
    finally:
        module.maybe_set_recommended_wired_limit = original


def _filled(plan: ModelPlan, name: str, context: int) -> list[Any]:
    """Caches of one row that hold `context` random tokens."""
    method, bits = METHODS[name]
    if method == BASELINE:
        caches = native_caches(plan.model)
    else:
        caches = new_caches(plan, KVCacheConfig(method=method, bit_width_inlier=bits))
    for cache, shape in zip(caches, plan.shapes(), strict=True):
        for start in range(0, context, FILL_CHUNK):
            n = min(FILL_CHUNK, context - start)
            cache.update_and_fetch(
                mx.random.normal((1, shape.n_kv_heads, n, shape.k_dim)),
                mx.random.normal((1, shape.n_kv_heads, n, shape.v_dim)),
            )
            mx.eval(cache.state)
    return caches


class Runner:
    """One row that decodes, and the times of its blocks of steps."""

    def __init__(self, plan: ModelPlan, name: str, context: int) -> None:
        from mlx_lm.generate import BatchGenerator

        self.name = name
        self.seconds: list[float] = []
        self.processor: list[float] = []
        with _wired_limit_untouched():
            self._generator = BatchGenerator(plan.model, completion_batch_size=1)
        caches = _filled(plan, name, context)
        self._generator.insert([[1]], max_tokens=[1 << 20], caches=[caches])
        self.block(2)
        self.seconds.clear()
        self.processor.clear()

    def block(self, steps: int) -> None:
        """Time `steps` steps; the step that runs ahead is waited for, so none is counted twice."""
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._generator.next()
        mx.synchronize(self._generator.stream)
        self.seconds.append((time.perf_counter() - start) / steps)
        self.processor.append((time.process_time() - busy) / steps)

    @property
    def nbytes(self) -> int:
        """Bytes held, floats counted as 16 bits."""
        held = 0
        for cache in self._generator._generation_batch.prompt_cache:
            held += sum(held_bytes(row) for row in getattr(cache, "rows", [cache]))
        return held


def run(
    *,
    quick: bool = False,
    names: Sequence[str] = tuple(METHODS),
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Decode with every method in turns; plain data, ratios of tokens a second to `fp16`.

    Args:
        quick: fewer blocks.
        names: methods of `METHODS`; `fp16` is always measured.
        report: gets one line for each method.

    Raises:
        ModelMissingError: when the demo model is not there.
    """
    model, _ = load()
    plan = plan_model(model, KVCacheConfig(method="kivi"))
    mx.random.seed(0)
    wanted = [BASELINE, *(name for name in names if name != BASELINE)]
    runners = [Runner(plan, name, CONTEXT) for name in wanted]
    for turn in range(3 if quick else 8):
        first = turn % len(runners)
        for runner in (*runners[first:], *runners[:first]):
            runner.block(BLOCK)
    dense = runners[0]
    rows = [
        {
            "name": runner.name,
            "tokens_per_second": 1 / float(np.median(runner.seconds)),
            "wall": _ratio(dense.seconds, runner.seconds),
            "processor": _ratio(dense.processor, runner.processor),
            "nbytes": runner.nbytes,
        }
        for runner in runners
    ]
    for row in rows:
        report(line(row))
    name, least = TARGET
    clock = "processor" if mx.default_device() == mx.Device(mx.cpu) else "wall"
    reached = next((row[clock] for row in rows if row["name"] == name), None)
    targets = []
    if reached is not None:
        targets.append(
            {"name": name, "ratio": least, "reached": reached, "holds": reached >= least}
        )
    return {"context": CONTEXT, "rows": rows, "targets": targets}


def _ratio(dense: Sequence[float], times: Sequence[float]) -> float:
    return float(np.median(np.array(dense) / np.array(times)))


def line(row: dict[str, Any]) -> str:
    """One line for a terminal."""
    return (
        f"T={CONTEXT} {row['name']:<22} {row['tokens_per_second']:7.2f} tok/s  "
        f"x{row['wall']:.2f} by wall, x{row['processor']:.2f} by processor time  "
        f"{row['nbytes'] / 2**20:7.2f} MiB"
    )
