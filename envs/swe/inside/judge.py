"""Runs listed test files and tells the outcomes, as a program that runs inside the sandbox.

Owns: the channel for outcomes (what was stdout; the tests get none), and where the tree stands among the places modules come from.
Promises: every line begins with a secret word that was read from stdin before any code of the tree ran; "ready" is told before, "end" after
the last test, so that a process that left early, or printed, is seen. The tree comes after the standard library and pytest, so a module
of the tree cannot stand in for one of theirs. No plugin is loaded that the tree brings. A failure that is expected counts as good only
where a test expects it (a mark, or ``pytest.xfail`` called in the test's file), not where the code under test says so.
Does not: withstand code that takes the running interpreter apart: tests run in the process they test, as everywhere.

Reads one JSON object on stdin: {word, root, files, narrow, site}.
"""

import json
import os
import sys


def main(order):
    """Run the tests."""
    channel = os.dup(1)
    word, root = order.pop("word"), order["root"]

    def tell(kind, *what):
        os.write(channel, f"{word} {json.dumps([kind, *what])}\n".encode())

    if order["narrow"]:
        sys.path.append(order["site"])
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)

    class Outcomes:
        """Tells the outcome of each test's phases; puts the tree on the path once the installed plugins are loaded."""

        @pytest.hookimpl(tryfirst=True)
        def pytest_load_initial_conftests(self):
            at = len(sys.path)
            if not order["narrow"]:
                at = next((n for n, path in enumerate(sys.path) if path.endswith(("site-packages", "dist-packages"))), at)
            sys.path[at:at] = [folder for folder in (root, root + "/src") if os.path.isdir(folder)]

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_makereport(self, item, call):
            made = yield
            made.get_result().expected = call.excinfo is None or expected(item, call.excinfo, pytest)

        def pytest_runtest_logreport(self, report):
            good = report.passed or (report.skipped and hasattr(report, "wasxfail") and report.expected)
            tell("test", report.nodeid, report.when, good)

    tell("ready")
    options = [
        "-q",
        "--rootdir",
        root,
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "--continue-on-collection-errors",
    ]
    files = [file for file in order["files"] if os.path.exists(os.path.join(root, file))]
    code = pytest.main([*options, *files], plugins=[Outcomes()])
    tell("end", int(code))


def expected(item, failure, pytest):
    """Whether the test itself, and not what it tests, called off its failure."""
    if not isinstance(failure.value, pytest.xfail.Exception):
        return True  # a mark did, then: nothing else makes a report of an expected failure
    files = [os.path.realpath(entry.frame.code.raw.co_filename) for entry in failure.traceback]
    own = os.path.dirname(os.path.realpath(str(sys.modules["_pytest"].__file__))) + os.sep
    if not files or not files[-1].startswith(own):  # raised as an assertion that was given another class, say
        return False
    while files and files[-1].startswith(own):
        files.pop()
    return not files or files[-1] == os.path.realpath(str(item.fspath))


if __name__ == "__main__":
    main(json.load(sys.stdin))
