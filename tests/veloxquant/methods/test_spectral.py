"""spectral: calibrated and not, where rotations come from, what does not fit is refused."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import (
    attend,
    feed,
    held_rows,
    new_cache,
    random_tokens,
    same,
    same_state,
    shape_of,
    worst,
)

from tests.architectures import prompt, tiny
from veloxquant.artifacts import InMemoryArtifactStore
from veloxquant.cache.builder import KVCacheBuilder, KVCacheFactory, build_layer, plan_model
from veloxquant.cache.calibration import fingerprint, fit_method
from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.sampling import collect
from veloxquant.cache.table import held
from veloxquant.config.folders import HOME_VARIABLE
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import SpectralQuantOptions
from veloxquant.core.exceptions import CacheStateError, QuantizerConfigError
from veloxquant.methods import spectral
from veloxquant.quantizers.sizes import LayerShape
from veloxquant.spectral.calibrate import calibrate_from_vectors

D = 96


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    return tmp_path


def concentrated(n: int, seed: int, heads: int = 2) -> mx.array:
    """Rows (heads, n, D) along four directions, others for each head, with a little noise."""
    basis = mx.random.normal((heads, 4, D), key=mx.random.key(0))
    noise, weights = (
        mx.random.normal((heads, n, width), key=mx.random.key(seed + i))
        for i, width in enumerate((D, 4))
    )
    return weights @ basis + 0.05 * noise


def tokens_of(n: int, seed: int = 5) -> Any:
    tokens = random_tokens(n, seed=seed, k_dim=D)
    return tokens._replace(keys=concentrated(n, seed)[None], values=concentrated(n, seed + 9)[None])


def config(**options: Any) -> KVCacheConfig:
    given = SpectralQuantOptions(**options) if options else None
    return KVCacheConfig(method="spectral", head_dim=D, options=given)


def found(tokens: Any) -> dict[str, np.ndarray]:
    positions = mx.arange(tokens.length)
    sample = LayerSample(0, 1, shape_of(tokens), tokens.keys[0], tokens.values[0], None, positions)
    return spectral.fit(config(), sample)


def calibrated(tokens: Any, settings: KVCacheConfig, arrays: dict[str, np.ndarray]) -> Any:
    cache = build_layer(settings, shape_of(tokens), LayerContext(artifacts=arrays, views=True))
    cache.returns = "views"
    return cache


def test_without_a_calibration_it_is_turboquant_mse() -> None:
    tokens, caches = tokens_of(60), []
    for method in ("spectral", "turboquant_mse"):
        cache = new_cache(KVCacheConfig(method=method), shape_of(tokens))
        feed(cache, tokens)
        caches.append(held_rows(cache))
    assert all(same(a, b) for a, b in zip(*caches, strict=True))


@pytest.mark.parametrize("sketched", [True, False])
def test_a_calibrated_cache_keeps_its_promises(sketched: bool) -> None:
    tokens, settings = tokens_of(80), config(spectral_apply_qjl=sketched)
    arrays = found(tokens_of(2_000, 20))
    caches = [calibrated(tokens, settings, arrays) for _ in range(3)]
    for cache, size in zip(caches, (1, 7, 80), strict=True):
        feed(cache, tokens, size)
        cache.commit()
    same_state(caches[0], caches[1])
    same_state(caches[0], caches[2])
    assert caches[0].keys_stream.body.codec is caches[1].keys_stream.body.codec
    now = tokens_of(1, 40)
    out = attend(caches[0], now)
    keys, values = (mx.repeat(a, 2, axis=1) for a in held_rows(caches[0]))
    weights = mx.softmax(now.queries @ keys.swapaxes(-1, -2) * D**-0.5, axis=-1)
    assert worst(out, weights @ values) < 1e-4
    # The bytes of the estimate, and a second norm a key for a sketch.
    norms = 2 * 128 * 4 if sketched else 0
    assert caches[1].nbytes == held(settings, shape_of(tokens), 80).nbytes + norms
    assert caches[2].trim(30) == 30
    fresh = calibrated(tokens, settings, arrays)
    feed(fresh, tokens.cut(0, 50))
    same_state(caches[2], fresh)


def test_concentrated_rows_lose_far_less() -> None:
    tokens = tokens_of(400)
    lost = []
    for arrays in (found(tokens_of(2_000, 20)), {}):
        cache = calibrated(tokens, config(spectral_apply_qjl=False), arrays)
        feed(cache, tokens)
        cache.commit()
        keys, values = held_rows(cache)
        lost.append([mx.square(keys - tokens.keys).mean().item(),
                     mx.square(values - tokens.values).mean().item()])  # fmt: skip
    assert lost[0][0] < 0.4 * lost[1][0]
    assert lost[0][1] < 0.4 * lost[1][1]


def test_states_of_other_bases_do_not_pass() -> None:
    tokens = tokens_of(40)
    cache = calibrated(tokens, config(), found(tokens_of(1_000, 20)))
    feed(cache, tokens)
    plain = new_cache(config(), shape_of(tokens))
    with pytest.raises(CacheStateError):
        plain.state = cache.state


def test_a_model_finds_its_own_calibration() -> None:
    model, store = tiny("llama"), InMemoryArtifactStore()
    plain = KVCacheConfig(method="spectral")
    plan = plan_model(model, plain)
    samples = collect(plan, prompt(200, 1), 150)
    store.save_calibration(fingerprint(model), "spectral", fit_method(plan, samples, plain))
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="spectral", store=store))
    for made in (caches, KVCacheBuilder.for_model(model, plain)):
        logits = model(mx.array([prompt(40, 2)]), cache=made)
        assert mx.isfinite(logits).all().item()
        wanted = "spectral" if made is caches else "codebook"
        assert {cache.plan.keys.spec.name for cache in made} == {wanted}


# ---- rotations kept by name -----------------------------------------------------------------


def kept(name: str, layers: int = 2, dim: int = D) -> dict[int, tuple]:
    rows = {n: np.random.default_rng(n).standard_normal((500, dim)) for n in range(layers)}
    return calibrate_from_vectors(rows, rows, name)


def test_rotations_under_the_name_are_used() -> None:
    kept("mine")
    settings = config(spectral_model_name="mine")
    tokens = tokens_of(20)
    context = LayerContext(layer=1, n_layers=2, views=True)
    cache = build_layer(settings, shape_of(tokens), context)
    assert cache.plan.keys.spec.name == "spectral"
    feed(cache, tokens)
    assert mx.isfinite(held_rows(cache)[0]).all().item()


@pytest.mark.parametrize("dim", [D, 64])
def test_rotations_of_another_model_are_refused_or_left_alone(dim: int) -> None:
    context = LayerContext(layer=0, n_layers=3 if dim == D else 2)
    for name in ("mine", "model"):
        kept(name, 2, dim)
    shape = LayerShape(2, 2, D, D)
    with pytest.raises(QuantizerConfigError, match="model"):
        build_layer(config(spectral_model_name="mine"), shape, context)
    assert build_layer(config(), shape, context).plan.keys.spec.name == "codebook"


def test_an_unknown_name_is_refused() -> None:
    for name in ("nobody", "../model", ""):
        with pytest.raises(QuantizerConfigError, match="saved under"):
            KVCacheFactory.create(config(spectral_model_name=name))


def test_artifacts_of_another_shape_are_refused() -> None:
    tokens = tokens_of(20)
    with pytest.raises(QuantizerConfigError, match="another model"):
        build_layer(config(), LayerShape(4, 4, D, D), LayerContext(artifacts=found(tokens)))


# ---- the standalone object ------------------------------------------------------------------


def test_a_standalone_cache_is_calibrated_by_hand() -> None:
    rows = {0: np.array(concentrated(1_000, 3, heads=1)[0])}
    entry = calibrate_from_vectors(rows, rows)[0]
    cache = KVCacheFactory.create(config(spectral_apply_qjl=False))
    assert cache.compression_ratio() == 1.0
    x = concentrated(300, 8, heads=1)[0]
    plain = KVCacheFactory.create(config())
    cache.calibrate(entry)
    for c in (plain, cache):
        c.append_key(x)
        c.append_value(x)
    lost = [
        mx.square(c.layer.keys_stream.body.decode(0, 300, mx.float32)[0, 0] - x).mean().item()
        for c in (plain, cache)
    ]
    assert lost[1] < 0.4 * lost[0]
    assert cache.compression_ratio() > 4
    with pytest.raises(CacheStateError, match="300 tokens"):
        cache.calibrate(entry)
    cache.reset()
    cache.append(x[0], x[0])
    assert cache.layer.plan.keys.spec.name == "spectral"
    cache.reset()
    with pytest.raises(QuantizerConfigError, match="another model"):
        cache.calibrate(tuple(np.asarray(a)[:4] if np.ndim(a) else a for a in entry))
    with pytest.raises(QuantizerConfigError, match="5 parts"):
        cache.calibrate(entry[:5])


def test_a_saved_rotation_is_found_by_the_standalone_object() -> None:
    kept("mine")
    cache = KVCacheFactory.create(config(spectral_model_name="mine"))
    assert cache.layer.plan.keys.spec.name == "spectral"
