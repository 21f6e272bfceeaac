"""Requests of the OpenAI API as typed structs with ranges, decoded from bytes in one step.

Unknown fields are ignored. Fields that are known and cannot be served are refused by name.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from veloxquant.worker.jobs import Sampling

MAX_BODY_BYTES = 16 << 20
MAX_STOPS = 16
MAX_PROMPT_PARTS = 1

Positive = Annotated[int, Meta(ge=1, le=1 << 20)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(msgspec.Struct):
    """`include_usage` asks for a last chunk with token counts."""

    include_usage: bool = False


class Part(msgspec.Struct):
    """One part of a message's content; only text can be served."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ResponseFormat(msgspec.Struct):
    """Only plain text can be served."""

    type: str = "text"


class Common(msgspec.Struct, kw_only=True):
    """Fields that both kinds of request share."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> Sampling:
        """How tokens are chosen, with OpenAI's defaults.

        Raises:
            BadRequestError: for a bias on something that is not a token id.
        """
        return Sampling(
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(0, _or(self.top_k, 0)),
            min_p=_or(self.min_p, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias=_biases(self.logit_bias or {}),
            seed=None if self.seed is None else self.seed & ((1 << 63) - 1),
        )


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """Most tokens of the answer, if the client said."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives per token; None for no log probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """Most tokens of the answer, if the client said."""
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives per token; None for no log probabilities at all."""
        return self.logprobs


class BadRequestError(ValueError):
    """Raised for a request that cannot be served as it stands; `param` names the field."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


_Kind = TypeVar("_Kind", ChatRequest, CompletionRequest)


def decode(raw: bytes, kind: type[_Kind]) -> _Kind:
    """A checked request.

    Raises:
        BadRequestError: when it is not JSON, a field has a wrong type or is out of range, or asks
            for something that is not served.
    """
    try:
        request = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        raise BadRequestError(text, _field(text)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"The body is not JSON: {error}") from error
    _refuse_unserved(request)
    return request


def _refuse_unserved(request: ChatRequest | CompletionRequest) -> None:
    if (request.n or 1) != 1:
        raise BadRequestError("n must be 1; send several requests instead.", "n", "unsupported")
    if isinstance(request, ChatRequest):
        kind = request.response_format.type if request.response_format else "text"
        if kind != "text":
            raise BadRequestError(
                f"response_format {kind!r} is not supported; use 'text' and ask in the prompt.",
                "response_format",
                "unsupported",
            )
        if request.tool_choice not in (None, "none", "auto"):
            raise BadRequestError(
                "A call of a tool cannot be forced; use tool_choice 'auto' or 'none', and ask for "
                "it in the prompt.",
                "tool_choice",
                "unsupported",
            )
        return
    for name, is_set in (
        ("echo", bool(request.echo)),
        ("suffix", bool(request.suffix)),
        ("best_of", (request.best_of or 1) != 1),
    ):
        if is_set:
            raise BadRequestError(f"{name} is not supported.", name, "unsupported")


def _field(text: str) -> str | None:
    """Name of the field in msgspec's message: `... - at `$.temperature``."""
    _, found, path = text.rpartition("`$.")
    if not found:
        return None
    return path.rstrip("`").split(".")[0].split("[")[0] or None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _biases(table: dict[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        out = tuple((int(token), value) for token, value in table.items())
    except ValueError as error:
        raise BadRequestError("logit_bias maps token ids to numbers.", "logit_bias") from error
    if any(token < 0 for token, _ in out):
        raise BadRequestError("logit_bias has a negative token id.", "logit_bias")
    return out
