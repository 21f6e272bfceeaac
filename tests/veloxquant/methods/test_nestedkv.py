"""nestedkv: heads that hold unequal numbers of rows, kept, attended, saved and batched."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import (
    Ragged,
    Tokens,
    attend,
    feed,
    held_rows,
    new_cache,
    plan_of,
    random_tokens,
    same,
    same_state,
    shape_of,
    worst,
)

from veloxquant.cache.persist import load_caches, save_caches
from veloxquant.cache.pooled_heads import competing_rows, counts_of
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import NestedKVOptions
from veloxquant.core.exceptions import CacheStateError
from veloxquant.quantizers.nestedkv import nestedkv_allocate_head_budgets, nestedkv_score

BUDGET, SINKS = 32, 4


def config(alpha: float = 0.2) -> KVCacheConfig:
    options = NestedKVOptions(nestedkv_budget=BUDGET, nestedkv_safeguard_alpha=alpha)
    return KVCacheConfig(method="nestedkv", options=options)


def uneven_tokens(length: int, seed: int = 0, **fields) -> Tokens:
    """One head's keys lie close together with few outliers, another's are spread."""
    tokens = random_tokens(length, seed=seed, heads=3, **fields)
    keys = mx.array(tokens.keys)
    keys[:, 0] = keys[:, 0] * 0.2 + 2.0
    return tokens._replace(keys=keys)


def compressed(tokens: Tokens, size: int | None = None, alpha: float = 0.2, *, views: bool = True):
    cache = new_cache(config(alpha), shape_of(tokens), views=views)
    feed(cache, tokens.cut(0, tokens.length - 1), size)
    attend(cache, tokens.cut(tokens.length - 1, tokens.length))
    cache.commit()
    return cache


def rows_of_heads(cache, batch: int = 0) -> list[list[int]]:
    """Positions that each head holds of the compressed prompt."""
    flat = np.array(cache.kept_positions()[batch, :, :BUDGET]).reshape(-1)
    return [p.tolist() for p in np.split(flat, np.cumsum(np.array(cache.head_rows[batch]))[:-1])]


def by_head(tokens: Tokens, places: list[list[int]], more: Tokens | None, scale: float):
    """Attention of the newest token head by head over just the rows it holds."""
    outs = []
    newest = tokens if more is None else more
    for head, own in enumerate(places):
        sides = []
        for i in (1, 2):
            rows = mx.take(tokens[i][:, head : head + 1], mx.array(own), axis=2)
            if more is not None:
                rows = mx.concatenate([rows, more[i][:, head : head + 1]], axis=2)
            sides.append(rows)
        q = newest.queries[:, 2 * head : 2 * head + 2]
        outs.append(mx.fast.scaled_dot_product_attention(q, *sides, scale=scale, mask="causal"))
    return mx.concatenate(outs, axis=1)


# ---- which rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.9])
def test_rows_of_heads_are_the_best_of_the_layer(alpha: float) -> None:
    tokens = uneven_tokens(200, seed=1, batch=2)
    cache = compressed(tokens, 64, alpha)
    assert cache.head_rows.sum(axis=-1).tolist() == [3 * BUDGET] * 2
    assert cache.size() == BUDGET
    assert cache.nestedkv_kept_bytes == 2 * shape_of(tokens).full_bytes(BUDGET)
    scores = np.array(nestedkv_score(tokens.keys))
    scores[..., :SINKS] = np.inf
    for i in range(2):
        least = max(int(alpha * BUDGET), SINKS)
        counts = np.array(cache.head_rows[i]).tolist()
        assert min(counts) >= least
        wanted = nestedkv_allocate_head_budgets(
            [mx.array(s) for s in scores[i]], 3 * BUDGET, max(alpha, SINKS / BUDGET)
        )
        assert counts == wanted
        for own, rated in zip(rows_of_heads(cache, i), scores[i], strict=True):
            best = np.argsort(-rated, kind="stable")[: len(own)]
            assert own == sorted(best.tolist())
    assert len(set(np.array(cache.head_rows).reshape(-1).tolist())) > 1
    assert same(compressed(tokens, None, alpha).kept_positions(), cache.kept_positions())


def test_a_full_safeguard_keeps_equal_heads() -> None:
    tokens = uneven_tokens(200, seed=2)
    cache = compressed(tokens, alpha=1.0)
    assert cache.head_rows is None
    scores = mx.where(mx.arange(200) < SINKS, mx.inf, nestedkv_score(tokens.keys))
    keep = competing_rows(scores, BUDGET, SINKS, BUDGET)
    assert counts_of(keep, 3, 200).tolist() == [[BUDGET] * 3]
    assert same(cache.kept_positions(), (keep % 200).reshape(1, 3, BUDGET))
    assert same(held_rows(cache)[0][0, 1], mx.take(tokens.keys[0, 1], keep[0, 32:64] - 200, axis=0))


def test_up_to_the_budget_nothing_goes() -> None:
    tokens, more = uneven_tokens(BUDGET, seed=3), uneven_tokens(3, seed=4)
    cache, plain = compressed(tokens), new_cache(KVCacheConfig(method="fp16"), shape_of(tokens))
    feed(plain, tokens)
    assert cache.evicted == 0
    assert same(feed(cache, more, 1), feed(plain, more, 1))


def test_equal_keys_keep_sinks_and_the_first_rows() -> None:
    tokens = random_tokens(100, seed=5, heads=3)
    cache = compressed(tokens._replace(keys=mx.ones_like(tokens.keys)), alpha=0.0)
    places = rows_of_heads(cache)
    assert all(own == list(range(len(own))) for own in places)
    assert [len(own) for own in places] == [3 * BUDGET - 2 * SINKS, SINKS, SINKS]


def test_without_the_hook_heads_are_equal_and_it_says_so() -> None:
    cache = compressed(uneven_tokens(100, seed=6), views=False)
    assert cache.head_rows is None
    assert cache.fidelity == "proxy"
    assert compressed(uneven_tokens(100, seed=6)).fidelity == "exact"


# ---- what queries see -----------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 1e-5), (mx.float16, 1e-2)])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_heads_see_their_own_rows_and_no_more(
    dtype: mx.Dtype, tolerance: float, length: int
) -> None:
    tokens, more = uneven_tokens(200, seed=7, dtype=dtype), uneven_tokens(length, 8, dtype=dtype)
    cache = compressed(tokens)
    out = attend(cache, more)
    assert out.dtype == dtype
    assert worst(out, by_head(tokens, rows_of_heads(cache), more, 64**-0.5)) < tolerance


def test_long_turns_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, more = uneven_tokens(100, seed=9), uneven_tokens(23, seed=10)
    whole = attend(compressed(tokens), more)
    monkeypatch.setattr("veloxquant.cache.pooled_heads.SCORE_BYTES", 4 * 6 * (96 + 23) * 5)
    assert worst(attend(compressed(tokens), more), whole) < 1e-5
    assert worst(feed(compressed(tokens), more, 4), whole) < 1e-5


def test_sinks_of_the_model_join_the_denominator() -> None:
    tokens, step = uneven_tokens(100, seed=11), uneven_tokens(1, seed=12)
    silent, loud = mx.full((6,), -1e9), mx.full((6,), 1e9)
    plain = attend(compressed(tokens), step)
    assert worst(attend(compressed(tokens), step, silent), plain) < 1e-6
    assert mx.abs(attend(compressed(tokens), step, loud)).max().item() < 1e-6


def test_other_value_sizes() -> None:
    tokens, step = (
        uneven_tokens(90, 13, k_dim=96, v_dim=80),
        uneven_tokens(1, 14, k_dim=96, v_dim=80),
    )
    cache = compressed(tokens)
    out = attend(cache, step)
    assert worst(out, by_head(tokens, rows_of_heads(cache), step, 96**-0.5)) < 1e-5


# ---- later ----------------------------------------------------------------------------------


def test_what_comes_later_is_appended_and_rewound() -> None:
    tokens, turn = uneven_tokens(100, seed=15), uneven_tokens(40, seed=16)
    cache = compressed(tokens)
    before, counts = held_pool(cache), cache.head_rows
    feed(cache, turn, 39)
    cache.commit()
    assert (cache.size(), cache.offset) == (BUDGET + 40, 140)
    assert same(held_pool(cache), before)
    assert same(cache.head_rows, counts)
    assert cache.kept_positions()[0, 1, BUDGET:].tolist() == list(range(100, 140))
    assert cache.trim(41) == 0
    assert cache.trim(40) == 40
    assert same(held_pool(cache), before)
    with pytest.raises(CacheStateError, match="safeguard_alpha"):
        held_rows(cache)


def held_pool(cache) -> mx.array:
    return cache.keys(BUDGET)


def test_states_files_and_copies_keep_the_counts(tmp_path) -> None:
    tokens, more = uneven_tokens(100, seed=17), uneven_tokens(4, seed=18)
    cache = compressed(tokens)
    twin, copied = new_cache(config(), shape_of(tokens)), copy.deepcopy(cache)
    twin.state = cache.state
    save_caches(tmp_path / "one", [cache], config())
    loaded = load_caches(tmp_path / "one", plan_of(shape_of(tokens), 1), config())[0]
    wanted = feed(cache, more, 1)
    for other in (twin, copied, loaded):
        assert same(feed(other, more, 1), wanted)
        same_state(other, cache)
    wrong = cache.state
    wrong[-1][-1] = cache.head_rows + 1
    with pytest.raises(CacheStateError, match="counts of heads"):
        twin.state = wrong


def test_sequences_of_a_batch_have_counts_of_their_own() -> None:
    both, step = uneven_tokens(100, seed=19, batch=2), uneven_tokens(1, seed=20, batch=2)
    together = compressed(both)
    out = attend(together, step)
    rows = [uneven_tokens(101, seed=21), uneven_tokens(70, seed=22)]
    ragged = Ragged(config(), rows)
    ragged.prompt(50)
    later = feed(ragged.batch, step.then(step), 1)
    for i in range(2):
        alone = compressed(both.row(i))
        assert same(alone.head_rows[0], together.head_rows[i])
        assert worst(attend(alone, step.row(i)), out[i : i + 1]) < 1e-5
        single = new_cache(config(), shape_of(rows[i]))
        feed(single, rows[i], 50)
        assert worst(feed(single, step.then(step).row(i), 1), later[i : i + 1]) < 1e-5
        single.commit()
        assert single.head_rows is not None
        same_state(ragged.batch.extract(i), single)
