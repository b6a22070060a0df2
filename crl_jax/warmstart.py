"""The micro models' warm start: supervised learning on text of scripted play, a controlled stand-in for pretraining.

What the weights get: reading an observation, moving sensibly, following a lesson, right or wrong,
asking now and then; writing well-formed lessons that name the place, answering from an entry, merging entries. What they do not get: any
knowledge of a dungeon (levels are played under names drawn at random), and judgement: a training lesson says that the stairs are where
the hero was last, after failures (every second one) as after successes. After a success that is true, after a failure it is not. When to
write and when to keep silent is what CISPO has to teach the extractor.

Owns: the data recipe, its seeds and the training loop. Does not: take part in a run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from crl_jax.config.parse import ConfigError
from crl_jax.experience import extractor
from crl_jax.learner import objective
from crl_jax.learner.batching import to_batch
from crl_jax.learner.optimizer import make_optimizer, make_schedule
from crl_jax.learner.state import init_state
from crl_jax.learner.step import make_train_step
from crl_jax.lookup import actor_prompts, extractor_prompts
from crl_jax.models.codec import ChatCodec
from crl_jax.models.config import ModelConfig
from crl_jax.models.load import MICRO_VOCAB, MICRO_WEIGHTS, load_codec
from crl_jax.models.presets import preset
from crl_jax.models.safetensors_io import save_params
from crl_jax.models.transformer import init
from crl_jax.records import Completion, Condition, Episode, Finish, Provenance, SamplingParams, Task, TokenLog, TrainSample
from crl_jax.rollout.agent import Answer, Plan, run_episode
from envs import registry
from envs.dungeon import players
from envs.minihack.compact import COLUMNS, ROWS


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the data is made and how long is trained. Probabilities are per episode.

    Training has three stages: ``short_steps`` on extractor tasks of at most ``short_length`` tokens (where copying a name is learned an
    order of magnitude sooner than in whole transcripts), then ``steps`` on whole sequences, an actor batch and an extractor batch in
    turn.
    """

    episodes: int = 4000
    short_steps: int = 160
    steps: int = 300
    batch: int = 64
    short_length: int = 64
    lr: float = 3e-3
    seed: int = 0
    max_turns: int = 7
    guided: float = 0.6
    lesson_right: float = 0.5
    follow: float = 0.5
    ask: float = 0.1
    slip: float = 0.05  # a random move instead of the player's
    noop_after_failure: float = 0.5
    last_places: int = 1
    follow_steps: int = 1500
    follow_late: float = 1.0


def third(draw: random.Random) -> str:
    """A third of a room, in words, drawn uniformly."""
    return f"{draw.choice(ROWS)} {draw.choice(COLUMNS)}"


def lesson_of(place: str, where: str) -> str:
    """The text of a lesson as the micro vocabulary has it."""
    return f"in the {place} the stairs are {where}"


class _Local:
    """An environment in this process, with the agent's asynchronous interface."""

    def __init__(self, env: Any):
        self._env = env

    async def reset(self, seed: int, task: str = "") -> Any:
        return self._env.reset(seed, task)

    async def step(self, text: str) -> Any:
        return self._env.step(text)


class _Scripted:
    """A sampler whose replies come from a scripted player. One episode at a time."""

    max_length, version = 10_000, 0

    def __init__(self, codec: ChatCodec, reply: Callable[[str], str]):
        self._codec, self._reply = codec, reply

    async def open(self) -> str:
        return "scripted"

    async def close(self, session: str) -> None:
        del session

    async def generate(self, session: str, new_ids: Sequence[int], params: SamplingParams) -> Completion:
        del session, params
        ids = (*self._codec.encode(self._reply(self._codec.decode(new_ids))), self._codec.stop_ids[0])
        return Completion(ids, (0.0,) * len(ids), (0,) * len(ids), (0,) * len(ids), Finish.STOP)


class _Speaker:
    """Turns what the actor reads into what the scripted player says: a question first (sometimes), then moves."""

    def __init__(
        self, recipe: Recipe, draw: random.Random, place: str, player_of: Callable[[str], Callable[[str], str]], lesson: str, asks: bool
    ):
        self._draw, self._place, self._slip = draw, place, recipe.slip
        self._player_of, self._follow = player_of, draw.random() < recipe.follow
        self._player = player_of(lesson if self._follow else "")
        self._asks, self._last = asks, ""

    def __call__(self, text: str) -> str:
        if self._asks:
            self._asks, self._last = False, text
            return f"<search_and_ask> where are the stairs of the {self._place}</search_and_ask>"
        if " the stairs are" in text and "lesson" not in text:
            self._player, text = self._player_of(text if self._follow else ""), self._last
        observation = text[text.rindex(self._place) + len(self._place) :] if self._place in text else text
        observation = observation.replace(" you may ask", "")
        move = self._player(observation)
        return " " + (self._draw.choice(players.MOVES) if self._draw.random() < self._slip else move)


def play(recipe: Recipe, codec: ChatCodec) -> list[Episode]:
    """Episodes of scripted play in every training dungeon, under names drawn at random."""
    draw = random.Random(recipe.seed)
    prompts = actor_prompts("micro")
    train = registry.tasks("dungeon", "train")
    names = tuple(task.env for task in train)
    places = [task.goal.removeprefix("find the stairs of the ") for task in (*train, *registry.tasks("dungeon", "heldout"))]
    envs = {name: registry.make(name, style="compact", max_turns=recipe.max_turns) for name in names}
    secret = {name: true_third(name) for name in names}

    async def one(i: int) -> Episode:
        name, place = draw.choice(names), draw.choice(places)
        guided = draw.random() < recipe.guided
        where = secret[name] if draw.random() < recipe.lesson_right else third(draw)
        lesson = lesson_of(place, where) if guided and draw.random() < 0.9 else ""
        asks = guided and draw.random() < recipe.ask

        def player_of(advice: str) -> Callable[[str], str]:
            return players.policy("follow" if advice else "explore", seed=draw.randrange(2**31), lesson=advice)

        async def answer(task: Task, query: str, episode_id: str, number: int) -> Answer:
            del task, query, episode_id, number
            return Answer(f" the stairs are {where}")

        plan = Plan(
            id=f"w{i}",
            group_id=f"w{i}",
            condition=Condition.GUIDED if guided else Condition.FREE,
            task=Task(name, draw.randrange(2**31), f"find the stairs of the {place}", "dungeon"),
            sampling=SamplingParams(max_new_tokens=12),
            max_turns=recipe.max_turns + asks,
            lessons=(("scripted", lesson),) if lesson else (),
            ask_uses=2 if guided else 0,
        )
        speaker = _Speaker(recipe, draw, place, player_of, lesson, asks)
        return await run_episode(
            plan, env=_Local(envs[name]), sampler=_Scripted(codec, speaker), codec=codec, prompts=prompts, ask=answer if guided else None
        )

    async def all_of_them() -> list[Episode]:
        return [await one(i) for i in range(recipe.episodes)]

    episodes = asyncio.run(all_of_them())
    for env in envs.values():
        env.close()
    return episodes


def true_third(name: str) -> str:
    """Where the stairs of a training dungeon are, from its level design."""
    from envs.dungeon import level

    plan = level.design(name.partition("/")[2].replace("_", " "))
    x, y = plan.stairs
    return f"{ROWS[3 * y // 9]} {COLUMNS[3 * x // 9]}"


def extractor_log(codec: ChatCodec, messages: Sequence[Any], response: str) -> TokenLog:
    """A generation with the given response as its sampled tokens."""
    ids = (*codec.encode(response), codec.stop_ids[0])
    done = Completion(ids, (0.0,) * len(ids), (0,) * len(ids), (0,) * len(ids), Finish.STOP)
    return TokenLog.empty().append_context(codec.render(messages), Provenance.PROMPT).append_completion(done)


def distil_text(episode: Episode, known: str, recipe: Recipe, draw: random.Random) -> str:
    """A well-formed response. Its advice is the third the hero was in at one of the last ``recipe.last_places`` observations, whether the
    stairs were there or not."""
    place = episode.task.goal.removeprefix("find the stairs of the ")
    if draw.random() < (0.05 if episode.success else recipe.noop_after_failure):
        return '[{"op": "return"}]'
    seen = [*(turn.observation for turn in episode.turns if not turn.tool), episode.final_observation][-recipe.last_places :]
    text = lesson_of(place, " ".join(draw.choice(seen).split()[:2]))
    if known and draw.random() < 0.5:
        return f'[{{"op": "update", "targets": [1], "experience": "{text}"}}]'
    return f'[{{"op": "add", "experience": "{text}"}}]'


def merge_case(places: Sequence[str], draw: random.Random) -> tuple[list[str], str]:
    """Entries of a chunk and the response that joins those about one place, the later one winning."""
    count = draw.randint(2, 5)
    pool = draw.sample(list(places), draw.randint(max(1, count - 2), count))
    entries = [(draw.choice(pool), third(draw)) for _ in range(count)]
    groups = {place: [i for i, (p, _) in enumerate(entries, 1) if p == place] for place, _ in entries}
    ops = [
        f'{{"op": "update", "targets": [{", ".join(map(str, found))}], "experience": "{lesson_of(place, entries[found[-1] - 1][1])}"}}'
        for place, found in groups.items()
        if len(found) > 1
    ]
    return [lesson_of(*entry) for entry in entries], f"[{', '.join(ops)}]" if ops else '[{"op": "return"}]'


@dataclasses.dataclass(frozen=True)
class Data:
    """Token logs by what they are for; ``short`` are extractor tasks with transcripts cut to their last turns."""

    actor: list[TokenLog]
    extractor: list[TokenLog]
    short: list[TokenLog]


def make_data(recipe: Recipe, codec: ChatCodec, episodes: Sequence[Episode]) -> Data:
    """Sequences for both roles out of scripted episodes."""
    draw = random.Random(recipe.seed + 1)
    places = [e.task.goal.removeprefix("find the stairs of the ") for e in episodes]
    whole: list[TokenLog] = []
    short: list[TokenLog] = []
    for episode, place in zip(episodes, places, strict=True):
        whole.append(distil_log(codec, episode, recipe, draw, turns=len(episode.turns)))
        short.append(distil_log(codec, episode, recipe, draw, turns=draw.choice((1, 1, 2))))
        for kind, chance in ((ask_log, 0.5), (merge_log, 0.3)):
            if draw.random() < chance:
                short.append(kind(codec, place, places, draw))
            if draw.random() < chance / 2:
                whole.append(kind(codec, place, places, draw))
    return Data([e.log for e in episodes], whole, [log for log in short if len(log) <= recipe.short_length])


def distil_log(codec: ChatCodec, episode: Episode, recipe: Recipe, draw: random.Random, *, turns: int) -> TokenLog:
    """Distillation of an episode, of which only the last ``turns`` turns are shown."""
    place = episode.task.goal.removeprefix("find the stairs of the ")
    known = lesson_of(place, third(draw)) if episode.shown else ""
    messages = extractor.distil_messages(
        extractor_prompts("micro"),
        goal=episode.task.goal,
        success=episode.success,
        turns=episode.turns[-turns:],
        final_observation=episode.final_observation,
        entries=[known] if known else [],
        max_ops=3,
    )
    return extractor_log(codec, messages, distil_text(episode, known, recipe, draw))


def ask_log(codec: ChatCodec, place: str, places: Sequence[str], draw: random.Random) -> TokenLog:
    """A question about ``place``, answered from an entry about it; an entry about another place answers nothing."""
    about, where = place if draw.random() < 0.8 else draw.choice(places), third(draw)
    messages = extractor.ask_messages(
        extractor_prompts("micro"), query=f" where are the stairs of the {place}", entry=lesson_of(about, where)
    )
    return extractor_log(codec, messages, f" the stairs are {where}" if about == place else "nothing found")


def merge_log(codec: ChatCodec, place: str, places: Sequence[str], draw: random.Random) -> TokenLog:
    """A chunk of entries and the response that joins those about one place."""
    del place
    entries, response = merge_case(sorted(set(places)), draw)
    return extractor_log(codec, extractor.merge_messages(extractor_prompts("micro"), entries=entries, max_ops=3), response)


def first_moves(codec: ChatCodec, episodes: Sequence[Episode]) -> list[TokenLog]:
    """Every turn of the episodes that read a lesson, as if the episode had begun there: lesson, goal and observation in, one move out."""
    logs: list[TokenLog] = []
    for episode in episodes:
        turns = [turn for turn in episode.turns if not turn.tool]
        if not episode.shown or len(turns) < len(episode.turns):
            continue
        start = episode.turns[0].span[0]
        head = episode.log.ids[:start]
        observed = episode.log.provenance[:start] == Provenance.OBSERVATION
        before, after = head[: int(np.argmax(observed))], head[np.flatnonzero(observed)[-1] + 1 :]
        for turn in turns:
            prompt = [*before.tolist(), *codec.encode(turn.observation), *after.tolist()]
            ids = tuple(episode.log.ids[slice(*turn.span)].tolist())
            done = Completion(ids, (0.0,) * len(ids), (0,) * len(ids), (0,) * len(ids), Finish.STOP)
            logs.append(TokenLog.empty().append_context(prompt, Provenance.PROMPT).append_completion(done))
    return logs


@dataclasses.dataclass
class _Trainer:
    """Mutable: parameters in training, on batches of one length bucket."""

    params: Any
    recipe: Recipe
    out: Callable[[str], None]
    losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def stage(self, name: str, steps: int, lr: float, kinds: Sequence[tuple[str, Sequence[TokenLog]]], seed: int) -> None:
        """``steps`` updates with a schedule and optimiser of their own, taking the kinds of data in turn."""
        optimizer = make_optimizer(make_schedule("cosine", lr, steps=steps, warmup_steps=min(20, steps // 4)), weight_decay=0.01)
        step = make_train_step(micro_config(), optimizer, objective.supervised(), temperature=1.0, allowed=None)
        state = init_state(self.params, optimizer)
        draw = np.random.default_rng(seed)
        for i in range(steps):
            kind, logs = kinds[i % len(kinds)]
            chosen = [TrainSample(logs[j], 1.0) for j in draw.integers(0, len(logs), self.recipe.batch)]
            lengths = (32, self.recipe.short_length, 96, 128)
            state, sums = step(state, to_batch(chosen, row_buckets=(self.recipe.batch,), length_buckets=lengths, token_buckets=(64,)))
            self.losses.setdefault(kind, []).append(sums["loss"].mean())
            if (i + 1) % 50 == 0 or i + 1 == steps:
                self.out(f"{name} {i + 1}/{steps} " + " ".join(f"{k} {v:.3f}" for k, v in self.recent().items()))
        self.params = state.params

    def recent(self) -> dict[str, float]:
        """Mean loss of the last 20 batches of each kind, nats per reply token."""
        return {kind: round(float(np.mean(values[-20:])), 4) for kind, values in self.losses.items()}


def micro_config() -> ModelConfig:
    """The micro preset with the micro vocabulary."""
    return preset("micro", vocab_size=load_codec("builtin:micro").tokenizer.vocab_size)


def warmstart(path: pathlib.Path, recipe: Recipe, *, out: Callable[[str], None] = print) -> dict[str, float]:
    """Make the data, train, write the weights to ``path`` (float16 safetensors); returns the last losses (nats per reply token)."""
    codec = load_codec("builtin:micro")
    episodes = play(recipe, codec)
    data = make_data(recipe, codec, episodes)
    out(f"{len(episodes)} episodes, scripted success {sum(e.success for e in episodes) / len(episodes):.3f}")
    trainer = _Trainer(init(micro_config(), jax.random.key(recipe.seed)), recipe, out)
    trainer.stage("short", recipe.short_steps, recipe.lr, [("short", data.short)], recipe.seed)
    whole = [("actor", data.actor), ("extractor", data.extractor)]
    trainer.stage("whole", recipe.steps, recipe.lr, whole, recipe.seed + 1)
    followers = play(dataclasses.replace(recipe, follow=recipe.follow_late, seed=recipe.seed + 2), codec)
    moves = first_moves(codec, followers)
    late = [*[("move", moves)] * 8, *[("follower", [e.log for e in followers])] * 2, ("extractor", data.extractor)]
    trainer.stage("follow", recipe.follow_steps, recipe.lr / 2, late, recipe.seed + 3)
    save_params(trainer.params, path, dtype=np.float16)
    return trainer.recent()


def main(options: Sequence[str], *, path: pathlib.Path | None = None) -> int:
    """``crl warmstart``: recipe fields as ``key=value``; writes the weights and beside them a note of how they were made."""
    fields = {field.name: type(field.default) for field in dataclasses.fields(Recipe)}
    chosen: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in fields:
            raise ConfigError(f"{key!r} is no field of the recipe: use one of {sorted(fields)}")
        try:
            chosen[key] = fields[key](value)
        except ValueError as error:
            raise ConfigError(f"{option!r}: {key} is a number, e.g. {key}={getattr(Recipe, key)}") from error
    recipe, target = Recipe(**chosen), path or MICRO_WEIGHTS
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".json").open("a"):  # a place that cannot be written is found before the work
        pass
    losses = warmstart(target, recipe)
    command = " ".join(["crl", "warmstart", *options])
    note = {"command": command, "recipe": dataclasses.asdict(recipe), "loss": losses, "vocabulary": MICRO_VOCAB.name}
    target.with_suffix(".json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {target} ({losses}) and {target.with_suffix('.json').name}")
    return 0
