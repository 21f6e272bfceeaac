"""Counters and gauges: written by the engine between steps, read by everyone else."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from veloxquant.supervisor.messages import Beat, LayerRow, Message, PoolCells, Profile, Stats
from veloxquant.worker.meter import Meter, Reading

STATS_SECONDS = 0.25
BEAT_SECONDS = 1.0
PROFILE_SECONDS = 2.0
_WINDOW_SECONDS = 3.0
_TTFT_KEPT = 256
NO_READING = Reading(0, 0, 0, 0)


class Rate:
    """Tokens a second of work, over the last seconds; 0 when nothing was done lately.

    Work that took long counts for as much longer: a prompt's next piece takes as long as the last.
    """

    def __init__(self, window: float = _WINDOW_SECONDS) -> None:
        self._window = window
        self._points: deque[tuple[float, int, float]] = deque()
        self._lock = threading.Lock()

    def add(self, tokens: int, seconds: float) -> None:
        """Note that `tokens` took `seconds`."""
        with self._lock:
            self._points.append((time.monotonic(), tokens, seconds))
            self._forget()

    def value(self) -> float:
        """The rate now."""
        with self._lock:
            self._forget()
            spent = sum(seconds for _, _, seconds in self._points)
            return sum(tokens for _, tokens, _ in self._points) / spent if spent > 0 else 0.0

    def _forget(self) -> None:
        old = time.monotonic() - self._window
        while self._points and self._points[0][0] + self._points[0][2] < old:
            self._points.popleft()


def percentile(values: Iterable[float], share: float) -> float:
    """Nearest-rank percentile; 0 without values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Totals:
    """What happened since the start; only the engine's thread writes, but for `refused`."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finishes: Counter[str] = field(default_factory=Counter)
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=_TTFT_KEPT))
    ttft_sum: float = 0.0
    ttft_count: int = 0
    seconds_sum: float = 0.0


@dataclass(frozen=True, slots=True)
class Gauges:
    """One consistent look at the engine, taken by its own thread between two steps."""

    weights: int = 0
    kv_claimed: int = 0
    kv_resident: int = 0
    kv_fp16: int = 0
    tokens: int = 0
    running: int = 0
    pool: PoolCells | None = None
    layers: tuple[LayerRow, ...] = ()
    reading: Reading = NO_READING


class Telemetry:
    """Keeps totals and the newest gauges, and sends them up from threads of its own.

    `step` counts engine steps: the supervisor tells a busy engine from a stuck one by it.
    """

    def __init__(self, send: Callable[[Message], None], meter: Meter) -> None:
        self._send = send
        self._meter = meter
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._prefill, self._decode = Rate(), Rate()
        self.waiting: Callable[[], int] = lambda: 0
        self.totals = Totals()
        self.gauges = Gauges()
        self.step = 0
        self.phase = "starting"

    def start(self) -> None:
        """Send a beat a second, gauges four times a second, a profile every two."""
        for name, seconds, make in (
            ("beat", BEAT_SECONDS, self.beat),
            ("stats", STATS_SECONDS, self.stats),
            ("profile", PROFILE_SECONDS, self.profile),
        ):
            thread = threading.Thread(
                target=self._repeat, args=(seconds, make), name=name, daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def note_work(self, prefill: tuple[int, float], decode: tuple[int, float]) -> None:
        """Note (tokens, seconds) of one engine step."""
        for (tokens, seconds), rate in ((prefill, self._prefill), (decode, self._decode)):
            if tokens:
                rate.add(tokens, seconds)
        self.totals.prompt_tokens += prefill[0]

    def stop(self) -> None:
        """Stop sending."""
        self._stop.set()

    def _repeat(self, seconds: float, make: Callable[[], Message]) -> None:
        self._send(make())
        while not self._stop.wait(seconds):
            self._send(make())

    def beat(self) -> Beat:
        """A sign of life."""
        return Beat(t=time.monotonic(), engine_step=self.step, phase=self.phase)

    def profile(self) -> Profile:
        """Bytes by layer."""
        gauges = self.gauges
        return Profile(layers=list(gauges.layers), tokens=gauges.tokens)

    def stats(self) -> Stats:
        """The gauges as they are now; the footprint is read afresh, also while loading."""
        g, totals = self.gauges, self.totals
        waits = list(totals.ttft)
        return Stats(
            footprint=self._meter.footprint(),
            mlx_active=g.reading.active,
            mlx_peak=g.reading.peak,
            mlx_cache=g.reading.cache,
            weights=g.weights,
            kv_claimed=g.kv_claimed,
            kv_resident=g.kv_resident,
            kv_fp16=g.kv_fp16,
            limit=self._meter.limit,
            tokens=g.tokens,
            pool=g.pool,
            decode_tps=self._decode.value(),
            prefill_tps=self._prefill.value(),
            ttft_p50=percentile(waits, 0.5),
            ttft_p95=percentile(waits, 0.95),
            running=g.running,
            waiting=self.waiting(),
            done=totals.done,
            failed=totals.failed,
            cancelled=totals.cancelled,
            engine_step=self.step,
        )
