"""Records of instances, the package's own repositories, and operators changed at places."""

import json
import subprocess

import pytest

from envs import registry
from envs.api import EnvError, EnvUnavailable
from envs.swe import catalogue as catalogues
from envs.swe import repositories, sources
from envs.swe.build import main, unsound
from envs.swe.grading import Grader
from envs.swe.instance import read_instance, read_instances
from envs.swe.layout import whole
from envs.swe.mutate import Place, PlaceNotFound, mutate
from envs.swe.sandbox import Sandbox

RECORD = {
    "repo": "owner/name",
    "instance_id": "owner__name-1",
    "base_commit": "abc",
    "patch": "",
    "test_patch": "",
    "problem_statement": "\n# It fails\n\nBadly.",
    "hints_text": None,
    "created_at": "2024-01-01",
    "version": "1.0",
    "FAIL_TO_PASS": '["tests/test_a.py::test_b[x/y]"]',
    "PASS_TO_PASS": ["tests/test_c.py::test_d"],
}


def test_a_record_in_the_schema():
    instance = read_instance(RECORD, "here")
    assert instance.fail_to_pass == ("tests/test_a.py::test_b[x/y]",)
    assert instance.pass_to_pass == ("tests/test_c.py::test_d",)
    assert instance.summary == "It fails"
    assert instance.test_files == ("tests/test_a.py", "tests/test_c.py")
    assert read_instance(instance.record(), "again") == instance


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repo": None}, "line 2, field repo: expected text, found nothing"),
        ({"patch": 5}, "line 2, field patch: expected text, found int"),
        ({"FAIL_TO_PASS": "test_a"}, "line 2, field FAIL_TO_PASS: expected a list"),
        ({"FAIL_TO_PASS": [1]}, "line 2, field FAIL_TO_PASS: expected a list of test ids"),
        ({"FAIL_TO_PASS": []}, "line 2, field FAIL_TO_PASS: no test"),
        ({"PASS_TO_PASS": None}, "line 2, field PASS_TO_PASS"),
        ({"instance_id": "../x"}, "line 2, field instance_id"),
        ({"instance_id": "first"}, "line 2: instance_id 'first' is there twice"),
    ],
)
def test_errors_name_line_and_field(tmp_path, change, message):
    path = tmp_path / "some.jsonl"
    path.write_text(json.dumps({**RECORD, "instance_id": "first"}) + "\n" + json.dumps({**RECORD, **change}) + "\n")
    with pytest.raises(ValueError, match="some.jsonl, " + message.replace("[", r"\[")):
        read_instances(path)


@pytest.mark.parametrize(
    ("text", "message"), [("", "no instance in the file"), ("{", "line 1: not JSON"), ("[]", "line 1: expected a JSON object")]
)
def test_files_that_are_none(tmp_path, text, message):
    (tmp_path / "f.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_instances(tmp_path / "f.jsonl")


def test_enough_repositories_and_a_split_by_module():
    recipes = repositories.recipes().values()
    assert sum(recipe.kind == "algorithm" for recipe in recipes) >= 30
    assert sum(recipe.kind == "mutation" for recipe in recipes) >= 30
    modules = {split: {recipe.module for recipe in recipes if recipe.split == split} for split in ("train", "heldout")}
    assert not modules["train"] & modules["heldout"]
    assert all(recipe.fail and len(recipe.issue) > 80 for recipe in recipes)
    assert all("tests" not in recipe.source for recipe in recipes)


def test_most_instances_can_be_made_here():
    assert len(repositories.refused()) < 5
    for name in repositories.recipes():
        if name not in repositories.refused():
            instance = repositories.instance(name)
            assert instance.patch.count("\n@@ ") == 1
            assert set(instance.fail_to_pass).isdisjoint(instance.pass_to_pass)
            assert len(instance.pass_to_pass) >= 1


@pytest.mark.parametrize("name", ["algorithm__lru", "mutation__tomli_long_escape"])
def test_an_instance_is_sound(name, best):
    assert unsound(name, Grader(best)) == ""


def test_the_command(best, capsys):
    assert main(["algorithm__coins"]) == 0
    assert "algorithm__coins: made\n" in capsys.readouterr().out


def test_the_base_commit_is_the_same_everywhere(best):
    head = repositories.repository("algorithm__searching", best)
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", str(head), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "5293807e81fb22d3d7f7d5039f767e26770f7a36"


def test_a_package_that_was_not_verified_is_refused(monkeypatch):
    changed = {**sources.pinned_sources("idna")[0], "core.py": "x = 1\n"}
    monkeypatch.setattr(sources, "_candidates", lambda package: [changed])
    sources.pinned_sources.cache_clear()
    try:
        with pytest.raises(EnvUnavailable, match=r"idna that pip carries here is not one of those that were verified: pip install pip==\d"):
            sources.pinned_sources("idna")
    finally:
        sources.pinned_sources.cache_clear()


SOURCE = """
def f(a, b):  # ä
    if a < b and (a != 0 or b < 7):
        return "ä" + str(a - 1)
    return a < \\
        b
class C:
    def g(self):
        return 0x10 * 2
"""


@pytest.mark.parametrize(
    ("place", "old", "new"),
    [
        (Place("f", "Compare", 0, "<", "<="), "a < b and", "a <= b and"),
        (Place("f", "Compare", 1, "<", ">"), "b < 7", "b > 7"),
        (Place("f", "Compare", 2, "<", ">"), "a < \\", "a > \\"),
        (Place("f", "BoolOp", 0, "and", "or"), "b and (", "b or ("),
        (Place("f", "BinOp", 0, "-", "+"), "a - 1", "a + 1"),
        (Place("f", "Constant", 0, "1", "2"), "a - 1", "a - 2"),
        (Place("C.g", "Constant", 0, "0x10", "0x11"), "0x10", "0x11"),
    ],
)
def test_only_the_operator_changes(place, old, new):
    assert SOURCE.count(old) == 1
    assert mutate(SOURCE, place) == SOURCE.replace(old, new)


@pytest.mark.parametrize(
    "place",
    [
        Place("f", "Compare", 3, "<", ">"),
        Place("f", "Compare", 0, ">=", ">"),
        Place("h", "Compare", 0, "<", ">"),
        Place("C.f", "BoolOp", 0, "or", "and"),
    ],
)
def test_a_place_that_reads_otherwise_is_refused(place):
    with pytest.raises(PlaceNotFound):
        mutate(SOURCE, place)


def users_file(folder, bundle):
    """A repository with a later repair in its history, and the file that names it."""
    git = ["git", "-c", "user.name=u", "-c", "user.email=u@localhost", "-C", str(folder / "owner__name")]
    (folder / "owner__name" / "tests").mkdir(parents=True)
    (folder / "owner__name" / "code.py").write_text("def double(n):\n    return n + n + 1\n")
    (folder / "owner__name" / "tests" / "test_code.py").write_text("import code_extra\n")
    (folder / "owner__name" / "code_extra.py").write_text("from code import double\n")
    repair = "--- a/code_extra.py\n+++ b/code_extra.py\n@@ -1 +1,2 @@\n-from code import double\n+def double(n):\n+    return 2 * n\n"
    test = "--- a/tests/test_code.py\n+++ b/tests/test_code.py\n@@ -1 +1,4 @@\n-import code_extra\n"
    test += "+from code_extra import double\n+\n+def test_double():\n+    assert double(2) == 4\n"
    for command in (
        ["init", "-q", "-b", "main"],
        ["add", "-A"],
        ["commit", "-qm", "one"],
        ["commit", "-q", "--allow-empty", "-m", "the repair"],
    ):
        subprocess.run([*git, *command], check=True)
    base = subprocess.run([*git, "rev-parse", "HEAD~1"], check=True, capture_output=True, text=True).stdout.strip()
    if bundle:
        subprocess.run([*git, "bundle", "create", "-q", str(folder / "owner__name-1.bundle"), "--all"], check=True)
        (folder / "owner__name").rename(folder / "elsewhere")
    record = {
        **RECORD,
        "base_commit": base,
        "patch": repair,
        "test_patch": test,
        "FAIL_TO_PASS": ["tests/test_code.py::test_double"],
        "PASS_TO_PASS": [],
    }
    (folder / "mine.jsonl").write_text(json.dumps(record) + "\n")
    return folder / "mine.jsonl"


@pytest.mark.parametrize("bundle", [False, True])
def test_a_users_file_with_repositories_beside_it(tmp_path, best, bundle):
    mine = catalogues.FromFile(users_file(tmp_path, bundle))
    wide = Sandbox(whole())
    assert mine.ids("train") == ("owner__name-1",)
    assert mine.ids("heldout") == ()
    repository, instance = mine.repository("owner__name-1", wide), mine.instance("owner__name-1")
    log = wide.run(["git", "log", "--all", "--format=%s"], catalogues.Limits(), binds=[catalogues.Bind(str(repository), "/testbed")])
    assert log.output == b"Base of owner/name\n"
    if bundle:
        return
    grader = Grader(wide, narrow=False)
    assert grader.grade(instance, repository, instance.patch.encode()).resolved


def test_what_is_missing_beside_a_users_file_is_told(tmp_path, best):
    (tmp_path / "mine.jsonl").write_text(json.dumps(RECORD))
    mine = catalogues.FromFile(tmp_path / "mine.jsonl")
    with pytest.raises(EnvUnavailable, match=r"owner__name-1\[.bundle\] or owner__name\[.bundle\]; or use backend=docker"):
        mine.repository("owner__name-1", best)
    (tmp_path / "owner__name").mkdir()
    with pytest.raises(EnvError, match=r"commit abc of .* cannot be checked out"):
        mine.repository("owner__name-1", best)
    with pytest.raises(EnvUnavailable, match=r"SWE_INSTANCES=.*none\.jsonl: No such file"):
        catalogues.FromFile(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{broken", "line 1: not JSON"),
        (b"\xff\xfe\0", "no text in UTF-8"),
        (b"null", "expected a JSON object"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b"", "no instance"),
        (json.dumps({**RECORD, "problem_statement": "\ud800"}).encode(), "field problem_statement: half a surrogate pair"),
        (json.dumps({**RECORD, "test_patch": "a\0"}).encode(), "field test_patch: .* NUL"),
        (json.dumps({**RECORD, "PASS_TO_PASS": ["\ud800"]}).encode(), "field PASS_TO_PASS"),
    ],
)
def test_a_broken_file_is_told_wherever_it_is_met(tmp_path, monkeypatch, content, message):
    path = tmp_path / "some.jsonl"
    path.write_bytes(content)
    monkeypatch.setenv("SWE_INSTANCES", str(path))
    for ask in (registry.tasks, registry.make):
        with pytest.raises(EnvUnavailable, match=f"SWE_INSTANCES=.*{message}.*correct the file"):
            ask("swe/repair")


def test_all_are_made_ahead_of_time(best, monkeypatch):
    from envs.swe import tasks

    monkeypatch.setattr(repositories, "refused", lambda: dict.fromkeys(list(repositories.recipes())[3:], ""))
    assert tasks.build() == "3 repositories"
