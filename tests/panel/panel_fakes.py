"""A control connection and a library made of plain values, and a realistic run of events."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

from veloxquant.panel.ports import (
    Check,
    CommandFailed,
    FitItem,
    FitReport,
    Memory,
    ModelItem,
    SettingItem,
)
from veloxquant.supervisor.messages import (
    Body,
    Event,
    Fault,
    HistoryPoint,
    LaunchSpec,
    LayerRow,
    Log,
    PoolCells,
    Profile,
    Request,
    Snapshot,
    StageReport,
    State,
    Stats,
)

GIB, MIB = 1 << 30, 1 << 20
WALL = 1_764_400_000.0


class FakeControl:
    """Plays the messages it is given; remembers commands; answers from a table."""

    def __init__(self, *messages: Any) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.first = list(messages)
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.refusals: dict[str, CommandFailed] = {}
        self.on_command: Any = None
        self.connect_error: CommandFailed | None = None
        self.seq = max([getattr(m, "seq", 0) for m in messages], default=0)
        self.closed = False

    async def connect(self) -> None:
        if self.connect_error is not None:
            raise self.connect_error

    async def events(self) -> AsyncIterator[Any]:
        for message in self.first:
            yield message
        while True:
            yield await self.queue.get()

    async def command(self, op: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        self.commands.append((op, args or {}))
        if op in self.refusals:
            raise self.refusals[op]
        if self.on_command is not None:
            self.on_command(op, args or {})
        return {}

    async def close(self) -> None:
        self.closed = True

    def send(self, *bodies: Body, t: float = 0.0) -> None:
        """Events as the supervisor would number them."""
        for body in bodies:
            self.seq += 1
            self.queue.put_nowait(event(self.seq, body, t or float(self.seq)))


class FakeLibrary:
    """Four models, a table of methods computed from simple sums."""

    def __init__(self, models: list[ModelItem] | None = None) -> None:
        self._models = MODELS if models is None else models
        self.fetched = 0
        self.fetch_error: CommandFailed | None = None
        self.asked: list[tuple[str, int, int]] = []
        self.last: dict[str, object] = {}

    def memory(self) -> Memory:
        return Memory(int(18.1 * GIB), 32 * GIB, 12 * GIB, "12.0 GiB = 32.0 - 12.0 in use - 8.0")

    def checks(self, models: list[ModelItem]) -> list[Check]:
        return [
            Check("ok", "Apple M2 Pro, 32 GiB, Metal available"),
            Check("ok", "mlx 0.32.4, mlx-lm 0.32.2, inside the tested range"),
            Check("ok", "memory: room for a model now 12.0 GiB"),
            Check("ok", f"{len(models)} models on this machine"),
            Check("warn", "port 8000 is taken by python (pid 4711)", "n on Run takes the next one"),
            Check("ok", "terminal: unicode and true colour"),
        ]

    def models(self) -> list[ModelItem]:
        return list(self._models)

    def settings(self) -> list[SettingItem]:
        return [
            SettingItem(
                "server.port", "8000", "default", "port to listen on", "VELOXQUANT_SERVER_PORT"
            ),
            SettingItem(
                "panel.quit",
                "ask",
                "config file",
                "the server when the panel closes",
                "VELOXQUANT_PANEL_QUIT",
            ),
        ]

    def config_path(self) -> str:
        return "/home/me/config.toml"

    def template(self) -> LaunchSpec:
        return LaunchSpec(model="")

    def last_start(self) -> dict[str, object]:
        return dict(self.last)

    def keep_start(self, spec: LaunchSpec) -> None:
        self.last = {"model": spec.name, "method": spec.method, "context": spec.context}

    def fit(
        self, model: ModelItem, context: int, batch: int, own: int = 0, options: Any = None
    ) -> FitReport:
        self.asked.append((model.path, context, batch))
        self.options = options
        return fit_report(model, context, batch)

    def method_settings(self, method: str) -> str:
        return "bit_width_inlier=2 residual_length=32"

    def parse_settings(self, method: str, text: str) -> dict[str, Any]:
        if not text.isdigit():
            raise CommandFailed("usage", f"{text!r} is no setting of {method}")
        return {"bit_width_inlier": int(text)}

    def free_port(self, host: str, wanted: int) -> int:
        return wanted

    def fetch_demo(self, report: Any, cancelled: Any) -> str:
        for done in (0, 90, 180, 270):
            report("model.safetensors", done * MIB, 270 * MIB)
        if self.fetch_error is not None:
            raise self.fetch_error
        self.fetched += 1
        self._models = [DEMO_MODEL]
        return DEMO_MODEL.path


QWEN = ModelItem(
    name="mlx-community/Qwen3-8B-4bit", path="/models/Qwen3-8B-4bit", params=8_200_000_000,
    quant="4 bit", disk=int(4.6 * GIB), fits_tokens=131_072, fits_method="turboquant_rvq",
    used_s_ago=7200.0,
    facts=(
        ("shape", "qwen3, 36 layers, 32/8 heads of 128"),
        ("weights", "4.34 GiB resident, kv fp16 144 KiB a token"),
        ("context", "trained for 40,960 tokens"),
        ("license", "apache-2.0"),
        ("where", "Hugging Face cache, shared with other tools"),
    ),
)  # fmt: skip
DEMO_MODEL = ModelItem(
    name="SmolLM2-135M-Instruct", path="/models/SmolLM2", params=135_000_000, quant="bf16",
    disk=270 * MIB, fits_tokens=8_192, fits_method="fp16",
    facts=(("shape", "llama, 30 layers, 9/3 heads of 64"),),
)  # fmt: skip
MODELS = [
    QWEN,
    ModelItem(
        name="mlx-community/Llama-3.2-3B-Instruct-4bit", path="/models/Llama-3.2-3B",
        params=3_200_000_000, quant="4 bit", disk=int(1.8 * GIB), fits_tokens=131_072,
        fits_method="fp16", used_s_ago=90_000.0,
    ),
    ModelItem(
        name="mlx-community/Mistral-Small-24B-4bit", path="/models/Mistral-24B",
        params=23_600_000_000, quant="4 bit", disk=int(13.3 * GIB), fits_tokens=0,
        fits_note="needs 1.9 GiB more",
    ),
    ModelItem(
        name="mlx-community/gemma-3-4b-it-4bit", path="/models/gemma", params=4_300_000_000,
        quant="4 bit", disk=int(1.1 * GIB), runnable=False,
        why_not="model-00002-of-00002.safetensors is missing",
    ),
]  # fmt: skip

_METHODS = (
    ("turboquant_rvq", "quantization", 3.5, 1.0, "Rotated two-stage codebook; no calibration"),
    ("kivi", "quantization", 2.3, 1.6, "Keys per channel, values per token, newest exact"),
    ("kivi_sink", "hybrid", 2.4, 1.6, "kivi with the first tokens exact"),
    ("fp16", "baseline", 16.0, 1.0, "Keys and values as the model made them"),
    ("snapkv", "eviction", None, 3.0, "Prompt tokens kept by the attention of the last queries"),
    ("streaming_llm", "eviction", None, 1.2, "First tokens and a recent window"),
)


def fit_report(model: ModelItem, context: int, batch: int) -> FitReport:
    """A method table from 144 KiB a token in fp16."""
    weights, room = int(4.34 * GIB), 12 * GIB
    rows = []
    for method, kind, bits, peak, blurb in _METHODS:
        plain = 144 * 1024 * context * batch
        kv = int(plain * bits / 16) if bits else min(plain, 144 * 1024 * 2048 * batch)
        need = weights + int(kv * peak) + int(0.35 * GIB)
        each = 144 * 1024 * batch * (bits or 2.0) / 16
        longest = int((room - weights - 0.35 * GIB) / each)
        rows.append(
            FitItem(
                method, True, kind, bits, kv, None, need, min(131_072, longest),
                need <= room, "kv exact, peak est.",
                note=f"keeps 2,048 of {context:,} tokens" if bits is None else "", blurb=blurb,
                limit="kv" if longest < 131_072 else "native context",
            )
        )  # fmt: skip
    rows += [
        FitItem(name, False, "quantization", note="documented but not built yet", blurb=name)
        for name in ("polar", "qjl", "h2o", "tova", "gear", "xquant")
    ]
    note = "12.0 GiB = 32.0 - 12.0 in use - 8.0 kept free (GPU cap 21.3)"
    return FitReport(model, context, batch, room, note, weights, 40_960, tuple(rows))


# ---- events -----------------------------------------------------------------------------------

SPEC = LaunchSpec(model="/models/Qwen3-8B-4bit", method="turboquant_rvq", context=131_072, batch=8)


def event(seq: int, body: Body, t: float = 0.0, epoch: str = "e1") -> Event:
    """One event of epoch `e1`."""
    return Event(epoch=epoch, seq=seq, t=t, body=body)


def snapshot(state: State | None = None, seq: int = 0, **more: Any) -> Snapshot:
    """A snapshot; nothing runs unless told."""
    return Snapshot(epoch="e1", seq=seq, state=state or State(phase="stopped"), **more)


STARTING = State(
    phase="loading", spec=SPEC, pid=48_213, port=8000,
    stages=[
        StageReport("process", "done", "pid 48213", seconds=0.2),
        StageReport("imports", "done", "mlx 0.32.4, mlx-lm 0.32.2", seconds=1.9),
        StageReport("weights", "now", "", done=int(2.9 * GIB), total=int(4.34 * GIB), seconds=4.8),
    ],
)  # fmt: skip
READY = State(
    phase="ready", spec=SPEC, pid=48_213, port=8000, ready_at=-761.0,
    stages=[StageReport(name, "done") for name in
            ("process", "imports", "weights", "cache", "canary", "listen")],
)  # fmt: skip
FAILED = State(
    phase="failed", spec=SPEC,
    reason=Fault("port_taken", "The port is in use by another program.",
                 "Choose another port (n takes the next free one), or stop that program.",
                 "127.0.0.1:8000 is held by python3, pid 4711"),
)  # fmt: skip


def stats(i: int = 60) -> Stats:
    """Gauges at second `i` of a lively run."""
    wave = 0.5 + 0.5 * math.sin(i / 9)
    used = 300 + int(170 * wave)
    return Stats(
        footprint=int((5.6 + 0.5 * wave) * GIB), mlx_active=int(5.2 * GIB),
        weights=int(4.34 * GIB), kv_claimed=int((0.23 + 0.08 * wave) * GIB),
        kv_resident=int((0.24 + 0.083 * wave) * GIB), kv_fp16=int((1.47 + 0.51 * wave) * GIB),
        limit=12 * GIB, tokens=12_960, decode_tps=41.3 * (0.8 + 0.2 * math.sin(i / 5)),
        prefill_tps=612.0, ttft_p50=0.42, ttft_p95=1.9, running=2, waiting=1, done=87, failed=1,
        cancelled=2, engine_step=i * 40,
        pool=PoolCells(
            block_size=16, blocks=1280, used=used, part=3, reused=1164, peak=512, grown=1,
            cells=[(130, "#", 1), (1, "*", 1), (6, ".", 0), (used - 230, "#", 2), (1, "*", 2),
                   (97, "#", 3), (1, "*", 3)],
        ),
    )  # fmt: skip


def history(seconds: int = 300) -> list[HistoryPoint]:
    """One point a second."""
    out = []
    for i in range(seconds):
        s = stats(i)
        grown = min(1.0, i / 120)
        out.append(
            HistoryPoint(
                float(i),
                int(s.footprint * (0.8 + 0.2 * grown)),
                s.weights,
                int(s.kv_claimed * grown),
                int(s.kv_resident * grown),
                s.decode_tps if i > 20 else 0.0,
                s.prefill_tps,
            )
        )
    return out


REQUESTS = [
    Request("chatcmpl-88", "done", 2_113, 2_048, 512, 0.38, 41.1, 12.4, "stop"),
    Request("chatcmpl-89", "refused", 171_204, detail="prompt above the context of 131,072"),
    Request("chatcmpl-90", "done", 412, 0, 64, 0.21, 42.0, 1.8, "stop"),
    Request("chatcmpl-91", "done", 8_020, 1_024, 512, 1.61, 39.8, 14.1, "length"),
    Request("chatcmpl-92", "cancelled", 1_200, 0, 31, 0.4, 40.2, 1.2),
    Request("chatcmpl-93", "decode", 2_113, 2_048, 311, 0.42, 41.3),
    Request("chatcmpl-94", "prefill", 16_384, 0, 0),
    Request("chatcmpl-95", "queued", 900),
]
_LINES = (
    ("info", "worker", "ready model=Qwen3-8B-4bit method=turboquant_rvq layers=36"),
    ("info", "http", "POST /v1/chat/completions 200 req=86 1.2 s"),
    ("warning", "pool", "low free blocks: 12 of 1,024, owner=req-87"),
    ("info", "pool", "grew by 256 blocks (1,280)"),
    ("info", "http", "POST /v1/chat/completions 200 req=88 12.4 s, 2,048 tokens from the prefix"),
    ("error", "worker", "prompt of 171,204 tokens refused: the context is 131,072"),
    ("info", "http", "POST /v1/chat/completions 200 req=91 14.1 s"),
)


def logs(count: int = 40, first: int = 1) -> list[Event]:
    """Log events of every level."""
    out = []
    for i in range(count):
        level, source, text = _LINES[i % len(_LINES)]
        out.append(
            event(first + i, Log(level=level, source=source, text=text, wall=WALL + i * 7.3))
        )
    return out


PROFILE = Profile(
    tokens=12_960,
    layers=[
        LayerRow(i, "full", "turboquant_rvq", 51 * MIB, int(8.4 * MIB), 12_960) for i in range(36)
    ],
)  # fmt: skip


def serving(count_logs: int = 40) -> list[Any]:
    """A snapshot of a busy server and its profile."""
    lines = logs(count_logs)
    snap = snapshot(
        READY, seq=count_logs, stats=stats(), logs=lines, history=history(), requests=REQUESTS
    )
    return [snap, event(count_logs + 1, PROFILE)]
