"""Where the program keeps settings, models and state; `supervisor/paths.py` adds its own."""

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
        root = Path(home).expanduser().absolute()
        return Folders(*(root / name for name in ("config", "data", "state")))
    from platformdirs import PlatformDirs  # 10 ms, not needed when a home is given

    dirs = PlatformDirs(APP, appauthor=False)
    return Folders(
        dirs.user_config_path,
        dirs.user_data_path,
        dirs.user_state_path,
    )
