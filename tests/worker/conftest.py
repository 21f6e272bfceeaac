"""A tiny model, an engine in this process, and clients for both."""

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_tiny_model

from veloxquant.supervisor.messages import LaunchSpec
from veloxquant.worker.admission import Admission
from veloxquant.worker.caches import config_of
from veloxquant.worker.engine import Engine
from veloxquant.worker.gate import open_gate
from veloxquant.worker.gauges import look
from veloxquant.worker.jobs import Delta, Job, Sampling
from veloxquant.worker.meter import Meter
from veloxquant.worker.startup import Stages, prepare
from veloxquant.worker.telemetry import Telemetry


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with clear winners."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class Bench:
    """An engine with everything around it, for tests that need no HTTP."""

    def __init__(self, spec: LaunchSpec, limit: int = 16 << 30) -> None:
        self.spec = spec
        self.sent: list[Any] = []
        self.meter = Meter(limit)
        self.telemetry = Telemetry(self.sent.append, self.meter)
        self.admission = Admission(spec.context, spec.batch, spec.block_size)
        self.events: queue.Queue[Any] = queue.Queue()
        gated, config = open_gate(spec.model), config_of(spec)
        stages = Stages(self.sent.append)
        self.engine = Engine(
            lambda: prepare(spec, gated, config, stages, self.meter),
            self.admission,
            self.telemetry,
            self.meter,
            self.sent.append,
            self.events.put,
            self.events.put,
        )
        self.engine.start()
        self.serving = self.events.get(timeout=50)

    def submit(self, text: str | list[int], max_tokens: int = 12, **fields: Any) -> "Asked":
        tokens = self.serving.tokenizer.encode(text) if isinstance(text, str) else text
        asked = Asked()
        fields.setdefault("sampling", Sampling(temperature=0))
        job = Job(f"job-{id(asked)}", tokens, max_tokens, asked.deltas.put, **fields)
        asked.job = job
        self.engine.submit(job)
        return asked

    def after_each_step(self, look_at: Callable[[list[Job], Any], None]) -> None:
        """Call with the running jobs and the gauges after each step from now on."""
        engine, real_step = self.engine, self.engine._step

        def step() -> None:
            real_step()
            engine._batch.synchronize()
            jobs, reading = list(engine._rows.values()), engine._meter.read()
            look_at(jobs, look(engine._serving, engine._batch, engine._admission, jobs, reading))

        engine._step = step  # type: ignore[method-assign]

    def close(self) -> None:
        self.engine.stop()
        self.engine.join(10)


class Asked:
    """What came back for one job."""

    def __init__(self) -> None:
        self.deltas: queue.Queue[Delta] = queue.Queue()
        self.job: Job = None  # type: ignore[assignment]
        self.last: Delta | None = None

    def next(self, timeout: float = 20) -> Delta:
        delta = self.deltas.get(timeout=timeout)
        self.last = delta if delta.is_last else self.last
        return delta

    def text(self) -> str:
        """The whole answer."""
        out = ""
        while True:
            delta = self.next()
            out += "".join(piece.text for piece in delta.pieces)
            if delta.is_last:
                return out


@pytest.fixture
def make_bench(tiny: Path) -> Iterator[Callable[..., Bench]]:
    """Engines that are stopped when the test ends."""
    benches: list[Bench] = []

    def make(limit: int = 16 << 30, **fields: Any) -> Bench:
        spec = LaunchSpec(**{"model": str(tiny), "method": "fp16", "context": 512, **fields})
        benches.append(Bench(spec, limit))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    """An engine with four rows."""
    return make_bench(batch=4)


@pytest.fixture
def gate_step(bench: Bench) -> Iterator[threading.Event]:
    """Holds the engine before each step until the event is set."""
    gate = threading.Event()
    original = bench.engine._batch.step

    def step() -> Any:
        assert gate.wait(20)
        return original()

    bench.engine._batch.step = step  # type: ignore[method-assign]
    yield gate
    gate.set()
