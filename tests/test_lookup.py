"""Names in a configuration: what does not exist or does not fit is said before anything starts."""

import pathlib

import pytest

from crl_jax import lookup
from crl_jax.config import Config, ConfigError, load
from crl_jax.config.load import parse_text
from crl_jax.models.load import load_codec


def config(*overrides: str) -> Config:
    return parse_text("env: {family: dungeon}\nactor: {weights: builtin:micro}\n", overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(["env.family=castle"], "`env.family`: no environment family 'castle'", id="family"),
        pytest.param(["env.family=", "env.names=[dungeon/amber_celar]"], "dungeon/amber_cellar", id="name"),
        pytest.param(["env.count=99"], "use 1 to 36, or 0 for all", id="count"),
        pytest.param(["env.options.size=2"], "use 6 to 18", id="size"),
        pytest.param(["env.options.size=8", "env.options.kind=maze"], "odd for a maze", id="maze"),
    ],
)
def test_environments_that_do_not_exist(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match="`env") as error:
        lookup.run_tasks(config(*overrides))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("actor.model=huge", "`actor.model`: unknown model preset `huge`", id="model"),
        pytest.param("actor.weights=/none.safetensors", "`actor.weights`", id="weights"),
        pytest.param("actor.tokenizer=/none.txt", "`actor.tokenizer`", id="tokenizer"),
        pytest.param("actor.mesh.data=50", "`actor.mesh`: mesh data=50", id="mesh"),
        pytest.param("actor.mesh.data=0", "`actor.mesh`: the 100 rows of an update do not divide over", id="rows-over-all-devices"),
        pytest.param("actor.mesh.data=4 actor.serve_tensor=3", "`actor.serve_tensor`: serve_tensor=3 does not divide", id="replicas"),
        pytest.param("actor.mesh.data=4 actor.serve_tensor=2", "`actor.serve_tensor`: mesh axis `tensor`=2", id="replica-too-wide"),
        pytest.param("actor.mesh.data=4 actor.serve_tensor=1 actor.slots=6", "actor.slots=6 does not divide over 4", id="slots"),
        pytest.param("actor.attention=splash", "`actor.attention`: the splash kernel runs on TPUs only", id="kernel-of-a-tpu"),
        pytest.param(
            "actor.model=gemma3-270m actor.weights=random actor.scan_layers=true",
            "`actor.scan_layers`: scan_layers needs",
            id="layers-of-two-kinds",
        ),
        pytest.param("actor.model=tiny", "model tiny only 64", id="tokenizer-of-a-larger-vocabulary"),
    ],
)
def test_models_that_do_not_exist_or_do_not_fit(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        lookup.role_parts(config("run.groups_per_step=25", "run.group_size=4", *override.split(" ")), "actor")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.action_format=tagged"], "`env.action_format`: tokenizer builtin:micro cannot write '<action>north</action>'"),
        (["env.constrained=true"], "`env.action_prefix`: tokenizer builtin:micro cannot write 'north'"),
    ],
)
def test_actions_that_the_tokenizer_cannot_write(overrides: list[str], message: str) -> None:
    wrong = config(*overrides)
    with pytest.raises(ConfigError) as error:
        lookup.check_actions(wrong, lookup.run_tasks(wrong).stream.goals, load_codec(wrong.actor.tokenizer))
    assert message in str(error.value)


def test_actions_that_the_tokenizer_can_write() -> None:
    for overrides in ([], ["env.constrained=true", 'env.action_prefix=" "']):
        fine = config(*overrides)
        lookup.check_actions(fine, lookup.run_tasks(fine).stream.goals, load_codec(fine.actor.tokenizer))


def test_the_actors_of_the_shipped_recipes_can_write_their_actions() -> None:
    for recipe in (pathlib.Path(__file__).parents[1] / "configs").glob("*.yaml"):
        shipped = load(recipe)
        if shipped.actor.tokenizer == "builtin:micro":
            lookup.check_actions(shipped, lookup.run_tasks(shipped).stream.goals, load_codec("builtin:micro"))


def test_prompts_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="use one of"):
        lookup.actor_prompts("none")
    with pytest.raises(ConfigError, match="use default or one of"):
        lookup.extractor_prompts("none")


def test_what_exists_is_found() -> None:
    tasks = lookup.run_tasks(config("env.count=2"))
    assert len(tasks.stream.goals) == 2
    assert set(tasks.eval_sets) == {"known", "heldout"}
    parts = lookup.role_parts(config(), "actor")
    assert parts.codec.tokenizer.vocab_size == parts.model.vocab_size


def test_roles_of_one_base_share_it_unless_their_vocabularies_make_it_another_model() -> None:
    both = ("actor.lora.rank=2", "extractor.lora.rank=2", "extractor.weights=builtin:micro")
    assert lookup.shares_base(config(*both))
    assert not lookup.shares_base(config(*both[:2]))
    assert not lookup.shares_base(config(both[0], both[2]))
    assert not lookup.shares_base(config(*both, "extractor.tokenizer=builtin:smollm2-135m"))


def test_prompts_of_gate_and_votes_are_found_by_name() -> None:
    assert "$lesson" in lookup.gate_prompts("default").user
    assert "upvote" in lookup.extractor_prompts("votes").distil_system
    with pytest.raises(ConfigError, match=r"actor\.gate\.prompt='polite' is unknown: use default"):
        lookup.gate_prompts("polite")
