"""The demo model, in the type that serving uses on this machine."""

from pathlib import Path
from typing import Any

from veloxquant.config.folders import folders

NAME = "SmolLM2-135M-Instruct"


class ModelMissingError(RuntimeError):
    """Raised when there is no model to measure with; the message says how to get one."""


def model_folder(folder: Path | None = None) -> Path:
    """The folder of the model to measure with.

    Raises:
        ModelMissingError: when it holds no model.
    """
    folder = folder or folders().models / NAME
    if not (folder / "config.json").is_file():
        raise ModelMissingError(
            f"no model in {folder.name!r}; fetch the demo model with: vq models demo"
        )
    return folder


def load(folder: Path | None = None) -> tuple[Any, Any]:
    """The model, in fp32 on a CPU, and its tokenizer (of the `tokenizers` library).

    Raises:
        ModelMissingError: when there is no model.
    """
    import mlx.core as mx
    from mlx_lm.utils import load_model  # loads transformers: only when used
    from tokenizers import Tokenizer

    folder = model_folder(folder)
    model, _ = load_model(folder)
    if mx.default_device() == mx.Device(mx.cpu):
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def token_ids(tokenizer: Any, text: str, length: int, skip: int = 0) -> list[int]:
    """`length` tokens of a text after the first `skip`.

    Raises:
        ValueError: when the text is too short.
    """
    ids = tokenizer.encode(text).ids
    if len(ids) < skip + length:
        raise ValueError(f"{skip} + {length} tokens wanted, the text has {len(ids)}")
    return ids[skip : skip + length]
