"""The HTTP surface: OpenAI's routes for programs, health and metrics for people and monitors."""

import asyncio
import logging
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from aiohttp import web

import veloxquant
from veloxquant.supervisor.messages import LaunchSpec
from veloxquant.worker import metrics, prompts
from veloxquant.worker.engine import Engine
from veloxquant.worker.guard import Guard, error_body, error_response
from veloxquant.worker.jobs import Delta, Failure, Job, Refused
from veloxquant.worker.schemas import (
    MAX_BODY_BYTES,
    BadRequestError,
    ChatRequest,
    CompletionRequest,
    decode,
)
from veloxquant.worker.startup import Serving
from veloxquant.worker.stream import DONE, KEEP_ALIVE, Shape, event
from veloxquant.worker.telemetry import Telemetry

logger = logging.getLogger(__name__)

BODY_SECONDS = 30.0
KEEP_ALIVE_SECONDS = 10.0
AnyRequest = ChatRequest | CompletionRequest


class Api:
    """The routes; `serving` is set when the engine is ready."""

    def __init__(
        self, spec: LaunchSpec, engine: Engine, telemetry: Telemetry, guard: Guard
    ) -> None:
        self._spec = spec
        self._engine = engine
        self._telemetry = telemetry
        self._guard = guard
        # one thread: tokenizers may not be used by two at once
        self._prompts = ThreadPoolExecutor(1, "prompts")
        self.serving: Serving | None = None
        self.created = 0

    def app(self) -> web.Application:
        """The application, guarded as a whole."""
        app = web.Application(middlewares=[self._guard.middleware], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/healthz", self.healthz),
                web.get("/readyz", self.readyz),
                web.get("/health", self.health),
                web.get("/version", self.version),
                web.get("/metrics", self.metrics),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{id:.+}", self.model),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.complete),
            ]
        )
        return app

    # ---- health -----------------------------------------------------------------------------

    async def healthz(self, _: web.Request) -> web.Response:
        """Alive, at constant cost."""
        return _json({"status": "ok"})

    async def readyz(self, _: web.Request) -> web.Response:
        """Able to take a request."""
        if self._engine.is_accepting:
            return _json({"status": "ready"})
        failure = self._engine.refusal
        return error_response(503, failure.message, code=failure.code, headers={"Retry-After": "1"})

    async def health(self, request: web.Request) -> web.Response:
        """Details, for those who may know them."""
        if not self._guard.is_authorized(request):
            return _json({"status": "ok"})
        stats = self._telemetry.stats()
        return _json(
            {
                "status": "ready" if self._engine.is_accepting else self._engine.refusal.code,
                "method": self._spec.method,
                "context": self._spec.context,
                "running": stats.running,
                "waiting": stats.waiting,
                "kv_claimed": stats.kv_claimed,
                "kv_resident": stats.kv_resident,
            }
        )

    async def version(self, _: web.Request) -> web.Response:
        """Version of this program."""
        return _json({"version": veloxquant.__version__})

    async def metrics(self, _: web.Request) -> web.Response:
        """Counters and gauges for Prometheus."""
        return web.Response(
            body=metrics.render(self._telemetry).encode(),
            headers={"Content-Type": metrics.CONTENT_TYPE},
        )

    # ---- models -----------------------------------------------------------------------------

    async def models(self, _: web.Request) -> web.Response:
        """The model that is loaded."""
        cards = [self._card(self.serving)] if self.serving else []
        return _json({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.Response:
        """One model by name."""
        name = request.match_info["id"]
        if self.serving is None or not self._is_ours(name, self.serving):
            return _unknown_model(name)
        return _json(self._card(self.serving))

    def _card(self, serving: Serving) -> dict[str, Any]:
        return {
            "id": serving.model_id,
            "object": "model",
            "created": self.created,
            "owned_by": "veloxquant",
            "loaded": True,
            "context": serving.context,
            "kv_method": self._spec.method,
        }

    def _is_ours(self, name: str, serving: Serving) -> bool:
        return name in {serving.model_id, self._spec.model, "default"}

    # ---- answers ----------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._answer(request, ChatRequest)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._answer(request, CompletionRequest)

    async def _answer(self, http: web.Request, kind: type[Any]) -> web.StreamResponse:
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        try:
            asked: AnyRequest = decode(await _body(http), kind)
            if not self._engine.is_accepting or self.serving is None:
                return _refusal(self._engine.refusal, 1)
            serving = self.serving
            if asked.model is not None and not self._is_ours(asked.model, serving):
                return _unknown_model(asked.model)
            job = await self._job(asked, serving, _into(deltas))
            self._engine.submit(job)
        except BadRequestError as error:
            return error_response(error.status, str(error), code=error.code, param=error.param)
        except Refused as refused:
            return _refusal(refused.failure, refused.retry_after)
        tools = asked.tools if isinstance(asked, ChatRequest) else None
        shape = Shape(job, serving.model_id, serving.tokenizer, tools)
        try:
            if asked.stream:
                return await _stream(http, shape, deltas, with_usage=asked.includes_usage)
            return await _whole(shape, deltas)
        finally:
            # costs nothing when the job is over; frees its slot when the client left
            self._engine.cancel(job.id)

    async def _job(self, asked: AnyRequest, serving: Serving, emit: Callable[[Delta], None]) -> Job:
        loop = asyncio.get_running_loop()
        tokenizer = serving.tokenizer
        prompts.require_short(asked, serving.context)
        is_chat = isinstance(asked, ChatRequest)
        if isinstance(asked, ChatRequest):
            work = loop.run_in_executor(self._prompts, prompts.chat_tokens, tokenizer, asked)
        else:
            work = loop.run_in_executor(
                self._prompts, prompts.completion_tokens, tokenizer, asked, serving.vocab
            )
        tokens = await work
        room = serving.context - len(tokens)
        if room < 1:
            raise BadRequestError(
                f"This model's context is {serving.context} tokens as it was started; the prompt "
                f"alone has {len(tokens)}. Shorten it, or start with a longer context.",
                "messages" if is_chat else "prompt",
                "context_length_exceeded",
            )
        prefix = "chatcmpl" if is_chat else "cmpl"
        return Job(
            id=f"{prefix}-{uuid.uuid4().hex[:24]}",
            prompt=tokens,
            max_tokens=min(asked.wanted_tokens or self._spec.max_tokens, room),
            emit=emit,
            sampling=asked.sampling(),
            stop=asked.stops,
            is_chat=is_chat,
            starts_in=prompts.starting_channel(tokenizer, tokens) if is_chat else "normal",
            top_logprobs=asked.wanted_logprobs,
        )


def _into(deltas: asyncio.Queue[Delta]) -> Callable[[Delta], None]:
    """From the engine's thread into a queue of this loop; harmless once the loop is closed."""
    loop = asyncio.get_running_loop()

    def emit(delta: Delta) -> None:
        try:
            loop.call_soon_threadsafe(deltas.put_nowait, delta)
        except RuntimeError:
            logger.debug("An answer came after the server had stopped")

    return emit


async def _body(http: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await http.read()
    except TimeoutError as error:
        raise BadRequestError(
            f"The body did not arrive within {BODY_SECONDS:.0f} s.", status=408
        ) from error


async def _whole(shape: Shape, deltas: asyncio.Queue[Delta]) -> web.Response:
    got: list[Delta] = []
    while True:
        delta = await deltas.get()
        if delta.failure is not None:
            return _refusal(delta.failure, None)
        if delta.cancelled:
            return error_response(499, "The request was cancelled.", code="cancelled")
        got.append(delta)
        if delta.is_last:
            return _json(shape.whole(got))


async def _stream(
    http: web.Request, shape: Shape, deltas: asyncio.Queue[Delta], *, with_usage: bool
) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }
    )
    await response.prepare(http)
    if opening := shape.opening():
        await response.write(event(opening))
    while True:
        try:
            async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                delta = await deltas.get()
        except TimeoutError:
            await response.write(KEEP_ALIVE)
            continue
        if delta.failure is not None or delta.cancelled:
            failure = delta.failure or Failure(499, "cancelled", "The request was cancelled.")
            body = error_body(failure.status, failure.message, failure.code)
            await response.write(event(body, "error"))
            break
        await response.write(event(shape.chunk(delta)))
        if delta.is_last:
            if with_usage:
                await response.write(event(shape.usage_chunk()))
            await response.write(DONE)
            break
    await response.write_eof()
    return response


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _refusal(failure: Failure, retry_after: int | None) -> web.Response:
    headers = {"Retry-After": str(retry_after)} if retry_after else None
    return error_response(failure.status, failure.message, code=failure.code, headers=headers)


def _unknown_model(name: str) -> web.Response:
    return error_response(
        404, f"The model {name[:200]!r} is not loaded here.", code="model_not_found", param="model"
    )
