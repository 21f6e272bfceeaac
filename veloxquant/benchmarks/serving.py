"""Decode speed of a whole model with each cache, in one process.

Every contender decodes one sequence of a long context, all take turns step by step, and a turn ends
when its step is computed; `clock.py` says how time is taken. Ours run through mlx-lm's continuous
batching, as in the worker, and so does mlx-lm's plain cache. Its 4-bit cache cannot join a batch
and runs through `generate_step`, as mlx-lm itself runs it. The context is made of random keys and
values: time does not depend on what is in them. BLAS uses all cores, as in the worker; one
contender holds hardly any context and shows what weights and sampling alone take, which no cache
can undercut.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from veloxquant.benchmarks.clock import Stopwatch, in_turns, median_ratio
from veloxquant.benchmarks.demo import load
from veloxquant.benchmarks.rivals import held_bytes
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.probe import ModelPlan, native_caches
from veloxquant.config.kv_cache import BASELINE, KVCacheConfig
from veloxquant.core.blas import blas_on_all_cores

CONTEXTS = (1024, 4096)
FILL_CHUNK = 512
WARM_UP = 3
NATIVE = "mlx-lm plain"
STOCK = "mlx-lm 4 bit g32"
FLOOR = "nothing held"

METHODS: dict[str, tuple[str, int]] = {
    BASELINE: (BASELINE, 2),
    "kivi 4 bit": ("kivi", 4),
    "kivi 2 bit": ("kivi", 2),
    "turboquant_rvq 2 bit": ("turboquant_rvq", 2),
    "turboquant_rvq 4 bit": ("turboquant_rvq", 4),
    "snapkv 512": ("snapkv", 2),
    "streaming_llm 516": ("streaming_llm", 2),
}
PACKED = tuple(name for name in METHODS if name.endswith("bit"))


@dataclass(frozen=True)
class Target:
    """Packed methods must decode at least `ratio` times as fast as `against`."""

    context: int
    against: str
    ratio: float


TARGETS = (
    Target(4096, BASELINE, 0.95),
    Target(1024, STOCK, 1.25),
    Target(4096, STOCK, 1.5),
)


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


def _empty(plan: ModelPlan, name: str) -> list[Any]:
    """Fresh caches of one sequence."""
    from mlx_lm.models.cache import QuantizedKVCache

    if name in (NATIVE, FLOOR):
        return native_caches(plan.model)
    if name == STOCK:
        return [QuantizedKVCache(group_size=32, bits=4) for _ in native_caches(plan.model)]
    method, bits = METHODS[name]
    return new_caches(plan, KVCacheConfig(method=method, bit_width_inlier=bits))


def _filled(plan: ModelPlan, name: str, context: int) -> list[Any]:
    """Caches of one sequence that hold `context` random tokens."""
    caches = _empty(plan, name)
    context = 1 if name == FLOOR else context
    for cache, shape in zip(caches, plan.shapes(), strict=True):
        for start in range(0, context, FILL_CHUNK):
            n = min(FILL_CHUNK, context - start)
            cache.update_and_fetch(
                mx.random.normal((1, shape.n_kv_heads, n, shape.k_dim)),
                mx.random.normal((1, shape.n_kv_heads, n, shape.v_dim)),
            )
            mx.eval(cache.state)
    return caches


class Batched(Stopwatch):
    """One sequence in a batch of its own, decoded as the worker does."""

    def __init__(self, plan: ModelPlan, name: str, context: int) -> None:
        from mlx_lm.generate import BatchGenerator

        super().__init__(name)
        with _wired_limit_untouched():
            self._generator = BatchGenerator(plan.model, completion_batch_size=1)
        caches = _filled(plan, name, context)
        self._generator.insert([[1]], max_tokens=[1 << 20], caches=[caches])

    def step(self) -> None:
        """Decode a token; the step that runs ahead is waited for, so none is counted twice."""
        self._generator.next()
        mx.synchronize(self._generator.stream)

    def close(self) -> None:
        """Give the generator's resources back."""
        self._generator.close()

    @property
    def nbytes(self) -> int:
        """Bytes held, floats counted as 16 bits."""
        held = 0
        for cache in self._generator._generation_batch.prompt_cache:
            held += sum(held_bytes(row) for row in getattr(cache, "rows", [cache]))
        return held


class Single(Stopwatch):
    """One sequence without a batch, decoded by mlx-lm's `generate_step`."""

    def __init__(self, plan: ModelPlan, name: str, context: int) -> None:
        module: Any = importlib.import_module("mlx_lm.generate")
        super().__init__(name)
        self._caches = _filled(plan, name, context)
        self._stream = module.generation_stream
        self._tokens = module.generate_step(
            mx.array([1]), plan.model, max_tokens=-1, prompt_cache=self._caches
        )

    def step(self) -> None:
        """Decode a token; the step that runs ahead is waited for, so none is counted twice."""
        next(self._tokens)
        mx.synchronize(self._stream)

    def close(self) -> None:
        """End the generator."""
        self._tokens.close()

    @property
    def nbytes(self) -> int:
        """Bytes held, floats counted as 16 bits."""
        return sum(held_bytes(cache) for cache in self._caches)


Runner = Batched | Single


def decode(plan: ModelPlan, context: int, names: Sequence[str], steps: int) -> list[Runner]:
    """Decode `steps` tokens with every contender in turns, after a few that do not count."""
    mx.random.seed(0)
    runners = [(Single if name == STOCK else Batched)(plan, name, context) for name in names]
    for order in in_turns(runners, WARM_UP + steps):
        for runner in order:
            runner.time(runner.step)
    for runner in runners:
        runner.forget(WARM_UP)
    return runners


def rows_of(context: int, runners: Sequence[Runner]) -> list[dict[str, Any]]:
    """The contenders as lines, with ratios of tokens a second to `fp16`."""
    plain = next(runner for runner in runners if runner.name == BASELINE)
    return [
        {
            "context": context,
            "name": runner.name,
            "tokens_per_second": 1e3 / runner.milliseconds,
            "wall": median_ratio(plain.seconds, runner.seconds),
            "processor": median_ratio(plain.processor, runner.processor),
            "total": sum(plain.processor) / sum(runner.processor),
            "nbytes": runner.nbytes,
        }
        for runner in runners
    ]


def targets_of(context: int, runners: Sequence[Runner]) -> list[dict[str, Any]]:
    """What must hold with `context` tokens, with the ratios reached."""
    by_name = {runner.name: runner for runner in runners}
    out = []
    for target in TARGETS:
        if target.context != context or target.against not in by_name:
            continue
        for name in PACKED:
            if name in by_name:
                reached = median_ratio(by_name[target.against].judged, by_name[name].judged)
                out.append(
                    {
                        "context": context,
                        "name": name,
                        "against": target.against,
                        "ratio": target.ratio,
                        "reached": reached,
                        "holds": reached >= target.ratio,
                        "asked": f"at least {target.ratio:.2f} times the tokens a second of "
                        f"{target.against}, T={context}",
                    }
                )
    return out


def run(
    *,
    quick: bool = False,
    names: Sequence[str] = (FLOOR, NATIVE, STOCK, *METHODS),
    contexts: Sequence[int] = CONTEXTS,
    steps: int = 32,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Decode with every contender in turns at every length; plain data.

    Args:
        quick: the shortest context and few steps.
        names: of `METHODS`, `FLOOR`, `NATIVE` or `STOCK`; `fp16` is always measured.
        contexts: tokens held before the first step.
        steps: tokens decoded by each.
        report: gets one line for each contender.

    Raises:
        ModelMissingError: when the demo model is not there.
    """
    model, _ = load()
    plan = plan_model(model, KVCacheConfig(method="kivi"))
    wanted = [BASELINE, *(name for name in names if name != BASELINE)]
    rows, targets = [], []
    for context in contexts[:1] if quick else contexts:
        with blas_on_all_cores():
            runners = decode(plan, context, wanted, 6 if quick else steps)
        for row in rows_of(context, runners):
            rows.append(row)
            report(line(row))
        targets += targets_of(context, runners)
        for runner in runners:
            runner.close()
    return {"rows": rows, "targets": targets}


def line(row: dict[str, Any]) -> str:
    """One line for a terminal."""
    return (
        f"T={row['context']:<5} {row['name']:<22} {row['tokens_per_second']:7.2f} tok/s  "
        f"x{row['wall']:.2f} by wall, x{row['processor']:.2f} by processor time, "
        f"x{row['total']:.2f} in all  {row['nbytes'] / 2**20:7.2f} MiB"
    )
