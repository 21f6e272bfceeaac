"""Samplers and logits processors of a request, from mlx-lm's parts.

Requests with equal settings and no seed share one sampler, so that a batch samples in one call. A
seeded request has a key of its own: its tokens do not depend on who else is served.
"""

import functools
from collections.abc import Callable
from typing import cast

import mlx.core as mx
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    greedy_sampler,
    make_repetition_penalty,
)

from veloxquant.worker.jobs import Sampling

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]
COLD = 1e-4
"""Temperatures below always take the likeliest token; divided by less, fp32 runs out."""


def make_sampler(sampling: Sampling, vocab: int) -> Sampler:
    """Function from log probabilities (B, V) to token ids (B,)."""
    s = sampling
    if s.temperature < COLD:
        return greedy_sampler
    top_k = s.top_k if 0 < s.top_k < vocab else 0
    if s.seed is None:
        return _shared_sampler(s.temperature, s.top_p, top_k, s.min_p)
    return _SeededSampler(s.temperature, s.top_p, top_k, s.min_p, s.seed)


def _filtered(logprobs: mx.array, top_p: float, top_k: int, min_p: float) -> mx.array:
    if 0 < top_p < 1:
        logprobs = apply_top_p(logprobs, top_p)
    if min_p > 0:
        logprobs = apply_min_p(logprobs, min_p)
    if top_k > 0:
        logprobs = apply_top_k(logprobs, top_k)
    return logprobs


@functools.lru_cache(maxsize=64)
def _shared_sampler(temperature: float, top_p: float, top_k: int, min_p: float) -> Sampler:
    def sample(logprobs: mx.array) -> mx.array:
        return mx.random.categorical(_filtered(logprobs, top_p, top_k, min_p) / temperature)

    return sample


class _SeededSampler:
    def __init__(self, temperature: float, top_p: float, top_k: int, min_p: float, seed: int):
        self._temperature = temperature
        self._filters = (top_p, top_k, min_p)
        self._key = mx.random.key(seed)

    def __call__(self, logprobs: mx.array) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return mx.random.categorical(
            _filtered(logprobs, *self._filters) / self._temperature, key=key
        )


class _Bias:
    """An object, not a closure, so that the arrays it holds can be found and counted."""

    def __init__(self, bias: list[tuple[int, float]]) -> None:
        self._indices = mx.array([token for token, _ in bias])
        self._values = mx.array([value for _, value in bias])

    def __call__(self, _: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, self._indices].add(self._values.astype(logits.dtype))


def make_processors(sampling: Sampling, prompt_tokens: int, vocab: int) -> list[Processor]:
    """Functions (tokens, logits) -> logits, in the order bias, repetition, presence, frequency.

    Presence and frequency count the answer only, as OpenAI's do; repetition looks back
    `repetition_context` tokens, prompt included.
    """
    out: list[Processor] = []
    bias = [(token, value) for token, value in sampling.logit_bias if token < vocab]
    if bias:
        out.append(_Bias(bias))
    if sampling.repetition_penalty != 1.0:
        out.append(
            make_repetition_penalty(sampling.repetition_penalty, sampling.repetition_context)
        )
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if presence or frequency:

        def penalise(tokens: mx.array, logits: mx.array) -> mx.array:
            answer = tokens[prompt_tokens:]
            if answer.size == 0:
                return logits
            if frequency:
                logits = logits.at[:, answer].subtract(frequency)
            if presence:
                seen = mx.zeros((logits.shape[-1],), logits.dtype)
                seen[answer] = presence
                logits = logits - seen
            return logits

        out.append(penalise)
    return out


def top_of(logprobs: mx.array, count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens of (V,) log probabilities, best first."""
    if count == 0:
        return []
    best = mx.argpartition(-logprobs, kth=count - 1)[:count]
    ids, values = cast(list[int], best.tolist()), cast(list[float], logprobs[best].tolist())
    pairs = zip(ids, values, strict=True)
    return sorted(((int(i), float(v)) for i, v in pairs), key=lambda pair: -pair[1])
