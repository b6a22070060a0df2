"""The bank's page on a made bank, with the small embedder of the bank's tests in place of the real one."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "experience"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bank_tools"))
from made_bank import make


@pytest.fixture
def made(tmp_path):
    """(folder, ids by name) of a bank with a past."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder, make(folder / "bank.sqlite")
