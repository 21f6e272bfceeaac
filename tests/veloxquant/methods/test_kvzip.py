"""kvzip: maxima of attention, of the prompt's own queries or of a repetition."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import Tokens, attend, feed, held_rows, new_cache, random_tokens, same, shape_of

from tests.architectures import prompt, tiny
from veloxquant.cache.builder import KVCacheBuilder
from veloxquant.cache.repetition import answer_tokens, request_tokens
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import KVzipOptions
from veloxquant.core.exceptions import CacheStateError
from veloxquant.methods.kvzip import kvzip_compress

SINKS = 4


def config(probe: str = "context", budget: int = 32) -> KVCacheConfig:
    return KVCacheConfig(
        method="kvzip", options=KVzipOptions(kvzip_budget=budget, kvzip_probe=probe)
    )


def compressed(tokens: Tokens, size: int | None = None, **fields: Any):
    """A cache that has read a prompt and its last token."""
    cache = new_cache(config(**fields), shape_of(tokens))
    feed(cache, tokens.cut(0, tokens.length - 1), size)
    attend(cache, tokens.cut(tokens.length - 1, tokens.length))
    cache.commit()
    return cache


def weights(queries: mx.array, keys: mx.array, first: int) -> np.ndarray:
    """Attention (H, G, R, n) in float64 of query rows from row `first` of these keys on."""
    q, k = (np.array(a, dtype=np.float64)[0] for a in (queries, keys))
    q = q.reshape(k.shape[0], -1, *q.shape[1:])
    logits = q @ k[:, None].swapaxes(-1, -2) * q.shape[-1] ** -0.5
    own = first + np.arange(q.shape[2])[:, None]
    logits[..., np.arange(k.shape[1]) > own] = -np.inf
    out = np.exp(logits - logits.max(-1, keepdims=True))
    return out / out.sum(-1, keepdims=True)


@pytest.mark.parametrize("size", [None, 41])
def test_a_row_counts_by_its_strongest_query_two_rows_on(size: int | None) -> None:
    tokens = random_tokens(300, seed=1)
    cache = new_cache(config(budget=400), shape_of(tokens))
    feed(cache, tokens, size)
    found = np.array(cache.scorer.score(cache))[0]
    truth = weights(tokens.queries, tokens.keys, 0)
    rows, columns = np.arange(300)[:, None], np.arange(300)
    truth[..., columns > rows - 2] = 0
    assert found == pytest.approx(truth.max(axis=(1, 2)), abs=1e-5)
    assert found.min() >= 0
    assert found.max() <= 1


def test_the_best_rows_stay_with_sinks_and_the_newest() -> None:
    tokens = random_tokens(100, seed=2)
    whole, cut = compressed(tokens), compressed(tokens, 13)
    assert same(whole.kept_positions(), cut.kept_positions())
    assert whole.size() == 32
    assert whole.fidelity == "exact"
    uncut = new_cache(config(budget=400), shape_of(tokens))
    feed(uncut, tokens)
    scores = np.array(uncut.scorer.score(uncut))[0]
    for row, kept in zip(scores, whole.kept_positions()[0].tolist(), strict=True):
        middle = np.arange(SINKS, 98)
        best = middle[np.argsort(-row[middle], kind="stable")][:26]
        assert kept == sorted([*range(SINKS), *best.tolist(), 98, 99])


def test_what_is_asked_later_does_not_matter() -> None:
    tokens = random_tokens(100, seed=3)
    kept = []
    for seed in (4, 5):
        cache = compressed(tokens)
        feed(cache, random_tokens(10, seed=seed), 1)
        assert cache.size() == 42
        assert cache.trim(10) == 10
        kept.append(held_rows(cache)[0])
    assert same(kept[0], kept[1])


# ---- repeating the prompt -------------------------------------------------------------------


def test_a_repetition_scores_its_piece_and_leaves_the_rest_alone() -> None:
    tokens, probe = random_tokens(100, seed=6), random_tokens(290, seed=7)
    cache = new_cache(config("reconstruct"), shape_of(tokens))
    feed(cache, tokens)
    before = [mx.array(a) for a in held_rows(cache)]
    cache.begin_probe(40, 90)
    attend(cache, probe)
    assert cache.size() == 390
    cache.end_probe()
    assert cache.offset == cache.size() == 100
    assert all(same(a, b) for a, b in zip(before, held_rows(cache), strict=True))
    seen = mx.concatenate([tokens.keys[:, :, :SINKS], tokens.keys[:, :, 40:90], probe.keys], axis=2)
    truth = weights(probe.queries, seen, SINKS + 50)[..., SINKS : SINKS + 50].max(axis=(1, 2))
    found = np.array(cache.columns["mass"])[0]
    assert found[:, 40:90] == pytest.approx(truth, abs=1e-5)
    assert not found[:, :40].any()
    assert not found[:, 90:].any()
    cache.prune()
    assert cache.size() == 32
    assert cache.fidelity == "exact"


def test_the_row_that_a_copy_asks_for_is_kept() -> None:
    tokens, probe = random_tokens(100, seed=8, heads=1), random_tokens(20, seed=9, heads=1)
    queries = mx.array(probe.queries)
    queries[:, :, 10] = 4 * tokens.keys[:, :, 55]
    queries[..., 3] = 0  # the channel that all keys are loud in
    cache = new_cache(config("reconstruct"), shape_of(tokens))
    feed(cache, tokens)
    cache.begin_probe(0, 100)
    attend(cache, probe._replace(queries=queries))
    cache.end_probe()
    assert cache.columns["mass"][0, 0, 55].item() > 0.5
    cache.prune()
    assert 55 in cache.kept_positions().reshape(-1).tolist()


def test_without_the_pass_the_prompts_own_queries_decide_and_it_says_so() -> None:
    tokens = random_tokens(100, seed=10)
    cache = compressed(tokens, probe="reconstruct")
    assert same(cache.kept_positions(), compressed(tokens).kept_positions())
    assert cache.fidelity == "proxy"
    with pytest.raises(CacheStateError, match="before its tokens are evicted"):
        cache.begin_probe(0, 10)


class Words:
    """A tokenizer of single characters."""

    chat_template: str | None = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(c) % 50 for c in text]

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> str:
        return f"<user>{turns[0]['content']}</user><assistant>"


def test_requests_quote_what_comes_before_and_end_the_users_turn() -> None:
    words, ids = Words(), list(range(3000))
    assert request_tokens(words, ids, 0) == words.encode("\n\nRepeat the previous context exactly.")
    assert request_tokens(words, ids, 2048)[-8:] == list(range(2040, 2048))
    assert answer_tokens(words) == words.encode("\n")
    words.chat_template = "there is one"
    assert answer_tokens(words) == words.encode("</user><assistant>")


def test_a_model_repeats_its_prompt() -> None:
    model, ids = tiny("llama"), prompt(90, 1)
    caches = KVCacheBuilder.for_model(model, config("reconstruct"))
    full = KVCacheBuilder.for_model(model, config("reconstruct"))
    for one in (caches, full):
        mx.eval(model(mx.array([ids]), cache=one))
    kvzip_compress(model, caches, ids, Words())
    for mine, other in zip(caches, full, strict=True):
        assert (mine.offset, mine.size(), other.size()) == (90, 32, 90)
        assert mine.fidelity == "exact"
        keys, all_keys = held_rows(mine)[0], held_rows(other)[0]
        assert same(keys, mx.take_along_axis(all_keys, mine.kept_positions()[..., None], axis=2))
    mx.eval(model(mx.array([[5]]), cache=caches))
    assert [c.size() for c in caches] == [33] * len(caches)
    with pytest.raises(CacheStateError, match="exactly the 90 tokens"):
        kvzip_compress(model, caches, ids, Words())
    with pytest.raises(CacheStateError, match="kvzip_probe='reconstruct'"):
        kvzip_compress(model, KVCacheBuilder.for_model(model, config()), ids, Words())
