"""Sets of tasks and mixtures of them: reading, the rules between their fields, and what they stand for."""

import collections

import pytest

from crl_jax import lookup
from crl_jax.config import ConfigError, to_yaml
from crl_jax.config.load import parse_text
from crl_jax.records import Task
from envs import registry

MIXED = """
run: {groups_per_step: 4, eval_episodes: 6, seed: 3}
env:
  action_format: tagged
  mixture:
    caves: {family: dungeon, count: 3, style: full, max_turns: 9, options: {hazards: trap, size: 12}}
    room: {names: [minihack/room_5x5], style: full, max_turns: 30}
"""


def test_a_mixture_is_read_overridden_and_written_back() -> None:
    config = parse_text(MIXED, ["env.mixture.caves.max_turns=5", "env.mixture.caves.options.hazards=none"])
    assert list(config.env.mixture) == ["caves", "room"]
    caves = config.env.mixture["caves"]
    assert (caves.family, caves.max_turns, caves.options) == ("dungeon", 5, {"hazards": "none", "size": 12})
    assert parse_text(to_yaml(config)) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.groups_per_step=5"], "`run.groups_per_step`: 5 groups do not divide over the 2 parts"),
        (["run.eval_episodes=7"], "`run.eval_episodes`: 7 episodes do not divide"),
        (["env.family=dungeon"], "`env.mixture`: goes instead of env.names and env.family"),
        (["env.mixture.room.family=dungeon"], "give either env.mixture.room.names"),
        (["env.mixture.room.max_turns=0"], "`env.mixture.room.max_turns`: must be positive"),
        (["env.mixture.a-b.family=dungeon", "run.groups_per_step=3"], "name a part with letters"),
        (["env.constrained=true", "env.action_format=bare"], "`env.constrained`: a constraint knows one list"),
        (["env.mixture.room.turns=3"], "unknown key `env.mixture.room.turns`; did you mean `env.mixture.room.max_turns`"),
        (["env.mixture.caves.options.max_turns=3"], "max_turns is a setting of its own: env.mixture.caves.max_turns"),
        (["env.mixture.caves.options=3"], "`env.mixture.caves.options` is a section of names"),
        (["env.mixture.caves.options.size=[3]"], "expects true or false or an integer"),
    ],
)
def test_contradictions_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_text(MIXED, overrides)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.mixture.caves.options.colour=red"], "`env.mixture.caves`: unknown option 'colour'"),
        (["env.mixture.caves.options.size=3"], "use 6 to 18"),
        (["env.mixture.caves.count=99"], "`env.mixture.caves.count`: 99, but there are 36 tasks"),
        (
            ["env.mixture.room.names=[minihack/rom_5x5]"],
            "`env.mixture.room.names`: no environment 'minihack/rom_5x5'; nearest: minihack/room",
        ),
        (["env.mixture.room.names=[dungeon/amber_cellar]"], "['dungeon/amber_cellar'] are in another part already"),
        (["env.mixture.room.style=haiku"], "style='haiku': use one of"),
    ],
)
def test_what_does_not_exist_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        lookup.run_tasks(parse_text(MIXED, overrides))
    assert message in str(error.value)


def parts(tasks: list[Task]) -> collections.Counter[str]:
    return collections.Counter(task.env.partition("/")[0] for task in tasks)


def test_every_step_and_every_evaluation_has_equal_shares() -> None:
    found = lookup.run_tasks(parse_text(MIXED))
    for start in range(0, 40, 4):
        assert parts(found.stream.tasks(start, 4)) == {"dungeon": 2, "minihack": 2}
    assert parts(found.eval_sets["known"]) == {"dungeon": 3, "minihack": 3}
    assert parts(found.eval_sets["heldout"]) == {"dungeon": 3}  # a fixed level keeps nothing back
    assert len({task.seed for task in found.stream.tasks(0, 40)}) == 40
    caves = found.envs["dungeon/amber_cellar"]
    assert (caves.part, caves.max_turns, caves.options["hazards"]) == ("caves", 9, "trap")
    assert "<action>" in caves.system_prompt
    assert found.envs["minihack/room_5x5"].part == "room"


def test_a_part_sees_the_tasks_it_would_see_alone() -> None:
    """Only the seeds differ: they carry the part's name."""
    mixed = lookup.run_tasks(parse_text(MIXED))
    alone = lookup.run_tasks(parse_text("env: {family: dungeon, count: 3, style: full, action_format: tagged}\nrun: {seed: 3}"))
    assert {task.env for task in mixed.stream.tasks(0, 6)} == {"minihack/room_5x5"} | {task.env for task in alone.stream.tasks(0, 3)}


def test_an_environment_that_is_kept_back_can_be_named() -> None:
    found = lookup.run_tasks(parse_text("env: {names: [dungeon/velvet_well]}"))
    assert {goal.env for goal in found.stream.goals} == {"dungeon/velvet_well"}
    assert set(found.eval_sets) == {"known"}


def test_repair_tasks_can_be_trained_on_and_have_time_for_a_call() -> None:
    found = lookup.run_tasks(parse_text("env: {names: [swe/repair], style: full, action_format: tagged}"))
    assert {goal.namespace for goal in found.stream.goals} == {"swe"}
    assert found.envs["swe/repair"].options["grammar"] == "tagged"
    assert found.envs["swe/repair"].call_timeout_s >= 150
    assert lookup.registry.spec("swe/repair", backend="docker").call_timeout_s >= 30 + 120 + 120 + 600


def test_what_a_lost_episode_is_worth_reaches_the_collector() -> None:
    found = lookup.run_tasks(parse_text("env: {family: alfworld, style: full, action_format: tagged}"))
    assert {settings.timeout_reward for settings in found.envs.values()} == {-1.0}


def test_goals_of_the_shop_are_trained_on_by_their_weight() -> None:
    pytest.importorskip("bm25s")
    found = lookup.run_tasks(parse_text("env: {names: [webshop/shop], style: full, action_format: tagged}"))
    weights = [goal.weight for goal in found.stream.goals]
    assert max(weights) > 5 * min(weights) > 0


def test_every_family_can_stand_in_one_mixture() -> None:
    for family in registry.families():
        settings = "" if family in ("swe", "webshop") else f"names: [{family}/{registry.module_of(family).names()[0]}], "
        settings = settings or f"family: {family}, count: 1, "
        config = parse_text(f"env: {{{settings}style: full, action_format: tagged}}")
        assert lookup.run_tasks(config).envs, family
