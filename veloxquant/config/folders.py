"""Where the program keeps its files: one rule for settings, models, state, logs and sockets."""

import os
from dataclasses import dataclass
from pathlib import Path

HOME_VARIABLE = "VELOXQUANT_HOME"
APP = "veloxquant"


@dataclass(frozen=True)
class Folders:
    """The folders of one user; none of them need exist yet."""

    config: Path
    data: Path
    state: Path
    logs: Path
    run: Path

    @property
    def models(self) -> Path:
        """Models that this program made or was given; other tools do not look here."""
        return self.data / "models"

    @property
    def config_file(self) -> Path:
        """The user's settings."""
        return self.config / "config.toml"


def folders() -> Folders:
    """The folders in force: below `VELOXQUANT_HOME` when that is set, else the platform's own."""
    if home := os.environ.get(HOME_VARIABLE):
        root = Path(home).expanduser()
        return Folders(*(root / name for name in ("config", "data", "state", "logs", "run")))
    from platformdirs import PlatformDirs  # 10 ms, not needed when a home is given

    dirs = PlatformDirs(APP, appauthor=False)
    return Folders(
        dirs.user_config_path,
        dirs.user_data_path,
        dirs.user_state_path,
        dirs.user_log_path,
        dirs.user_runtime_path,
    )
