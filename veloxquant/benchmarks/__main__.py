"""Run benchmarks: `python -P -m veloxquant.benchmarks [PART ...]`, all parts when none is given."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veloxquant.benchmarks.planned import chosen
from veloxquant.core.blas import preload_openblas


def _say(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True)
class Wanted:
    """What was asked for: a short run, and which quantising methods (all when empty)."""

    quick: bool = False
    methods: tuple[str, ...] = ()


def _quality(wanted: Wanted) -> Any:
    from veloxquant.benchmarks import quality

    return quality.run(quick=wanted.quick, methods=wanted.methods, report=_say)


def _retrieval(wanted: Wanted) -> Any:
    from veloxquant.benchmarks import retrieval

    return retrieval.run(quick=wanted.quick, report=_say)


def _methods(wanted: Wanted) -> Any:
    from veloxquant.benchmarks import methods

    return methods.run(quick=wanted.quick, methods=wanted.methods, report=_say)


def _evicting(wanted: Wanted) -> Any:
    from veloxquant.benchmarks import evicting

    return evicting.run(quick=wanted.quick, report=_say)


def _speed(wanted: Wanted) -> Any:
    from veloxquant.benchmarks import speed

    return speed.run(quick=wanted.quick, report=_say)


def _prefill(wanted: Wanted) -> Any:
    from veloxquant.benchmarks import prefill

    return prefill.run(quick=wanted.quick, report=_say)


def _worker(wanted: Wanted) -> Any:
    from veloxquant.benchmarks import serving

    return serving.run(quick=wanted.quick, report=_say)


def _pool(wanted: Wanted) -> Any:
    from veloxquant.benchmarks import pool

    del wanted
    rows = pool.run()
    _say(pool.table(rows))
    return rows


PARTS: dict[str, Callable[[Wanted], Any]] = {
    "pool": _pool,
    "speed": _speed,
    "methods": _methods,
    "evicting": _evicting,
    "prefill": _prefill,
    "worker": _worker,
    "quality": _quality,
    "retrieval": _retrieval,
}


def _names(text: str) -> tuple[str, ...]:
    """Names of quantising methods, separated by commas."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    try:
        chosen(names)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return names


def _sentence(check: dict[str, Any]) -> str:
    """What was asked and what was reached."""
    if "asked" not in check:
        return check["name"]
    return f"{check['name']}: {check['asked']}; reached {check['reached']:.2f}"


def _missed(results: dict[str, Any]) -> list[str]:
    """What should hold and does not, one sentence each."""
    out = []
    for name, result in results.items():
        checks = [] if name == "pool" else [
            *result.get("targets", []), *result.get("verdicts", []), *result.get("growth", [])
        ]  # fmt: skip
        out += [f"{name}: {_sentence(c)}" for c in checks
                if c.get("judged", True) and not c["holds"]]  # fmt: skip
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected parts, print their tables, and write them to files when asked to."""
    parser = argparse.ArgumentParser(prog="veloxquant.benchmarks", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", choices=[*PARTS, []],
        help=", ".join(PARTS) + "; all when none is given",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer settings, shorter text")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write FILE.json and FILE.md beside each other"
    )
    parser.add_argument(
        "--methods", type=_names, default=(), metavar="NAME,NAME",
        help="quantising methods that the parts 'methods' and 'quality' measure; all by default",
    )  # fmt: skip
    args = parser.parse_args(argv)
    wanted = Wanted(args.quick, args.methods)
    blas = preload_openblas()  # before anything imports MLX

    from veloxquant.benchmarks import report
    from veloxquant.benchmarks.demo import ModelMissingError
    from veloxquant.benchmarks.machine import describe

    facts = describe(blas)
    results: dict[str, Any] = {}
    try:
        for name, run in PARTS.items():
            if args.parts and name not in args.parts:
                continue
            _say(f"--- {name}")
            results[name] = run(wanted)
    except ModelMissingError as error:
        print(f"veloxquant.benchmarks: {error}", file=sys.stderr)
        return 1
    for sentence in _missed(results):
        _say(f"does not hold: {sentence}")
    if args.out is not None:
        stem = args.out.with_suffix("")
        data = {"machine": facts, "results": results}
        stem.with_suffix(".json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        stem.with_suffix(".md").write_text(report.document(facts, results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
