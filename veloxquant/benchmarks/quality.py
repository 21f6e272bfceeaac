"""How much each method changes what a model says, and at what size.

The demo model reads held-out prose through the serving path: the prompt in chunks of 256, then one
token at a time, always the next of the text (teacher forcing), so that windows move and evictions
happen. At each of these steps the distribution over the next token is compared with that of the
exact cache: mean KL divergence in nats (paired, so little noise), same top token, and perplexity.

Bytes are those really held at the end, floats counted as 16 bits (the run is fp32 on a CPU).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from veloxquant.benchmarks.compare import Outcome, judge
from veloxquant.benchmarks.demo import load, token_ids
from veloxquant.benchmarks.field import FieldLayer
from veloxquant.benchmarks.rivals import held_bytes, random_caches, stock_quantized
from veloxquant.benchmarks.text import prose
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.probe import ModelPlan, native_caches
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import SnapKVOptions, StreamingLLMOptions

CHUNK = 256
PROGRESS = 64
"""Tokens between lines of progress."""


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


FULL = Size(prompt=1792, steps=256, budget=512)
QUICK = Size(prompt=704, steps=64, budget=256)


Report = Callable[[str], None]
Caches = tuple[list[Any], Callable[[], None]]


@dataclass(frozen=True)
class Contender:
    """Something to measure: `kind` is exact, ours, stock, evicting or random."""

    name: str
    kind: str
    make: Callable[[], Caches]


def _nothing() -> None:
    pass


def contenders(model: Any, plan: ModelPlan, size: Size, *, quick: bool) -> Iterator[Contender]:
    """Everything that is measured at this size."""

    def ours(config: KVCacheConfig) -> Callable[[], Caches]:
        return lambda: (new_caches(plan_model(model, config), config), _nothing)

    yield Contender("fp16 (exact)", "exact", lambda: (native_caches(model), _nothing))
    settings = {
        "kivi": (2, 4) if quick else (2, 3, 4, 8),
        "kivi_sink": () if quick else (2, 4),
        "turboquant_rvq": (4,) if quick else (2, 3, 4),
    }
    for method, widths in settings.items():
        for bits in widths:
            config = KVCacheConfig(method=method, bit_width_inlier=bits)
            yield Contender(f"{method} {bits} bit", "ours", ours(config))
    for bits, group in ((2, 32), (4, 32), (8, 64)) if quick else _STOCK:
        yield Contender(
            f"mlx-lm {bits} bit g{group}",
            "stock",
            lambda bits=bits, group=group: stock_quantized(plan, bits, group),
        )
    snap = SnapKVOptions(snap_budget=size.budget)
    stream = StreamingLLMOptions(stream_window_size=size.budget - 4)
    for method, options in (("snapkv", snap), ("streaming_llm", stream)):
        config = KVCacheConfig(method=method, options=options)
        yield Contender(f"{method} {size.budget}", "evicting", ours(config))
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


_STOCK = ((2, 64), (2, 32), (4, 64), (4, 32), (8, 64), (8, 32))


class Sheet:
    """What was seen of one contender, a number a step."""

    def __init__(self) -> None:
        self.kl: list[float] = []
        self.same: list[bool] = []
        self.surprise: list[float] = []


def _log_probs(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def read(
    model: Any,
    tokens: list[int],
    size: Size,
    entrants: Sequence[Caches],
    report: Report = lambda _: None,
) -> list[Sheet]:
    """Feed `tokens`, `size.tokens` + 1 of them, to all entrants; the first is the exact one."""
    sheets = [Sheet() for _ in entrants]
    count = len(entrants)

    def feed(start: int, stop: int) -> mx.array:
        ids = mx.broadcast_to(mx.array(tokens[start:stop])[None], (count, stop - start))
        # Lists change in place where mlx-lm quantizes a cache, so layers are gathered each time.
        layers = [FieldLayer(rows) for rows in zip(*(e[0] for e in entrants), strict=True)]
        out = model(ids, cache=layers)
        if stop - start > 1:
            # As mlx-lm's generators do: the head of a prompt is never computed.
            mx.eval([layer.states() for layer in layers])
        else:
            out = _log_probs(out[:, -1])
            mx.eval(out)
        for _, after_step in entrants:
            after_step()
        if stop % PROGRESS == 0:
            report(f"{stop} of {size.tokens} tokens read by {count} caches")
        return out

    for start in range(0, size.prompt, CHUNK):
        feed(start, min(start + CHUNK, size.prompt))
    for place in range(size.prompt, size.tokens):
        log_q = feed(place, place + 1)
        log_p = log_q[:1]
        kl = np.array((mx.exp(log_p) * (log_p - log_q)).sum(axis=-1))
        top = np.array(log_q.argmax(axis=-1))
        surprise = np.array(-log_q[:, tokens[place + 1]])
        for i, sheet in enumerate(sheets):
            sheet.kl.append(float(kl[i]))
            sheet.same.append(bool(top[i] == top[0]))
            sheet.surprise.append(float(surprise[i]))
    return sheets


def outcome_of(contender: Contender, sheet: Sheet, nbytes: int, elements: int) -> Outcome:
    """The line of one contender; `elements` is keys and values read, in numbers."""
    kl = np.array(sheet.kl)
    return Outcome(
        name=contender.name,
        kind=contender.kind,
        kl=float(kl.mean()),
        kl_error=float(kl.std() / math.sqrt(kl.size)),
        same_top=float(np.mean(sheet.same)),
        perplexity=math.exp(float(np.mean(sheet.surprise))),
        nbytes=nbytes,
        bits=8 * nbytes / elements,
    )


def run(
    *,
    quick: bool = False,
    only: str = "",
    skip: int = 0,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Measure every contender; returns plain data: size, outcomes and verdicts.

    Args:
        quick: a short text and fewer settings.
        only: measure just the contenders whose name contains this.
        skip: tokens of the text to leave out at the start.
        report: gets lines of progress, then one for each contender.

    Raises:
        ModelMissingError: when the demo model is not there.
    """
    size = QUICK if quick else FULL
    model, tokenizer = load()
    tokens = token_ids(tokenizer, prose(), size.tokens + 1, skip)
    plan = plan_model(model, KVCacheConfig(method="kivi"))
    elements = size.tokens * sum(s.n_kv_heads * (s.k_dim + s.v_dim) for s in plan.shapes())
    field = [
        c for c in contenders(model, plan, size, quick=quick) if c.kind == "exact" or only in c.name
    ]
    entrants = [contender.make() for contender in field]
    sheets = read(model, tokens, size, entrants, report)
    outcomes = []
    for contender, sheet, (caches, _) in zip(field, sheets, entrants, strict=True):
        nbytes = sum(held_bytes(cache) for cache in caches)
        outcomes.append(outcome_of(contender, sheet, nbytes, elements))
        report(line(outcomes[-1]))
    return {
        "size": asdict(size) | {"skip": skip},
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "verdicts": [asdict(verdict) for verdict in judge(outcomes)],
    }


def line(outcome: Outcome) -> str:
    """One outcome for a terminal."""
    return (
        f"{outcome.name:<26} {outcome.bits:6.2f} bit {outcome.nbytes / 2**20:7.2f} MiB  "
        f"KL {outcome.kl:8.4f} ±{outcome.kl_error:.4f}  same {outcome.same_top:6.1%}  "
        f"ppl {outcome.perplexity:8.2f}"
    )
