"""Made-up model folders: headers that are true, weights that are zeros."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def weight_file(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    """A safetensors file of zeros: name -> (type, shape, bytes)."""
    entries, offset = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(offset)


PLAIN = weight_file({"model.embed_tokens.weight": ("BF16", [32, 64], 4096)})


@pytest.fixture
def weights() -> Callable[..., bytes]:
    """The function that writes a weight file."""
    return weight_file


@pytest.fixture
def llama_config() -> dict[str, Any]:
    """A small llama-type configuration."""
    return dict(CONFIG)


@pytest.fixture
def make_model() -> Callable[..., Path]:
    """Write a model folder; keywords replace or (with None) leave out files."""

    def make(folder: Path, config: Any = CONFIG, **files: bytes | None) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        content: dict[str, bytes | None] = {
            "config.json": json.dumps(config).encode(),
            "model.safetensors": PLAIN,
            "tokenizer.json": b"{}",
            "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}',
        }
        for name, data in (content | files).items():
            if data is not None:
                (folder / name).write_bytes(data)
        return folder

    return make
