"""The sampler of a role by its configuration: on a server, with the run's weights, or a reason why not."""

import contextlib
import pathlib
import sys

import jax
import pytest

pytest.importorskip("aiohttp", reason="a sampler on a server needs aiohttp: pip install -e '.[serve]'")
sys.path.insert(0, str(pathlib.Path(__file__).parent / "serving" / "http"))
from front_door import LetterCodec, served, tiny

from crl_jax.config import ActorConfig, ConfigError, ServerConfig
from crl_jax.lookup import RoleParts
from crl_jax.records import SamplingParams
from crl_jax.role_sampler import open_sampler
from crl_jax.rollout.shell import Shell
from crl_jax.sharding.mesh import make_mesh
from crl_jax.sharding.reshard import unchanged


@contextlib.contextmanager
def running_server(shell, folder, **options):
    """A server on ``shell``'s loop; gives its address."""
    stack = contextlib.AsyncExitStack()
    client, _ = shell.call(stack.enter_async_context(served(folder=folder, **options)), 60, "starting the server")
    try:
        yield str(client.make_url("/"))
    finally:
        shell.call(stack.aclose(), 60, "stopping the server")


def parts():
    mesh = make_mesh(1, 1, 1, jax.devices()[:1])
    return RoleParts(LetterCodec(), tiny.CONFIG, mesh, mesh, tiny.weights(1))


def role(url, folder, **more):
    server = ServerConfig(url=url, weights_folder=str(folder), token_file=more.pop("token_file", ""))
    return ActorConfig(server=server, max_length=more.pop("max_length", tiny.LENGTH))


def test_it_starts_with_the_runs_own_weights_and_publishes_to_the_server(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    prompt = tiny.prompt(1, 6)
    with Shell("server") as there, Shell("run") as here, running_server(there, tmp_path, token="secret") as url:
        settings = role(url, tmp_path, token_file=str(tmp_path / "token"))
        sampler, serving = open_sampler("actor", settings, parts(), None, here, request_timeout_s=60)
        first = here.call(sampler.complete(prompt, SamplingParams(4, temperature=0.0)), 60, "asking")
        sampler.publish(tiny.weights(0), 1)
        second = here.call(sampler.complete(prompt, SamplingParams(4, temperature=0.0)), 60, "asking")
        here.call(sampler.aclose(), 30, "closing")
    assert serving.layout is unchanged
    assert list(first.ids) == tiny.greedy(tiny.weights(1), prompt, 4)
    assert list(second.ids) == tiny.greedy(tiny.weights(0), prompt, 4)
    assert (first.versions, second.versions) == ((0,) * 4, (1,) * 4)


@pytest.mark.parametrize(
    ("token", "max_length", "said"),
    [("secret", 32, r"`actor\.server\.url`: .*401"), ("", 64, r"`actor\.max_length`: 64, but the server takes 32")],
)
def test_a_server_that_cannot_be_used_is_a_configuration_error_that_names_the_key(tmp_path, token, max_length, said):
    with (
        Shell("server") as there,
        Shell("run") as here,
        running_server(there, tmp_path, token=token) as url,
        pytest.raises(ConfigError, match=said),
    ):
        open_sampler("actor", role(url, tmp_path, max_length=max_length), parts(), None, here, request_timeout_s=60)


def test_several_servers_get_the_runs_weights_and_share_its_sessions(tmp_path):
    prompt = tiny.prompt(1, 6)
    with Shell("servers") as there, Shell("run") as here, running_server(there, tmp_path) as one, running_server(there, tmp_path) as two:
        sampler, _ = open_sampler("actor", role(f"{one}, {two}", tmp_path), parts(), None, here, request_timeout_s=60)
        asked = (sampler.complete(prompt, SamplingParams(4, temperature=0.0)) for _ in range(2))
        found = [here.call(one_of_them, 60, "asking") for one_of_them in asked]
        stats = sampler.stats()
        here.call(sampler.aclose(), 30, "closing")
    assert [list(c.ids) for c in found] == [tiny.greedy(tiny.weights(1), prompt, 4)] * 2
    assert (stats["servers_up"], stats["swaps"], stats["decoded_tokens"]) == (2, 1, 8)


def test_a_server_without_a_folder_for_weights_is_refused_before_it_is_asked():
    settings = ActorConfig(server=ServerConfig(url="http://127.0.0.1:9"))
    with (
        Shell("run") as here,
        pytest.raises(ConfigError, match=r"`extractor\.server\.weights_folder`: the server must get this run's weights"),
    ):
        open_sampler("extractor", settings, parts(), None, here, request_timeout_s=60)
