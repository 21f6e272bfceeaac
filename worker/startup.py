"""From a launch specification to something that can serve, stage by stage."""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.supervisor.messages import LaunchSpec, Message, Progress, Stage, StageReport
from veloxquant.worker.backend import CPU_PREFILL_STEP, GPU_PREFILL_STEP, is_cpu
from veloxquant.worker.faults import WorkerFault
from veloxquant.worker.gate import Gated
from veloxquant.worker.meter import SOFT_SHARE, Meter

logger = logging.getLogger(__name__)


class Stages:
    """Tells the supervisor how the start goes on; each report also re-arms its start budget."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send

    @contextmanager
    def stage(self, stage: Stage, detail: str = "") -> Iterator[Callable[..., None]]:
        """A stage that is `now` inside the block, and `done` or `failed` after it.

        Yields:
            A function that reports (done, total), and a new detail when it is given one.
        """
        start = time.monotonic()
        self.report(stage, "now", detail)

        def progress(done: int, total: int, now: str = "") -> None:
            nonlocal detail
            detail = now or detail
            self._send(Progress(StageReport(stage, "now", detail, done, total)))

        try:
            yield progress
        except BaseException as error:
            reason = error.detail if isinstance(error, WorkerFault) else type(error).__name__
            self.report(stage, "failed", reason, time.monotonic() - start)
            raise
        self.report(stage, "done", detail, time.monotonic() - start)

    def report(self, stage: Stage, state: Any, detail: str = "", seconds: float | None = None):
        """Send one line of the list."""
        self._send(Progress(StageReport(stage, state, detail, seconds=seconds)))


@dataclass(frozen=True)
class Serving:
    """All that the engine needs. `baseline` is MLX's active memory before the first request."""

    model: Any
    tokenizer: Any
    plan: Any
    model_id: str
    context: int
    vocab: int
    weights: int
    baseline: int
    on_cpu: bool
    prefill_step: int
    costs: list[Any]
    warnings: list[str]
    calibration: str = ""


def prepare(
    spec: LaunchSpec, gated: Gated, config: KVCacheConfig, stages: Stages, meter: Meter
) -> Serving:
    """Load, plan and try; runs on the engine's thread, which owns every array from here on.

    Raises:
        WorkerFault: with the reason why this cannot serve.
    """
    import mlx.core as mx

    from veloxquant.worker import calibrated, canary, load
    from veloxquant.worker.caches import plan_for

    on_cpu = is_cpu()
    with stages.stage("weights", gated.model_id) as progress:
        need = gated.loaded_bytes(as_float32=on_cpu)
        room = int(SOFT_SHARE * meter.limit) - meter.footprint()
        if need > room:
            raise WorkerFault(
                "does_not_fit",
                f"The weights take {need:,} bytes; {max(room, 0):,} are free below the limit of "
                f"{meter.limit:,}.",
            )
        meter.bound_buffer_cache(on_cpu=on_cpu)
        loaded = load.load(gated, as_float32=on_cpu, report=progress)
        mx.clear_cache()  # the narrow arrays of the file
    warnings = []
    if loaded.context is not None and spec.context > loaded.context:
        warnings.append(
            f"The context of {spec.context} tokens is longer than the {loaded.context} this model "
            "was made for; answers beyond that may be poor."
        )
    with stages.stage("cache", config.method):
        plan = plan_for(loaded.model, config)
        warnings += plan.warnings
    step = spec.prefill_step or (CPU_PREFILL_STEP if on_cpu else GPU_PREFILL_STEP)
    with stages.stage("canary", "trial tokens") as progress:
        costs = canary.check(loaded.model, loaded.tokenizer, plan)
        warnings += canary.recall(
            loaded.model, loaded.tokenizer, plan, context=spec.context, chunk=step, report=progress
        )
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return Serving(
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        plan=plan,
        model_id=gated.model_id,
        context=spec.context,
        vocab=loaded.vocab,
        weights=loaded.weights,
        baseline=mx.get_active_memory(),
        on_cpu=on_cpu,
        prefill_step=step,
        costs=costs,
        warnings=warnings,
        calibration=calibrated.words(plan, spec.name or gated.model_id, spec.options),
    )
