"""How much each method changes what a model says, and at what size.

The demo model reads held-out prose through the serving path: the prompt in chunks of 256, then one
token at a time, always the next of the text (teacher forcing), so that windows move and evictions
happen. At each of these steps the distribution over the next token is compared with that of the
exact cache: mean KL divergence in nats (paired, so little noise), same top token, and perplexity.

Bytes are those really held at the end, floats counted as 16 bits (the run is fp32 on a CPU).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.benchmarks.compare import Outcome, best_of_four, judge, ladders
from veloxquant.benchmarks.contenders import Caches, Contender, Report, Size, contenders
from veloxquant.benchmarks.demo import load, token_ids
from veloxquant.benchmarks.field import FieldLayer
from veloxquant.benchmarks.rivals import held_bytes
from veloxquant.benchmarks.text import prose
from veloxquant.cache.builder import plan_model
from veloxquant.config.kv_cache import KVCacheConfig

CHUNK = 256
PROGRESS = 64
"""Tokens between lines of progress."""


GROUP = 24
"""Caches that read together, so that few are held at once; the exact one is in every group."""

FULL = Size(prompt=1536, steps=96, budget=512)
"""Short enough for every method and width in one run."""
QUICK = Size(prompt=704, steps=64, budget=256)
QUICK_METHODS = ("kivi", "turboquant_rvq")


class Sheet:
    """What was seen of one contender, a number a step."""

    def __init__(self) -> None:
        self.kl: list[float] = []
        self.same: list[bool] = []
        self.surprise: list[float] = []


def log_probs(logits: mx.array) -> mx.array:
    """Log-probabilities of logits (..., V), fp32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def note(sheets: Sequence[Sheet], log_q: mx.array, then: int) -> None:
    """Note one step: log-probabilities (sheets, V), the exact ones first, and what followed."""
    log_p = log_q[:1]
    kl = np.array((mx.exp(log_p) * (log_p - log_q)).sum(axis=-1))
    top = np.array(log_q.argmax(axis=-1))
    surprise = np.array(-log_q[:, then])
    for i, sheet in enumerate(sheets):
        sheet.kl.append(float(kl[i]))
        sheet.same.append(bool(top[i] == top[0]))
        sheet.surprise.append(float(surprise[i]))


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
            out = log_probs(out[:, -1])
            mx.eval(out)
        for _, after_step in entrants:
            after_step()
        if stop % PROGRESS == 0:
            report(f"{stop} of {size.tokens} tokens read by {count} caches")
        return out

    for start in range(0, size.prompt, CHUNK):
        feed(start, min(start + CHUNK, size.prompt))
    for place in range(size.prompt, size.tokens):
        note(sheets, feed(place, place + 1), tokens[place + 1])
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
        method=contender.method,
        width=contender.width,
        default=contender.default,
    )


def grouped(field: Sequence[Contender]) -> list[list[Contender]]:
    """The contenders, the first of which is the exact one, in groups that all begin with it."""
    exact, *others = field
    return [[exact, *others[i : i + GROUP - 1]] for i in range(0, max(1, len(others)), GROUP - 1)]


def run(
    *,
    quick: bool = False,
    methods: tuple[str, ...] = (),
    skip: int = 0,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Measure every contender; returns plain data: size, outcomes, verdicts and targets.

    Args:
        quick: a short text, two methods if none is named, defaults and 4 bits only.
        methods: names of the method table; all quantising ones when empty. Rivals are always
            measured, evicting methods when none is named.
        skip: tokens of the text to leave out at the start.
        report: gets lines of progress, and one for each contender.

    Raises:
        ModelMissingError: when the demo model is not there.
        ValueError: for a name that is no ready quantising method.
    """
    size = QUICK if quick else FULL
    model, tokenizer = load()
    tokens = token_ids(tokenizer, prose(), size.tokens + 1, skip)
    plan = plan_model(model, KVCacheConfig(method="kivi"))
    elements = size.tokens * sum(s.n_kv_heads * (s.k_dim + s.v_dim) for s in plan.shapes())
    names = methods or (QUICK_METHODS if quick else ())
    field = [*contenders(plan, size, names, quick=quick, evicting=not methods)]
    outcomes: dict[str, Outcome] = {}
    groups = grouped(field)
    for number, group in enumerate(groups, 1):
        say = _in_group(report, number, len(groups))
        entrants = [contender.make() for contender in group]
        sheets = read(model, tokens, size, entrants, say)
        for contender, sheet, (caches, _) in zip(group, sheets, entrants, strict=True):
            if contender.name not in outcomes:
                nbytes = sum(held_bytes(cache) for cache in caches)
                outcomes[contender.name] = outcome_of(contender, sheet, nbytes, elements)
                report(line(outcomes[contender.name]))
        del entrants
    found = list(outcomes.values())
    return {
        "size": asdict(size) | {"skip": skip},
        "outcomes": [asdict(outcome) for outcome in found],
        "verdicts": [asdict(verdict) for verdict in judge(found)],
        "targets": ladders(found) + best_of_four(found),
    }


def _in_group(report: Report, number: int, of: int) -> Report:
    return lambda text: report(f"group {number} of {of}: {text}")


def line(outcome: Outcome) -> str:
    """One outcome for a terminal."""
    return (
        f"{outcome.name:<26} {outcome.bits:6.2f} bit {outcome.nbytes / 2**20:7.2f} MiB  "
        f"KL {outcome.kl:8.4f} ±{outcome.kl_error:.4f}  same {outcome.same_top:6.1%}  "
        f"ppl {outcome.perplexity:8.2f}"
    )
