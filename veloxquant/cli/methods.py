"""`vq methods`: the table of methods, under the documented keys.

The JSON of this command keeps its documented shape (no envelope). The documents' tiers describe
caches that keep an uncompressed copy; none of ours does, so the tiers here are `honest_bytes`,
`not_trimmable` (after an eviction a prompt prefix cannot be taken back) and `planned`.
"""

import argparse
import dataclasses
import json
import types
import typing
from typing import Any

from veloxquant.cache.table import TABLE, MethodRow
from veloxquant.cli import exit_codes
from veloxquant.cli.output import CliError, clean, result, table
from veloxquant.config.kv_cache import BASELINE, KVCacheConfig

SCHEMA_VERSION = 1
DEFAULT_METHOD = "turboquant_rvq"
SOURCE_FIELDS = {
    "turboquant_rvq": ("bit_width_inlier", "seed"),
    "kivi": ("bit_width_inlier", "residual_length"),
    "kivi_sink": ("bit_width_inlier", "residual_length", "n_sink_tokens"),
}
"""Common fields that a method reads besides its own options."""
TIERS = {
    "honest_bytes": "available",
    "not_trimmable": "available (no prompt-cache trimming)",
    "planned": "not available yet",
}


def config_fields(row: MethodRow) -> list[str]:
    """Settings that mean something to this method, own options first."""
    own = [field.name for field in dataclasses.fields(row.options)]
    common = SOURCE_FIELDS.get(row.name, () if row.kind == "baseline" else ("seed",))
    return own + [name for name in common if name not in own]


def field_type(annotation: Any) -> tuple[str, bool]:
    """Documented type name of an annotation, and whether it may be empty."""
    parts = list(typing.get_args(annotation)) if _is_union(annotation) else [annotation]
    optional = type(None) in parts
    plain = [part for part in parts if part is not type(None)]
    if len(plain) == 1 and plain[0] in (int, float, bool, str):
        return plain[0].__name__, optional
    if plain and all(typing.get_origin(part) in (list, tuple) or part in (tuple, list, int)
                     for part in plain):  # fmt: skip
        return ("array" if plain[0] is not int else "int"), optional
    if plain and all(typing.get_origin(part) is typing.Literal for part in plain):
        return "str", optional
    return "unknown", optional


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def field_schema(row: MethodRow) -> list[dict[str, Any]]:
    """Type, default and whether it may be empty, for each setting of a method."""
    hints = typing.get_type_hints(KVCacheConfig)
    defaults = {field.name: field for field in dataclasses.fields(KVCacheConfig)}
    out = []
    for name in config_fields(row):
        kind, optional = field_type(hints[name])
        default = defaults[name].default
        out.append(
            {
                "name": name,
                "type": kind,
                "default": None if default is dataclasses.MISSING else default,
                "optional": optional,
                "help": "",
            }
        )
    return out


def tier(row: MethodRow) -> str:
    """Whether a method can be served, and whether its cache can be rewound."""
    if not row.is_ready:
        return "planned"
    return "not_trimmable" if row.trim == "until_evicted" else "honest_bytes"


def as_data(row: MethodRow) -> dict[str, Any]:
    """One method under its documented keys."""
    level = tier(row)
    coverage = "none" if row.kind == "eviction" else "keys_and_values"
    return {
        "name": row.name,
        "family": row.kind,
        "serve_tier": level,
        "serve_tier_label": TIERS[level],
        "maturity": "beta" if row.is_ready else "planned",
        "is_servable": row.is_ready,
        "blurb": row.blurb,
        "config_fields": config_fields(row),
        "field_schema": field_schema(row),
        "coverage": coverage,
        "coverage_label": "full estimate" if row.held else "no estimate",
        "paper_deviation": None,
        "is_adapted": False,
        "unsupported_reason": None if row.is_ready else "documented but not built yet",
        "docs_url": None,
        "source": row.source,
        "capabilities": {
            "trim": row.trim,
            "queries": row.queries,
            "calibration": row.calibration,
            "layers_coupled": row.couples,
            "batching": row.is_ready,
        },
    }


def payload(*, servable_only: bool = False, family: str | None = None) -> dict[str, Any]:
    """The documented object of `methods --json`."""
    rows = [
        row
        for row in TABLE.values()
        if (row.is_ready or not servable_only) and family in (None, row.kind)
        if row.name != BASELINE or family is None
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "default_serve_method": DEFAULT_METHOD,
        "accounting_only": False,
        "accounting_note": "",
        "methods": [as_data(row) for row in rows],
    }


def run(args: argparse.Namespace) -> int:
    """List the methods."""
    data = payload(servable_only=args.servable_only, family=args.family)
    if args.json:
        result(json.dumps(data, ensure_ascii=False))
        return exit_codes.OK
    rows = [
        [
            m["name"] + (" *" if m["name"] == DEFAULT_METHOD else ""),
            m["family"],
            "ready" if m["is_servable"] else "planned",
            m["blurb"],
        ]
        for m in data["methods"]
    ]
    if not rows:
        raise CliError("No method matches.", "Leave out a filter.", exit_codes.NOT_FOUND)
    result(table(["METHOD", "FAMILY", "STATUS", "WHAT IT DOES"], rows))
    result(clean(f"{sum(r[2] == 'ready' for r in rows)} ready, * default of `vq up`"))
    return exit_codes.OK


def build_parser() -> argparse.ArgumentParser:
    """The parser of this command alone."""
    from veloxquant.cli.commands import COMMANDS

    parser = argparse.ArgumentParser(prog="veloxquant methods")
    for flag in next(command for command in COMMANDS if command.name == "methods").flags:
        parser.add_argument(*flag.names, **flag.options)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main() -> None:
    """List the methods; the documented entry point."""
    run(build_parser().parse_args())
