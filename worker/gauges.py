"""One consistent look at the engine, taken on its own thread between two steps."""

from collections.abc import Sequence

from veloxquant.supervisor.messages import LayerRow
from veloxquant.worker.admission import Admission
from veloxquant.worker.batch import Batch
from veloxquant.worker.caches import layer_bytes
from veloxquant.worker.jobs import Job
from veloxquant.worker.meter import Reading
from veloxquant.worker.startup import Serving
from veloxquant.worker.telemetry import Gauges


def look(
    serving: Serving, batch: Batch, admission: Admission, jobs: Sequence[Job], reading: Reading
) -> Gauges:
    """Gauges as they are now.

    `kv_claimed` is what the caches say, `kv_resident` what MLX's allocator says: two roads, so
    that a gauge could show a lie.
    """
    plan = serving.plan
    held = layer_bytes(batch.cache_lists(), plan.n_layers)
    plain = [sum(cost.at(job.held_tokens) for job in jobs) for cost in serving.costs]
    tokens = sum(job.held_tokens for job in jobs)
    resident = reading.active - serving.baseline - batch.transient_bytes()
    return Gauges(
        weights=serving.weights,
        kv_claimed=sum(held),
        kv_resident=max(0, resident),
        kv_fp16=sum(plain),
        tokens=tokens,
        running=len(jobs),
        pool=admission.cells(),
        layers=tuple(
            LayerRow(i, plan.kinds[i], plan.formats[i], plain[i], held[i], tokens)
            for i in range(plan.n_layers)
        ),
        reading=reading,
    )
