"""Names, specs and errors of the registry."""

import subprocess
import sys

import pytest

from envs import registry
from envs.api import EnvUnavailable


def test_every_environment_is_described_without_its_game():
    code = (
        "import sys; from envs import registry; specs = [registry.spec(n) for n in registry.names()];"
        "assert len(specs) == len({s.name for s in specs}) >= 11 + 48; assert len({s.goal for s in specs}) == len(specs);"
        "assert not {'nle', 'minihack', 'gymnasium', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_name_tells_the_nearest():
    with pytest.raises(KeyError, match="dungeon/amber_cellar"):
        registry.make("dungeon/amber_celar")


def test_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="colour"):
        registry.spec("dungeon/amber_cellar", colour="red")


@pytest.mark.parametrize("name", ["dungeon/amber_cellar", "minihack/room_5x5"])
def test_a_value_that_an_option_cannot_have_is_an_error_that_names_what_it_can(name):
    with pytest.raises(ValueError, match="grammar='xml': use one of bare, tagged"):
        registry.spec(name, grammar="xml")
    with pytest.raises(ValueError, match="max_turns=True: use a whole number"):
        registry.spec(name, max_turns=True)


def test_missing_package_names_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "minihack", None)
    with pytest.raises(EnvUnavailable, match=r"pip install 'crl-jax\[minihack\]'"):
        registry.make("dungeon/amber_cellar")


@pytest.mark.parametrize("grammar", ["bare", "tagged"])
@pytest.mark.parametrize("style", ["full", "compact"])
def test_system_prompt_tells_the_actions(style, grammar):
    spec = registry.spec("minihack/keyroom_dark_s5", style=style, grammar=grammar, max_turns=17)
    assert all(action in spec.system_prompt for action in spec.actions)
    assert ("<action>north</action>" in spec.system_prompt) == (grammar == "tagged")
    assert spec.max_turns == 17


@pytest.mark.parametrize("seed", [-1, 2**63, 1e3, "5", None, float("nan"), [1]])
def test_a_seed_is_a_whole_number(seed):
    env = registry.make("sokoban/boxes_1")
    with pytest.raises(ValueError, match="use a whole number from 0"):
        env.reset(seed)


def test_whole_numbers_of_any_kind_are_the_same_seed():
    np = pytest.importorskip("numpy")
    env = registry.make("sokoban/boxes_1")
    assert env.reset(1) == env.reset(np.int64(1)) == env.reset(True)
