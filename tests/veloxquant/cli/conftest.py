"""A home of its own for every command, and a supervisor made of answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from veloxquant.cli.main import main
from veloxquant.supervisor import client, launch

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home; the Hugging Face cache is empty too."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("VELOXQUANT_SERVER_PORT", raising=False)
    return home


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; returns exit code, stdout, stderr."""

    def go(*words: str) -> tuple[int, str, str]:
        try:
            code = main(words)
        except SystemExit as leave:  # argparse's help and version
            code = int(leave.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return go


@pytest.fixture
def demo(home: Path) -> Path:
    """A model that the planner believes in: true headers, no use for answers."""
    folder = home / "data" / "models" / "Tiny-1B"
    folder.mkdir(parents=True)
    header = json.dumps(
        {"model.w.weight": {"dtype": "BF16", "shape": [64, 64], "data_offsets": [0, 8192]}}
    ).encode()
    (folder / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(8192)
    )
    config = {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 8192, "vocab_size": 1000, "max_position_embeddings": 131072,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


class Supervisor:
    """Answers by command; `raises` refuses every command with a code."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.raises: Exception | None = None
        self.events: list[Any] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def state(self, phase: str, **more: Any) -> None:
        """What `status` and `stop` answer."""
        state = {"phase": phase, "spec": None, "pid": 7, "port": 8000, **more}
        self.answers["status"] = {
            "state": state, "stats": None, "summary": {}, "history": [], "barred": False,
            "supervisor": {"pid": 5}, "base_url": "http://127.0.0.1:8000/v1",
            "token_file": "/secret/token",
        }  # fmt: skip
        self.answers["stop"] = {"state": state | {"phase": "stopped"}}

    def run_command(self, op: str, args: Any = None, *, start: bool = True) -> dict[str, Any]:
        self.calls.append((op, args or {}))
        if self.raises is not None:
            raise self.raises
        return self.answers.get(op, {})


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """A running supervisor whose answers the test sets."""
    fake = Supervisor()
    fake.state("ready")

    class Client:
        def __init__(self, **_: Any) -> None: ...

        async def __aenter__(self) -> "Client":
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def events(self) -> Any:
            for item in fake.events:
                yield item

    monkeypatch.setattr(launch, "is_running", lambda _: True)
    monkeypatch.setattr(client, "run_command", fake.run_command)
    monkeypatch.setattr(client, "ControlClient", Client)
    return fake
