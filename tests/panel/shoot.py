"""Pictures of every area with fake events: `python tests/panel/shoot.py FOLDER [size ...]`.

Writes SVG, and PNG where Pillow is installed. Not a test: for looking at.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("COLORTERM", "truecolor")
os.environ["VELOXQUANT_HOME"] = tempfile.mkdtemp()

import panel_fakes as fakes

from veloxquant.panel import transcript
from veloxquant.panel.app import PanelApp

SIZES = ("60x18", "80x24", "120x36", "160x50")


def chat() -> None:
    """A conversation in the state folder."""
    folder = Path(os.environ["VELOXQUANT_HOME"]) / "state" / "chats"
    with transcript.Writer(transcript.create(folder)) as out:
        out.write(kind="user", text="Summarise what a block pool does in two sentences.")
        out.write(kind="answer", model="Qwen3-8B-4bit")
        out.write(
            kind="delta",
            text="A block pool hands out fixed-size pieces of cache so that growing a "
            "conversation never has to move what is already stored. When a request ends, its "
            "pieces go back to the pool for the next one.",
        )
        out.write(kind="end", finish="stop", prompt_tokens=1126, output_tokens=78, ttft=0.38,
                  seconds=2.28)  # fmt: skip
        out.write(kind="user", text="And when it is full? Antworte auf 日本語 please.")
        out.write(kind="answer", model="Qwen3-8B-4bit")
        out.write(kind="delta", text="プールが満杯になると、新しいリクエストは待ち行列に入ります。")
        out.write(kind="end", finish="length", prompt_tokens=1300, output_tokens=41, ttft=0.4,
                  seconds=1.4)  # fmt: skip


class PlannedLibrary(fakes.FakeLibrary):
    """The method table as planning computes it for Qwen3-8B in 4 bits on a Mac with 16 GiB."""

    def memory(self):
        """A small Mac."""
        from veloxquant.panel.ports import Memory

        return Memory(6 * fakes.GIB, 16 * fakes.GIB, 8 * fakes.GIB)

    def fit(self, model, context, batch, own=0, options=None):
        """Real bytes of a model that is not here."""
        from veloxquant.cache import plans
        from veloxquant.panel.library import _fit_item
        from veloxquant.panel.ports import FitReport
        from veloxquant.planning.fit import fit_table
        from veloxquant.planning.model_shape import shape_of
        from veloxquant.planning.safetensors import Tensor

        config = {
            "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 12_288, "vocab_size": 151_936, "max_position_embeddings": 40_960,
        }  # fmt: skip
        plans.FUSED = True  # as on a Mac, wherever the picture is made
        weights = int(4.34 * fakes.GIB)
        shape = shape_of(config, {"all": Tensor("U32", (weights // 4,), weights)}, "metal")
        room = 8 * fakes.GIB
        rows = tuple(map(_fit_item, fit_table(shape, context, batch, room)))
        note = "8.0 GiB = 16.0 - 6.0 in use - 2.0 kept free (GPU cap 10.7)"
        return FitReport(model, context, batch, room, note, weights, 40_960, rows)


SCENES = {
    "first": ([fakes.snapshot()], []),
    "empty": ([fakes.snapshot()], []),
    "models": ([fakes.snapshot()], ["p"]),
    "fit": ([fakes.snapshot()], ["p", "enter", "plus"]),
    "fit-planned": ([fakes.snapshot()], ["p", "enter", "plus", "plus"]),
    "planned": ([fakes.snapshot()], ["p", "enter", "v"]),
    "starting": ([fakes.snapshot(fakes.STARTING, logs=fakes.logs(2), seq=2)], ["3"]),
    "run": (fakes.serving(), ["3"]),
    "failed": ([fakes.snapshot(fakes.FAILED, logs=fakes.logs(5), seq=5)], ["3"]),
    "chat": (fakes.serving(), ["4"]),
    "logs": (fakes.serving(300), ["5"]),
    "paused": (fakes.serving(300), ["5", "up", "up", "up"]),
    "profile": (fakes.serving(), ["6"]),
    "settings": (fakes.serving(), ["7"]),
    "help": (fakes.serving(), ["3", "question_mark"]),
    "quit": (fakes.serving(), ["3", "ctrl+q"]),
    "palette": (fakes.serving(), ["3", "ctrl+p"]),
}


async def shoot(folder: Path, name: str, size: str) -> None:
    """One picture."""
    messages, keys = SCENES[name]
    control = fakes.FakeControl(*messages)
    library = fakes.FakeLibrary([] if name == "empty" else None)
    if name == "fit-planned":
        library = PlannedLibrary()
    app = PanelApp(lambda: control, lambda: library, clock=lambda: 3.0)
    wide, high = map(int, size.split("x"))
    async with app.run_test(size=(wide, high)) as pilot:
        for _ in range(100):
            await pilot.pause(0.02)
            if app.checks is not None and app.view.epoch:
                break
        await pilot.pause(0.15)
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.15)
        await pilot.pause(0.2)
        strips = app.screen._compositor.render_strips()
        svg = app.export_screenshot(title="")
    path = folder / f"{name}-{size}.svg"
    path.write_text(svg)
    try:
        from picture import draw
    except ImportError:
        return
    draw(strips, path.with_suffix(".png"))


async def main() -> None:
    """All scenes at all sizes, or those named."""
    folder = Path(sys.argv[1])
    sizes = [arg for arg in sys.argv[2:] if arg[0].isdigit()] or list(SIZES)
    names = [arg for arg in sys.argv[2:] if not arg[0].isdigit()] or list(SCENES)
    chat()
    for name in names:
        for size in sizes:
            await shoot(folder, name, size)


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    asyncio.run(main())
