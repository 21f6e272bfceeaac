"""Time of one decode step of one attention layer: ours, the dense cache, mlx-lm's 4-bit cache.

Every contender holds T tokens and takes a new token in turn, in an order that moves on with each
step, so that whatever else the machine does hits all alike. A step is what a model does in a layer:
write the token, attend to everything. fp32 on both sides on a CPU.

Two clocks are read: the wall's, and the processor time of this process, which does not count what
other programs took. With one BLAS thread both agree on a quiet CPU, so targets are judged by
processor time there; on a GPU, where that means nothing, by the wall's.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from veloxquant.benchmarks.rivals import held_bytes
from veloxquant.cache.builder import build_layer
from veloxquant.cache.context import LayerContext
from veloxquant.cache.view import CacheView
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape

DENSE = "dense"
STOCK = "mlx-lm 4 bit g32"
FILL_CHUNK = 512
WARM_UP = 3
OBSERVED = 32
"""Prompt tokens that attend while a cache is filled: what a scorer looks at."""


@dataclass(frozen=True)
class Heads:
    """One attention shape: query heads, KV heads, head size."""

    n_q: int
    n_kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.n_q}/{self.n_kv} heads, D={self.dim}"


LARGE = Heads(32, 8, 128)
SMALL = Heads(9, 3, 64)


@dataclass(frozen=True)
class Target:
    """`name` must take at most `ratio` times as long as `against`."""

    heads: Heads
    name: str
    against: str
    ratio: float


TARGETS = (
    Target(LARGE, "kivi 4 bit", DENSE, 1.0),
    Target(SMALL, "kivi 4 bit", DENSE, 1.7),
    Target(LARGE, "kivi 2 bit", DENSE, 1.8),
    Target(SMALL, "kivi 2 bit", DENSE, 2.8),
    Target(LARGE, "kivi 4 bit", STOCK, 0.8),
    Target(SMALL, "kivi 4 bit", STOCK, 0.8),
)

CONFIGS = {
    "kivi 4 bit": ("kivi", 4),
    "kivi 2 bit": ("kivi", 2),
    "turboquant_rvq 2 bit": ("turboquant_rvq", 2),
    "turboquant_rvq 3 bit": ("turboquant_rvq", 3),
    "turboquant_rvq 4 bit": ("turboquant_rvq", 4),
    "snapkv 512": ("snapkv", 2),
    "streaming_llm 516": ("streaming_llm", 2),
}


def make_cache(name: str, heads: Heads) -> Any:
    """An empty cache of one layer: a name of `CONFIGS`, `DENSE` or `STOCK`."""
    from mlx_lm.models.cache import KVCache, QuantizedKVCache

    if name == DENSE:
        return KVCache()
    if name == STOCK:
        return QuantizedKVCache(group_size=32, bits=4)
    method, bits = CONFIGS[name]
    shape = LayerShape(heads.n_q, heads.n_kv, heads.dim, heads.dim, 4)
    context = LayerContext(views=True, rope=nn.RoPE(heads.dim))
    return build_layer(KVCacheConfig(method=method, bit_width_inlier=bits), shape, context)


class Lane:
    """One contender: its cache and the times of its steps."""

    def __init__(self, name: str, heads: Heads) -> None:
        self.name = name
        self.cache = make_cache(name, heads)
        self.scale = heads.dim**-0.5
        self.seconds: list[float] = []
        self.processor: list[float] = []

    def attend(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """Write tokens and attend, as a model does."""
        from mlx_lm.models import base

        mask: Any = None if k.shape[2] == 1 else "causal"
        keys, values = self.cache.update_and_fetch(k, v)
        if isinstance(keys, CacheView):
            return keys.attend(q, values, self.scale, mask)
        return base.scaled_dot_product_attention(
            q, keys, values, cache=self.cache, scale=self.scale, mask=mask
        )

    @property
    def judged(self) -> list[float]:
        """Times by the clock that counts here."""
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        return self.processor if on_cpu else self.seconds

    def step(self, q: mx.array, k: mx.array, v: mx.array) -> None:
        """One timed decode step."""
        start, busy = time.perf_counter(), time.process_time()
        mx.eval(self.attend(q, k, v))
        self.seconds.append(time.perf_counter() - start)
        self.processor.append(time.process_time() - busy)


def _tokens(heads: Heads, n: int) -> tuple[mx.array, mx.array, mx.array]:
    q = mx.random.normal((1, heads.n_q, n, heads.dim))
    k, v = (mx.random.normal((1, heads.n_kv, n, heads.dim)) for _ in range(2))
    mx.eval(q, k, v)
    return q, k, v


def fill(lanes: Sequence[Lane], heads: Heads, tokens: int) -> None:
    """Put the same `tokens` random tokens into every lane's cache."""
    for start in range(0, tokens - OBSERVED, FILL_CHUNK):
        _, k, v = _tokens(heads, min(FILL_CHUNK, tokens - OBSERVED - start))
        for lane in lanes:
            lane.cache.update_and_fetch(k, v)
            mx.eval(lane.cache.state)
    q, k, v = _tokens(heads, OBSERVED)
    for lane in lanes:
        mx.eval(lane.attend(q, k, v))


def take_turns(lanes: Sequence[Lane], heads: Heads, steps: int) -> None:
    """Time `steps` steps of every lane after a few that do not count."""
    for step in range(WARM_UP + steps):
        q, k, v = _tokens(heads, 1)
        first = step % len(lanes)
        for lane in (*lanes[first:], *lanes[:first]):
            lane.step(q, k, v)
    for lane in lanes:
        del lane.seconds[:WARM_UP], lane.processor[:WARM_UP]


def race(heads: Heads, tokens: int, names: Sequence[str], steps: int) -> list[Lane]:
    """Fill a cache of every name with `tokens` tokens and time `steps` interleaved steps."""
    mx.random.seed(0)
    lanes = [Lane(name, heads) for name in names]
    fill(lanes, heads, tokens)
    take_turns(lanes, heads, steps)
    return lanes


def ratio(lane: Lane, against: Lane) -> float:
    """Median over steps of a lane's times divided by those of another, by the clock that counts."""
    return _median_ratio(lane.judged, against.judged)


def _median_ratio(times: Sequence[float], against: Sequence[float]) -> float:
    return float(np.median(np.array(times) / np.array(against)))


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        heads: the attention shape.
        tokens: tokens held.
        name: what was measured.
        milliseconds: median wall time of a step.
        wall: median ratio of wall times to the dense cache.
        processor: the same of processor times.
        total: quotient of all processor time, steps that pack a block included.
        nbytes: bytes held, floats counted as 16 bits.
    """

    heads: str
    tokens: int
    name: str
    milliseconds: float
    wall: float
    processor: float
    total: float
    nbytes: int


def rows_of(heads: Heads, tokens: int, lanes: Sequence[Lane]) -> list[Row]:
    """The lanes as lines; ratios are to the first lane."""
    dense = lanes[0]
    return [
        Row(
            heads=str(heads),
            tokens=tokens,
            name=lane.name,
            milliseconds=1e3 * float(np.median(lane.seconds)),
            wall=_median_ratio(lane.seconds, dense.seconds),
            processor=_median_ratio(lane.processor, dense.processor),
            total=sum(lane.processor) / sum(dense.processor),
            nbytes=held_bytes(lane.cache),
        )
        for lane in lanes
    ]


def targets_of(heads: Heads, lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    """What this shape must hold, with the ratios reached."""
    by_name = {lane.name: lane for lane in lanes}
    out = []
    for target in TARGETS:
        if target.heads != heads or not {target.name, target.against} <= by_name.keys():
            continue
        reached = ratio(by_name[target.name], by_name[target.against])
        line = asdict(target) | {"heads": str(heads), "reached": reached}
        out.append(line | {"holds": reached <= target.ratio})
    return out


GROWTH = (1024, 2048, 4096, 8192)
GROWTH_SLACK = 1.25
"""Eight times T may take this much more than eight times the time: noise, caches of the CPU."""


def growth(heads: Heads, names: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Median step times at growing lengths, all in turns, and whether they outgrow the length."""
    mx.random.seed(0)
    lanes: dict[str, list[Lane]] = {name: [] for name in names}
    for tokens in GROWTH:
        new = [Lane(name, heads) for name in names]
        fill(new, heads, tokens)
        for lane in new:
            lanes[lane.name].append(lane)
    take_turns([lane for group in lanes.values() for lane in group], heads, steps)
    out = []
    for name, group in lanes.items():
        ms = [1e3 * float(np.median(lane.judged)) for lane in group]
        holds = ms[-1] <= ms[0] * GROWTH[-1] / GROWTH[0] * GROWTH_SLACK
        out.append(
            {"heads": str(heads), "name": name, "tokens": list(GROWTH), "milliseconds": ms,
             "holds": holds}
        )  # fmt: skip
    return out


def run(*, quick: bool = False, report: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Race all contenders at T=4,096 in both shapes, then a few at growing T; plain data.

    Args:
        quick: fewer steps, one shape, no growth.
        report: gets one line for each contender.
    """
    names = (DENSE, STOCK, *CONFIGS)
    steps = 15 if quick else 64
    rows, targets = [], []
    for heads in (SMALL,) if quick else (LARGE, SMALL):
        lanes = race(heads, 4096, names, steps)
        for row in rows_of(heads, 4096, lanes):
            rows.append(asdict(row))
            report(line(row))
        targets += targets_of(heads, lanes)
    grown = []
    if not quick:
        grown = growth(SMALL, (DENSE, *list(CONFIGS)[:3], "turboquant_rvq 4 bit"), 32)
    return {"rows": rows, "targets": targets, "growth": grown}


def line(row: Row) -> str:
    """One line for a terminal."""
    return (
        f"{row.heads:<20} T={row.tokens:<6} {row.name:<22} {row.milliseconds:8.2f} ms  "
        f"x{row.wall:5.2f} wall, x{row.processor:5.2f} processor, x{row.total:5.2f} in all  "
        f"{row.nbytes / 2**20:6.2f} MiB"
    )
