"""Every method that gives up tokens: decode step and prompt of one layer.

Decode, in turns with the dense cache: a budget of every token at the long context, where nothing is
saved and each step may evict; and a small budget at both contexts, where a step must cost the same.
Prompt: 1,024 tokens in two chunks with attention into an empty cache, against the dense cache.
`clock.py` says how time is taken; times are fp32 on both sides.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from veloxquant.benchmarks.clock import Stopwatch, in_turns, median_ratio
from veloxquant.benchmarks.keepers import BUDGETS, config_of, rocket_ratio
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
from veloxquant.quantizers.sizes import LayerShape

DECODE_MOST = 3.0
"""A decode step with a budget of all tokens, against the dense cache that holds as many."""
CONSTANT_MOST = 1.3
"""A step with a small budget at the long context, against one at the short: noise."""
PROMPT_SECONDS = 1.0
"""What a prompt may cost beyond the attention that a dense cache needs as well."""
GROUP = 2
"""Methods that take turns at a time, so that few caches are held at once."""


@dataclass(frozen=True)
class Size:
    """What is measured: rows of the small budget, short and long context, tokens of a prompt."""

    heads: Heads
    budget: int
    short: int
    long: int
    steps: int
    prompt: int
    turns: int


FULL = Size(LARGE, budget=512, short=1088, long=4096, steps=24, prompt=1024, turns=3)
QUICK = Size(LARGE, budget=512, short=640, long=1088, steps=5, prompt=1024, turns=1)


@dataclass(frozen=True)
class Case:
    """A method with a budget of `rows` after `tokens` tokens; the dense cache has no method."""

    method: str
    tokens: int
    rows: int

    def new_lane(self, heads: Heads) -> Lane:
        """An empty cache that answers through the hook."""
        if not self.method:
            return Lane(DENSE, heads)
        config = config_of(self.method, self.rows)
        if self.method == "rocketkv":
            ratio = rocket_ratio(self.rows / max(self.rows, self.tokens))
            config = config.with_fields(rocketkv_compression_ratio=ratio)
        shape = LayerShape(heads.n_q, heads.n_kv, heads.dim, heads.dim, 4)
        context = LayerContext(views=True, rope=nn.RoPE(heads.dim))
        return Lane(self.method, heads, build_layer(config, shape, context))


def cases(size: Size, names: Sequence[str]) -> list[Case]:
    """The dense cache, and three cases a method."""
    out = [Case("", size.long, size.long)]
    for name in names:
        out += [
            Case(name, size.long, size.long),
            Case(name, size.short, size.budget),
            Case(name, size.long, size.budget),
        ]
    return out


def race(size: Size, names: Sequence[str]) -> list[dict[str, Any]]:
    """Decode with every case in the same turns; ratios are to the dense cache."""
    mx.random.seed(0)
    asked = cases(size, names)
    lanes = [case.new_lane(size.heads) for case in asked]
    for tokens in {case.tokens for case in asked}:
        some = [lane for case, lane in zip(asked, lanes, strict=True) if case.tokens == tokens]
        fill(some, size.heads, tokens)
    take_turns(lanes, size.heads, size.steps)
    dense = lanes[0]
    return [
        {
            "name": case.method,
            "tokens": case.tokens,
            "budget": case.rows,
            "rows": lane.cache.size(),
            "milliseconds": lane.milliseconds,
            "judged": lane.judged_milliseconds,
            "wall": median_ratio(lane.seconds, dense.seconds),
            "of_dense": median_ratio(lane.judged, dense.judged),
        }
        for case, lane in zip(asked[1:], lanes[1:], strict=True)
    ]


def decode_targets(size: Size, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether a step is fast enough, and costs the same however many tokens came before."""
    table = {(row["name"], row["tokens"], row["budget"]): row for row in rows}
    out = []
    for name in dict.fromkeys(row["name"] for row in rows):
        whole = table[name, size.long, size.long]
        first, last = (table[name, n, size.budget] for n in (size.short, size.long))
        constant = last["judged"] / first["judged"]
        out += [
            {
                "name": name,
                "asked": f"a step with a budget of all {size.long} tokens in at most "
                f"{DECODE_MOST:.2f} of {DENSE}",
                "limit": DECODE_MOST,
                "reached": whole["of_dense"],
                "holds": whole["of_dense"] <= DECODE_MOST,
            },
            {
                "name": name,
                "asked": f"a step with {size.budget} rows after {size.long} tokens in at most "
                f"{CONSTANT_MOST:.2f} of one after {size.short}",
                "limit": CONSTANT_MOST,
                "reached": constant,
                "holds": constant <= CONSTANT_MOST,
            },
        ]
    return out


# ---- prompts --------------------------------------------------------------------------------


def prompts(size: Size, names: Sequence[str]) -> list[dict[str, Any]]:
    """Read a prompt into empty caches of the small budget, in turns after one to warm up."""
    mx.random.seed(0)
    asked = [Case("", size.prompt, 0), *(Case(n, size.prompt, size.budget) for n in names)]
    clocks = {case: Stopwatch(case.method or DENSE) for case in asked}
    for order in in_turns(asked, 1 + size.turns):
        parts = [
            random_tokens(size.heads, min(FILL_CHUNK, size.prompt - start))
            for start in range(0, size.prompt, FILL_CHUNK)
        ]
        for case in order:
            lane = case.new_lane(size.heads)
            clocks[case].time(lambda lane=lane, parts=parts: _read(lane, parts))
    for clock in clocks.values():
        clock.forget(1)
    dense, *rest = clocks.values()
    return [
        {
            "name": clock.name,
            "tokens": size.prompt,
            "milliseconds": clock.milliseconds,
            "judged": clock.judged_milliseconds,
            "dense": dense.judged_milliseconds,
        }
        for clock in rest
    ]


def _read(lane: Lane, parts: Sequence[tuple[mx.array, mx.array, mx.array]]) -> None:
    for q, k, v in parts:
        mx.eval(lane.attend(mx.array(q), k, v))
        mx.eval(lane.cache.state)


def prompt_targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether choosing what stays is fast enough."""
    out = []
    for row in rows:
        reached = (row["judged"] - row["dense"]) / 1e3
        out.append(
            {
                "name": row["name"],
                "asked": f"{row['tokens']} tokens of a prompt in at most {PROMPT_SECONDS:.1f} s a "
                f"layer beyond {DENSE}",
                "limit": PROMPT_SECONDS,
                "reached": reached,
                "holds": reached <= PROMPT_SECONDS,
            }
        )
    return out


# ---- all ------------------------------------------------------------------------------------


def groups(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """A few methods at a time."""
    for start in range(0, len(names), GROUP):
        yield names[start : start + GROUP]


def run(
    *,
    quick: bool = False,
    names: Sequence[str] = (),
    size: Size | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure every method that gives up tokens; plain data: size, decode, prompts, targets.

    Args:
        quick: shorter contexts and few steps.
        names: of methods; all that give up tokens when empty.
        size: what is measured, if neither of the usual two.
        report: gets one line for each measurement.
    """
    size = size or (QUICK if quick else FULL)
    names = names or [*BUDGETS]
    decode, prompt = [], []
    for some in groups(names):
        found = race(size, some)
        decode += found
        for row in found:
            report(decode_line(row))
        found = prompts(size, some)
        prompt += found
        for row in found:
            report(prompt_line(row))
    return {
        "size": asdict(size) | {"heads": str(size.heads)},
        "decode": decode,
        "prompts": prompt,
        "targets": decode_targets(size, decode) + prompt_targets(prompt),
    }


def decode_line(row: dict[str, Any]) -> str:
    """One decode measurement for a terminal."""
    return (
        f"T={row['tokens']:<5} {row['name']:<14} {row['rows']:>5} rows  "
        f"{row['milliseconds']:8.2f} ms a step  x{row['wall']:.2f} of {DENSE} by wall, "
        f"x{row['of_dense']:.2f} judged"
    )


def prompt_line(row: dict[str, Any]) -> str:
    """One prompt for a terminal."""
    return (
        f"{row['tokens']} new {row['name']:<14} {row['milliseconds']:8.1f} ms; judged "
        f"{row['judged']:.1f}, {DENSE} {row['dense']:.1f}"
    )
