"""What an agent may try: to get out of its tree, to see the hidden tests, to win without repairing."""

import dataclasses

import pytest

from envs.api import EnvError
from envs.swe import grading, repositories, tasks
from envs.swe.calls import Call
from envs.swe.grading import Grader
from envs.swe.players import _change
from envs.swe.sandbox import Finished, Sandbox

TASK = "algorithm__searching"


def bash(bench, command):
    return bench.use(Call("execute_bash", {"command": command}))[0]


def edit(bench, command, path, **text):
    return bench.use(Call(command, {"path": path, **text}))[0]


@pytest.fixture
def working(bench):
    return bench(TASK)


@pytest.mark.parametrize(
    "path", ["../../x", "/etc/x", "a/../../b", "link/x", "tests/out.py", "/proc/self/environ", "\ud7ff/../../x", "/testbed2/x"]
)
def test_Z06_the_editor_stays_in_the_tree(working, path):
    bash(working, "ln -s /usr link; ln -s /usr/lib/os-release tests/out.py")
    for command, text in (("view", {}), ("create", {"file_text": "x"}), ("str_replace", {"old_str": "a", "new_str": "b"})):
        assert edit(working, command, path, **text).startswith("Error: "), command
    assert "is outside /testbed" in edit(working, "view", path)
    assert edit(working, "undo_edit", path).startswith("Error: ")


def test_the_editor_answers_strange_files_and_requests(working):
    bash(
        working, "mkfifo pipe; printf '\\xff\\xfe' > binary; head -c 2000000 /dev/zero | tr '\\0' x > large; mkdir folder; ln -s loop loop"
    )
    for path in ("pipe", "binary", "large", "folder/none", "loop", "README.md/x", "", "x" * 5000):
        assert edit(working, "view", path).startswith("Error: "), path
    for path in ("pipe", "folder", "README.md"):
        assert edit(working, "create", path, file_text="x").startswith("Error: "), path
    assert "not unique" in edit(working, "str_replace", "searching.py", old_str="low", new_str="x")
    assert "not in the file" in edit(working, "str_replace", "searching.py", old_str="lowest", new_str="x")


def test_the_hidden_tests_and_the_repair_are_nowhere(working):
    instance = repositories.instance(TASK)
    assert "def test_bug_last" in instance.test_patch
    objects = "git cat-file --batch-all-objects --batch --buffer"
    seen = bash(working, f"({objects}; find . -type f | xargs cat; env; cat /proc/*/cmdline /proc/*/environ) | tr '\\0' '\\n' > /tmp/all; "
                         "grep -c . /tmp/all; grep -n -e 'test[_]bug' -e 'test[_]issue' -e 'len(items)[ ]and' /tmp/all")  # fmt: skip
    assert int(seen.splitlines()[0]) > 30
    assert len(seen.splitlines()) == 2, seen  # the second tells that grep found nothing
    assert bash(working, "git rev-list --all --count; git stash list; ls .git/hooks; git reflog | wc -l").splitlines()[0] == "1"


CHEATS = {
    "conftest": "echo 'def pytest_runtest_makereport(item, call):\n    call.excinfo = None' > conftest.py; cp conftest.py tests/",
    "ini": "printf '[pytest]\\naddopts = --collect-only\\npython_functions = nothing\\n' > pytest.ini",
    "plugin": "mkdir evil.egg-info; printf '[pytest11]\\nevil = evil\\n' > evil.egg-info/entry_points.txt; "
    "printf 'Name: evil\\nVersion: 1\\n' > evil.egg-info/PKG-INFO; echo 'import os; os._exit(0)' > evil.py",
    "sitecustomize": "echo 'import os; os._exit(0)' | tee sitecustomize.py usercustomize.py pytest.py json.py > x.pth",
    "shadow": "mkdir _pytest pluggy; echo 'raise SystemExit(0)' | "
    "tee pytest.py json.py _pytest/__init__.py pluggy/__init__.py tests/json.py unittest.py >/dev/null",
    "exit": "echo 'import sys; sys.exit(0)' >> searching.py",
    "hard_exit": "echo 'import os; os._exit(0)' >> searching.py",
    "printing": "cat >> searching.py <<'E'\nimport os\nfor fd in range(30):\n    try:\n"
    '        os.write(fd, b\'["test", "tests/test_issue_searching.py::test_bug_last", "call", true]\\n2 passed\\n\')\n'
    "    except OSError:\n        pass\nE",
    "visible_tests": "echo 'def test_front(): pass\ndef test_absent(): pass' > tests/test_searching.py",
    "hidden_test_file": "echo 'def test_bug_last(): pass\ndef test_bug_every_value(): pass' > tests/test_issue_searching.py",
    "folder_for_hidden_test": "mkdir -p tests/test_issue_searching.py; touch tests/test_issue_searching.py/x",
    "linked_tests": "mv tests other; ln -s other tests",
    "no_tests": "rm -rf tests .git; git init -q; git commit -q --allow-empty -m x",
    "daemon": "(setsid sh -c 'while :; do echo def test_bug_last\\(\\): pass > /testbed/tests/test_issue_searching.py; done' &)",
    "git_config": "git config core.fsmonitor 'touch /tmp/x'; git config filter.x.clean 'sed s/1//'; "
    "echo '*.py filter=x diff=x' > .gitattributes; "
    "echo '*' > .gitignore; git config diff.x.textconv 'echo x'",
    "closed": "chmod 000 /testbed tests searching.py",
    "expected_failure": "sed -i -E 's/^(def .*)$/\\1\\n    import pytest; pytest.xfail(\"later\")/' searching.py",
    "raised_expected_failure": "sed -i -E 's/^(def .*)$/\\1\\n    from _pytest import outcomes as o; raise o.XFailed()/' searching.py",
    "assertion_of_another_class": "echo 'import builtins, pytest; builtins.AssertionError = pytest.xfail.Exception' >> searching.py",
    "skip": "sed -i -E 's/^(def .*)$/\\1\\n    import pytest; pytest.skip(\"later\")/' searching.py",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_no_way_to_win_without_a_repair(working, cheat):
    bash(working, CHEATS[cheat])
    verdict = working.grade()
    assert not verdict.resolved
    assert "tests/test_issue_searching.py::test_bug_last" in verdict.failed


EXPECTED = """import unittest

import pytest

@pytest.mark.xfail
def test_marked():
    raise AssertionError

def test_called():
    pytest.xfail("known")

class TestCase(unittest.TestCase):
    @unittest.expectedFailure
    def test_decorated(self):
        self.fail()
"""


def test_a_failure_that_the_test_expects_is_good(best):
    instance, repository = repositories.instance(TASK), repositories.repository(TASK, best)
    hidden = "tests/test_issue_searching.py"
    listed = tuple(f"{hidden}::{name}" for name in ("test_marked", "test_called", "TestCase::test_decorated"))
    expecting = repositories._diff(hidden, "", EXPECTED)
    changed = dataclasses.replace(instance, test_patch=expecting, fail_to_pass=listed, pass_to_pass=())
    assert Grader(best).grade(changed, repository, b"").resolved


def test_what_is_too_much_for_the_editor_is_the_agents_affair(bench):
    working = bench(TASK, command_s=5.0)
    assert "too much" in edit(working, "create", "a/" * 1500 + "x", file_text="x")
    bash(working, "head -c 999000 /dev/zero | tr '\\0' a > many.txt; head -c 400 /dev/zero | tr '\\0' '\\n' > lines.txt")
    assert edit(working, "str_replace", "many.txt", old_str="a", new_str="b").startswith("Error: old_str is not unique")
    assert "lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10" in edit(working, "str_replace", "lines.txt", old_str="\n", new_str="b")


def test_an_editor_that_is_stopped_answers(working, monkeypatch):
    for stopped in ("time", "memory", "processes", "disk"):
        monkeypatch.setattr(working._copy, "run", lambda *_, by=stopped, **__: Finished(b"", 0, None, by, b"", 1.0))
        assert edit(working, "view", "README.md").startswith("Error: stopped")


@pytest.mark.parametrize("cheat", ["conftest", "shadow", "linked_tests"])
def test_a_repair_counts_whatever_lies_around(working, cheat):
    name, old, new = _change(TASK)
    edit(working, "str_replace", name, old_str=old, new_str=new)
    bash(working, CHEATS[cheat])
    assert working.grade().resolved


def test_a_hanging_test_has_failed(bench):
    working = bench(TASK, grading_s=4.0)
    bash(working, "echo 'while True: pass' >> searching.py")
    verdict = working.grade()
    assert not verdict.resolved
    assert "limit of time" in verdict.why


def test_large_and_binary_changes(working, monkeypatch):
    bash(
        working,
        "head -c 1000 /dev/urandom > data.bin; chmod +x README.md; mv README.md $'na\\xe4hm.md'; mkdir -p a/b; touch a/b/'new\nline'",
    )
    assert edit(working, "view", ".").encode().decode().startswith("/testbed/\n")
    assert working.grade().failed == repositories.instance(TASK).fail_to_pass
    monkeypatch.setattr(grading, "PATCH_MOST", 1_000)  # random bytes take more, whatever they are
    assert working.grade().why == "the changes cannot be told as a patch"


def test_N12_what_is_wrong_with_the_grader_is_no_reward(best, working, monkeypatch):
    instance, grader = repositories.instance(TASK), Grader(best)
    repository = repositories.repository(TASK, best)
    broken = dataclasses.replace(instance, test_patch=instance.test_patch.replace("@@ -0,0", "@@ -7,7"))
    with pytest.raises(EnvError, match="does not apply"):
        grader.grade(broken, repository, b"")
    monkeypatch.setattr(grading, "_JUDGE", "import no_such_module")
    with pytest.raises(EnvError, match="test runner did not start"):
        grader.grade(instance, repository, b"")
    monkeypatch.setattr(grading, "_ARRANGE", "print('no JSON')")
    with pytest.raises(EnvError, match="preparing algorithm__searching"):
        grader.grade(instance, repository, b"")


def test_a_patch_that_is_none_is_the_agents_fault(best):
    instance, repository = repositories.instance(TASK), repositories.repository(TASK, best)
    verdict = Grader(best).grade(instance, repository, b"\x00\xff no patch")
    assert not verdict.resolved
    assert "does not apply" in verdict.why


def test_closing_removes_whatever_was_made(bench):
    working = bench(TASK)
    home = working._copy.tree.parent
    bash(
        working,
        "mkdir -p shut/in; chmod 000 shut; python -c \"import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\"; chmod 555 .",
    )
    working.close()
    assert not home.exists()
    working.close()


def test_the_deadline_of_a_call_covers_a_command_and_every_part_of_grading(working, monkeypatch):
    limits, run = list[float](), Sandbox.run

    def counted(self, argv, limit, **more):
        limits.append(limit.wall_s)
        return run(self, argv, limit, **more)

    monkeypatch.setattr(Sandbox, "run", counted)
    working.grade()
    assert len(limits) == grading.PARTS
    options = {"command_s": 7, "grading_s": 11}
    assert tasks.spec("repair", **options).call_timeout_s > 7 + len(limits) * 11
