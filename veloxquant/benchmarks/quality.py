"""How much each method changes what a model says, and at what size.

The demo model reads held-out prose through the serving path: the prompt in chunks of 256, then one
token at a time, always the next of the text (teacher forcing), so that windows move and evictions
happen. At each of these steps the distribution over the next token is compared with that of the
exact cache: mean KL divergence in nats (paired, so little noise), same top token, and perplexity.

Bytes are those really held at the end, floats counted as 16 bits (the run is fp32 on a CPU).
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.benchmarks.compare import Verdict, judge
from veloxquant.benchmarks.demo import load, token_ids
from veloxquant.benchmarks.rivals import held_bytes, random_caches, stock_quantized
from veloxquant.benchmarks.text import prose
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.probe import ModelPlan, native_caches
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import SnapKVOptions, StreamingLLMOptions

CHUNK = 256


@dataclass(frozen=True)
class Size:
    """How much is read: tokens of the prompt, single steps after it, and rows of the cache that
    evicting methods may keep."""

    prompt: int
    steps: int
    budget: int

    @property
    def tokens(self) -> int:
        """Tokens in the cache at the end."""
        return self.prompt + self.steps


FULL = Size(prompt=1792, steps=256, budget=512)
QUICK = Size(prompt=640, steps=128, budget=256)


@dataclass(frozen=True)
class Outcome:
    """One line of the table; `bits` is bits per element of all keys and values read."""

    name: str
    kind: str
    kl: float
    kl_error: float
    same_top: float
    perplexity: float
    nbytes: int
    bits: float
    seconds: float


Caches = tuple[list[Any], Callable[[], None]]


@dataclass(frozen=True)
class Contender:
    """Something to measure: `kind` is ours, stock, evicting or random."""

    name: str
    kind: str
    make: Callable[[], Caches]


def _nothing() -> None:
    pass


def contenders(model: Any, plan: ModelPlan, size: Size, *, quick: bool) -> Iterator[Contender]:
    """Everything that is measured at this size."""

    def ours(config: KVCacheConfig) -> Callable[[], Caches]:
        return lambda: (new_caches(plan_model(model, config), config), _nothing)

    settings = {
        "kivi": (2, 4) if quick else (2, 3, 4, 8),
        "kivi_sink": () if quick else (2, 4),
        "turboquant_rvq": (2, 4) if quick else (2, 3, 4),
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
    for name, when in (("snapkv", "prompt"), ("streaming_llm", "always")):
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


def _log_probs(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def read(model: Any, tokens: mx.array, size: Size, caches: Caches) -> Iterator[mx.array]:
    """Feed `tokens` (B, T + 1); log-probabilities (B, V) of the next token at each single step."""
    entries, after_step = caches
    for start in range(0, size.prompt, CHUNK):
        stop = min(start + CHUNK, size.prompt)
        # Only the newest position is evaluated, as in serving: the rest of the head is not needed.
        mx.eval(model(tokens[:, start:stop], cache=entries)[:, -1])
        after_step()
    for place in range(size.prompt, size.tokens):
        out = _log_probs(model(tokens[:, place : place + 1], cache=entries)[:, -1])
        mx.eval(out)
        after_step()
        yield out


class Reference:
    """What the exact cache says at each step, kept for all comparisons."""

    def __init__(self, model: Any, tokens: mx.array, size: Size) -> None:
        caches = native_caches(model)
        start = time.perf_counter()
        self.steps = [np.array(p) for p in read(model, tokens, size, (caches, _nothing))]
        self.seconds = time.perf_counter() - start
        self.nbytes = sum(held_bytes(c) for c in caches)
        self.tokens = tokens
        self.size = size

    def next_ids(self, step: int) -> mx.array:
        """The tokens that really follow, (B, 1)."""
        place = self.size.prompt + step + 1
        return self.tokens[:, place : place + 1]


def measure(model: Any, reference: Reference, contender: Contender, values: int) -> Outcome:
    """Run one contender against the reference.

    Args:
        model: the loaded model.
        reference: the exact cache on the same tokens.
        contender: what to measure.
        values: elements of keys and values of one token in all layers.
    """
    size, tokens = reference.size, reference.tokens
    kls, same, surprise = [], [], []
    caches = contender.make()
    start = time.perf_counter()
    for step, log_q in enumerate(read(model, tokens, size, caches)):
        log_p = mx.array(reference.steps[step])
        kls.append((mx.exp(log_p) * (log_p - log_q)).sum(axis=-1))
        same.append(log_p.argmax(axis=-1) == log_q.argmax(axis=-1))
        surprise.append(-mx.take_along_axis(log_q, reference.next_ids(step), axis=-1))
    seconds = time.perf_counter() - start
    kl = np.array(mx.stack(kls)).ravel()
    nbytes = sum(held_bytes(cache) for cache in caches[0])
    return Outcome(
        name=contender.name,
        kind=contender.kind,
        kl=float(kl.mean()),
        kl_error=float(kl.std() / math.sqrt(kl.size)),
        same_top=float(mx.stack(same).astype(mx.float32).mean().item()),
        perplexity=math.exp(mx.stack(surprise).mean().item()),
        nbytes=nbytes // tokens.shape[0],
        bits=8 * nbytes / (tokens.shape[0] * values * size.tokens),
        seconds=seconds,
    )


def baseline(reference: Reference, values: int) -> Outcome:
    """The line of the exact cache."""
    rows = reference.tokens.shape[0]
    surprise = [
        -mx.take_along_axis(mx.array(p), reference.next_ids(i), axis=-1)
        for i, p in enumerate(reference.steps)
    ]
    return Outcome(
        "fp16 (exact)", "exact", 0.0, 0.0, 1.0, math.exp(mx.stack(surprise).mean().item()),
        reference.nbytes // rows, 8 * reference.nbytes / (rows * values * reference.size.tokens),
        reference.seconds,
    )  # fmt: skip


def run(
    *,
    quick: bool = False,
    rows: int = 1,
    only: str = "",
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure every contender; returns plain data: size, outcomes and verdicts.

    Args:
        quick: a short text and fewer settings.
        rows: stretches of text read side by side; more rows, less noise.
        only: measure just the contenders whose name contains this.
        report: gets one line for each finished contender.

    Raises:
        ModelMissingError: when the demo model is not there.
    """
    size = QUICK if quick else FULL
    model, tokenizer = load()
    tokens = mx.array(token_ids(tokenizer, prose(), rows, size.tokens + 1))
    plan = plan_model(model, KVCacheConfig(method="kivi"))
    values = sum(s.n_kv_heads * (s.k_dim + s.v_dim) for s in plan.shapes())
    reference = Reference(model, tokens, size)
    outcomes = [baseline(reference, values)]
    report(line(outcomes[0]))
    for contender in contenders(model, plan, size, quick=quick):
        if only not in contender.name:
            continue
        mx.clear_cache()
        outcomes.append(measure(model, reference, contender, values))
        report(line(outcomes[-1]))
    verdicts: list[Verdict] = judge(outcomes)
    return {
        "size": {**asdict(size), "rows": rows},
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def line(outcome: Outcome) -> str:
    """One outcome for a terminal."""
    return (
        f"{outcome.name:<26} {outcome.bits:6.2f} bit {outcome.nbytes / 2**20:7.2f} MiB  "
        f"KL {outcome.kl:8.4f} ±{outcome.kl_error:.4f}  same {outcome.same_top:6.1%}  "
        f"ppl {outcome.perplexity:8.2f}  {outcome.seconds:6.1f} s"
    )
