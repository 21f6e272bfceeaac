"""Compare three independent counts of the cache: claimed, walked and measured."""

import gc

import mlx.core as mx

from veloxquant.memory.walker import arrays_in, bytes_of
from veloxquant.worker.batch import Batch
from veloxquant.worker.meter import Meter
from veloxquant.worker.startup import Serving


def audit(serving: Serving, batch: Batch, meter: Meter) -> dict[str, int]:
    """Bytes by three roads; runs on the engine's thread between two steps.

    Returns:
        `claimed`: sum of `nbytes` over all caches. `walked`: sum over every array reachable from
        them, without what fresh caches hold in common with them. `resident`: growth of MLX's
        active memory since before the first request. Also `weights`, `mlx_active`, `footprint`.
    """
    batch.synchronize()  # first of all: it may bring tokens into their stores
    lists = batch.cache_lists()
    shared = {id(array) for array in arrays_in(serving.plan.new())}
    found = [array for array in arrays_in(lists) if id(array) not in shared]
    mx.eval(found)
    claimed = sum(cache.nbytes for caches in lists for cache in caches)
    walked = bytes_of(found)
    del found
    gc.collect()
    mx.synchronize()
    active = mx.get_active_memory()
    return {
        "claimed": claimed,
        "walked": walked,
        "resident": active - serving.baseline - batch.transient_bytes(),
        "weights": serving.weights,
        "mlx_active": active,
        "footprint": meter.footprint(),
    }
