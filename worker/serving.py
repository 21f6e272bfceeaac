"""Engine and HTTP server together; imported only when the model is known to be there."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.supervisor.messages import CancelArgs, Command, Launch, Message, Ready, args_of
from veloxquant.worker.admission import Admission
from veloxquant.worker.backend import default_limit
from veloxquant.worker.engine import Engine
from veloxquant.worker.faults import WorkerFault
from veloxquant.worker.gate import Gated
from veloxquant.worker.guard import Guard
from veloxquant.worker.jobs import Failure
from veloxquant.worker.meter import Meter
from veloxquant.worker.routes import Api
from veloxquant.worker.startup import Serving, Stages, prepare
from veloxquant.worker.telemetry import Telemetry

logger = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 75.0
_LAST_WORDS_SECONDS = 0.8
_STOPPING = Failure(503, "stopping", "The server is stopping.")


class Service:
    """Starts engine and HTTP, says when both are ready, drains both.

    While the model loads the port answers already: alive, but not ready.
    """

    def __init__(
        self,
        launch: Launch,
        gated: Gated,
        config: KVCacheConfig,
        listener: socket.socket,
        stages: Stages,
        send: Callable[[Message], None],
    ) -> None:
        spec = launch.spec
        self._spec = spec
        self._stages = stages
        self._listener = listener
        self._meter = Meter(spec.memory_limit or default_limit())
        self._telemetry = Telemetry(send, self._meter)
        self._events: asyncio.Queue[Serving | WorkerFault] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine = Engine(
            lambda: prepare(spec, gated, config, stages, self._meter),
            Admission(spec.context, spec.batch, spec.block_size),
            self._telemetry,
            self._meter,
            send,
            self._tell,
            self._tell,
        )
        guard = Guard(spec.host, launch.token if spec.api_key else "")
        self._api = Api(spec, self._engine, self._telemetry, guard)
        self._runner = web.AppRunner(
            self._api.app(),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE_SECONDS,
            shutdown_timeout=_LAST_WORDS_SECONDS,
        )

    def _tell(self, event: Serving | WorkerFault) -> None:
        """From the engine's thread to the loop."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            logger.debug("The engine spoke after the loop had ended")

    async def start(self, stop: asyncio.Event) -> Ready | None:
        """Load and listen; None when asked to stop meanwhile.

        Raises:
            WorkerFault: when the model cannot serve.
        """
        self._loop = asyncio.get_running_loop()
        self._telemetry.start()
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()
        self._telemetry.phase = "loading"
        self._engine.start()
        serving = await self._next_event(stop)
        if serving is None:
            return None
        port = self._listener.getsockname()[1]
        self._stages.report("listen", "done", f"{self._spec.host}:{port}")
        self._telemetry.phase = "ready"
        self._api.created = int(time.time())
        self._api.serving = serving
        logger.info("Serving %s with %s on port %d", serving.model_id, self._spec.method, port)
        if serving.calibration:
            logger.info("calibration: %s", serving.calibration)
        for warning in serving.warnings:
            logger.warning("%s", warning)
        return Ready(
            port=port,
            model_id=serving.model_id,
            context=serving.context,
            method=self._spec.method,
            layers=serving.plan.n_layers,
            compressed_layers=serving.plan.compressed,
            weights=serving.weights,
            warnings=list(serving.warnings),
            calibration=serving.calibration,
        )

    async def wait(self, stop: asyncio.Event) -> None:
        """Until asked to stop.

        Raises:
            WorkerFault: when the engine ended by a fault.
        """
        await self._next_event(stop)

    async def _next_event(self, stop: asyncio.Event) -> Serving | None:
        stopped = asyncio.ensure_future(stop.wait())
        spoken = asyncio.ensure_future(self._events.get())
        await asyncio.wait({stopped, spoken}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not spoken.done():
            spoken.cancel()
            return None
        event = spoken.result()
        if isinstance(event, WorkerFault):
            raise event
        return event

    async def finish(self, grace: float) -> None:
        """Let running answers end within `grace` seconds, cut the rest with a last word, close."""
        self._telemetry.phase = "stopping"
        self._engine.drain(_STOPPING)
        if not await asyncio.to_thread(self._engine.wait_idle, grace):
            logger.warning("Stopped before every answer was complete.")
        self._engine.stop()
        self._telemetry.stop()
        await self._runner.cleanup()

    async def command(self, command: Command) -> dict[str, Any]:
        """Carry out a command of the supervisor."""
        if command.op == "audit":
            return dict(await asyncio.wrap_future(self._engine.audit()))
        if command.op == "cancel":
            reason = Failure(499, "cancelled", "The request was cancelled by the operator.")
            self._engine.cancel(args_of(command, CancelArgs).request, reason)
            return {}
        raise ValueError(f"a worker has no command {command.op!r}")
