"""Where families keep what they make: folders that cannot be used are told, not thrown."""

import errno
import pathlib

import pytest

from envs import cache
from envs.api import EnvUnavailable


def fill(folder):
    (folder / "x").write_text("made")


@pytest.mark.parametrize("variable", ["CRL_CACHE", "ALFWORLD_DATA"])
def test_a_home_folder_of_nobody(monkeypatch, variable):
    monkeypatch.setenv("CRL_CACHE", "~no_such_user/x")
    with pytest.raises(EnvUnavailable, match="CRL_CACHE=~no_such_user/x: no such home folder"):
        cache.folder("toy")
    with pytest.raises(EnvUnavailable, match=f"give {variable} a whole path"):
        cache.path_of("~no_such_user", variable)


def test_a_file_in_the_folders_place(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        monkeypatch.setenv("CRL_CACHE", str(tmp_path / place))
        with pytest.raises(EnvUnavailable, match=r"cannot be written .*let CRL_CACHE name one"):
            cache.made_once(cache.folder("toy") / "game", fill)


@pytest.mark.parametrize(("code", "error"), [(errno.EROFS, EnvUnavailable), (errno.EACCES, EnvUnavailable), (errno.ENOSPC, OSError)])
def test_a_disk_that_is_full_may_have_room_later(tmp_path, monkeypatch, code, error):
    def refuse(*_, **__):
        raise OSError(code, "refused")

    monkeypatch.setattr(pathlib.Path, "mkdir", refuse)
    with pytest.raises(error, match="refused"):
        cache.made_once(tmp_path / "a" / "game", fill)


def test_what_is_there_needs_no_right_to_write(tmp_path, monkeypatch):
    made = cache.made_once(tmp_path / "game", fill)
    monkeypatch.setattr(pathlib.Path, "mkdir", lambda *_, **__: pytest.fail("nothing is to be made"))
    assert cache.made_once(tmp_path / "game", fill) == made
