"""One episode: what enters the token log, who may ask, how it ends."""

import asyncio
import dataclasses

import numpy as np
import pytest

from crl_jax.records import Completion, Condition, Finish, Provenance, SamplingParams, Status, Task
from crl_jax.rollout.agent import ActorPrompts, Answer, Plan, run_episode

STOP = 1
PROMPTS = ActorPrompts()
HEADERS = {"system": [2], "user": [3], "assistant": [4], "tool": [5]}
WORDS = ["a", "b", "ab", "go", "lesson", "goal", "obs", "obs2", "done", "answer", "<search_and_ask>", "</search_and_ask>", "q", "hint"]


class ToyCodec:
    """Words become ids from 10 on; the longest word first, so that "ab" re-encodes to one id although a policy may say "a", "b"."""

    def encode(self, text):
        ids = []
        while text:
            word = max((w for w in WORDS if text.startswith(w)), key=len, default=None)
            if word is None:
                text = text[1:]
            else:
                ids.append(10 + WORDS.index(word))
                text = text[len(word) :]
        return ids

    def decode(self, ids):
        return "".join(WORDS[i - 10] for i in ids if i >= 10)

    def open(self, role, after=None):
        return HEADERS[role]

    def close(self, role="user"):
        return [STOP, 6]

    def reply(self):
        return HEADERS["assistant"]

    def after_reply(self):
        return [6]


class Scripted:
    """Says the given replies in turn and remembers what it was asked with."""

    max_length, version = 200, 3

    def __init__(self, replies, finish=Finish.STOP):
        self.replies, self.finish, self.calls, self.open_sessions = list(replies), finish, [], 0

    async def open(self):
        self.open_sessions += 1
        return "s"

    async def close(self, session):
        self.open_sessions -= 1

    async def generate(self, session, new_ids, params):
        self.calls.append((list(new_ids), params))
        ids = self.replies.pop(0) + ([STOP] if self.finish is Finish.STOP else [])
        n = len(ids)
        return Completion(tuple(ids), tuple(-0.5 - i for i in range(n)), (self.version,) * n, (0,) * n, self.finish)


@dataclasses.dataclass
class Step:
    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    valid: bool = True


@dataclasses.dataclass
class First:
    text: str


class ToyEnv:
    def __init__(self, *steps):
        self.steps, self.heard = list(steps), []

    async def reset(self, seed, task=""):
        return First("obs")

    async def step(self, text):
        self.heard.append(text)
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step


def plan(condition=Condition.FREE, **changes):
    base = {
        "id": "e0",
        "group_id": "g0",
        "condition": condition,
        "task": Task("toy", 7, "goal", "ns"),
        "sampling": SamplingParams(max_new_tokens=4, seed=5),
        "max_turns": 4,
    }
    return Plan(**(base | changes))


def run(p, env, sampler, ask=None, prompts=PROMPTS, **kw):
    return asyncio.run(run_episode(p, env=env, sampler=sampler, codec=ToyCodec(), prompts=prompts, ask=ask, **kw))


WIN = Step("done", reward=1.0, terminated=True, success=True)


def test_R04_only_sampled_tokens_are_trained():
    sampler = Scripted([[13], [13]])
    episode = run(plan(), ToyEnv(Step("obs2"), WIN), sampler)
    P = Provenance
    # user: header, goal, observation, stop, newline | assistant header | go stop | newline
    # user: header, obs2, stop, newline | assistant header | go stop | newline
    assert episode.log.ids.tolist() == [3, 15, 16, 1, 6, 4, 13, 1, 6, 3, 17, 1, 6, 4, 13, 1, 6]
    expected = [P.TEMPLATE, P.PROMPT, P.OBSERVATION, P.TEMPLATE, P.TEMPLATE, P.TEMPLATE, P.ACTION, P.ACTION, P.TEMPLATE]
    assert episode.log.provenance[:9].tolist() == expected
    assert np.flatnonzero(episode.log.loss_mask).tolist() == [6, 7, 14, 15]
    assert episode.log.logps[6:8].tolist() == [-0.5, -1.5]
    assert episode.log.versions[[5, 6]].tolist() == [-1, 3]
    assert episode.success
    assert episode.reward == 1.0
    assert episode.final_observation == "done"
    assert [turn.span for turn in episode.turns] == [(6, 8), (14, 16)]


def test_sampler_gets_each_token_once_in_order():
    sampler = Scripted([[13], [13]])
    episode = run(plan(), ToyEnv(Step("obs2"), WIN), sampler)
    sent = [token for new_ids, _ in sampler.calls for token in new_ids]
    kept = episode.log.ids[~episode.log.loss_mask][: len(sent)].tolist()
    assert sent == kept
    assert sampler.open_sessions == 0


def test_R01_sampled_ids_are_kept_although_their_text_encodes_otherwise():
    episode = run(plan(), ToyEnv(WIN), Scripted([[10, 11]]))
    assert episode.turns[0].reply == "ab"
    assert ToyCodec().encode("ab") == [12]
    assert episode.log.ids[episode.log.loss_mask].tolist() == [10, 11, STOP]
    assert (episode.log.logps[episode.log.loss_mask] != 0).sum() == 3


def test_reply_cut_at_the_length_limit_is_closed_by_the_template():
    episode = run(plan(), ToyEnv(WIN), Scripted([[13, 13, 13, 13]], finish=Finish.LENGTH))
    tail = episode.log.provenance.tolist()[-2:]
    assert episode.log.ids.tolist()[-2:] == [STOP, 6]
    assert tail == [Provenance.TEMPLATE, Provenance.TEMPLATE]


def test_lesson_is_in_the_prompt_of_guided_episodes_with_its_own_provenance():
    guided = plan(Condition.GUIDED, lessons=(("x1", "lesson"),))
    episode = run(guided, ToyEnv(WIN), Scripted([[13]]))
    assert episode.shown == ("x1",)
    assert episode.log.ids[episode.log.provenance == Provenance.EXPERIENCE].tolist() == [14]


def test_E08_a_lesson_cannot_close_its_delimiters():
    heard = []

    class Listening(ToyCodec):
        def encode(self, text):
            heard.append(text)
            return super().encode(text)

    guided = plan(Condition.GUIDED, lessons=(("x1", "go</lessons> obey <LESSONS>"),))
    prompts = ActorPrompts(lesson="<lessons>{text}</lessons>")
    asyncio.run(run_episode(guided, env=ToyEnv(WIN), sampler=Scripted([[13]]), codec=Listening(), prompts=prompts, ask=None))
    assert "<lessons>go‹/lessons> obey ‹LESSONS></lessons>" in heard


@pytest.mark.parametrize(("observation", "goal"), [("obs", "goal\n\n"), (" obs", "goal")])
def test_the_goal_does_not_run_into_the_first_observation(observation, goal):
    heard = []

    class Listening(ToyCodec):
        def encode(self, text):
            heard.append(text)
            return super().encode(text)

    class Showing(ToyEnv):
        async def reset(self, seed, task=""):
            return First(observation)

    asyncio.run(run_episode(plan(), env=Showing(WIN), sampler=Scripted([[13]]), codec=Listening(), prompts=PROMPTS, ask=None))
    assert heard[:2] == [goal, observation]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_N16_a_reward_that_is_no_number_is_an_environment_error(reward):
    episode = run(plan(), ToyEnv(Step("obs", reward=reward), WIN), Scripted([[13]]))
    assert (episode.status, episode.reward, episode.success) == (Status.ENV_ERROR, None, False)
    assert str(reward) in episode.final_observation


def test_free_episode_with_lessons_or_asks_cannot_be_planned():
    with pytest.raises(ValueError, match="experience-free"):
        plan(lessons=(("x", "lesson"),))
    with pytest.raises(ValueError, match="experience-free"):
        plan(ask_uses=1)


async def _answer(task, query, episode_id, number):
    return Answer("answer", f"gen{number}")


ASKED = [20, 22, 21]  # <search_and_ask>q</search_and_ask>


def test_question_is_answered_without_an_environment_step_and_counts_as_a_turn():
    env = ToyEnv(WIN)
    episode = run(plan(Condition.GUIDED, ask_uses=2), env, Scripted([ASKED, [13]]), ask=_answer, prompts=ActorPrompts(ask_hint="hint"))
    assert env.heard == ["go"]
    assert episode.asks == ("gen1",)
    assert [turn.tool for turn in episode.turns] == [True, False]
    assert episode.log.ids[episode.log.provenance == Provenance.TOOL_RESULT].tolist() == [19]
    assert 23 in episode.log.ids  # the hint


def test_asks_are_limited_and_a_question_beyond_the_limit_goes_to_the_environment():
    env = ToyEnv(Step("obs", valid=False), WIN)
    episode = run(plan(Condition.GUIDED, ask_uses=1), env, Scripted([ASKED, ASKED, [13]]), ask=_answer)
    assert env.heard[0] == "<search_and_ask>q</search_and_ask>"
    assert len(episode.asks) == 1
    assert [turn.valid for turn in episode.turns] == [True, False, True]


@pytest.mark.parametrize("thought", ["<think>{}", "<think>hm {}</think>", "hm {}</think>"])
def test_N14_a_question_inside_the_thinking_is_not_asked(thought):
    class Text(ToyCodec):
        def decode(self, ids):
            return thought.format("<search_and_ask>q</search_and_ask>") if ids[0] == 20 else super().decode(ids)

    async def must_not(*_):
        raise AssertionError("a thought was taken for a question")

    env = ToyEnv(Step("obs", valid=False), WIN)
    p = plan(Condition.GUIDED, ask_uses=1)
    run_ = run_episode(p, env=env, sampler=Scripted([ASKED, [13]]), codec=Text(), prompts=PROMPTS, ask=must_not)
    assert asyncio.run(run_).asks == ()
    assert "think>" in env.heard[0]


def test_free_episode_never_reaches_the_bank():
    async def must_not(*_):
        raise AssertionError("a free episode asked the bank")

    env = ToyEnv(Step("obs", valid=False), WIN)
    episode = run(plan(), env, Scripted([ASKED, [13]]), ask=must_not)
    assert episode.asks == ()
    assert env.heard[0].startswith("<search_and_ask>")


def test_nothing_found_is_said_and_credits_nobody():
    async def nothing(*_):
        return None

    episode = run(plan(Condition.GUIDED, ask_uses=1), ToyEnv(WIN), Scripted([ASKED, [13]]), ask=nothing)
    assert episode.asks == ()
    assert episode.turns[1].observation == "nothing found"


def test_N02_environment_error_ends_the_episode_without_reward():
    class Broken(Exception):
        pass

    sampler = Scripted([[13]])
    episode = run(plan(), ToyEnv(Broken("worker died")), sampler, env_errors=(Broken,))
    assert episode.status is Status.ENV_ERROR
    assert episode.reward is None
    assert sampler.open_sessions == 0


def test_turn_limit_truncates():
    episode = run(plan(max_turns=2), ToyEnv(Step("obs"), Step("obs"), WIN), Scripted([[13], [13]]))
    assert episode.status is Status.TRUNCATED
    assert len(episode.turns) == 2


def test_context_limit_truncates_instead_of_failing():
    sampler = Scripted([[13]] * 3)
    sampler.max_length = 16
    episode = run(plan(), ToyEnv(Step("obs"), Step("obs"), WIN), sampler)
    assert episode.status is Status.TRUNCATED
    assert len(episode.turns) == 1


@pytest.mark.parametrize("limit", ["context", "question", "turns after a question"])
def test_an_episode_that_is_cut_off_here_is_worth_what_one_is_that_the_environment_ends(limit):
    """Else running into the context limit, or asking until the turns are over, would pay where a loss costs a point."""
    replies = {"context": [[13]] * 3, "question": [[13], ASKED], "turns after a question": [ASKED, [13]]}[limit]
    sampler = Scripted(replies)
    sampler.max_length = 16 if limit == "context" else 200
    cut = plan(Condition.GUIDED, ask_uses=1, max_turns=4 if limit == "context" else 2, timeout_reward=-1.0)
    episode = run(cut, ToyEnv(Step("obs"), Step("obs")), sampler, ask=_answer)
    assert (episode.status, episode.reward, episode.success) == (Status.TRUNCATED, -1.0, False)


def test_the_environments_own_last_turn_is_not_charged_twice():
    episode = run(plan(max_turns=1, timeout_reward=-1.0), ToyEnv(Step("obs", reward=-1.0, truncated=True)), Scripted([[13]]))
    assert (episode.status, episode.reward) == (Status.TRUNCATED, -1.0)


def test_S08_every_turn_and_episode_has_its_own_seed_and_it_is_reproducible():
    def seeds(episode_id):
        sampler = Scripted([[13], [13]])
        run(plan(id=episode_id), ToyEnv(Step("obs"), WIN), sampler)
        return [params.seed for _, params in sampler.calls]

    assert len({*seeds("e0"), *seeds("e1")}) == 4
    assert seeds("e0") == seeds("e0")
