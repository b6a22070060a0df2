"""The folder of a run: one writer at a time, nothing overwritten, a failed start is no run."""

import pathlib

import pytest

from crl_jax import run_folder
from crl_jax.config import Config, ConfigError
from crl_jax.config.load import load, parse_text


def config(folder: pathlib.Path) -> Config:
    return parse_text(f"env: {{family: dungeon}}\nrun: {{dir: {folder}, name: a}}\n")


def test_a_started_run_is_not_overwritten_and_can_be_resumed(tmp_path: pathlib.Path) -> None:
    c = config(tmp_path)
    with run_folder.claim(c, resume=False) as folder:
        run_folder.write_config(folder, c)
        assert load(folder / "config.yaml") == c
    with pytest.raises(ConfigError, match="already holds a run: add --resume"), run_folder.claim(c, resume=False):
        pass
    with run_folder.claim(c, resume=True) as again:
        assert again == folder


def test_a_start_that_failed_leaves_the_folder_free(tmp_path: pathlib.Path) -> None:
    with run_folder.claim(config(tmp_path), resume=False) as folder:
        (folder / "metrics.jsonl").touch()  # the trackers were opened, then a part did not start
    with run_folder.claim(config(tmp_path), resume=False):
        pass


def test_two_runs_do_not_share_a_folder(tmp_path: pathlib.Path) -> None:
    c = config(tmp_path)
    with run_folder.claim(c, resume=False), pytest.raises(ConfigError, match="another process"), run_folder.claim(c, resume=True):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"set run\.dir"), run_folder.claim(config(tmp_path / "file"), resume=False):
        pass


def test_only_a_run_with_a_checkpoint_is_evaluated(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="train the run first"):
        run_folder.existing(config(tmp_path))
    assert list(tmp_path.iterdir()) == []
