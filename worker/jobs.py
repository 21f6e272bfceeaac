"""One request as the engine sees it: tokens in, pieces of text out."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from veloxquant.memory.lease import Lease

Finish = Literal["stop", "length", "tool_calls"]
Channel = Literal["normal", "reasoning", "tool"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; temperature 0 takes the most likely one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


class Piece(NamedTuple):
    """Text of one channel of the answer; a tool piece is the whole text of one call."""

    channel: Channel
    text: str


class TokenLogprob(NamedTuple):
    """Log probability of the chosen token and of the most likely ones, as (id, value)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Failure(NamedTuple):
    """Why a request failed, in the words the client gets."""

    status: int
    code: str
    message: str


class Refused(Exception):
    """Raised when a request cannot be taken; `failure` is what the client is told."""

    def __init__(self, failure: Failure, retry_after: int | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.retry_after = retry_after


@dataclass(slots=True)
class Delta:
    """News about a job: pieces of text, or its end (`finish`, `failure` or `cancelled`)."""

    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    failure: Failure | None = None
    cancelled: bool = False

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.failure is not None or self.cancelled


_owners = itertools.count(1)


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way through the engine.

    `emit` is called on the engine's thread and must neither block nor raise. Times are monotonic
    seconds. Only the engine's thread changes a job after it was submitted.
    """

    id: str
    prompt: list[int]
    max_tokens: int
    emit: Callable[[Delta], None]
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    is_chat: bool = False
    starts_in: Channel = "normal"
    top_logprobs: int | None = None

    owner: int = field(default_factory=lambda: next(_owners))
    submitted: float = field(default_factory=time.monotonic)
    uid: int | None = None
    fed: int = 0
    """Prompt tokens already in the cache."""
    output_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    answer: Any = None
    """The text so far, made by the engine when the job starts."""
    lease: Lease | None = None
    """What the job holds of the block pool."""

    @property
    def held_tokens(self) -> int:
        """Tokens of this job that the caches have seen."""
        return self.fed + self.output_tokens

    @property
    def most_tokens(self) -> int:
        """Tokens that it may come to."""
        return len(self.prompt) + self.max_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds from submission to the first token."""
        return None if self.first_token is None else self.first_token - self.submitted

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the answer after its first token."""
        if self.first_token is None or self.last_token is None or self.output_tokens < 2:
            return None
        spent = self.last_token - self.first_token
        return (self.output_tokens - 1) / spent if spent > 0 else None
