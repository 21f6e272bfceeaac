"""mlx-lm's speculative decoding: refused where rows may be given up, right where none are."""

from typing import Any

import mlx.core as mx
import pytest
from architectures import tiny
from mlx_lm.generate import generate_step, speculative_generate_step

from veloxquant import KVCacheBuilder, KVCacheConfig

PROMPT = mx.array([5, 9, 2, 7, 1, 3])


def caches_of(method: str, model: Any, draft: Any) -> list[Any]:
    made = KVCacheBuilder.for_model(model, KVCacheConfig(method=method))
    return [*made, *KVCacheBuilder.for_model(draft, KVCacheConfig(method="fp16"))]


@pytest.mark.parametrize("method", ["streaming_llm", "knorm", "snapkv"])
def test_methods_that_give_up_rows_are_refused_at_the_start(method: str) -> None:
    model, draft = tiny("llama"), tiny("llama", seed=1)
    steps = speculative_generate_step(
        PROMPT, model, draft, max_tokens=8, prompt_cache=caches_of(method, model, draft)
    )
    with pytest.raises(ValueError, match="trimmable"):
        list(steps)


def test_packed_tokens_are_rewound() -> None:
    model, draft = tiny("llama"), tiny("llama", seed=1)
    caches = caches_of("kivi", model, draft)
    got = [
        token
        for token, *_ in speculative_generate_step(
            PROMPT, model, draft, max_tokens=8, prompt_cache=caches
        )
    ]
    plain = KVCacheBuilder.for_model(model, KVCacheConfig(method="kivi"))
    true = [
        int(token) for token, _ in generate_step(PROMPT, model, max_tokens=8, prompt_cache=plain)
    ]
    assert [int(token) for token in got] == true
