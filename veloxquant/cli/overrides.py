"""`--set FIELD=VALUE`: the pairs of the command line as settings of a method."""

import difflib
from collections.abc import Sequence
from typing import Any

from veloxquant.cache.table import TABLE, row_of
from veloxquant.cli import exit_codes
from veloxquant.cli.output import CliError, usage_error
from veloxquant.planning.method_settings import SettingsError, fields_of, parse_setting, refusal


def parse_overrides(pairs: Sequence[str], method: str, bits: int | None = None) -> dict[str, Any]:
    """Settings by name with their values; `bits` is short for `bit_width_inlier`.

    Raises:
        CliError: NOT_FOUND for an unknown method; USAGE for an unknown or foreign field, a text
            that is no value, or values that cannot work together.
    """
    if method not in TABLE:
        ready = [row.name for row in TABLE.values() if row.is_ready]
        near = difflib.get_close_matches(method, ready, n=2)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Ready: {', '.join(ready)}."
        raise CliError(
            f"There is no method {method!r}.", f"{hint} `vq methods` tells about them.",
            exit_codes.NOT_FOUND, "method_missing",
        )  # fmt: skip
    fields = fields_of(method)
    options: dict[str, Any] = {}
    if bits is not None:
        if "bit_width_inlier" not in fields:
            usage_error(f"--bits: method {method!r} has no bit width", _names(fields))
        options["bit_width_inlier"] = bits
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator or not name.strip():
            usage_error(f"--set {pair!r} is not FIELD=VALUE", _names(fields))
        try:
            options[name.strip()] = parse_setting(method, name.strip(), text)
        except SettingsError as error:
            usage_error(f"--set: {error}")
    if reason := refusal(method, options):
        usage_error(reason, _names(fields))
    return options


def check_ready(method: str) -> None:
    """Refuse a method that cannot be started yet.

    Raises:
        CliError: UNSUPPORTED while it is planned.
    """
    if not row_of(method).is_ready:
        raise CliError(
            f"The method {method} is documented but not built yet.",
            "`vq methods --servable-only` lists those that can be started.",
            exit_codes.UNSUPPORTED, "unsupported",
        )  # fmt: skip


def _names(fields: dict[str, Any]) -> str:
    return f"Settings of this method: {', '.join(fields) or 'none'}."
