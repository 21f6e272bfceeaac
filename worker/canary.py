"""Prove before READY that model and caches work together, and look whether they remember.

A canary that raises or gives numbers that are not finite stops the launch. Forgetting is a
property of a method, not a fault: it is a warning, measured by completion against plain caches.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import mlx.core as mx

from veloxquant.worker.caches import CachePlan, plain_caches
from veloxquant.worker.faults import WorkerFault

logger = logging.getLogger(__name__)

_PROMPT = 12
_DECODE = 2
RECALL_TOKENS = 700
_MIN_RECALL_TOKENS = 200
RECALL_SECONDS = 6.0
_NUMBER = "74937"
_NEEDLE = f" The magic number for Oslo is {_NUMBER}."
_QUESTION = " The magic number for Oslo is"
_FILLER = (
    " A river begins where rain and melting snow gather in the hills. It runs down through narrow"
    " valleys, grows as smaller streams join it, and slows where the land is flat. Towns were built"
    " along such rivers because boats could carry grain, wood and stone more cheaply than carts."
    " Mills stood on the banks and turned with the current. Later came bridges of iron, and after"
    " them railways that followed the same valleys. In dry years the water is low and the old"
    " stones of the fords can be seen again. In wet years it covers the fields and leaves mud that"
    " makes the soil rich. People who live there know the sound of the river before a flood."
)


class PlainCost(NamedTuple):
    """Bytes of one plain cache entry: by token up to `most` tokens, and what it holds anyway."""

    per_token: int
    most: int | None
    fixed: int

    def at(self, tokens: int) -> int:
        """Bytes for a request of `tokens` tokens."""
        return self.fixed + self.per_token * (
            tokens if self.most is None else min(tokens, self.most)
        )


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _feed(model: Any, tokens: list[int], caches: list[Any]) -> mx.array:
    """Logits (V,) after `tokens`."""
    logits = model(mx.array([tokens]), cache=caches)[0, -1]
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def _best(logits: mx.array) -> int:
    return int(cast(int, mx.argmax(logits).item()))


def check(model: Any, tokenizer: Any, plan: CachePlan) -> list[PlainCost]:
    """Run a prompt and a few tokens through caches as the engine batches them.

    Returns:
        What plain caches would cost, by layer, measured on the way.

    Raises:
        WorkerFault: `canary_failed` when anything raises or a logit is not finite.
    """
    prompt = (_tokens(tokenizer, _FILLER) * _PROMPT)[:_PROMPT]
    try:
        caches = [cache.merge([cache]) for cache in plan.new()]
        logits = _feed(model, prompt, caches)
        for _ in range(_DECODE):
            if not mx.isfinite(logits).all().item():
                raise WorkerFault("canary_failed", "The model's output was not a number.")
            logits = _feed(model, [_best(logits)], caches)
    except WorkerFault:
        raise
    except Exception as error:  # whatever a model file raises: this is the trial
        logger.exception("The trial token failed")
        detail = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        raise WorkerFault("canary_failed", detail) from error
    return _plain_costs(model, prompt)


def _plain_costs(model: Any, prompt: list[int]) -> list[PlainCost]:
    caches = plain_caches(model)
    _feed(model, prompt, caches)
    return [_cost(cache) for cache in caches]


def _cost(cache: Any) -> PlainCost:
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if keys is None or values is None or keys.ndim != 4:
        return PlainCost(0, None, cache.nbytes)
    per_token = sum(a.nbytes // a.shape[2] for a in (keys, values))
    return PlainCost(per_token, getattr(cache, "max_size", None), 0)


def recall(
    model: Any,
    tokenizer: Any,
    plan: CachePlan,
    *,
    context: int,
    chunk: int,
    report: Callable[[int, int, str], None],
) -> list[str]:
    """Hide a number in prose and ask for it by completion, with plain caches and the method's.

    `report` gets tokens read, tokens in all and what is going on.

    Returns:
        A warning when plain caches answer and the method's do not; nothing otherwise.
    """
    if plan.compressed == 0:
        return []
    tokens, skipped = _recall_length(model, tokenizer, context)
    if skipped:
        logger.info("The recall check was skipped: %s", skipped)
        return []
    text = _recall_text(tokenizer, tokens)
    what = f"recall check, {tokens} tokens"
    if _answers(model, plan.new(), text, chunk, lambda n: report(n, tokens, what)):
        logger.info("Recall check passed at %d tokens.", tokens)
        return []
    what = f"recall check uncompressed, {tokens} tokens"
    if not _answers(model, plain_caches(model), text, chunk, lambda n: report(n, tokens, what)):
        logger.info("The recall check says nothing: this model fails it uncompressed too.")
        return []
    warning = (
        f"With {plan.config.method} this model forgot a number hidden in {tokens} tokens of "
        "text; without compression it found it."
    )
    return [warning]


def _recall_length(model: Any, tokenizer: Any, context: int) -> tuple[int, str]:
    """Tokens that fit context and time, and why not when they are too few."""
    room = min(RECALL_TOKENS, context)
    if room < _MIN_RECALL_TOKENS:
        return 0, f"a context of {context} tokens is too short for it"
    sample = (_tokens(tokenizer, _FILLER) * 2)[:64]
    start = time.perf_counter()
    _feed(model, sample, plain_caches(model))
    rate = len(sample) / max(time.perf_counter() - start, 1e-6)
    room = min(room, int(rate * RECALL_SECONDS))
    if room < _MIN_RECALL_TOKENS:
        return 0, f"reading {_MIN_RECALL_TOKENS} tokens takes over {RECALL_SECONDS:.0f} s"
    return room, ""


def _recall_text(tokenizer: Any, tokens: int) -> tuple[list[int], list[int], list[int]]:
    """History with the number in it, the question, and the answer, as tokens."""
    needle, question = _tokens(tokenizer, _NEEDLE), _tokens(tokenizer, _QUESTION)
    answer = _tokens(tokenizer, _QUESTION + f" {_NUMBER}")[len(question) :]
    filler = _tokens(tokenizer, _FILLER)
    room = max(tokens - len(needle) - len(question) - len(answer), 2)
    filler = (filler * (room // max(1, len(filler)) + 1))[:room]
    before = room // 4  # far enough back to have left every window
    return filler[:before] + needle + filler[before:], question, answer


def _answers(
    model: Any,
    caches: list[Any],
    text: tuple[list[int], list[int], list[int]],
    chunk: int,
    report: Callable[[int], None],
) -> bool:
    """Whether every token of the answer is the most likely one where it stands.

    Question and answer are read in one call of their own, so that the history is read back as it
    was stored.
    """
    history, question, answer = text
    for start in range(0, len(history), chunk):
        report(start)
        _feed(model, history[start : start + chunk], caches)
        mx.clear_cache()  # or the start would need more memory than the answers do
    report(len(history))
    logits = model(mx.array([question + answer]), cache=caches)[0]
    best = mx.argmax(logits[len(question) - 1 : -1], axis=-1)
    return cast(list[int], best.tolist()) == answer
