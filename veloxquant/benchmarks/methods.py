"""Every quantising method at its defaults: bytes held, decode step, prompt, of one layer.

Bytes: rows of 16 bits are put in, and the bytes of every array that the cache then holds are
counted against rows of 16 bits; constants that layers share are given beside them. Decode: a few
methods at a time take turns with the dense cache, at two lengths in the same turns. Prompt: 1,024
tokens in two chunks into an empty cache, without and with attention. `clock.py` says how time is
taken; times are fp32 on both sides.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from veloxquant.benchmarks.clock import Stopwatch, in_turns, median_ratio
from veloxquant.benchmarks.planned import PLAIN, PUBLISHED, SLOW_ENCODERS, chosen
from veloxquant.benchmarks.speed import (
    DENSE,
    FILL_CHUNK,
    LARGE,
    Heads,
    Lane,
    fill,
    random_tokens,
    take_turns,
)
from veloxquant.cache.builder import build_layer
from veloxquant.cache.context import LayerContext
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.memory.walker import arrays_in
from veloxquant.quantizers.sizes import LayerShape

RATIO_SLACK = 0.03
"""Share by which the compression ratio may be below the planned one."""
DECODE_MOST = 3.0
"""A decode step against the dense cache."""
PLAIN_MOST = 1.0
"""The same for methods that are nothing but affine groups or one codebook."""
GROWTH_SLACK = 1.3
"""How much more than in proportion to the length a step may grow: noise, caches of the CPU."""
PROMPT_SECONDS = 1.0
SLOW_PROMPT_SECONDS = 3.0
GROUP = 3
"""Methods that take turns with the dense cache at a time, so that few caches are held at once."""


@dataclass(frozen=True)
class Size:
    """What is measured: `held` tokens for bytes, `contexts` for decode, `prompt` for prompts."""

    heads: Heads
    held: int
    contexts: tuple[int, ...]
    steps: int
    prompt: int
    turns: int


FULL = Size(LARGE, held=4096, contexts=(1088, 4096), steps=24, prompt=1024, turns=3)
QUICK = Size(LARGE, held=4096, contexts=(1088,), steps=5, prompt=1024, turns=1)


def new_layer(name: str, heads: Heads, itemsize: int) -> Any:
    """An empty cache of one layer at the defaults, that answers through the hook."""
    shape = LayerShape(heads.n_q, heads.n_kv, heads.dim, heads.dim, itemsize)
    config = KVCacheConfig(method=name).with_fields(head_dim=heads.dim)
    return build_layer(config, shape, LayerContext(views=True, rope=nn.RoPE(heads.dim)))


def new_lane(name: str, heads: Heads) -> Lane:
    """A contender in decode: the dense cache, or a method."""
    return Lane(name, heads, None if name == DENSE else new_layer(name, heads, 4))


# ---- bytes ----------------------------------------------------------------------------------


def size_of(name: str, size: Size) -> dict[str, Any]:
    """Bytes held of `size.held` tokens in rows of 16 bits, and the ratio to those rows."""
    heads, tokens = size.heads, size.held
    mx.random.seed(0)
    cache = new_layer(name, heads, 2)
    for start in range(0, tokens, FILL_CHUNK):
        _, k, v = random_tokens(heads, min(FILL_CHUNK, tokens - start))
        cache.update_and_fetch(k.astype(mx.float16), v.astype(mx.float16))
        mx.eval(cache.state)
    cache.commit()
    own = {id(a): a.nbytes for a in cache.arrays()}
    nbytes, full = sum(own.values()), 2 * heads.n_kv * tokens * heads.dim * 2
    return {
        "name": name,
        "tokens": tokens,
        "nbytes": nbytes,
        "full": full,
        "ratio": full / nbytes,
        "bits": 16 * nbytes / full,
        "planned": PUBLISHED.get(name),
        "shared": sum(a.nbytes for a in arrays_in([cache]) if id(a) not in own),
    }


def size_targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether caches are as small as planned."""
    return [
        {
            "name": row["name"],
            "asked": f"compression ratio at least {1 - RATIO_SLACK:.2f} of the planned "
            f"{row['planned']:.2f}, T={row['tokens']}",
            "limit": (1 - RATIO_SLACK) * row["planned"],
            "reached": row["ratio"],
            "holds": row["ratio"] >= (1 - RATIO_SLACK) * row["planned"],
        }
        for row in rows
        if row["planned"] is not None
    ]


# ---- decode ---------------------------------------------------------------------------------


def groups(names: Sequence[str]) -> Iterator[list[str]]:
    """The dense cache and the next few methods."""
    for start in range(0, len(names), GROUP):
        yield [DENSE, *names[start : start + GROUP]]


def race(size: Size, names: Sequence[str]) -> dict[int, list[Lane]]:
    """Decode with every contender at every length in the same turns; lanes by length."""
    mx.random.seed(0)
    lanes = {tokens: [new_lane(name, size.heads) for name in names] for tokens in size.contexts}
    for tokens, some in lanes.items():
        fill(some, size.heads, tokens)
    take_turns([lane for some in lanes.values() for lane in some], size.heads, size.steps)
    return lanes


def decode_rows(lanes: dict[int, list[Lane]]) -> list[dict[str, Any]]:
    """The methods as lines; ratios are to the dense cache of the same length and turns."""
    return [
        {
            "name": lane.name,
            "tokens": tokens,
            "milliseconds": lane.milliseconds,
            "judged": lane.judged_milliseconds,
            "wall": median_ratio(lane.seconds, dense.seconds),
            "of_dense": median_ratio(lane.judged, dense.judged),
        }
        for tokens, (dense, *rest) in lanes.items()
        for lane in rest
    ]


def decode_targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether a step is fast enough at every length."""
    out = []
    for row in rows:
        most = PLAIN_MOST if row["name"] in PLAIN else DECODE_MOST
        out.append(
            {
                "name": row["name"],
                "asked": f"a step in at most {most:.2f} of {DENSE}, T={row['tokens']}",
                "limit": most,
                "reached": row["of_dense"],
                "holds": row["of_dense"] <= most,
            }
        )
    return out


def growth_targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether the time of a step grows no faster than the tokens held."""
    out = []
    for name in dict.fromkeys(row["name"] for row in rows):
        first, *_, last = sorted((r for r in rows if r["name"] == name), key=lambda r: r["tokens"])
        most = last["tokens"] / first["tokens"] * GROWTH_SLACK
        reached = last["judged"] / first["judged"]
        out.append(
            {
                "name": name,
                "asked": f"from T={first['tokens']} to {last['tokens']} a step grows at most "
                f"{most:.2f} times",
                "limit": most,
                "reached": reached,
                "holds": reached <= most,
            }
        )
    return out


# ---- prompts --------------------------------------------------------------------------------


class Reader(Stopwatch):
    """One contender with prompts: packs rows only, or attends to them as well."""

    def __init__(self, name: str, *, attends: bool) -> None:
        super().__init__(name)
        self.attends = attends

    def read(self, heads: Heads, parts: Sequence[tuple[mx.array, mx.array, mx.array]]) -> None:
        """Put the parts of a prompt into an empty cache, timed."""
        lane = new_lane(self.name, heads)
        own = [mx.array(q) for q, _, _ in parts]
        mx.eval(own)

        def work() -> None:
            for q, (_, k, v) in zip(own, parts, strict=True):
                if self.attends:
                    mx.eval(lane.attend(q, k, v))
                else:
                    lane.cache.update_and_fetch(k, v)
                mx.eval(lane.cache.state)

        self.time(work)


def prompts(size: Size, names: Sequence[str]) -> list[dict[str, Any]]:
    """Put a prompt into empty caches, without and with attention, in turns after one to warm up."""
    mx.random.seed(0)
    packing = [Reader(name, attends=False) for name in names]
    attending = [Reader(name, attends=True) for name in names]
    for order in in_turns([*packing, *attending], 1 + size.turns):
        parts = [
            random_tokens(size.heads, min(FILL_CHUNK, size.prompt - start))
            for start in range(0, size.prompt, FILL_CHUNK)
        ]
        for reader in order:
            reader.read(size.heads, parts)
    for reader in (*packing, *attending):
        reader.forget(1)
    return [
        {
            "name": packs.name,
            "tokens": size.prompt,
            "append_ms": packs.milliseconds,
            "attend_ms": attends.milliseconds,
            "judged": packs.judged_milliseconds,
            "attend_judged": attends.judged_milliseconds,
        }
        for packs, attends in zip(packing, attending, strict=True)
    ]


def prompt_targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether a prompt is packed fast enough."""
    out = []
    for row in rows:
        most = SLOW_PROMPT_SECONDS if row["name"] in SLOW_ENCODERS else PROMPT_SECONDS
        out.append(
            {
                "name": row["name"],
                "asked": f"{row['tokens']} tokens of a prompt in at most {most:.1f} s a layer",
                "limit": most,
                "reached": row["judged"] / 1e3,
                "holds": row["judged"] <= 1e3 * most,
            }
        )
    return out


# ---- all ------------------------------------------------------------------------------------


def run(
    *,
    quick: bool = False,
    methods: tuple[str, ...] = (),
    size: Size | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure every method; plain data: sizes, decode, prompts, targets.

    Args:
        quick: the shorter context and few steps; whether a step outgrows the length is not asked.
        methods: names of the method table; all quantising ones when empty.
        size: what is measured, if neither of the usual two.
        report: gets one line for each measurement.

    Raises:
        ValueError: for a name that is no ready quantising method.
    """
    size = size or (QUICK if quick else FULL)
    rows = chosen(methods)
    names = [row.name for row in rows if row.couples == 1]
    left_out = [row.name for row in rows if row.couples != 1]
    sizes, decode, prompt = [], [], []
    for name in names:
        sizes.append(size_of(name, size))
        report(size_line(sizes[-1]))
    for some in groups(names):
        found = decode_rows(race(size, some))
        decode += found
        for row in found:
            report(decode_line(row))
    for some in groups(names):
        found = prompts(size, some[1:])
        prompt += found
        for row in found:
            report(prompt_line(row))
    targets = size_targets(sizes) + decode_targets(decode) + prompt_targets(prompt)
    if len(size.contexts) > 1:
        targets += growth_targets(decode)
    return {
        "size": asdict(size) | {"heads": str(size.heads)},
        "sizes": sizes,
        "decode": decode,
        "prompts": prompt,
        "targets": targets,
        "left_out": left_out,
    }


def size_line(row: dict[str, Any]) -> str:
    """Bytes of one method for a terminal."""
    planned = "" if row["planned"] is None else f", planned x{row['planned']:.2f}"
    return (
        f"T={row['tokens']:<5} {row['name']:<16} {row['nbytes'] / 2**20:6.2f} MiB  "
        f"x{row['ratio']:.2f} smaller{planned}; shared {row['shared'] / 2**10:.0f} KiB"
    )


def decode_line(row: dict[str, Any]) -> str:
    """One decode measurement for a terminal."""
    return (
        f"T={row['tokens']:<5} {row['name']:<16} {row['milliseconds']:8.2f} ms a step  "
        f"x{row['wall']:.2f} of {DENSE} by wall, x{row['of_dense']:.2f} judged"
    )


def prompt_line(row: dict[str, Any]) -> str:
    """One prompt for a terminal."""
    return (
        f"{row['tokens']} new {row['name']:<16} {row['append_ms']:8.1f} ms, with attention "
        f"{row['attend_ms']:8.1f} ms; judged {row['judged']:.1f} and {row['attend_judged']:.1f}"
    )
