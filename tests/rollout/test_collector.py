"""The collector: one dead worker or one long prompt says what it is and does not take more with it than it must."""

import asyncio
import types

import pytest

from crl_jax.records import SamplingParams, Task
from crl_jax.rollout import collector
from crl_jax.rollout.collector import Collector, CollectSettings, EnvSettings, PromptTooLong
from crl_jax.rollout.pool import EnvError, Quarantined

TASKS = [Task("dungeon/a", 1, "find it", "dungeon"), Task("dungeon/b", 2, "find it", "dungeon")]
ENVS = [task.env for task in TASKS]


class Pool:
    """Leases fail as listed, then succeed."""

    def __init__(self, *errors):
        self.errors, self.released = list(errors), 0

    async def lease(self, env, options):
        if self.errors:
            raise self.errors.pop(0)

        async def release():
            self.released += 1

        return types.SimpleNamespace(release=release)


def play(pool, monkeypatch, turns=("a turn",), reward=1.0):
    async def run_episode(plan, **_):
        return types.SimpleNamespace(turns=turns, reward=reward, group_id=plan.group_id, log=range(30))

    monkeypatch.setattr(collector, "run_episode", run_episode)
    settings = CollectSettings(
        group_size=2, guided=0, sampling=SamplingParams(8), ask_uses=0, envs=dict.fromkeys(ENVS, EnvSettings(max_turns=3))
    )
    sampler = types.SimpleNamespace(max_length=32, version=0)
    return asyncio.run(Collector(pool, sampler, None, None, None, settings).groups(TASKS, batch_id="s0"))


def test_a_worker_that_dies_while_an_environment_is_made_costs_nothing(monkeypatch):
    pool = Pool(EnvError("the environment's worker is gone: it exited"))
    assert [len(group.episodes) for group in play(pool, monkeypatch)] == [2, 2]
    assert pool.released == 4


def test_an_environment_that_cannot_be_made_ends_the_batch_with_its_own_error(monkeypatch):
    with pytest.raises(EnvError, match="no such level"):
        play(Pool(*[EnvError("no such level")] * 8), monkeypatch)


@pytest.mark.parametrize("error", [Quarantined, EnvError])
def test_N02_an_environment_that_is_not_lent_fails_its_own_episodes_until_there_is_no_other(monkeypatch, error):
    class Sick(Pool):
        async def lease(self, env, options):
            if env in self.errors:
                raise error(f"environment {env} is in quarantine")
            return types.SimpleNamespace(release=lambda: asyncio.sleep(0))

    assert [len(group.episodes) for group in play(Sick(ENVS[0]), monkeypatch)] == [2, 2]
    with pytest.raises(EnvError, match="dungeon/a is in quarantine"):
        play(Sick(*ENVS), monkeypatch)


def test_a_prompt_that_leaves_no_room_for_a_reply_is_an_error_that_names_the_length(monkeypatch):
    with pytest.raises(PromptTooLong, match=r"set actor\.max_length above 38"):
        play(Pool(), monkeypatch, turns=())
    assert play(Pool(), monkeypatch, turns=(), reward=None), "an environment error is no long prompt"
