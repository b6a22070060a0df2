"""Episodes of repair tasks."""

import concurrent.futures
import hashlib
import os
import tempfile

import pytest

from envs import registry
from envs.api import EnvError, EnvUnavailable
from envs.players import play, players_of
from envs.swe import env as module
from envs.swe import tasks as family
from envs.swe.calls import write_call

TASK = "algorithm__searching"
PLAYERS = players_of("swe")


def bash(command):
    return write_call("execute_bash", {"command": command})


def edit(command, path, **parameters):
    return write_call("str_replace_editor", {"command": command, "path": path, **parameters})


SUBMIT = write_call("submit", {})


def task_of(name):
    return next(task for split in ("train", "heldout") for task in registry.tasks("swe/repair", split) if task.id == name)


@pytest.fixture
def env(best):
    made = registry.make("swe/repair", command_s=20)
    yield made
    made.close()
    made.close()


def test_described_without_a_sandbox(monkeypatch):
    monkeypatch.setenv("PATH", "")
    spec = registry.spec("swe/repair", max_turns=7, command_s=9)
    assert (spec.namespace, spec.max_turns, spec.actions) == ("swe", 7, ())
    assert "You have 7 turns" in spec.system_prompt
    assert "after 9 seconds" in spec.system_prompt
    assert all(
        tool in registry.spec("swe/repair", style="compact").system_prompt for tool in ("execute_bash", "str_replace_editor", "submit")
    )
    assert {task.kind for task in registry.tasks("swe/repair")} == {"algorithm", "mutation"}
    assert task_of(TASK).goal == "find_first misses values at the end of the list"
    assert module.SweRepair.slow


def test_without_a_task_the_seed_draws_a_training_instance_and_info_tells_which(env):
    env.reset(5)
    assert env.step("hm").info["task"] in {task.id for task in registry.tasks("swe/repair", "train")}


def test_Z04_without_a_sandbox_there_is_no_environment(monkeypatch):
    monkeypatch.setenv("PATH", "")
    for start in (lambda: registry.make("swe/repair"), family.prepare):
        with pytest.raises(EnvUnavailable, match="apt-get install bubblewrap"):
            start()


def test_an_episode(env):
    seen = env.reset(3, TASK)
    assert "The repository crl/searching is in /testbed." in seen.text
    assert "find_first([7], 7)" in seen.text
    assert env.step(bash("cd tests && export X=1 && touch made && pwd")).observation == "/testbed/tests"
    assert env.step(bash('echo "$PWD" "[$X]" && ls')).observation == "/testbed/tests []\nmade\ntest_searching.py"
    assert env.step(bash("cd /usr; exit 3")).observation == "[exit status 3]"
    assert env.step(bash("pwd")).observation == "/testbed"
    assert env.step(bash("python -m pytest -q | tail -n 1; cat")).observation == "2 passed in N s"
    step = env.step("no call")
    assert (step.valid, step.reward, step.info["invalid"]) == (False, 0.0, 1)
    assert step.observation.endswith("2 passed in N s")
    step = env.step(edit("view", "searching.py", view_range="[4, 6]"))
    assert (
        step.observation == "     4\tdef find_first(items, wanted):\n"
        '     5\t    """The first index of ``wanted`` in the sorted list ``items``, or -1."""\n'
        "     6\t    low, high = 0, len(items)"
    )
    assert not step.info["effective"]
    assert env.step(edit("str_replace", "searching.py", old_str="len(items) - 1 and", new_str="len(items) and")).info["effective"]
    step = env.step(SUBMIT)
    assert (step.reward, step.success, step.terminated, step.truncated) == (1.0, True, True, False)
    assert step.info["status"] == "resolved"
    assert step.info["data_source"] == "generated"
    with pytest.raises(RuntimeError):
        env.step(SUBMIT)


def test_the_editor(env):
    env.reset(0, TASK)
    assert env.step(edit("view", "/testbed")).observation.splitlines() == [
        "/testbed/", "/testbed/README.md", "/testbed/searching.py", "/testbed/tests/", "/testbed/tests/test_searching.py",
    ]  # fmt: skip
    assert env.step(edit("create", "new/a.txt", file_text="one\ntwo")).observation == "Created /testbed/new/a.txt."
    assert env.step(edit("create", "new/a.txt", file_text="x")).observation.startswith("Error: the file exists")
    assert env.step(edit("insert", "new/a.txt", insert_line="1", new_str="and a half")).observation.endswith(
        "     2\tand a half\n     3\ttwo"
    )
    assert env.step(edit("insert", "new/a.txt", insert_line="9", new_str="x")).observation == "Error: insert_line 9: the file has 3 lines"
    assert env.step(edit("str_replace", "new/a.txt", old_str="and a half\n")).observation.startswith("Edited")
    assert env.step(bash("cat new/a.txt")).observation == "one\ntwo"
    for shown in ("one\nand a half\ntwo", "one\ntwo", "No"):
        assert env.step(edit("undo_edit", "new/a.txt")).observation == "Undid the last edit of /testbed/new/a.txt."
        assert env.step(bash("cat new/a.txt 2>/dev/null || echo No")).observation == shown
    assert env.step(edit("undo_edit", "new/a.txt")).observation == "Error: no edit of new/a.txt to undo"
    assert env.step(edit("view", "new/none")).observation == "Error: /testbed/new/none does not exist"


def test_what_was_not_submitted_is_graded_at_the_end(best):
    env = registry.make("swe/repair", max_turns=1)
    path, old, new = PLAYERS._change(TASK)
    env.reset(0, TASK)
    step = env.step(edit("str_replace", path, old_str=old, new_str=new))
    assert (step.reward, step.success, step.terminated, step.truncated) == (1.0, True, False, True)
    assert step.observation.endswith("No turns left. All tests pass: the issue is solved.")
    env.reset(0, TASK)
    step = env.step("\ud800" * 1000)
    assert (step.reward, step.success, step.truncated, step.valid) == (0.0, False, True, False)
    env.close()


def test_limits_of_a_command_and_of_an_episode(best):
    env = registry.make("swe/repair", command_s=1, episode_s=1)
    env.reset(0, TASK)
    step = env.step(bash("echo begun; sleep 100"))
    assert step.observation.startswith("begun\n[stopped after 1 s, with everything it had started]")
    assert step.observation.endswith("No time left. Not all tests pass: the issue is not solved.")
    assert (step.truncated, step.reward) == (True, 0.0)
    with pytest.raises(RuntimeError):
        env.step(SUBMIT)
    env.close()


def test_N12_a_failing_sandbox_is_no_reward(env, monkeypatch):
    env.reset(0, TASK)
    monkeypatch.setattr(env._place._sandbox, "_program", "/bin/false")
    with pytest.raises(EnvError, match="did not start"):
        env.step(SUBMIT)


def test_N03_the_same_replies_give_the_same_observations(best):
    replies = [bash("ls -A; git log --format='%H %ad'"), bash("cd tests; git status --short"), "?", edit("view", "README.md"),
               bash("python -c 'print(hash(\"x\"), {\"b\", \"a\"})'; echo $RANDOM >/dev/null; false")]  # fmt: skip
    transcripts = []
    for _ in range(2):
        env = registry.make("swe/repair")
        transcripts.append([env.reset(5, TASK).text, *(env.step(reply).observation for reply in replies)])
        env.close()
    assert transcripts[0] == transcripts[1]
    digest = hashlib.sha256("\0".join(transcripts[0][:5]).encode()).hexdigest()[:16]
    assert digest == "74d7325837f89d53"


def test_a_seed_without_a_task_draws_one_for_training(env):
    trained = {task.goal for task in registry.tasks("swe/repair")}
    texts = [env.reset(seed).text for seed in (0, 1, 0)]
    assert texts[0] == texts[2] != texts[1]
    assert all(any(goal in text for goal in trained) for text in texts)
    with pytest.raises(KeyError, match="no task 'nothing'"):
        env.reset(0, "nothing")


def test_players(env):
    task, options = task_of("mutation__msgpack_equal_timestamps"), {}
    assert play(env, PLAYERS.make_player("expert", task, seed=0, options=options), 0, task.id).success
    told = PLAYERS.lesson(task, 0)
    assert "in msgpack/ext.py, replace" in told
    assert play(env, PLAYERS.make_player("follow", task, seed=0, options=options, lesson=told), 0, task.id).success
    misled = PLAYERS.lesson(task, 0, right=False)
    assert not play(env, PLAYERS.make_player("follow", task, seed=0, options=options, lesson=misled), 0, task.id).success
    assert not play(env, PLAYERS.make_player("random", task, seed=3, options=options), 3, task.id).success
    for kind, lesson, message in (("follow", "be good", "names no file"), ("best", "", "no player 'best'")):
        with pytest.raises(ValueError, match=message):
            PLAYERS.make_player(kind, task, seed=0, options=options, lesson=lesson)


def test_every_repair_has_a_unique_place(cache):
    for split in ("train", "heldout"):
        for task in registry.tasks("swe/repair", split):
            _, old, new = PLAYERS._change(task.id)
            assert old != new
            assert len(old.splitlines()) < 8


def test_environments_in_threads_and_nothing_left(best, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def episode(seed):
        env = registry.make("swe/repair")
        env.reset(seed, TASK)
        seen = env.step(bash(f"echo {seed} > mine; sleep 0.2; cat mine; ls | wc -l")).observation
        env.close()
        return seen

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(episode, range(4))) == [f"{seed}\n4" for seed in range(4)]
    assert os.listdir(tmp_path) == []
