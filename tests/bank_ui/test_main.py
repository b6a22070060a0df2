"""``crl bank ui`` as a process: it says where it is, answers, and ends when it is told to."""

import re
import signal
import subprocess
import sys
import urllib.request

import pytest

pytest.importorskip("aiohttp", reason="the page's server needs aiohttp: pip install -e '.[serve]'")

from crl_jax import cli


@pytest.mark.system
def test_the_server_starts_answers_and_ends_in_order(made):
    words = [sys.executable, "-m", "crl_jax.cli", "bank", "ui", str(made[0])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+/", line)
            assert found, line + process.stderr.read() if process.stderr else line
            assert "revision 14, 5 entries" in line
            with urllib.request.urlopen(found[0], timeout=20) as answer:
                assert b"Experience bank" in answer.read()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--port", "70000"], 2, "--port 70000"),
        (["--host", "0.0.0.0"], 2, "give a token with --token-file"),
        (["--token-file", "nowhere"], 2, "cannot be read"),
        (["--host", "no-such-host.invalid"], 1, "is no address of this machine"),
    ],
)
def test_what_cannot_be_served_is_one_line(words, code, text, made, capsys):
    token = made[0] / "token"
    token.write_text("secret\n")
    more = ["--token-file", str(token)] if "no-such-host.invalid" in words else []
    assert cli.main(["bank", "ui", str(made[0]), *words, *more]) == code
    out = capsys.readouterr().err
    assert text in out
    assert len(out.splitlines()) == 1
    assert cli.main(["bank", "ui", str(made[0] / "nothing")]) == 1


def test_a_missing_package_is_named_with_the_line_that_installs_it(made, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("crl_jax.bank_ui.app")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delattr("crl_jax.bank_ui.app", raising=False)
    assert cli.main(["bank", "ui", str(made[0])]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "crl bank ui needs aiohttp" in line
    assert "pip install -e '.[serve]'" in line
