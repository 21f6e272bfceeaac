"""`vq precompute`: fit methods to a model and keep the result, or write seeded matrices."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veloxquant.cache.layouts import LEAST_TEXT, least_text
from veloxquant.cache.table import TABLE, row_of
from veloxquant.cli import exit_codes
from veloxquant.cli.models import pick
from veloxquant.cli.output import CliError, envelope, result, table, talk, usage_error
from veloxquant.cli.overrides import check_ready, parse_overrides
from veloxquant.core.blas import preload_openblas
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.planning.method_settings import config_of

if TYPE_CHECKING:
    from veloxquant.cache.probe import ModelPlan
    from veloxquant.cache.sampling import Samples
    from veloxquant.worker.gate import Gated
    from veloxquant.worker.load import Loaded

ROWS = 2048
"""Tokens of each layer that fitters see."""
SENSITIVITIES = "ratequant"
"""The name that layer sensitivities are kept under: no method, but made from the same run."""
_PIECE = 4000
_QUIET_SECONDS = 5.0


def run(args: argparse.Namespace) -> int:
    """Calibrate a model, or without one write matrices and codebooks."""
    if args.model is None:
        return _matrices(args)
    given = [name for name in args.method or [] if name != SENSITIVITIES]
    if args.overrides and len(given) != 1:
        usage_error("--set needs the one method it belongs to", "Add `--method NAME`.")
    options: dict[str, dict[str, Any]] = {}
    for name in given:
        options[name] = parse_overrides(args.overrides, name)
        check_ready(name)
        _check_fitted(name)
    model = pick(args.model)
    text = _text(args.text)
    least = _least_text(options)
    if args.tokens < least:
        usage_error(f"--tokens {args.tokens} is too few.", f"Give at least {least}.")
    preload_openblas()  # before anything imports MLX
    gated, tokens = _tokens(str(model.path), text, args.tokens, least)
    loaded = _load(gated)
    started = time.monotonic()
    plan, samples = _samples(loaded, tokens, max(ROWS, least))
    read = len(tokens)
    talk(f"Read {read:,} tokens in {time.monotonic() - started:.0f} s.")
    about = {"model": model.name, "tokens": read, "text": Path(args.text).name if args.text else "",
             "fitted": time.strftime("%Y-%m-%d")}  # fmt: skip
    rows, warnings = _fit_all(plan, samples, args.method, options, about)
    bits = _bits(samples)
    if args.json:
        result(envelope({"model": model.name, "calibrations": rows, "layer_bits": bits}, warnings))
        return exit_codes.OK
    result(table(
        ("METHOD", "LAYERS", "ARRAYS", "KIB", "SECONDS"),
        [(r["method"], str(r["layers"]), ", ".join(r["arrays"]), f"{r['bytes'] / 1024:.0f}",
          f"{r['seconds']:.1f}") for r in rows],
        right=(1, 3, 4),
    ))  # fmt: skip
    for warning in warnings:
        talk(f"warning: {warning}")
    talk(f"Kept in {rows[0]['folder']}; `vq up {model.name}` finds it by itself.")
    if bits:
        chosen = ",".join(map(str, bits))
        talk(f"For kivi or turboquant, 2 bits on average: --set bit_width_inlier={chosen}")
    return exit_codes.OK


def main() -> None:
    """Run the command from the words of the process."""
    from veloxquant.cli.main import main as command

    sys.exit(command(["precompute", *sys.argv[1:]]))


def _matrices(args: argparse.Namespace) -> int:
    """The documented form: rotation, sketch and codebooks of one head size."""
    for name in ("method", "overrides", "text"):
        if getattr(args, name):
            word = {"overrides": "set"}.get(name, name)
            usage_error(f"--{word} needs a model to calibrate", "Put the model's name first.")
    preload_openblas()
    from veloxquant.codebooks.precompute import precompute  # imports MLX

    try:
        precompute(args.head_dim, args.bits, args.jl_dim, args.seed, args.output_dir)
    except QuantizerConfigError as error:
        usage_error(str(error), "See `vq precompute --help`.")
    except OSError as error:
        raise CliError(f"{args.output_dir}: {error.strerror}.", "Choose another folder.") from error
    files = sorted(path.name for path in Path(args.output_dir).expanduser().glob("*.npy"))
    if args.json:
        result(envelope({"folder": args.output_dir, "files": files}))
    else:
        result("\n".join(files))
        talk(f"Written to {args.output_dir}; use it with NpyArtifactStore({args.output_dir!r}).")
    return exit_codes.OK


def _text(file: str | None) -> str:
    """The calibration text: a file of the user, or the prose that comes along."""
    if file is None:
        from importlib.resources import files

        return files("veloxquant").joinpath("data", "prose.txt").read_text(encoding="utf-8")
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise CliError(
            f"{file} cannot be read: {error.strerror}.", "Give a text file.", exit_codes.NOT_FOUND
        ) from error
    except UnicodeDecodeError as error:
        raise CliError(f"{file} is not a text in UTF-8.", "Give a text file.") from error


def _check_fitted(name: str) -> None:
    """Refuse a method that fits nothing."""
    row = row_of(name)
    if row.calibration == "none":
        fitted = [r.name for r in TABLE.values() if r.is_ready and r.calibration != "none"]
        raise CliError(
            f"{name} fits nothing to a model.", f"These do: {', '.join(fitted)}.",
            exit_codes.UNSUPPORTED, "unsupported",
        )  # fmt: skip


def _least_text(options: dict[str, dict[str, Any]]) -> int:
    """Tokens that every method that was asked for can be fitted with."""
    needed = (least_text(config_of(name, given)) for name, given in options.items())
    return max(LEAST_TEXT, *needed, 0)


@contextmanager
def _faults_told() -> Iterator[None]:
    """Faults of the server's loader as errors of this command."""
    from veloxquant.worker.faults import WorkerFault

    try:
        yield
    except WorkerFault as error:
        told = error.fault
        raise CliError(
            f"{told.message} {error.detail}", told.hint, exit_codes.of_fault(told.code), told.code
        ) from error


def _tokens(path: str, text: str, wanted: int, least: int) -> tuple[Gated, list[int]]:
    """The model's files, through the same gate as the server's, and its tokens of the text.

    Raises:
        CliError: when the text is too short; before any weights are read.
    """
    from veloxquant.worker.gate import open_gate
    from veloxquant.worker.load import read_tokenizer

    with _faults_told():
        gated = open_gate(path)
        tokenizer = read_tokenizer(gated)
    tokens = tail_tokens(
        lambda piece: list(tokenizer.encode(piece, add_special_tokens=False)), text, wanted
    )
    if len(tokens) < least:
        raise CliError(
            f"The text has {len(tokens)} tokens; at least {least} are needed.", "Give a longer one."
        )
    return gated, tokens


def _load(gated: Gated) -> Loaded:
    from veloxquant.worker.backend import is_cpu
    from veloxquant.worker.load import load

    with _faults_told():
        return load(gated, as_float32=is_cpu(), report=lambda *_: None)


def tail_tokens(encode: Callable[[str], Sequence[int]], text: str, wanted: int) -> list[int]:
    """The last `wanted` tokens of a text, encoded in pieces.

    The end, because quality is measured on the beginning of the text that comes along.
    """
    ids: list[int] = []
    for line in reversed(text.splitlines(keepends=True)):
        # long lines in pieces too: tokenizers warn about more tokens than the model can read
        for start in reversed(range(0, len(line), _PIECE)):
            ids = [*encode(line[start : start + _PIECE]), *ids]
        if len(ids) >= wanted:
            break
    return ids[-wanted:]


def _samples(loaded: Loaded, tokens: list[int], rows: int) -> tuple[ModelPlan, Samples]:
    from veloxquant.cache.probe import probe
    from veloxquant.cache.sampling import WINDOW, collect

    try:
        plan = probe(loaded.model)
        samples = collect(
            plan, tokens, rows, window=min(WINDOW, loaded.context or WINDOW), report=_progress
        )
    except QuantizerConfigError as error:
        raise CliError(
            f"This model cannot be calibrated: {error}", "", exit_codes.UNSUPPORTED
        ) from error
    return plan, samples


def _progress(done: int, total: int) -> None:
    talk(f"  {done:,} of {total:,} tokens")


def _patience(name: str) -> Callable[[int, int], None]:
    """Tells how far a fitter is, every few seconds."""
    told = [time.monotonic()]

    def report(done: int, total: int) -> None:
        if time.monotonic() - told[0] > _QUIET_SECONDS:
            told[0] = time.monotonic()
            talk(f"  {name}: layer {done} of {total}")

    return report


def _fit_all(
    plan: ModelPlan,
    samples: Samples,
    wanted: Sequence[str] | None,
    options: dict[str, dict[str, Any]],
    about: dict[str, Any],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Fit and keep; what was kept, and what could not be.

    Raises:
        CliError: when a method that was asked for cannot be fitted.
    """
    from veloxquant.artifacts import Calibration
    from veloxquant.cache.calibration import fingerprint, fit_method, fitters, user_store

    store, key = user_store(), fingerprint(plan.model)
    rows: list[dict[str, Any]] = []
    warnings: list[str] = []
    for name in wanted or [SENSITIVITIES, *fitters()]:
        started = time.monotonic()
        try:
            if name == SENSITIVITIES:
                layers = [{"sensitivity": value} for value in _sensitivities(samples)]
                found = Calibration(layers, {}, dict(about))
            else:
                config = config_of(name, options.get(name, {}), plan.shapes()[0].k_dim)
                found = fit_method(plan, samples, config, about=about, report=_patience(name))
            store.save_calibration(key, name, found)
        except (QuantizerConfigError, ValueError) as error:
            if wanted:
                raise CliError(
                    f"{name}: {error}", "`vq precompute MODEL` fits all that can be.",
                    exit_codes.UNSUPPORTED, "unsupported",
                ) from error  # fmt: skip
            warnings.append(f"{name} was left out: {error}")
            continue
        except OSError as error:
            raise CliError(f"{store.root}: {error.strerror}.", "Make room there.") from error
        file = store.calibration_file(key, name)
        names = {n for layer in found.layers for n in layer} | set(found.shared)
        rows.append({
            "method": name, "layers": len(found.layers), "arrays": sorted(names),
            "bytes": file.stat().st_size, "seconds": round(time.monotonic() - started, 2),
            "folder": str(file.parent),
        })  # fmt: skip
        talk(f"  {name}: {rows[-1]['seconds']:.1f} s")
    return rows, warnings


def _sensitivities(samples: Samples) -> list[float]:
    """Mean squared key norm of each layer, the weights of RateQuant."""
    import mlx.core as mx

    found = mx.stack([mx.square(s.keys).sum(axis=-1).mean() for s in samples])
    values: Any = found.tolist()
    return values


def _bits(samples: Samples) -> list[int]:
    """Bits by layer for a mean of 2."""
    from veloxquant.allocators.ratequant import allocate_bits_ratequant

    return allocate_bits_ratequant([max(w, 1e-30) for w in _sensitivities(samples)], 2.0)
