"""What the tests of the repair environment share: a sandbox, and a bench on one of the package's repositories."""

import pytest

from envs.api import EnvUnavailable
from envs.swe.bounds import Limits
from envs.swe.catalogue import Own
from envs.swe.layout import TREE, Bind, narrow
from envs.swe.sandbox import Sandbox
from envs.swe.workplace import Here


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """A cache of our own for the whole session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("SWE_INSTANCES", raising=False)
        narrow.cache_clear()
        yield
        narrow.cache_clear()


def sandbox_or_skip(backend):
    """A sandbox of this kind, or a skip that says why there is none."""
    try:
        return Sandbox(narrow(), backend)
    except EnvUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture(params=["bwrap", "userns"])
def sandbox(request, cache):
    """Each kind of sandbox."""
    return sandbox_or_skip(request.param)


@pytest.fixture
def best(cache):
    """The sandbox that is chosen here."""
    return sandbox_or_skip("auto")


@pytest.fixture
def tree(tmp_path):
    """An empty folder for commands to work in."""
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder


@pytest.fixture
def shell(sandbox, tree):
    """Runs a command line in ``tree``."""
    return _shell_of(sandbox, tree)


@pytest.fixture
def best_shell(best, tree):
    """As ``shell``, in the sandbox that is chosen here."""
    return _shell_of(best, tree)


def _shell_of(sandbox, tree):
    """Runs command lines in ``tree``."""

    def run(line, **limits):
        binds = [Bind(str(tree), TREE, writable=True)]
        return sandbox.run(["/usr/bin/bash", "-c", line], Limits(**{"wall_s": 20.0, **limits}), binds=binds, watch=tree)

    return run


@pytest.fixture
def bench(best):
    """Opens benches on the package's own repositories, and closes them."""
    opened = []

    def at(instance_id, *, command_s=20.0, grading_s=60.0):
        own = Own()
        place = Here(own, best, Limits(wall_s=command_s), Limits(wall_s=grading_s))
        opened.append(place.open(own.instance(instance_id)))
        return opened[-1]

    yield at
    for one in opened:
        one.close()
