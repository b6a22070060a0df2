"""The actor-critic gate: what an episode reads after its verdicts, who is asked, what it costs."""

import asyncio
import types

import pytest

from crl_jax.experience.verdict import GatePrompts
from crl_jax.records import Completion, Condition, Decision, Finish, Provenance, SamplingParams, Task, Usage, Verdict
from crl_jax.rollout.agent import ActorPrompts, Plan
from crl_jax.rollout.collector import Collector, CollectSettings, EnvSettings
from crl_jax.rollout.gate import Gate, GateQuestionTooLong, GateSettings

STOP = 0
ACCEPT, REJECT = '<answer>{"verdict":"accept"}</answer>', '<answer>{"verdict":"reject"}</answer>'
REFINE = '<answer>{"verdict":"refine","experience":"go west"}</answer>'
LESSON = "\n<lesson>\n{}\n</lesson>"
PROMPTS = GatePrompts("judge", "$task" + LESSON.format("$lesson") + "\n$shown/$succeeded/$success")


class Letters:
    """One id per character; role markers are characters, too."""

    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(chr(i) for i in ids if i != STOP)

    def open(self, role, after=None):
        return [ord("[")]

    def close(self, role="user"):
        return [ord("]")]

    def reply(self):
        return [ord(">")]

    def after_reply(self):
        return []

    def render(self, messages):
        return self.encode("".join(f"[{m.content}]" for m in messages) + ">")


class Actor:
    """Answers the gate by a function of the prompt, plays "go" otherwise; remembers both."""

    max_length, version = 4000, 3

    def __init__(self, verdict, delay=0.0):
        self.verdict, self.delay, self.asked, self.params, self.played = verdict, delay, [], [], []

    async def open(self):
        return "s"

    async def close(self, session):
        pass

    def _said(self, text):
        ids = (*map(ord, text), STOP)
        n = len(ids)
        return Completion(ids, (-0.5,) * n, (3,) * n, (0,) * n, Finish.STOP)

    async def complete(self, prompt_ids, params):
        prompt = Letters().decode(prompt_ids)
        self.asked.append(prompt)
        self.params.append(params)
        await asyncio.sleep(self.delay)
        return self._said(self.verdict(prompt))

    async def generate(self, session, new_ids, params):
        self.played.append((Letters().decode(new_ids), params))
        return self._said("go")


class Env:
    async def reset(self, seed, task=""):
        return types.SimpleNamespace(text=" dark")

    async def step(self, text):
        return types.SimpleNamespace(observation="end", reward=1.0, terminated=True, truncated=False, success=True, valid=True)

    async def release(self):
        pass


class Pool:
    async def lease(self, env, options):
        return Env()


class Bank:
    def __init__(self, lessons=(("x1", "go east"),)):
        self.lessons, self.peeks = list(lessons), []

    async def retrieve(self, queries, *, peek=False):
        self.peeks.append(peek)
        return [self.lessons for _ in queries]

    async def ask(self, *_):
        raise AssertionError("nobody asks")


TASKS = [Task("dungeon/a", 1, "find it", "dungeon")]
SAMPLING = SamplingParams(8, temperature=0.7, stop_ids=(STOP,), seed=5, constrained=True)


def make(actor, *, bank=None, timeout_s=20.0, usage=None, **changes):
    settings = CollectSettings(
        **{"group_size": 4, "guided": 2, "sampling": SAMPLING, "ask_uses": 0, "envs": {TASKS[0].env: EnvSettings(max_turns=3)}, **changes}
    )
    gate_settings = GateSettings(PROMPTS, max_new_tokens=100, timeout_s=timeout_s, system="rules {env}")
    gate = Gate(actor, Letters(), gate_settings, lambda i: (usage or {}).get(i, Usage()), clock=iter(range(100)).__next__)
    prompts = ActorPrompts(system="", lesson="lesson: {text}")
    return Collector(Pool(), actor, Letters(), prompts, bank or Bank(), settings, gate)


def play(collector):
    (group,) = asyncio.run(collector.groups(TASKS, batch_id="s0"))
    return [e for e in group.episodes if e.condition is Condition.GUIDED], [e for e in group.episodes if e.condition is Condition.FREE]


def read(episode):
    return Letters().decode(episode.log.ids[episode.log.provenance == Provenance.EXPERIENCE])


@pytest.mark.parametrize(
    ("answer", "decision", "shown", "lesson"),
    [
        (ACCEPT, Decision.ACCEPT, ("x1",), "lesson: go east"),
        (REFINE, Decision.REFINE, ("x1",), "lesson: go west"),
        (REJECT, Decision.REJECT, (), ""),
        ("I would accept it", Decision.NONE, (), ""),
        ('{"verdict":"accept","verdict":"accept"}', Decision.NONE, (), ""),
    ],
)
def test_what_is_shown_and_credited_follows_from_the_verdict(answer, decision, shown, lesson):
    collector = make(Actor(lambda prompt: answer))
    guided, free = play(collector)
    for episode in guided:
        assert (episode.shown, read(episode)) == (shown, lesson)
        assert [v.decision for v in episode.verdicts] == [decision]
        assert episode.handed == ("x1",), "what was retrieved is given back, shown or not"
    assert all(e.verdicts == e.shown == () for e in free)
    stats = collector.gate.stats()
    assert (stats["requests"], stats[decision.value]) == (2, 2)
    assert stats.get("unreadable", 0) == 2 * (decision is Decision.NONE)


def test_only_guided_episodes_ask_and_their_verdicts_are_never_trained():
    actor = Actor(lambda prompt: ACCEPT)
    collector = make(actor, usage={"x1": Usage(3, 2, recent_shown=3.0, recent_succeeded=2.0)})
    guided, _ = play(collector)
    assert len(actor.asked) == 2
    # the posterior mean of 2 successes in 3 episodes, with one success and one failure added: 3 / 5
    assert actor.asked[0] == "[judge][rules \nfind it" + LESSON.format("go east") + "\n3/2/60]>"
    for episode in guided:
        assert Letters().decode(episode.log.ids[episode.log.loss_mask]) == "go"
        assert "verdict" not in Letters().decode(episode.log.ids)
    stats = collector.gate.stats()
    assert stats["prompt_tokens"] == sum(map(len, actor.asked))
    assert stats["sampled_tokens"] == 2 * (len(ACCEPT) + 1)
    assert stats["seconds"] > 0


def test_a_verdict_is_sampled_as_the_episode_is_but_free_of_its_constraint_and_with_seeds_of_its_own():
    actor = Actor(lambda prompt: ACCEPT)
    play(make(actor))
    again = Actor(lambda prompt: ACCEPT)
    play(make(again))
    assert {(p.temperature, p.max_new_tokens, p.constrained, p.stop_ids) for p in actor.params} == {(0.7, 100, False, (STOP,))}
    assert len({p.seed for p in actor.params} | {p.seed for _, p in actor.played}) == 2 + 4
    assert [p.seed for p in actor.params] == [p.seed for p in again.params]


def test_a_late_verdict_shows_nothing_and_is_counted():
    collector = make(Actor(lambda prompt: ACCEPT, delay=30.0), timeout_s=0.02)
    guided, _ = play(collector)
    assert all(e.shown == () and e.success for e in guided)
    stats = collector.gate.stats()
    assert (stats["timeouts"], stats["none"], stats.get("sampled_tokens", 0)) == (2, 2, 0)


def test_a_question_that_does_not_fit_is_not_asked():
    actor = Actor(lambda prompt: ACCEPT)
    collector = make(actor, bank=Bank([("x1", "go east"), ("x2", "wait " * 800)]))
    guided, _ = play(collector)
    assert (len(actor.asked), [e.shown for e in guided]) == (2, [("x1",), ("x1",)])
    assert collector.gate.stats()["too_long"] == collector.gate.stats()["none"] == 2


def test_a_batch_none_of_whose_questions_fit_is_an_error_that_names_the_length():
    actor = Actor(lambda prompt: ACCEPT)
    actor.max_length = 120
    question = len(f"[judge][rules \nfind it{LESSON.format('go east')}\n0/0/50]>")
    with pytest.raises(GateQuestionTooLong, match=f"set actor.max_length to {question + 100} or more"):
        play(make(actor))
    assert actor.asked == []


def test_the_tally_of_questions_that_do_not_fit_goes_on_in_another_process():
    before, after = (Gate(None, None, None, None) for _ in range(2))  # type: ignore[arg-type]
    before._too_long_in_row, before._longest = 3, 99
    after.go_on(before.carry())
    assert after.carry() == [3, 99]


def test_questions_of_an_evaluation_that_do_not_fit_stop_no_training():
    bank, actor = Bank(), Actor(lambda prompt: ACCEPT)
    actor.max_length = 120
    collector = make(actor, bank=bank)
    asyncio.run(collector.evaluate([*TASKS] * 3, name="eval", guided=True, sampling=SAMPLING))
    bank.lessons = ()
    guided, _ = play(collector)  # a batch that asks nothing
    assert all(e.verdicts == () for e in guided)


def test_each_lesson_has_its_own_verdict():
    bank = Bank([("x1", "go east"), ("x2", "jump"), ("x3", "wait")])
    actor = Actor(lambda prompt: REJECT if "jump" in prompt else REFINE if "wait" in prompt else ACCEPT)
    guided, _ = play(make(actor, bank=bank))
    assert guided[0].shown == ("x1", "x3")
    assert read(guided[0]) == "lesson: go eastlesson: go west"
    assert guided[0].verdicts == (Verdict("x1", Decision.ACCEPT), Verdict("x2", Decision.REJECT), Verdict("x3", Decision.REFINE, "go west"))
    assert guided[0].handed == ("x1", "x3", "x2")


def test_without_lessons_nobody_is_asked():
    actor = Actor(lambda prompt: ACCEPT)
    guided, _ = play(make(actor, bank=Bank(())))
    assert actor.asked == []
    assert all(e.verdicts == () for e in guided)


def test_evaluation_is_gated_and_counts_nothing():
    actor = Actor(lambda prompt: REJECT)
    bank = Bank()
    collector = make(actor, bank=bank)
    greedy = SamplingParams(8, temperature=0.0, stop_ids=(STOP,))
    with_lessons = asyncio.run(collector.evaluate(TASKS, name="eval", guided=True, sampling=greedy))
    without = asyncio.run(collector.evaluate(TASKS, name="eval", guided=False, sampling=greedy))
    assert [e.shown for e in with_lessons + without] == [(), ()]
    assert [v.decision for v in with_lessons[0].verdicts] == [Decision.REJECT]
    assert (len(actor.asked), actor.params[0].temperature, bank.peeks) == (1, 0.0, [True])
    assert collector.gate.stats() == {"seconds": 0.0}


def test_an_error_of_the_sampler_is_no_verdict_but_an_error():
    def broken(prompt):
        raise ConnectionError("the server is gone")

    with pytest.raises(ConnectionError, match="server is gone"):
        play(make(Actor(broken)))


def test_a_free_episode_with_verdicts_cannot_be_planned():
    with pytest.raises(ValueError, match="experience-free"):
        Plan("e", "g", Condition.FREE, TASKS[0], SAMPLING, 3, verdicts=(Verdict("x1", Decision.REJECT),))
