"""Write a tiny random model with tokenizer and chat template: for protocols, not for quality.

Everything is made here; nothing is downloaded. As a program: `python tests/tiny_model.py FOLDER`.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

VOCAB = 384
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content']"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog while the river runs down to the sea.",
    "A number of people asked the server to answer many short questions at the same time.",
    "Compression keeps the memory of a long conversation small enough for one machine.",
)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
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
    "bos_token_id": 0,
    "eos_token_id": 2,
}


@functools.cache
def tokenizer_json() -> str:
    """A byte-level BPE tokenizer, trained on three sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def _weights(config: dict[str, Any], seed: int, dtype: str) -> dict[str, Any]:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    key = mx.random.key(seed)
    out = {}
    for name, value in tree_flatten(model.parameters()):
        if value.ndim >= 2:
            # The usual initialisation leaves logits nearly flat, and greedy decoding then hangs
            # on rounding; larger matrices give it clear winners.
            key, sub = mx.random.split(key)
            value = mx.random.normal(value.shape, key=sub) * (1.5 / value.shape[-1] ** 0.5)
        out[name] = value.astype(getattr(mx, dtype))
    return out


def make_tiny_model(
    folder: Path, *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Write a model into `folder` and return it.

    Args:
        folder: made when missing.
        seed: of the random weights.
        dtype: name of an MLX type.
        overrides: fields of the configuration to replace, `model_type` and its own among them.
    """
    import mlx.core as mx

    folder.mkdir(parents=True, exist_ok=True)
    config = {**LLAMA, **overrides, "torch_dtype": dtype}
    mx.save_safetensors(
        str(folder / "model.safetensors"), _weights(config, seed, dtype), {"format": "mlx"}
    )
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[0],
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    return folder


if __name__ == "__main__":
    make_tiny_model(Path(sys.argv[1]))
