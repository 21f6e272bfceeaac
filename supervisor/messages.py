"""The wire: every message between panel, command line, supervisor and worker.

Two carriers use these structs: a WebSocket over a Unix socket (clients and supervisor) and a
length-prefixed socketpair (supervisor and worker, `framing.py`). A frame is a JSON array of
messages, or one message. Units: bytes, seconds, tokens. `t` is monotonic time of the sender.
"""

from typing import Any, Literal, TypeVar, get_args

import msgspec

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0

MAX_MESSAGE_BYTES = 1 << 20
MAX_TEXT_BYTES = 64 << 10
MAX_LOG_CHARS = 16 << 10
MAX_LIST = 10_000

Phase = Literal[
    "stopped",
    "starting",
    "loading",
    "ready",
    "busy",
    "stopping",
    "crashed",
    "backoff",
    "failed",
]
Stage = Literal["process", "imports", "weights", "cache", "canary", "listen"]
StageState = Literal["next", "now", "done", "warned", "failed"]
Kind = Literal["state", "log", "stats", "profile", "progress", "request"]
Role = Literal["panel", "cli", "supervisor", "worker"]
Op = Literal[
    "start",
    "stop",
    "restart",
    "status",
    "subscribe",
    "audit",
    "logs",
    "shutdown",
    "drain",
    "cancel",
]
LogLevel = Literal["debug", "info", "warning", "error"]


class Message(msgspec.Struct, tag_field="type", tag=str.lower, omit_defaults=True):
    """Base of everything on the wire; the tag is the class name in lower case."""


class LaunchSpec(msgspec.Struct, omit_defaults=True):
    """What a server is started with; frozen at start, reused by every restart.

    `model` is a folder or a Hub id that is already on this machine. `options` are fields of the
    method's options class or common fields of `KVCacheConfig` (`bit_width_inlier`, `seed`, ...).
    """

    model: str
    method: str = "turboquant_rvq"
    options: dict[str, Any] = {}
    context: int = 8192
    batch: int = 8
    host: str = "127.0.0.1"
    port: int = 8000
    max_tokens: int = 512
    memory_limit: int | None = None
    block_size: int = 16
    prefill_step: int | None = None
    api_key: bool = False
    name: str | None = None
    openblas: bool = True


# ---- events ---------------------------------------------------------------------------------


class StageReport(msgspec.Struct, omit_defaults=True):
    """One line of the start-up list: `done` of `total` bytes or items, `seconds` it took."""

    stage: Stage
    state: StageState
    detail: str = ""
    done: int | None = None
    total: int | None = None
    seconds: float | None = None


class Fault(msgspec.Struct, omit_defaults=True):
    """Why something failed: a code of `failures.py`, a sentence, the next step."""

    code: str
    message: str
    hint: str = ""
    detail: str = ""


class State(Message):
    """Where the server is; never dropped. `moves` counts transitions of this supervisor.

    `calibration` says in a few words whether the method uses one; empty for those that take none.
    """

    phase: Phase
    reason: Fault | None = None
    spec: LaunchSpec | None = None
    pid: int | None = None
    port: int | None = None
    restarts: int = 0
    unresponsive: bool = False
    moves: int = 0
    since: float = 0.0
    retry_in: float | None = None
    ready_at: float | None = None
    stages: list[StageReport] = []
    warnings: list[str] = []
    last_lines: list[str] = []
    asked_by: str = ""
    calibration: str = ""


class PoolCells(msgspec.Struct, omit_defaults=True):
    """The block pool, run-length coded: `cells` are (count, state, owner), state one of `#*.`."""

    block_size: int
    blocks: int
    used: int
    part: int = 0
    reused: int = 0
    exhausted: int = 0
    grown: int = 0
    peak: int = 0
    cells: list[tuple[int, str, int]] = []


class Stats(Message):
    """Gauges, 4 times a second. `kv_claimed` sums `nbytes`, `kv_resident` is measured.

    `kv_fp16` is what uncompressed caches would hold, in 32 bits where the model computes in them.
    """

    footprint: int = 0
    mlx_active: int = 0
    mlx_peak: int = 0
    mlx_cache: int = 0
    weights: int = 0
    kv_claimed: int = 0
    kv_resident: int = 0
    kv_fp16: int = 0
    limit: int = 0
    tokens: int = 0
    pool: PoolCells | None = None
    decode_tps: float = 0.0
    prefill_tps: float = 0.0
    ttft_p50: float = 0.0
    ttft_p95: float = 0.0
    running: int = 0
    waiting: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    engine_step: int = 0


class Log(Message):
    """One log line, text as it came: the reader sanitises before drawing."""

    level: LogLevel
    source: str
    text: str
    wall: float = 0.0
    request: str = ""


class Progress(Message):
    """A start-up stage moved."""

    report: StageReport


class Request(Message):
    """A request changed state; prompts and answers are never in it."""

    id: str
    state: Literal["queued", "prefill", "decode", "done", "failed", "cancelled", "refused"]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft: float | None = None
    tps: float | None = None
    seconds: float | None = None
    finish: str = ""
    detail: str = ""


class LayerRow(msgspec.Struct, omit_defaults=True):
    """Bytes of one layer over all running requests; `fp16` if it were uncompressed, as above."""

    index: int
    kind: str
    format: str
    fp16: int
    resident: int
    rows: int = 0


class Profile(Message):
    """Bytes by layer."""

    layers: list[LayerRow]
    tokens: int = 0


class Gap(Message):
    """`count` events of `kind` were dropped for this reader; nothing is lost in silence."""

    kind: Kind
    count: int


Body = State | Stats | Log | Progress | Request | Profile | Gap


class Event(Message):
    """A body with its place in the stream: `seq` counts up within one supervisor `epoch`."""

    epoch: str
    seq: int
    t: float
    body: Body
    server: str = "main"


# ---- hand-shake and commands ----------------------------------------------------------------


class Hello(Message):
    """First message of each side. `wall` and `mono` translate between the two clocks."""

    role: Role
    name: str
    pid: int
    major: int = PROTOCOL_MAJOR
    minor: int = PROTOCOL_MINOR
    start_time: float = 0.0
    epoch: str = ""
    wall: float = 0.0
    mono: float = 0.0
    version: str = ""
    capabilities: list[str] = []
    read_only: bool = False


class Refuse(Message):
    """The other side cannot talk to us."""

    reason: str
    hint: str = ""


class Command(Message):
    """A request; `id` is made by the sender, and a repeated id gets the same answer."""

    id: str
    op: Op
    args: dict[str, Any] = {}


class Accepted(Message):
    """The command was understood and is under way."""

    id: str


class Done(Message):
    """The command ended well."""

    id: str
    result: dict[str, Any] = {}


class Error(Message):
    """The command failed; nothing was changed unless `message` says so."""

    id: str
    code: str
    message: str
    hint: str = ""


class Snapshot(Message):
    """Everything a new viewer needs; includes all events up to `seq`."""

    epoch: str
    seq: int
    state: State
    stats: Stats | None = None
    logs: list[Event] = []
    history: list["HistoryPoint"] = []
    requests: list[Request] = []


class HistoryPoint(msgspec.Struct, array_like=True):
    """One point of the gauge history, about one a second: time, then bytes and tokens a second."""

    t: float
    footprint: int
    weights: int
    kv_claimed: int
    kv_resident: int
    decode_tps: float
    prefill_tps: float


# ---- supervisor and worker ------------------------------------------------------------------


class Launch(Message):
    """First message to the worker: the whole specification, so that nothing is in argv."""

    spec: LaunchSpec
    token: str = ""
    listen_fd: int = -1
    state_dir: str = ""


class Beat(Message):
    """A sign of life, once a second in both directions."""

    t: float
    engine_step: int = 0
    phase: str = ""


class Ready(Message):
    """The worker answered its own canary and listens."""

    port: int
    model_id: str
    context: int
    method: str
    layers: int
    compressed_layers: int
    weights: int
    warnings: list[str] = []
    calibration: str = ""


class Fatal(Message):
    """The worker gives up and says why before it exits."""

    fault: Fault


AnyMessage = (
    Event | Hello | Refuse | Command | Accepted | Done | Error | Snapshot
    | Launch | Beat | Ready | Fatal | State | Stats | Log | Progress | Request | Profile | Gap
)  # fmt: skip


# ---- arguments of the commands --------------------------------------------------------------


class StartArgs(msgspec.Struct):
    """`start`: the specification of the server."""

    spec: LaunchSpec


class StopArgs(msgspec.Struct):
    """`stop`: seconds that running answers get to finish (`grace`), then the signals."""

    grace: float = 10.0


class SubscribeArgs(msgspec.Struct):
    """`subscribe`: kinds to receive, and the last event seen as (epoch, seq) if any."""

    kinds: list[Kind] = msgspec.field(default_factory=lambda: list(get_args(Kind)))
    since: tuple[str, int] | None = None


class LogsArgs(msgspec.Struct):
    """`logs`: the newest `last` lines of the ring, at `level` or above, containing `grep`."""

    last: int = 200
    level: LogLevel = "debug"
    grep: str = ""


class CancelArgs(msgspec.Struct):
    """`cancel`: one request of the worker."""

    request: str


class NoArgs(msgspec.Struct):
    """A command without arguments."""


ARGS: dict[str, type[msgspec.Struct]] = {
    "start": StartArgs,
    "stop": StopArgs,
    "restart": NoArgs,
    "status": NoArgs,
    "subscribe": SubscribeArgs,
    "audit": NoArgs,
    "logs": LogsArgs,
    "shutdown": NoArgs,
    "drain": StopArgs,
    "cancel": CancelArgs,
}

CLOSE_CODES: dict[int, str] = {
    1000: "closed",
    4400: "The supervisor speaks another protocol version; restart it with `vq shutdown`.",
    4403: "This socket belongs to another user.",
    4408: "This viewer read too slowly, or sent no hello; it may connect again.",
    4409: "This viewer fell behind in state changes; it may connect again.",
    4413: "A message was larger than the protocol allows.",
}

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyMessage | list[AnyMessage])
_Args = TypeVar("_Args", bound=msgspec.Struct)


class ProtocolError(ValueError):
    """Raised when bytes on the wire are not a message of this schema."""


def encode(message: Message | list[Message] | list[Event]) -> bytes:
    """Message or batch of messages as JSON bytes."""
    return _encoder.encode(message)


def decode(raw: bytes | str) -> list[Any]:
    """Messages in one frame.

    Raises:
        ProtocolError: when the frame is too large, is not JSON, or fits no message.
    """
    if len(raw) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"frame of {len(raw)} bytes, limit {MAX_MESSAGE_BYTES}")
    try:
        out = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(str(error)) from error
    return out if isinstance(out, list) else [out]


def plain(value: Any) -> Any:
    """Structs as dicts with every field, defaults included; what `Done.result` carries."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def args_of(command: Command, kind: type[_Args]) -> _Args:
    """Typed arguments of a command.

    Raises:
        ProtocolError: when they do not fit `kind`.
    """
    try:
        return msgspec.convert(command.args, kind)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{command.op}: {error}") from error
