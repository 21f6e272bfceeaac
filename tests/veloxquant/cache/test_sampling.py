from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.architectures import prompt, tiny
from veloxquant.cache.probe import native_caches, probe
from veloxquant.cache.sampling import collect
from veloxquant.core.exceptions import QuantizerConfigError

TOKENS = prompt(300)


def windows(model: Any, window: int) -> list[list[tuple[mx.array, mx.array]]]:
    """Keys and values of every layer that plain caches hold after each piece."""
    out = []
    for start in range(0, len(TOKENS), window):
        caches = native_caches(model)
        mx.eval(model(mx.array([TOKENS[start : start + window]]), cache=caches))
        out.append([tuple(x[0] for x in cache.keys_and_values()) if hasattr(
            cache, "keys_and_values") else (cache.keys[0, :, : cache.offset],
                                            cache.values[0, :, : cache.offset])
                    for cache in caches])  # fmt: skip
    return out


def test_samples_are_what_plain_caches_hold() -> None:
    model = tiny("llama")
    samples = collect(probe(model), TOKENS, rows=10_000, window=150)
    assert len(samples) == 2
    for index, sample in enumerate(samples):
        assert (sample.layer, sample.n_layers) == (index, 2)
        whole = windows(model, 150)
        for got, which in ((sample.keys, 0), (sample.values, 1)):
            wanted = mx.concatenate([piece[index][which] for piece in whole], axis=1)
            assert mx.allclose(got, wanted.astype(mx.float32), atol=1e-4)
        assert sample.positions.tolist() == [*range(150), *range(150)]
        assert sample.rope is model.layers[index].self_attn.rope


def test_queries_are_those_of_the_layer_after_rotation() -> None:
    model = tiny("llama")
    sample = collect(probe(model), TOKENS[:80], rows=80)[0]
    layer = model.layers[0]
    x = layer.input_layernorm(model.model.embed_tokens(mx.array([TOKENS[:80]])))
    q = layer.self_attn.q_proj(x).reshape(1, 80, 4, 64).transpose(0, 2, 1, 3)
    assert sample.queries is not None
    assert mx.allclose(sample.queries, layer.self_attn.rope(q)[0], atol=1e-4)


def test_tokens_are_the_same_in_all_arrays_and_spread_evenly() -> None:
    model = tiny("llama", dtype="bfloat16")
    plan = probe(model)
    everything = collect(plan, TOKENS, rows=10_000, window=100)[1]
    sample = collect(plan, TOKENS, rows=60, window=100)[1]
    assert sample.keys.dtype == mx.float32
    assert sample.keys.shape[1] == 60
    for piece in range(3):
        at = np.array(sample.positions)[20 * piece : 20 * piece + 20]
        assert np.all(np.diff(at) > 0)
        rows = mx.array(at + 100 * piece)
        for name in ("keys", "values", "queries"):
            part = getattr(sample, name)[:, 20 * piece : 20 * piece + 20]
            assert mx.array_equal(part, mx.take(getattr(everything, name), rows, axis=1))


def test_seed_picks_tokens_and_a_slice_is_a_list() -> None:
    plan = probe(tiny("llama"))
    first, same, other = (collect(plan, TOKENS, rows=50, seed=s) for s in (1, 1, 2))
    assert mx.array_equal(first[0].positions, same[0].positions)
    assert not mx.array_equal(first[0].positions, other[0].positions)
    assert [s.layer for s in first[:]] == [0, 1]
    assert first[-1].layer == 1


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_other_attention_is_sampled_too(name: str) -> None:
    try:
        model = tiny(name)
    except KeyError:
        pytest.skip(f"no {name} in the table")
    plan = probe(model)
    for sample in collect(plan, TOKENS[:100], rows=40):
        assert sample.keys.shape == (sample.shape.n_kv_heads, 40, sample.shape.k_dim)
        assert (sample.queries is None) == (plan.returns == "arrays")


def test_short_texts_and_models_without_attention_are_refused() -> None:
    plan = probe(tiny("llama"))
    with pytest.raises(QuantizerConfigError, match="at least 64"):
        collect(plan, TOKENS[:63])
    with pytest.raises(QuantizerConfigError, match="no layer"):
        collect(probe(tiny("mamba2")), TOKENS)


def test_progress_counts_tokens() -> None:
    seen: list[tuple[int, int]] = []
    collect(probe(tiny("llama")), TOKENS, window=128, report=lambda *at: seen.append(at))
    assert seen == [(128, 256), (256, 256)]
