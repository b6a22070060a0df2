"""Which replies are calls, and which are none."""

import time

import pytest

from envs.swe.calls import MOST, Call, last_call, write_call

LS = "<function=execute_bash>\n<parameter=command>ls</parameter>\n</function>"


def bash(command):
    return Call("execute_bash", {"command": command})


@pytest.mark.parametrize(
    ("reply", "call"),
    [
        (LS, bash("ls")),
        (f"<think>{LS}</think>{LS.replace('ls', 'pwd')}", bash("pwd")),
        (f"{LS.replace('ls', 'pwd')} then {LS}", bash("ls")),
        (f"{LS} and <function=execute_bash></function>", bash("ls")),
        (f"reasoning the template opened {LS.replace('ls', 'rm')}</think>{LS}", bash("ls")),
        ("<function=submit>\n</function>", Call("submit")),
        ("<function=submit></function>", Call("submit")),
        (write_call("execute_bash", {"command": "echo '<b>' && a < b\n\n"}), bash("echo '<b>' && a < b\n\n")),
        (write_call("str_replace_editor", {"command": "view", "path": "x", "view_range": "[1, -1]"}), Call("view", {"path": "x"}, (1, -1))),
        (
            write_call("str_replace_editor", {"command": "insert", "path": "x", "insert_line": "0", "new_str": "  y"}),
            Call("insert", {"path": "x", "new_str": "  y"}, (0,)),
        ),
    ],
)
def test_N14_the_last_well_formed_call_outside_reasoning(reply, call):
    assert last_call(reply) == call


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "ls",
        f"<think>{LS}</think>",
        f"<think>{LS}",
        f"{LS}</think>",
        LS.replace("</function>", ""),
        LS.replace("</parameter>", ""),
        LS.replace("execute_bash", "python"),
        LS.replace("=command", "=cmd"),
        LS.replace("</function>", "left over</function>"),
        LS.replace("<parameter=command>ls</parameter>", "<parameter=command>ls</parameter>" * 2),
        "<function=submit><parameter=command>x</parameter></function>",
        write_call("str_replace_editor", {"command": "view"}),
        write_call("str_replace_editor", {"command": "delete", "path": "x"}),
        write_call("str_replace_editor", {"command": "view", "path": "x", "view_range": "1-5"}),
        write_call("str_replace_editor", {"command": "insert", "path": "x", "insert_line": "-1", "new_str": "y"}),
        write_call("str_replace_editor", {"command": "insert", "path": "x", "insert_line": "²", "new_str": "y"}),
        write_call("execute_bash", {"command": "echo \0"}),
        write_call("execute_bash", {"command": "echo \ud800"}),
        LS + " " * MOST,
    ],
)
def test_N14_malformed_replies_are_no_call(reply):
    assert last_call(reply) is None


@pytest.mark.parametrize("piece", ["<think>", "</think>", "<function=", "</function>", "<parameter=command>", LS[:-1], "<think></think>"])
def test_hostile_replies_are_read_in_bounded_time(piece):
    began = time.process_time()
    last_call(piece * (MOST // len(piece)))
    last_call(piece * 1_000_000)
    assert time.process_time() - began < 1.0
