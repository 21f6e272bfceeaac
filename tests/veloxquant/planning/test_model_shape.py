from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from veloxquant.planning.model_shape import NativeLayer, ShapeError, read_shape, shape_of
from veloxquant.planning.safetensors import Tensor
from veloxquant.quantizers.sizes import LayerShape

Config = dict[str, Any]


def test_plain_model_has_equal_layers_in_the_backends_type(llama_config: Config) -> None:
    for backend, itemsize in (("metal", 2), ("cpu", 4)):
        shape = shape_of(llama_config, {}, backend)  # type: ignore[arg-type]
        assert shape.layers == ((LayerShape(4, 2, 16, 16, itemsize), 2),)
        assert shape.kv_bytes_per_token == 2 * 2 * 2 * 16 * itemsize
        assert (shape.n_layers, shape.native_context, shape.others) == (2, 4096, ())


def test_heads_default_to_all_and_head_size_to_the_rest(llama_config: Config) -> None:
    del llama_config["head_dim"], llama_config["num_key_value_heads"]
    assert shape_of(llama_config, {}, "metal").layers == ((LayerShape(4, 4, 16, 16), 2),)


def test_text_config_of_a_multimodal_model_counts(llama_config: Config) -> None:
    nested = {"model_type": "gemma3", "text_config": llama_config}
    assert shape_of(nested, {}, "metal").n_layers == 2


def test_older_names_are_understood() -> None:
    gpt2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 1024}
    shape = shape_of(gpt2, {}, "metal")
    assert shape.layers == ((LayerShape(4, 4, 12, 12), 3),)
    assert shape.native_context == 1024


def kinds(config: Config, **more: Any) -> tuple[int, dict[str, int]]:
    shape = shape_of(config | more, {}, "metal")
    others: dict[str, int] = {}
    for layer, count in shape.others:
        others[layer.kind] = others.get(layer.kind, 0) + count
    return shape.n_compressed, others


@pytest.mark.parametrize(
    ("more", "full", "others"),
    [
        ({"sliding_window": 512}, 12, {}),
        ({"sliding_window": 512, "sliding_window_pattern": 6}, 2, {"sliding": 10}),
        ({"layer_types": ["sliding_attention", "full_attention"] * 6, "sliding_window": 64}, 6,
         {"sliding": 6}),
        ({"layer_types": ["linear_attention"] * 9 + ["full_attention"] * 3}, 3, {"recurrent": 9}),
        ({"full_attention_interval": 4}, 3, {"recurrent": 9}),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 0, {"latent": 12}),
        ({"hybrid_override_pattern": "M-M-M*-M-M-*"}, 2, {"recurrent": 5}),
        ({"num_kv_shared_layers": 4}, 8, {}),
        ({"attn_layer_period": 4, "attn_layer_offset": 3}, 3, {"recurrent": 9}),
        ({"model_type": "mamba2"}, 0, {"recurrent": 12}),
    ],
)  # fmt: skip
def test_layer_kinds(llama_config: Config, more: Config, full: int, others: dict[str, int]) -> None:
    assert kinds(llama_config | {"num_hidden_layers": 12}, **more) == (full, others)


def test_head_counts_by_layer_give_several_shapes(llama_config: Config) -> None:
    shape = shape_of(llama_config | {"num_key_value_heads": [2, 1]}, {}, "metal")
    assert {s.n_kv_heads: n for s, n in shape.layers} == {2: 1, 1: 1}


def test_sliding_layers_are_bounded_by_their_window() -> None:
    layer = NativeLayer("sliding", token_bytes=10, window=512)
    assert layer.nbytes(100) == 10 * 256
    assert layer.nbytes(512) == layer.nbytes(100_000) == 10 * 512


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_missing_sizes_are_named(llama_config: Config, missing: str) -> None:
    del llama_config[missing]
    with pytest.raises(ShapeError, match=missing):
        shape_of(llama_config, {}, "metal")


@pytest.mark.parametrize("value", [-1, 0, "x", None, 1 << 60, True, []])
def test_senseless_sizes_are_refused(llama_config: Config, value: Any) -> None:
    with pytest.raises(ShapeError):
        shape_of(llama_config | {"num_attention_heads": value}, {}, "metal")


def test_resident_weights_become_float32_on_the_cpu_only(llama_config: Config) -> None:
    tensors = {
        "a.weight": Tensor("BF16", (10,), 20),
        "b.weight": Tensor("U32", (10,), 40),
        "lm_head.weight": Tensor("BF16", (5,), 10),
        "vision_tower.x": Tensor("BF16", (100,), 200),
    }
    assert shape_of(llama_config, tensors, "cpu").resident_weights == 40 + 40
    assert shape_of(llama_config, tensors, "metal").resident_weights == 20 + 40
    untied = llama_config | {"tie_word_embeddings": False}
    assert shape_of(untied, tensors, "metal").resident_weights == 20 + 40 + 10


def test_read_shape_reads_a_folder(tmp_path: Path, make_model: Callable[..., Path]) -> None:
    shape = read_shape(make_model(tmp_path / "m"), "cpu")
    assert (shape.file_weights, shape.resident_weights) == (4096, 8192)
    with pytest.raises(ShapeError, match=r"no config\.json"):
        read_shape(tmp_path)
