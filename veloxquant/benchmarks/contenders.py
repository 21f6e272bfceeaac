"""What the quality benchmark measures: the exact cache, every quantising method, and rivals."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from veloxquant.benchmarks.planned import chosen, settings_of
from veloxquant.benchmarks.rivals import random_caches, stock_quantized
from veloxquant.cache.builder import new_caches
from veloxquant.cache.probe import ModelPlan, native_caches
from veloxquant.cache.table import row_of
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import SnapKVOptions, StreamingLLMOptions

STOCK = ((2, 64), (2, 32), (4, 64), (4, 32), (8, 64), (8, 32))
QUICK_STOCK = ((2, 32), (4, 32), (8, 64))
"""Bits and group of mlx-lm's quantized cache."""

Report = Callable[[str], None]
Caches = tuple[list[Any], Callable[[], None]]


@dataclass(frozen=True)
class Size:
    """How much is read; `budget` is the rows of the cache that evicting methods may keep."""

    prompt: int
    steps: int
    budget: int

    @property
    def tokens(self) -> int:
        """Tokens in the cache at the end."""
        return self.prompt + self.steps


@dataclass(frozen=True)
class Contender:
    """Something to measure: `kind` is exact, ours, stock, evicting or random.

    `method`, `width` and `default` are those of `Outcome`.
    """

    name: str
    kind: str
    make: Callable[[], Caches]
    method: str = ""
    width: int | None = None
    default: bool = False


def _nothing() -> None:
    pass


def contenders(
    plan: ModelPlan, size: Size, methods: tuple[str, ...], *, quick: bool, evicting: bool
) -> Iterator[Contender]:
    """Everything that is measured at this size, the exact cache first.

    Methods are measured as they are without a calibration of the model.

    Raises:
        ValueError: for a name that is no ready quantising method.
    """
    yield Contender("fp16 (exact)", "exact", lambda: (native_caches(plan.model), _nothing))
    dim = plan.shapes()[0].k_dim
    for row in chosen(methods):
        for width, default, config in settings_of(row.name, dim, quick=quick):
            name = row.name if width is None else f"{row.name} {width} bit"
            yield Contender(name, "ours", _ours(plan, config), row.name, width, default)
    for bits, group in QUICK_STOCK if quick else STOCK:
        yield Contender(
            f"mlx-lm {bits} bit g{group}",
            "stock",
            lambda bits=bits, group=group: stock_quantized(plan, bits, group),
        )
    if evicting:
        yield from _evicting(plan, size)


def _ours(plan: ModelPlan, config: KVCacheConfig) -> Callable[[], Caches]:
    row_of(config.method).check(config)
    return lambda: (new_caches(plan, config), _nothing)


def _evicting(plan: ModelPlan, size: Size) -> Iterator[Contender]:
    """Evicting methods, and eviction by lot at the same budget."""
    snap = SnapKVOptions(snap_budget=size.budget)
    stream = StreamingLLMOptions(stream_window_size=size.budget - 4)
    for method, options in (("snapkv", snap), ("streaming_llm", stream)):
        config = KVCacheConfig(method=method, options=options)
        yield Contender(f"{method} {size.budget}", "evicting", _ours(plan, config), method)
    lots: tuple[tuple[str, Literal["prompt", "always"]], ...] = (
        ("snapkv", "prompt"),
        ("streaming_llm", "always"),
    )
    for name, when in lots:
        recent = snap.snap_obs_window if when == "prompt" else 1
        yield Contender(
            f"random for {name}",
            "random",
            lambda when=when, recent=recent: (
                random_caches(plan, size.budget, 4, recent, when),
                _nothing,
            ),
        )
