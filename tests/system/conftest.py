"""One whole smoke run for all tests that look at one."""

import pytest
from smoke_runs import ASKING, DEADLINE_S, changed, start


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder, the process id and the output of a run that was left alone; its guided episodes ask. A profiler trace was taken of its
    last two steps.
    """
    folder = tmp_path_factory.mktemp("runs")
    log = folder / "log.txt"
    process = start(changed(ASKING, folder, "--profile-steps", "1:3"), log)
    assert process.wait(DEADLINE_S) == 0, log.read_text()
    return folder, process.pid, log.read_text()
