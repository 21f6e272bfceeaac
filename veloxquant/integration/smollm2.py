"""Turn the GGUF file of SmolLM2-135M-Instruct into a model folder that mlx-lm loads.

Three things must be got right: llama.cpp stores the rows of the query and key projections in its
own rotary order; the packed weights are unpacked in float32, so that the one rounding is the one to
bfloat16; the tokenizer is rebuilt from the vocabulary and merges in the file.
"""

import json
from pathlib import Path
from typing import Any, cast

GROUP_SIZE = 32
CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of special tokens."""

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def _scalar(meta: dict[str, Any], key: str) -> Any:
    value = meta[key]
    return value.item() if hasattr(value, "item") else value


def model_config(meta: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` that the metadata of the file amounts to."""

    def get(key: str) -> Any:
        return _scalar(meta, f"llama.{key}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("rope.dimension_count"),
        "max_position_embeddings": get("context_length"),
        # stored as float32: drop the noise digits of the conversion to double
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(f"{get('rope.freq_base'):.6g}"),
        "vocab_size": get("vocab_size"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": _scalar(meta, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _scalar(meta, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _scalar(meta, "tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def tokenizer_config(meta: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The `tokenizer_config.json`, with the chat template of the file."""
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[_scalar(meta, "tokenizer.ggml.unknown_token_id")],
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": _scalar(meta, "tokenizer.chat_template"),
    }


def _tokenizer(meta: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"].tolist()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def _renamed(name: str) -> str:
    """Name in mlx-lm; the last part is weight, scales or biases."""
    stem, part = name.rsplit(".", 1)
    if stem.startswith("blk."):
        _, layer, block = stem.split(".")
        return f"model.layers.{layer}.{NAMES[block]}.{part}"
    return f"{NAMES[stem]}.{part}"


def _half_split(rows: Any, n_heads: int) -> Any:
    """Interleaved rotary rows (n_heads * D, ...) in the half-split order of mlx-lm."""
    import mlx.core as mx

    head_dim = rows.shape[0] // n_heads
    pairs = rows.reshape(n_heads, head_dim // 2, 2, *rows.shape[1:])
    return mx.contiguous(pairs.swapaxes(1, 2).reshape(rows.shape))


def _weights(raw: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Unpacked bfloat16 weights under mlx-lm's names."""
    import mlx.core as mx

    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    named = {}
    for name, value in raw.items():
        new = _renamed(name)
        projection = new.split(".")[-2]
        # the permutation moves whole rows, so it is exact for packed ones too
        named[new] = _half_split(value, heads[projection]) if projection in heads else value

    plain = {}
    for name, value in named.items():
        stem, part = name.rsplit(".", 1)
        if part in ("scales", "biases"):
            continue
        if f"{stem}.scales" in named:
            scales, biases = named[f"{stem}.scales"], named[f"{stem}.biases"]
            value = mx.dequantize(
                value,
                scales.astype(mx.float32),
                biases.astype(mx.float32),
                group_size=GROUP_SIZE,
                bits=value.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE),
            )
        plain[name] = value.astype(mx.bfloat16)
    return plain


def convert(gguf: Path, folder: Path) -> None:
    """Write the model folder of `gguf` into the existing `folder`.

    Raises:
        ValueError: when the file is not a llama-type model.
        RuntimeError: when MLX cannot read it.
    """
    import mlx.core as mx

    raw, meta = cast(
        "tuple[dict[str, Any], dict[str, Any]]", mx.load(str(gguf), return_metadata=True)
    )
    if (kind := _scalar(meta, "general.architecture")) != "llama":
        raise ValueError(f"expected a llama-type model in {gguf.name}, found {kind!r}")
    config = model_config(meta)
    mx.save_safetensors(
        str(folder / "model.safetensors"), _weights(raw, config), metadata={"format": "mlx"}
    )
    _tokenizer(meta).save(str(folder / "tokenizer.json"))
    for name, content in {
        "tokenizer_config.json": tokenizer_config(meta, config),
        "config.json": config,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
