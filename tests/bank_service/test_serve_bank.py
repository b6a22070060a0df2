"""``crl bank serve``: what is refused before it opens anything, one writer for a file, and its end."""

import asyncio
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from service_toys import ROOT, HashEmbedder, ScriptedSampler, Store, add, decode, echo, episode, remote, render, run

from crl_jax import bank_lock, build, cli, serve_bank
from crl_jax.config.load import parse_text
from crl_jax.config.parse import ConfigError
from crl_jax.experience.store import StoreError
from crl_jax.serve_bank import ServeOptions


@contextlib.contextmanager
def started(*words):
    """``crl bank serve`` in a process of its own, with what it printed when it was ready."""
    command = [sys.executable, "-m", "crl_jax.cli", "bank", "serve", *map(str, words)]
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.wait(timeout=20)


def test_Z07_a_bank_alone_is_served_with_a_token_to_one_server_at_a_time_and_ends_in_order(tmp_path: pathlib.Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    words = (tmp_path, "--no-extractor", "--port", "0", "--token-file", tmp_path / "token")
    with started(*words) as (process, line):
        assert "a new bank, no extractor) at grpc://127.0.0.1:" in line
        assert line.endswith("(token required)\n")
        url = line.split(" at ")[1].split()[0]

        async def story():
            async with remote(url, token="secret", timeout_s=60.0) as bank:
                (written,) = (await bank.write("room", add("the key is under the bed"))).written
                assert (await bank.retrieve("room", "where is the key?"))[0].id == written

        run(story())
        with pytest.raises(ConfigError, match=r"another process writes .*bank\.sqlite .* use its address as bank\.server\.url"):
            serve_bank.main(tmp_path, [], ServeOptions(port=0, extractor=False))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    store = Store.open(tmp_path / "bank.sqlite", read_only=True)
    assert [e.text for e in store.load().space("room").values()] == ["the key is under the bed"]
    store.close()


def test_the_end_says_what_is_not_distilled_and_the_next_start_goes_on(tmp_path, monkeypatch, capsys):
    class Words:
        stop_ids = (0,)
        render, decode = staticmethod(render), staticmethod(decode)

    delay = {"s": 60.0}

    async def extractor(config, stack, wrong):
        return ScriptedSampler(echo, lambda prompt: delay["s"]), Words()

    monkeypatch.setattr(serve_bank, "_extractor", extractor)
    monkeypatch.setattr(build, "MiniLM", HashEmbedder)
    config = parse_text("env: {family: dungeon}", [])

    async def story(act):
        serving = asyncio.create_task(serve_bank._serve(config, tmp_path / "bank.sqlite", ServeOptions(port=0, drain_s=0.2), "", None))
        while not (said := capsys.readouterr().out):
            await asyncio.sleep(0.05)
            assert not serving.done(), serving.result()
        async with remote("grpc" + said.split(" at grpc")[1].split()[0]) as bank:
            await act(bank)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == 0
        return said

    async def submit(bank):
        assert await bank.submit(episode("e1", observation="one"))

    async def wait(bank):
        assert await bank.drain(10) == 0
        assert [e.experience.text async for e in bank.entries()] == ["one"]

    run(story(submit))
    assert "1 episodes are not distilled yet; they wait in" in capsys.readouterr().out
    delay["s"] = 0.0
    assert ", 1 episodes go on)" in run(story(wait))  # it may be distilled by the time this is said


def test_a_start_that_fails_leaves_the_port_and_the_file(tmp_path):
    (tmp_path / "bank.sqlite").write_bytes(b"something else entirely, " * 100)
    for _ in range(2):
        with pytest.raises(StoreError, match="restore a backup, or move it away to start empty"):
            serve_bank.main(tmp_path, [], ServeOptions(port=0, extractor=False))
    with bank_lock.writing(tmp_path / "bank.sqlite"):
        pass


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "a port is 1 to 65535"),
        (["--calls", "0"], "--calls 0 must be 1 or more"),
        (["--message-mib", "0"], "--message-mib 0 1 to 1024"),
        (["--tls-cert", "x"], "--tls-cert and --tls-key go together"),
        (["--tls-cert", "x", "--tls-key", "y"], "x cannot be read"),
        (["--token-file", "nowhere"], "token file nowhere cannot be read"),
        (["--host", "0.0.0.0", "--no-extractor"], "give a token with --token-file"),
        ([], "names no server for the extractor: .* --no-extractor"),
        (["no.key=1"], "no.key"),
    ],
)
def test_wrong_words_are_refused_before_a_bank_is_made(words, message, tmp_path, capsys):
    assert cli.main(["bank", "serve", str(tmp_path), *words]) == 2
    assert not list(tmp_path.glob("bank*"))
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_a_recipe_a_run_and_a_folder_name_a_bank(tmp_path):
    recipe = ROOT / "configs" / "smoke.yaml"
    config, folder = serve_bank.resolve(recipe, [f"run.dir={tmp_path}", "bank.top_k=2"], extractor=False)
    assert (folder, config.bank.top_k) == (tmp_path / "smoke", 2)
    (folder / "config.yaml").write_text("env: {family: dungeon}\nbank: {top_k: 3}\n")
    config, again = serve_bank.resolve(folder, [], extractor=False)
    assert (again, config.bank.top_k) == (folder, 3)
    with pytest.raises(ConfigError, match="cannot read"):
        serve_bank.resolve(tmp_path / "nothing", [], extractor=False)


def test_a_lock_ends_with_its_owner_and_needs_a_folder(tmp_path):
    with bank_lock.writing(tmp_path / "b"), pytest.raises(ConfigError, match="another process writes"), bank_lock.writing(tmp_path / "b"):
        pass
    with bank_lock.writing(tmp_path / "b"):
        pass
    with pytest.raises(ConfigError, match="give another folder"), bank_lock.writing(tmp_path / "no" / "b"):
        pass
