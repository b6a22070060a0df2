"""Games are made in a folder of the test run; the environment's own data folder is not looked at."""

import pytest

from envs.alfworld import games


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv(games.DATA, raising=False)
        patch.delenv(games.TRAIN_IDS, raising=False)
        yield
