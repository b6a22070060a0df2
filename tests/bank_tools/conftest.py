"""The bank tools on a made bank, with the small embedder of the bank's tests in place of the real one."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "experience"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from experience_toys import HashEmbedder
from made_bank import make

from crl_jax.bank_tools import view
from crl_jax.experience.index import ExactIndex


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    """No test of the tools loads the real embedding model."""
    monkeypatch.setattr(view, "real_embedder", HashEmbedder)
    monkeypatch.setattr(view, "real_index", ExactIndex)


@pytest.fixture
def made(tmp_path, small):
    """(folder, ids by name) of a bank with a past."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder, make(folder / "bank.sqlite")
