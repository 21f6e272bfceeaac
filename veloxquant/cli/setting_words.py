"""What a method's bit width, or the form of its kept rows, means, in a cell of a table."""

from typing import Any

from veloxquant.planning.method_settings import fields_of


def setting_words(method: str, options: dict[str, Any]) -> str:
    """The width that is asked for, in the method's own terms; `-` for methods without one.

    `bit_width_inlier` is the width of every coordinate in most methods; in qjl it is that of
    values alone, whose keys are signs, and in polar that of angles, beside which signs are kept.

    Args:
        method: name of the method.
        options: settings that differ from its defaults.

    Raises:
        QuantizerConfigError: for an unknown method.
    """
    values = {name: field.default for name, field in fields_of(method).items()} | options
    if "bit_width_inlier" not in values:
        return values.get("eviction_storage") or "-"
    bits = values["bit_width_inlier"]
    width = f"{min(bits)}-{max(bits)}" if isinstance(bits, list | tuple) else str(bits)
    if method == "qjl":
        signs = f"{rows} signs" if (rows := values["jl_dim"]) else "1 bit"
        return f"k {signs}, v {width} bit"
    if method == "polar":
        return f"{width} bit angles, signs"
    return f"{width} bit"
