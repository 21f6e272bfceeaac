import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.architectures import prompt, tiny
from veloxquant.artifacts import Calibration, InMemoryArtifactStore, NpyArtifactStore
from veloxquant.cache.builder import new_caches, plan_model
from veloxquant.cache.calibration import (
    artifacts_for,
    fingerprint,
    fit_method,
    fitters,
    user_store,
)
from veloxquant.cache.context import LayerContext, LayerSample
from veloxquant.cache.sampling import collect
from veloxquant.cache.table import TABLE, MethodRow
from veloxquant.config.folders import HOME_VARIABLE
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.methods import fp16

METHOD = "vecinfer"
CONFIG = KVCacheConfig(method=METHOD, head_dim=64)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any calibration."""
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[LayerContext]:
    """The method's module replaced by one that fits means; what `build` was told."""
    told: list[LayerContext] = []

    def fit(config: KVCacheConfig, sample: LayerSample) -> dict[str, Any]:
        assert config.head_dim == sample.shape.k_dim
        return {"mean": sample.keys.mean(axis=1), "layer": np.array(sample.layer)}

    def fit_shared(samples: Sequence[LayerSample], config: KVCacheConfig) -> dict[str, Any]:
        return {"book": mx.ones((2, 3)), "layers": np.array(len(samples))}

    def build(config: KVCacheConfig, shape: Any, context: LayerContext) -> Any:
        told.append(context)
        return fp16.build(config, shape, context)

    module = types.SimpleNamespace(
        fit=fit, fit_shared=fit_shared, build=build, FIT_FIELDS=("key_sub_dim",)
    )
    real = MethodRow.load
    monkeypatch.setattr(MethodRow, "load", lambda row: module if row.name == METHOD else real(row))
    return told


def calibrate(model: Any, config: KVCacheConfig = CONFIG) -> Calibration:
    plan = plan_model(model, config)
    return fit_method(plan, collect(plan, prompt(100), rows=50), config, about={"model": "x"})


def test_for_model_hands_each_layer_its_own(contexts: list[LayerContext]) -> None:
    model = tiny("llama")
    made = calibrate(model)
    assert made.meta["fields"] == {"key_sub_dim": 4}
    user_store().save_calibration(fingerprint(model), METHOD, made)
    plan = plan_model(model, CONFIG)
    new_caches(plan, CONFIG)
    new_caches(plan, CONFIG)
    assert len(contexts) == 4
    for index, context in enumerate(contexts[:2]):
        assert context.artifacts is not None
        assert set(context.artifacts) == {"mean", "layer", "book", "layers"}
        assert context.artifacts["layer"].item() == index
        assert mx.array_equal(context.artifacts["mean"], made.layers[index]["mean"])
    first, second = contexts[0].artifacts, contexts[1].artifacts
    assert first is not None
    assert second is not None
    assert first["book"] is second["book"]  # one array, counted once
    assert contexts[2].artifacts is first


def test_without_a_calibration_there_is_nothing(contexts: list[LayerContext]) -> None:
    plan = plan_model(tiny("llama"), CONFIG)
    new_caches(plan, CONFIG)
    assert [context.artifacts for context in contexts] == [None, None]
    assert plan.warnings == []


@pytest.mark.usefixtures("contexts")
def test_a_store_of_the_configuration_comes_first() -> None:
    model = tiny("llama")
    user_store().save_calibration(fingerprint(model), METHOD, calibrate(model))
    config = CONFIG.with_fields(store=InMemoryArtifactStore())
    assert plan_model(model, config).artifacts == []
    config.store.save_calibration(fingerprint(model), METHOD, calibrate(model))
    assert len(plan_model(model, config).artifacts) == 2


@pytest.mark.parametrize("method", ["kvquant", "turboquant_mse"])
def test_what_is_no_store_is_refused(method: str) -> None:
    model, config = tiny("llama"), KVCacheConfig(method=method, head_dim=64, store="folder")
    with pytest.raises(QuantizerConfigError, match=r"store='folder' .* give an NpyArtifactStore"):
        new_caches(plan_model(model, config), config)


@pytest.mark.usefixtures("contexts")
def test_other_models_and_other_settings_do_not_use_it() -> None:
    model = tiny("llama")
    user_store().save_calibration(fingerprint(model), METHOD, calibrate(model))
    assert plan_model(tiny("llama", seed=1), CONFIG).artifacts == []
    plan = plan_model(model, CONFIG.with_fields(key_sub_dim=8))
    assert plan.artifacts == []
    assert "key_sub_dim=4" in plan.warnings[-1]
    assert "vq precompute" in plan.warnings[-1]
    assert len(plan_model(model, CONFIG.with_fields(value_sub_dim=4)).artifacts) == 2


@pytest.mark.usefixtures("contexts")
def test_a_calibration_of_other_shapes_is_left_alone() -> None:
    model = tiny("llama")
    made = calibrate(model)
    made.meta["shapes"][0][1] = 7
    user_store().save_calibration(fingerprint(model), METHOD, made)
    plan = plan_model(model, CONFIG)
    assert plan.artifacts == []
    assert "other shapes" in plan.warnings[-1]


def test_fingerprint_follows_weights_not_their_type() -> None:
    narrow = tiny("llama", dtype="bfloat16")
    key = fingerprint(narrow)
    assert key == fingerprint(narrow)
    assert key != fingerprint(tiny("llama", seed=1, dtype="bfloat16"))
    weights = narrow.parameters()
    try:
        narrow.set_dtype(mx.float32)
        assert fingerprint(narrow) == key
    finally:
        narrow.update(weights)


def test_fingerprint_of_packed_weights_is_stable() -> None:
    from mlx import nn

    def packed(seed: int) -> nn.Module:
        layer = nn.Linear(64, 8, bias=False)
        layer.weight = mx.random.normal((8, 64), key=mx.random.key(seed))
        return nn.Sequential(nn.QuantizedLinear.from_linear(layer))

    assert fingerprint(packed(0)) == fingerprint(packed(0)) != fingerprint(packed(1))


def test_the_table_says_which_methods_can_be_calibrated() -> None:
    assert fitters() == [row.name for row in TABLE.values() if row.calibration != "none"]


def test_methods_without_a_fitter_are_refused() -> None:
    model = tiny("llama")
    config = KVCacheConfig(method="kivi", head_dim=64)
    plan = plan_model(model, config)
    with pytest.raises(QuantizerConfigError, match="fits nothing"):
        fit_method(plan, [], config)
    assert artifacts_for(plan, config) == []
    assert "kivi" not in fitters()


@pytest.mark.parametrize("name", fitters())
def test_every_fitter_gives_a_cache_that_works(name: str, home: Path) -> None:
    from tests.cache_lab import small_config
    from veloxquant.cache.table import row_of

    model = tiny("llama")
    config = small_config(row_of(name))
    if name == "vecinfer":
        config = config.with_fields(key_codebook_bits=4, value_codebook_bits=4)
    plan = plan_model(model, config)
    made = fit_method(plan, collect(plan, prompt(400), rows=300), config)
    assert made.layers[0] or made.shared
    store = NpyArtifactStore(home / "own")
    store.save_calibration(fingerprint(model), name, made)
    config = config.with_fields(store=store)
    plan = plan_model(model, config)
    assert len(plan.artifacts) == 2, plan.warnings
    caches = new_caches(plan, config)
    logits = model(mx.array([prompt(200)]), cache=caches)
    logits = model(mx.array([prompt(4)]), cache=caches)
    assert mx.isfinite(logits).all()
