"""Time of reading a prompt: attention of many tokens over packed history, and the encoders.

Attention: one layer holds a history and takes a chunk of a prompt, as a model that reads a long
prompt does: write the chunk, attend causally to everything. Every turn starts from a copy of the
same history. Encoders: rows of one layer to packed arrays, for every format.
`clock.py` says how time is taken.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from veloxquant.benchmarks.clock import Stopwatch, in_turns, median_ratio
from veloxquant.benchmarks.speed import (
    DENSE,
    LARGE,
    PACKED,
    STOCK,
    Heads,
    Lane,
    fill,
    random_tokens,
)
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.sizes import CodecSpec
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.codebook import CodebookSpec


@dataclass(frozen=True)
class Size:
    """What is read: `prompt` tokens over `history` tokens, in `turns` that count."""

    heads: Heads
    history: int
    prompt: int
    turns: int

    def __str__(self) -> str:
        return f"{self.prompt} tokens over {self.history}, {self.heads}"


FULL = Size(LARGE, history=4096, prompt=256, turns=4)
QUICK = Size(LARGE, history=1024, prompt=64, turns=2)
OF_STOCK = 0.5
"""Share of the time of mlx-lm's 4-bit cache that a packed method may take."""

ROWS = (1, 8, 1024, 128)
"""What the encoders pack: (B, H, tokens, D)."""
ENCODER_MS = 20.0
"""Milliseconds that an encoder may take for `ROWS`."""
GROUP = 32
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
CODEBOOK_BITS = (1, 2, 3, 4)
WARM_UP = 2


def formats() -> dict[str, CodecSpec]:
    """Every format that is timed, by the name in the table."""
    out: dict[str, CodecSpec] = {}
    for bits in AFFINE_BITS:
        out[f"affine {bits} bit, per token"] = AffineTokenSpec(bits, GROUP)
        out[f"affine {bits} bit, per channel"] = AffineChannelSpec(bits, GROUP)
    for bits in CODEBOOK_BITS:
        out[f"codebook {bits} bit"] = CodebookSpec(bits, seed=0, unbiased=True)
    return out


def read_prompts(size: Size, names: Sequence[str]) -> list[Lane]:
    """Let every contender read a chunk of a prompt in turns; the first turn does not count."""
    mx.random.seed(0)
    lanes = [Lane(name, size.heads) for name in names]
    fill(lanes, size.heads, size.history)
    for order in in_turns(lanes, 1 + size.turns):
        q, k, v = random_tokens(size.heads, size.prompt)
        for lane in order:
            history = lane.cache
            lane.cache = copy.deepcopy(history)
            mx.eval(lane.cache.state)
            lane.step(q, k, v)
            lane.cache = history
    for lane in lanes:
        lane.forget(1)
    return lanes


def rows_of(size: Size, lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    """The lanes as lines, with ratios to the dense cache and to mlx-lm's 4-bit cache."""
    by_name = {lane.name: lane for lane in lanes}
    return [
        {
            "heads": str(size.heads),
            "history": size.history,
            "prompt": size.prompt,
            "name": lane.name,
            "milliseconds": lane.milliseconds,
            "of_dense": median_ratio(lane.judged, by_name[DENSE].judged),
            "of_stock": median_ratio(lane.judged, by_name[STOCK].judged),
        }
        for lane in lanes
    ]


def attention_targets(size: Size, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether the packed methods are fast enough."""
    return [
        {
            "name": row["name"],
            "asked": f"at most {OF_STOCK:.2f} of {STOCK}, {size}",
            "limit": OF_STOCK,
            "reached": row["of_stock"],
            "holds": row["of_stock"] <= OF_STOCK,
        }
        for row in rows
        if row["name"] in PACKED
    ]


def encode_all(shape: Sequence[int], turns: int) -> list[Stopwatch]:
    """Pack fp32 rows (B, H, T, D) in every format in turns."""
    mx.random.seed(0)
    x = mx.random.normal(tuple(shape))
    mx.eval(x)
    codecs = {name: codec_for(spec, shape[-1]) for name, spec in formats().items()}
    clocks = [Stopwatch(name) for name in codecs]
    for order in in_turns(clocks, WARM_UP + turns):
        for clock in order:
            codec = codecs[clock.name]
            clock.time(lambda codec=codec: mx.eval(list(codec.encode(x).values())))
    for clock in clocks:
        clock.forget(WARM_UP)
    return clocks


def encoders_of(clocks: Sequence[Stopwatch]) -> list[dict[str, Any]]:
    """The encoders as lines: medians of wall time and by the clock that counts."""
    return [
        {
            "name": clock.name,
            "milliseconds": clock.milliseconds,
            "judged": clock.judged_milliseconds,
        }
        for clock in clocks
    ]


def encoder_targets(
    shape: Sequence[int], encoders: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Whether every encoder is fast enough."""
    _, heads, tokens, dim = shape
    return [
        {
            "name": f"encoder {row['name']}",
            "asked": f"at most {ENCODER_MS:.0f} ms for {tokens} tokens x {heads} heads, D={dim}",
            "limit": ENCODER_MS,
            "reached": row["judged"],
            "holds": row["judged"] <= ENCODER_MS,
        }
        for row in encoders
    ]


def run(*, quick: bool = False, report: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Time attention of prompts and all encoders; plain data.

    Args:
        quick: a short prompt over a short history, for which no target is set, and fewer turns.
        report: gets one line for each contender.
    """
    size = QUICK if quick else FULL
    rows = rows_of(size, read_prompts(size, (DENSE, STOCK, *PACKED)))
    for row in rows:
        report(line(row))
    encoders = encoders_of(encode_all(ROWS, 5 if quick else 15))
    for row in encoders:
        report(f"{row['name']:<26} {row['milliseconds']:8.2f} ms, judged {row['judged']:8.2f} ms")
    targets = [] if quick else attention_targets(size, rows)
    return {
        "rows": rows,
        "shape": list(ROWS),
        "encoders": encoders,
        "targets": targets + encoder_targets(ROWS, encoders),
    }


def line(row: dict[str, Any]) -> str:
    """One contender for a terminal."""
    return (
        f"{row['prompt']} over {row['history']}, {row['heads']:<20} {row['name']:<22} "
        f"{row['milliseconds']:9.1f} ms  x{row['of_dense']:.2f} of dense, "
        f"x{row['of_stock']:.2f} of {STOCK}"
    )
