"""Time of one decode step of one attention layer: ours, the dense cache, mlx-lm's 4-bit cache.

Every contender holds T tokens and takes a new token in turn; `clock.py` says how time is taken. A
step is what a model does in a layer: write the token, attend to everything. fp32 on both sides on a
CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from veloxquant.benchmarks.clock import Stopwatch, in_turns, median_ratio
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


CONFIGS = {
    "kivi 4 bit": ("kivi", 4),
    "kivi 2 bit": ("kivi", 2),
    "turboquant_rvq 2 bit": ("turboquant_rvq", 2),
    "turboquant_rvq 3 bit": ("turboquant_rvq", 3),
    "turboquant_rvq 4 bit": ("turboquant_rvq", 4),
    "snapkv 512": ("snapkv", 2),
    "streaming_llm 516": ("streaming_llm", 2),
}
PACKED = tuple(name for name in CONFIGS if name.endswith("bit"))
"""Those that keep every token, so that the kernel must read T of them."""

LENGTHS = (4096, 8192)
"""Tokens held at which the targets must hold."""

TARGETS = tuple(
    Target(heads, name, against, most)
    for heads, of_dense in ((LARGE, 0.7), (SMALL, 0.9))
    for against, most in ((DENSE, of_dense), (STOCK, 1 / 3))
    for name in PACKED
)


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


class Lane(Stopwatch):
    """One contender: its cache and the times of its steps."""

    def __init__(self, name: str, heads: Heads, cache: Any = None) -> None:
        super().__init__(name)
        self.cache = make_cache(name, heads) if cache is None else cache
        self.scale = heads.dim**-0.5

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

    def step(self, q: mx.array, k: mx.array, v: mx.array) -> None:
        """One timed step."""
        own = mx.array(q)  # mlx-lm scales the queries of its quantized cache in place
        mx.eval(own)
        self.time(lambda: mx.eval(self.attend(own, k, v)))


def random_tokens(heads: Heads, n: int) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of `n` tokens, (1, heads, n, D), evaluated."""
    q = mx.random.normal((1, heads.n_q, n, heads.dim))
    k, v = (mx.random.normal((1, heads.n_kv, n, heads.dim)) for _ in range(2))
    mx.eval(q, k, v)
    return q, k, v


def fill(lanes: Sequence[Lane], heads: Heads, tokens: int) -> None:
    """Put the same `tokens` random tokens into every lane's cache."""
    for start in range(0, tokens - OBSERVED, FILL_CHUNK):
        _, k, v = random_tokens(heads, min(FILL_CHUNK, tokens - OBSERVED - start))
        for lane in lanes:
            lane.cache.update_and_fetch(k, v)
            mx.eval(lane.cache.state)
    q, k, v = random_tokens(heads, OBSERVED)
    for lane in lanes:
        mx.eval(lane.attend(q, k, v))


def take_turns(lanes: Sequence[Lane], heads: Heads, steps: int) -> None:
    """Time `steps` steps of every lane after a few that do not count."""
    for order in in_turns(lanes, WARM_UP + steps):
        q, k, v = random_tokens(heads, 1)
        for lane in order:
            lane.step(q, k, v)
    for lane in lanes:
        lane.forget(WARM_UP)


def race(heads: Heads, tokens: int, names: Sequence[str], steps: int) -> list[Lane]:
    """Fill a cache of every name with `tokens` tokens and time `steps` interleaved steps."""
    mx.random.seed(0)
    lanes = [Lane(name, heads) for name in names]
    fill(lanes, heads, tokens)
    take_turns(lanes, heads, steps)
    return lanes


def ratio(lane: Lane, against: Lane) -> float:
    """Median over steps of a lane's times divided by those of another, by the clock that counts."""
    return median_ratio(lane.judged, against.judged)


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
            milliseconds=lane.milliseconds,
            wall=median_ratio(lane.seconds, dense.seconds),
            processor=median_ratio(lane.processor, dense.processor),
            total=sum(lane.processor) / sum(dense.processor),
            nbytes=held_bytes(lane.cache),
        )
        for lane in lanes
    ]


def targets_of(heads: Heads, tokens: int, lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    """What this shape must hold with `tokens` tokens, with the ratios reached."""
    by_name = {lane.name: lane for lane in lanes}
    out = []
    for target in TARGETS:
        if target.heads != heads or not {target.name, target.against} <= by_name.keys():
            continue
        reached = ratio(by_name[target.name], by_name[target.against])
        out.append(
            asdict(target)
            | {
                "heads": str(heads),
                "tokens": tokens,
                "reached": reached,
                "holds": reached <= target.ratio,
                "asked": f"at most {target.ratio:.2f} of {target.against}, {heads}, T={tokens}",
            }
        )
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
        ms = [lane.judged_milliseconds for lane in group]
        holds = ms[-1] <= ms[0] * GROWTH[-1] / GROWTH[0] * GROWTH_SLACK
        out.append(
            {"heads": str(heads), "name": name, "tokens": list(GROWTH), "milliseconds": ms,
             "holds": holds}
        )  # fmt: skip
    return out


def run(*, quick: bool = False, report: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Race all contenders at every length in both shapes, then a few at growing T; plain data.

    Args:
        quick: fewer steps, one shape and length, no growth.
        report: gets one line for each contender.
    """
    names = (DENSE, STOCK, *CONFIGS)
    steps = 15 if quick else 64
    rows, targets = [], []
    for heads in (SMALL,) if quick else (LARGE, SMALL):
        for tokens in LENGTHS[:1] if quick else LENGTHS:
            lanes = race(heads, tokens, names, steps)
            for row in rows_of(heads, tokens, lanes):
                rows.append(asdict(row))
                report(line(row))
            targets += targets_of(heads, tokens, lanes)
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
