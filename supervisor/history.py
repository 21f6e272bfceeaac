"""Gauge history: one point a second for the last quarter of an hour, and peaks of the whole run."""

import collections

from veloxquant.supervisor.messages import HistoryPoint, Stats

POINTS = 900
SECONDS_PER_POINT = 1.0


class History:
    """Folds gauges that come several times a second into points of one second."""

    def __init__(self, points: int = POINTS) -> None:
        self._points: collections.deque[HistoryPoint] = collections.deque(maxlen=points)
        self._peak: dict[str, float] = {}
        self.latest: Stats | None = None

    def add(self, t: float, stats: Stats) -> None:
        """Take in one set of gauges; within a second bytes keep their peak, speeds the newest."""
        self.latest = stats
        for name in ("footprint", "kv_claimed", "kv_resident", "decode_tps", "prefill_tps"):
            self._peak[name] = max(self._peak.get(name, 0), getattr(stats, name))
        point = HistoryPoint(
            t,
            stats.footprint,
            stats.weights,
            stats.kv_claimed,
            stats.kv_resident,
            stats.decode_tps,
            stats.prefill_tps,
        )
        last = self._points[-1] if self._points else None
        if last is None or t - last.t >= SECONDS_PER_POINT:
            self._points.append(point)
            return
        last.footprint = max(last.footprint, point.footprint)
        last.weights = max(last.weights, point.weights)
        last.kv_claimed = max(last.kv_claimed, point.kv_claimed)
        last.kv_resident = max(last.kv_resident, point.kv_resident)
        last.decode_tps, last.prefill_tps = point.decode_tps, point.prefill_tps

    def points(self) -> list[HistoryPoint]:
        """The points, oldest first."""
        return list(self._points)

    def summary(self) -> dict[str, float]:
        """Peaks of this run (bytes, tokens a second) and how many requests it finished."""
        latest = self.latest or Stats()
        counts = {"done": latest.done, "failed": latest.failed, "cancelled": latest.cancelled}
        return {f"peak_{name}": value for name, value in self._peak.items()} | counts

    def new_run(self) -> None:
        """Forget the gauges of the last run; the points stay for the chart."""
        self.latest = None
        self._peak.clear()
