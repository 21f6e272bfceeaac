"""The shape of a model's cache, from `config.json` and the headers of its weights, without MLX.

Layers with plain full attention are the ones that a method compresses; the others (sliding window,
recurrent, latent attention) keep what the model gave them, and their bytes are estimates.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from veloxquant.planning import model_files
from veloxquant.planning.model_files import FLOATS, ModelFilesError
from veloxquant.planning.safetensors import Tensor
from veloxquant.quantizers.sizes import LayerShape, round_up

Backend = Literal["metal", "cpu"]
LayerKind = Literal["full", "sliding", "recurrent", "latent", "none"]
CACHE_STEP = 256
"""Tokens by which mlx-lm's own caches grow."""
UNUSED_PREFIXES = (
    "vision_tower.", "vision_model.", "multi_modal_projector.", "audio_tower.", "model.visual.",
    "visual.", "embed_vision.", "embed_audio.",
)  # fmt: skip
"""Weights of parts that a text model does not load."""


class ShapeError(ValueError):
    """Raised when a model's configuration does not say how large its cache is."""


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """A layer whose own cache stays: bytes per token up to `window` tokens, and a fixed part."""

    kind: LayerKind
    token_bytes: int = 0
    fixed_bytes: int = 0
    window: int | None = None

    def nbytes(self, tokens: int) -> int:
        """Estimated bytes of one sequence of `tokens` tokens."""
        rows = min(tokens, self.window) if self.window else tokens
        return self.fixed_bytes + self.token_bytes * round_up(rows, CACHE_STEP)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a plan needs of a model; bytes are those of the backend it was read for.

    `layers` counts equal shapes of the compressed layers; `notes` say what is estimated.
    """

    layers: tuple[tuple[LayerShape, int], ...]
    others: tuple[tuple[NativeLayer, int], ...]
    hidden: int
    intermediate: int
    vocabulary: int
    native_context: int
    file_weights: int
    resident_weights: int
    backend: Backend
    notes: tuple[str, ...] = ()

    @property
    def n_compressed(self) -> int:
        """Layers that a method compresses."""
        return sum(n for _, n in self.layers)

    @property
    def n_layers(self) -> int:
        """All layers with a cache."""
        return self.n_compressed + sum(n for _, n in self.others)

    @property
    def kv_bytes_per_token(self) -> int:
        """Uncompressed bytes that one more token costs in the compressed layers."""
        return sum(n * shape.full_bytes(1) for shape, n in self.layers)

    def native_bytes(self, tokens: int) -> int:
        """Bytes of the layers that stay as they are, one sequence."""
        return sum(n * layer.nbytes(tokens) for layer, n in self.others)


def resident_weights(tensors: dict[str, Tensor], backend: Backend, *, tied: bool = False) -> int:
    """Bytes of the weights in memory.

    On the CPU backend the worker turns every float array into float32 (16-bit arithmetic is slow
    there); packed words stay as they are.
    """
    total = 0
    for name, tensor in tensors.items():
        if name.startswith(UNUSED_PREFIXES) or (tied and name.startswith("lm_head.")):
            continue
        wide = backend == "cpu" and tensor.dtype in FLOATS
        total += 4 * tensor.size if wide else tensor.nbytes
    return total


def read_shape(folder: Path, backend: Backend | None = None) -> ModelShape:
    """The shape of the model in `folder`.

    Args:
        folder: the model's folder.
        backend: where it will run; this machine's by default.

    Raises:
        ShapeError: when the folder cannot be read or its configuration lacks sizes.
    """
    from veloxquant.planning.room import this_backend

    try:
        config = model_files.read_json(folder / "config.json")
        tensors = model_files.read_weights(folder)
    except ModelFilesError as error:
        raise ShapeError(str(error)) from error
    return shape_of(config, tensors, backend or this_backend())


def shape_of(config: dict[str, Any], tensors: dict[str, Tensor], backend: Backend) -> ModelShape:
    """The shape that a `config.json` and the weights' headers amount to.

    Raises:
        ShapeError: when layer count, heads or head size are not there.
    """
    text = config.get("text_config")
    config = config | text if isinstance(text, dict) else config
    itemsize = 4 if backend == "cpu" else 2
    hidden = _number(config, "hidden_size", "n_embd", "d_model", "dim")
    n_layers = _number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    kinds = layer_kinds(config, n_layers)
    layers: Counter[LayerShape] = Counter()
    others: Counter[NativeLayer] = Counter()
    for index, kind in enumerate(kinds):
        if kind == "full":
            layers[_attention(config, index, hidden, itemsize, sliding=False)] += 1
        elif kind == "sliding":
            shape = _attention(config, index, hidden, itemsize, sliding=True)
            others[NativeLayer("sliding", shape.full_bytes(1), 0, _window(config))] += 1
        elif kind == "latent":
            rank = _number(config, "kv_lora_rank") + _optional(config, "qk_rope_head_dim", 64)
            others[NativeLayer("latent", rank * itemsize)] += 1
        elif kind == "recurrent":
            others[NativeLayer("recurrent", 0, _state_bytes(config, hidden))] += 1
    names = {"sliding": "sliding-window", "recurrent": "recurrent", "latent": "latent-attention"}
    notes = [
        f"{n} {names[layer.kind]} layers keep their own cache (bytes estimated)"
        for layer, n in others.items()
    ]
    experts = _optional(config, "num_experts_per_tok", 1)
    return ModelShape(
        layers=tuple(layers.items()),
        others=tuple(others.items()),
        hidden=hidden,
        intermediate=max(
            _optional(config, "intermediate_size", 4 * hidden),
            experts * _optional(config, "moe_intermediate_size", 0),
        ),
        vocabulary=_optional(config, "vocab_size", 0),
        native_context=native_context(config),
        file_weights=sum(tensor.nbytes for tensor in tensors.values()),
        resident_weights=resident_weights(
            tensors, backend, tied=config.get("tie_word_embeddings") is True
        ),
        backend=backend,
        notes=tuple(notes),
    )


def native_context(config: dict[str, Any]) -> int:
    """Tokens that the model was made for; 8,192 when it does not say."""
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(value := config.get(key), int) and value > 0:
            return value
    return 8192


def layer_kinds(config: dict[str, Any], n_layers: int) -> list[LayerKind]:
    """Kind of each layer that has a cache of its own."""
    shared = config.get("num_kv_shared_layers")
    count = n_layers - shared if isinstance(shared, int) and 0 <= shared < n_layers else n_layers
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):
        marks: dict[str, LayerKind] = {"*": "full", "M": "recurrent"}
        return [marks.get(mark, "none") for mark in pattern[:count]]
    if _optional(config, "kv_lora_rank", 0):
        return ["latent"] * count
    types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(types, list) and types:
        return [_kind_of(str(types[i % len(types)])) for i in range(count)]
    if isinstance(attention := config.get("attn_layer_indices"), list):
        return ["full" if i in attention else "recurrent" for i in range(count)]
    if isinstance(attention := config.get("full_attn_idxs"), list):
        return ["full" if i in attention else "recurrent" for i in range(count)]
    if every := _optional(config, "full_attention_interval", 0):
        return ["full" if (i + 1) % every == 0 else "recurrent" for i in range(count)]
    if every := _optional(config, "attn_layer_period", 0):
        first = _optional(config, "attn_layer_offset", 0)
        return ["full" if i % every == first else "recurrent" for i in range(count)]
    every = config.get("sliding_window_pattern")
    if config.get("model_type") in ("gemma3", "gemma3_text") and not isinstance(every, int):
        every = 6
    if isinstance(every, int) and every > 1 and config.get("sliding_window"):
        return ["full" if (i + 1) % every == 0 else "sliding" for i in range(count)]
    if config.get("model_type") in ("mamba", "mamba2", "rwkv7"):
        return ["recurrent"] * count
    # a bare `sliding_window` means nothing: mlx-lm's llama, qwen and mistral models ignore it
    return ["full"] * count


def _kind_of(name: str) -> LayerKind:
    if "sliding" in name or "chunked" in name or name == "local":
        return "sliding"
    if name in ("full_attention", "attention", "global", "hybrid"):
        return "full"
    return "recurrent"


def _attention(
    config: dict[str, Any], index: int, hidden: int, itemsize: int, *, sliding: bool
) -> LayerShape:
    queries = _number(config, "num_attention_heads", "n_head", "n_heads", index=index)
    keys = _optional(
        config, "num_key_value_heads", 0, "num_kv_heads", "n_head_kv", "n_kv_heads", index=index
    ) or (1 if config.get("multi_query") else queries)
    head_dim = _optional(config, "head_dim", 0) or hidden // queries
    if not sliding:
        head_dim = _optional(config, "global_head_dim", 0) or head_dim
        keys = _optional(config, "num_global_key_value_heads", 0) or keys
    return LayerShape(
        queries, keys, head_dim, _optional(config, "v_head_dim", 0) or head_dim, itemsize
    )


def _window(config: dict[str, Any]) -> int:
    for key in ("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size"):
        if isinstance(value := config.get(key), int) and value > 0:
            return value
    return 4096


def _state_bytes(config: dict[str, Any], hidden: int) -> int:
    """Rough bytes of a recurrent layer's state, in float32."""
    heads = _optional(config, "linear_num_value_heads", 0, "mamba_n_heads", "mamba_num_heads")
    rows = _optional(config, "linear_value_head_dim", 0, "mamba_d_head", "mamba_head_dim")
    columns = _optional(config, "linear_key_head_dim", 0, "mamba_d_state", "ssm_state_size",
                        "state_size")  # fmt: skip
    if heads and rows and columns:
        return 4 * heads * rows * columns
    return 4 * 2 * hidden * (columns or 16)


def _number(config: dict[str, Any], *keys: str, index: int = 0) -> int:
    if value := _optional(config, keys[0], 0, *keys[1:], index=index):
        return value
    raise ShapeError(f"config.json gives no {keys[0]}")


def _optional(config: dict[str, Any], key: str, default: int, *others: str, index: int = 0) -> int:
    """The first of the keys with a positive whole number, or one per layer."""
    for name in (key, *others):
        value = config.get(name)
        if isinstance(value, list) and value:
            value = value[index % len(value)]
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40:
            return value
    return default
