"""The local knowledge of the app: models, memory, checks, method tables, the demo model.

Everything blocks, so everything runs in threads owned by the app: changing the area cancels
nothing.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from textual.worker import get_current_worker

from veloxquant.panel.ports import (
    Check,
    CommandFailed,
    FitReport,
    Library,
    Memory,
    ModelItem,
    SettingItem,
)
from veloxquant.panel.progress import Fetching
from veloxquant.panel.proposal import DEFAULT, Proposal, propose
from veloxquant.panel.text import clean
from veloxquant.supervisor.messages import LaunchSpec

if TYPE_CHECKING:
    from textual.app import App

    _Base = App[int]
else:
    _Base = object

DEMO = "SmolLM2-135M"
FitAnswer = Callable[[FitReport | None, CommandFailed | None], None]


class Scout(_Base):
    """Mixed into the app; `None` means not known yet."""

    models: tuple[ModelItem, ...] | None = None
    memory: Memory | None = None
    checks: list[Check] | None = None
    checks_took: float = 0.0
    proposal: Proposal | None = None
    picked: ModelItem | None = None
    fetching: Fetching | None = None
    library: Library | None = None
    template: LaunchSpec = DEFAULT
    settings: tuple[SettingItem, ...] = ()
    config_path: str = ""
    _make_library: Callable[[], Library]
    view: Any

    @property
    def has_demo(self) -> bool:
        """Whether the demo model is on this machine."""
        return any(DEMO.casefold() in model.name.casefold() for model in self.models or ())

    def look_around(self) -> None:
        """Models, memory and checks, in a thread."""
        self.run_worker(self._scan, thread=True, group="scan", exclusive=True, exit_on_error=False)

    def measure_memory(self) -> None:
        """Measure the machine's memory again, for the bar at the top."""
        if self.library is not None:
            self.run_worker(self._measure, thread=True, group="memory", exit_on_error=False)

    def _measure(self) -> None:
        self.call_from_thread(self._learn, memory=self._the_library().memory())

    def _the_library(self) -> Library:
        if self.library is None:
            self.library = self._make_library()
        return self.library

    def _scan(self) -> None:
        started = time.monotonic()
        worker = get_current_worker()
        library = self._the_library()
        memory = library.memory()
        self.call_from_thread(self._learn, memory=memory)
        models = tuple(library.models())
        template = library.template()
        self.call_from_thread(
            self._learn,
            models=models,
            template=template,
            proposal=propose(models, library.last_start(), template),
            settings=tuple(library.settings()),
            config_path=library.config_path(),
        )
        checks = library.checks(list(models))
        if not worker.is_cancelled:
            took = time.monotonic() - started
            self.call_from_thread(self._learn, checks=checks, checks_took=took)

    def _learn(self, **known: Any) -> None:
        for name, value in known.items():
            setattr(self, name, value)
        self.poke()

    def poke(self) -> None:
        """Redraw the area in front."""
        raise NotImplementedError

    # ---- method tables ----------------------------------------------------------------------

    def pick_model(self, model: ModelItem) -> None:
        """Show what fits for this model."""
        self.picked = model
        self.switch_mode("fit")

    def pick_path(self, spec: Any) -> None:
        """Show what fits for the model of a start."""
        for model in self.models or ():
            if spec is not None and model.path == spec.model:
                self.picked = model
        self.switch_mode("fit")

    def load_fit(
        self,
        model: ModelItem,
        context: int,
        batch: int,
        options: dict[str, dict[str, Any]],
        answer: FitAnswer,
    ) -> None:
        """Compute a method table; only the newest question is answered."""
        view = self.view
        # a running server would be stopped first: its memory counts as free
        own = view.stats.footprint if view.is_running and view.stats else 0

        def work() -> None:
            worker = get_current_worker()
            report, problem = None, None
            try:
                report = self._the_library().fit(model, context, batch, own, options)
            except CommandFailed as error:
                problem = error
            if not worker.is_cancelled:
                self.call_from_thread(answer, report, problem)

        self.run_worker(work, thread=True, group="fit", exclusive=True, exit_on_error=False)

    # ---- the demo model ---------------------------------------------------------------------

    def fetch_demo(self) -> None:
        """Fetch the demo model once; a second press does nothing."""
        if self.fetching is not None and not self.fetching.problem:
            return
        self.fetching = Fetching(what=f"{DEMO}, the demo model")
        self.poke()
        self.run_worker(self._fetch, thread=True, group="fetch", exit_on_error=False)

    def _fetch(self) -> None:
        worker = get_current_worker()
        moved = [time.monotonic(), 0]

        def report(step: str, done: int, total: int | None) -> None:
            now = time.monotonic()
            idle = now - moved[0]
            speed = 0.0
            if done > moved[1]:
                speed = (done - moved[1]) / max(1e-3, idle)
                moved[:] = [now, done]
                idle = 0.0
            self.call_from_thread(self._fetched, step, done, total, speed, idle)

        try:
            self._the_library().fetch_demo(report, lambda: worker.is_cancelled)
        except CommandFailed as error:
            if self.fetching is not None:
                failed = replace(self.fetching, problem=error.message, hint=error.hint)
                self.call_from_thread(self._learn, fetching=failed)
            return
        self.call_from_thread(self._learn, fetching=None)
        self.call_from_thread(self.look_around)

    def _fetched(self, step: str, done: int, total: int | None, speed: float, idle: float) -> None:
        if self.fetching is not None:
            smooth = speed if not self.fetching.speed else 0.7 * self.fetching.speed + 0.3 * speed
            self.fetching = replace(
                self.fetching, step=clean(step, 120), done=done, total=total,
                speed=0.0 if idle > 2 else smooth, idle_s=idle,
            )  # fmt: skip
            self.poke()
