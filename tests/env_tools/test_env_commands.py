"""``crl envs``: what is printed, what is an error, and the exit codes."""

import io
import json
import sys

import pytest
import toy_family

from crl_jax import cli
from crl_jax.env_tools import checking, rendering
from envs import registry
from envs.api import EnvUnavailable
from envs.check import Finding, Report
from envs.sokoban import tasks as sokoban


@pytest.fixture(autouse=True)
def two_families(monkeypatch):
    modules = {"toy": toy_family, "absent": toy_family.Missing}
    monkeypatch.setattr(registry, "_FAMILIES", dict.fromkeys(modules, ""))
    monkeypatch.setattr(registry, "module_of", modules.__getitem__)
    monkeypatch.setattr(rendering, "players_of", lambda family: toy_family.Players)


def crl(capsys, *words):
    code = cli.main(["envs", *words])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_ls_tells_goals_tasks_and_what_can_be_made(capsys):
    code, out, _ = crl(capsys, "ls")
    assert code == 0
    assert "1 environment, 1 training and 1 held-out task; can be made here" in out
    assert "tasks unknown; not here: absent: pip install 'crl-jax[absent]'" in out
    assert [line.split() for line in out.splitlines() if line.startswith("  toy/line")] == [["toy/line", "1", "1", "walk"]]
    _, families, _ = crl(capsys, "ls", "--families")
    assert len(families.splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["play", "toy/line", "--task", "bleu"], 2, "no task 'bleu'; of its 2 tasks the nearest: blue"),
        (["play", "toy/lime"], 2, "nearest: toy/line"),
        (["play", "toy/line", "colour=red"], 2, "unknown option 'colour'"),
        (["play", "toy/line", "colour"], 2, "write key=value"),
        (["play", "absent/far"], 1, "pip install 'crl-jax[absent]'"),
        (["render", "toy/line", "--player", "wizard"], 2, "no player 'wizard': use one of random, expert, follow"),
        (["render", "toy/line", "--seed", "-1"], 2, "seed -1"),
        (["check"], 2, "or --all"),
        (["check", "toy", "--all"], 2, "not both"),
        (["check", "tiy"], 2, "no environment family 'tiy': use one of toy, absent"),
        (["check", "toy", "--episodes", "0"], 2, "more than 0"),
        (["check", "toy", "--timeout-s", "nan"], 2, "more than 0, and finite"),
        (["prepare", "absent"], 1, "not installed: absent: pip install"),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(words, code, said, capsys):
    found, _, err = crl(capsys, *words)
    assert found == code
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("more", [(), ("grammar=tagged",)])
def test_nobody_has_to_type_tags(monkeypatch, capsys, more):
    monkeypatch.setattr(sys, "stdin", io.StringIO("?\nup\n"))
    monkeypatch.setattr(registry, "_FAMILIES", {"sokoban": ""})
    monkeypatch.setattr(registry, "module_of", {"sokoban": sokoban}.__getitem__)
    _, out, _ = crl(capsys, "play", "sokoban/boxes_1", *more)
    assert "reward 0" in out
    assert ("not a valid action" in out) == ("<action>" in out) == bool(more)


def test_play_takes_a_task_and_shows_the_rules(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("?\nfly\nright\nright\n"))
    code, out, _ = crl(capsys, "play", "toy/line", "--task", "blue", "max_turns=4")
    assert code == 0
    assert "walk to blue" in out
    assert "Walk to the right." in out
    assert "not a valid action" in out
    assert "actions: left, right, stay" in out
    assert out.rstrip().endswith("the episode is over; success")


def test_render_as_text_and_as_a_page_of_its_own(tmp_path, capsys):
    code, out, _ = crl(capsys, "render", "toy/line", "--task", "red <b>")
    assert code == 0
    assert "1> <script>alert(1)</script>   [not a valid action]" in out
    assert out.rstrip().endswith("success after 3 of 5 turns, reward 1")
    page = tmp_path / "deep" / "page.html"
    code, out, _ = crl(capsys, "render", "toy/line", "--task", "red <b>", "--player", "follow", "--out", str(page))
    text = page.read_text()
    assert f"{page}: success after 3 of 5 turns" in out
    assert "go right" in text
    assert "prefers-color-scheme: dark" in text
    assert "<script" not in text
    assert "red <b>" not in text
    assert not {"http://", "https://", "src=", "@import"} & {word for word in ("http://", "https://", "src=", "@import") if word in text}
    assert "$" not in text, "no place of the template is left"


def test_prepare_builds_what_there_is_to_build(capsys):
    code, out, _ = crl(capsys, "prepare")
    assert code == 0
    assert toy_family.BUILT
    assert "2 tasks in a folder" in out
    assert "not installed: absent: pip install" in out


def test_check_prints_a_table_and_fails_on_findings(monkeypatch, tmp_path, capsys):
    asked = []

    def fake(name, *, episodes, timeout_s):
        asked.append((name, episodes))
        if name == "absent/far":
            raise EnvUnavailable("absent: pip install nothing")
        return Report(name, tuple(findings), episodes, 1.0)

    findings = []
    monkeypatch.setattr(checking, "check", fake)
    code, out, _ = crl(capsys, "check", "--all", "--episodes", "50")
    assert (code, asked) == (0, [("toy/line", 50), ("absent/far", 50)])
    assert "not installed: absent (absent: pip install nothing)" in out
    assert "1 environments checked, 0 with findings, 1 families not installed" in out
    assert crl(capsys, "check", "--all", "--strict")[0] == 1
    findings.append(Finding("leak", "3 more open files"))
    code, out, _ = crl(capsys, "check", "toy/line", "--json", str(tmp_path / "found.json"))
    assert code == 1
    assert "leak: 3 more open files" in out
    assert json.loads((tmp_path / "found.json").read_text())["reports"][0]["findings"][0]["rule"] == "leak"


def test_bench_is_the_script_of_the_source_tree(monkeypatch):
    asked = []
    monkeypatch.setattr("crl_jax.benchmarks.run", lambda name, words: asked.append((name, list(words))) or 0)
    assert cli.main(["envs", "bench", "success", "toy", "--episodes", "9", "--out", "a=b.json"]) == 0
    assert asked == [("envs", ["success", "toy", "--episodes", "9", "--out", "a=b.json"])]


def test_closed_input_ends_a_game_as_its_end_does(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    code, out, err = crl(capsys, "play", "toy/line")
    assert (code, err) == (1, "")
    assert "walk" in out


def test_a_folder_in_the_place_of_a_file_to_write(tmp_path, capsys):
    code, _, err = crl(capsys, "render", "toy/line", "--out", str(tmp_path))
    assert code == 1
    assert "Is a directory" in err
