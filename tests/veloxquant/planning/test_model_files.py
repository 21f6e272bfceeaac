"""Reading the small files of a model folder never waits and never raises anything else."""

import os
from pathlib import Path

import pytest

from veloxquant.planning.model_files import ModelFilesError, read_json


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelFilesError, match="not a regular file"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "not valid JSON"), ("[1]", "not a JSON object"), ("[" * 100_000, "not valid JSON")],
)
def test_what_is_no_object_is_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFilesError, match=why):
        read_json(tmp_path / "config.json")
    with pytest.raises(ModelFilesError, match=r"has no other\.json"):
        read_json(tmp_path / "other.json")
