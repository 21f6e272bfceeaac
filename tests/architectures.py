"""Tiny random models of many architectures, made in this process: for caches, not for quality.

The table covers every cache class and every kind of attention that mlx-lm's models have.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

VOCAB = 384
DENSE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
MOE: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    **MOE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
GEMMA3N: dict[str, Any] = {
    **DENSE,
    "model_type": "gemma3n_text",
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention", "full_attention",
        "sliding_attention", "full_attention",
    ],
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "sliding_window": 32,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.0] * 6,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}  # fmt: skip

# Fields that differ from DENSE, by the name tests use.
TABLE: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    # layers of two kinds: RotatingKVCache and KVCache
    "llama_sliding": {
        "model_type": "llama", "num_hidden_layers": 3, "layer_types": SLIDING,
        "sliding_window": 32,
    },
    # one KV head for all queries
    "mistral": {"model_type": "mistral", "head_dim": 32, "num_key_value_heads": 1},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 128},
    # head size without a power of two
    "llama_80": {"model_type": "llama", "head_dim": 80},
    # no make_cache of its own; float32 queries beside 16-bit keys
    "phi": {"model_type": "phi", "num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {"model_type": "phi3"},
    # soft cap: attention written out in the model file
    "gemma2": {
        "model_type": "gemma2", "query_pre_attn_scalar": 64, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", "num_hidden_layers": 3, "num_key_value_heads": 1,
        "sliding_window": 32, "sliding_window_pattern": 3, "query_pre_attn_scalar": 64,
    },
    # layers that share the keys of another layer, by its cache and by its fetched rows
    "gemma3n": {"model_type": "gemma3n", "text_config": GEMMA3N},
    "gemma4": {
        "model_type": "gemma4_text", "num_hidden_layers": 6, "num_key_value_heads": 1,
        "num_kv_shared_layers": 2, "sliding_window": 32, "global_head_dim": 128,
        "layer_types": GEMMA3N["layer_types"], "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 16, "use_double_wide_mlp": False,
    },
    # sinks in the softmax
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
    },
    # ChunkedKVCache beside KVCache; cannot be batched
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            **DENSE, "model_type": "llama4_text", "attention_bias": False,
            "attention_chunk_size": 64, "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128, "num_experts_per_tok": 1, "num_hidden_layers": 4,
            "num_local_experts": 2, "rope_scaling": None, "use_qk_norm": True,
        },
    },
    # values narrower than keys
    "deepseek_v2": {
        **LATENT, "model_type": "deepseek_v2", "n_group": 1, "topk_group": 1,
        "rope_scaling": {
            "type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
        },
    },
    # the cache holds a latent; v32 adds an indexer: CacheList(KVCache, KVCache)
    "deepseek_v3": {**LATENT, "model_type": "deepseek_v3"},
    "deepseek_v32": {
        **LATENT, "model_type": "deepseek_v32", "index_head_dim": 64, "index_n_heads": 4,
        "index_topk": 64,
    },
    # hybrids: recurrent layers, or both in one layer (CacheList)
    "qwen3_next": {
        "model_type": "qwen3_next", "num_hidden_layers": 4, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "decoder_sparse_step": 1, "shared_expert_intermediate_size": 64, "mlp_only_layers": [],
        "moe_intermediate_size": 64, "partial_rotary_factor": 0.25, "norm_topk_prob": True,
    },
    "lfm2": {
        "model_type": "lfm2", "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
        "block_dim": 128, "block_ff_dim": 128, "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "falcon_h1": {
        "model_type": "falcon_h1", "mamba_d_ssm": 256, "mamba_d_head": 64, "mamba_n_heads": 4,
        "mamba_d_state": 32, "lm_head_multiplier": 1.0, "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0, "key_multiplier": 1.0, "embedding_multiplier": 1.0,
    },
    # no attention at all
    "mamba2": {
        "model_type": "mamba2", "num_heads": 4, "state_size": 32, "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4, "n_groups": 1, "use_bias": False, "use_conv_bias": True,
        "intermediate_size": 256, "time_step_limit": [0.0, 100.0], "time_step_rank": "auto",
    },
}  # fmt: skip


@functools.cache
def tiny(name: str, seed: int = 0, dtype: str = "float32") -> Any:
    """The model of a row of the table; the same object for equal arguments.

    The usual initialisation leaves logits nearly flat, and greedy decoding then hangs on rounding;
    larger matrices give it clear winners.
    """
    from mlx_lm.utils import _get_classes

    config = {**DENSE, **TABLE[name]}
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    key, weights = mx.random.key(seed), []
    for path, value in tree_flatten(model.parameters()):
        if not mx.issubdtype(value.dtype, mx.floating):
            continue
        key, sub = mx.random.split(key)
        if value.ndim >= 2:
            value = mx.random.normal(value.shape, key=sub) * (1.5 / value.shape[-1] ** 0.5)
        elif path.endswith("sinks"):
            value = mx.random.normal(value.shape, key=sub) * 2 + 2
        weights.append((path, value.astype(getattr(mx, dtype))))
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run graphs as they are: on the CPU, MLX compiles fused ones with a C++ compiler first."""
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def prompt(n: int, seed: int = 0) -> list[int]:
    """`n` token ids."""
    ids = mx.random.randint(3, VOCAB, (n,), key=mx.random.key(1000 + seed))
    return [int(i) for i in ids.tolist()]  # type: ignore[union-attr]


def feed(model: Any, tokens: list[int], caches: list[Any]) -> mx.array:
    """One forward pass; logits (n, vocabulary) in float32."""
    out = model(mx.array([tokens]), cache=caches)[0].astype(mx.float32)
    mx.eval(out)
    return out
