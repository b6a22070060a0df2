"""Cross-field rules: each contradiction is found, and named with its fix."""

import pytest

from crl_jax.config import Config, ConfigError, check
from crl_jax.config.load import parse_text

BASE = "env: {family: dungeon}\n"


def problems_of(*overrides: str) -> str:
    try:
        parse_text(BASE, overrides)
    except ConfigError as error:
        return str(error)
    return ""


def test_the_defaults_with_tasks_are_fine_and_without_tasks_are_not() -> None:
    assert problems_of() == ""
    assert [p.key for p in check(Config())] == ["env.names"]
    assert "not both" in problems_of("env.names=[dungeon/a]")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("actor.sampling.max_new_tokens=2048", "leaves no room for a prompt", id="C07-reply-longer-than-sequence"),
        pytest.param("extractor.max_length=64", "`extractor.sampling.max_new_tokens`: 64 leaves no room", id="C07-extractor"),
        pytest.param("actor.sampling.temperature=0", "all episodes of a group equal", id="C08-train-temperature"),
        pytest.param("run.group_size=1", "makes every advantage 0", id="L36-group-of-one"),
        pytest.param("run.group_size=2", "half of one episode always has advantage 0", id="L36-halves-of-one"),
        pytest.param("actor.optimizer.warmup_steps=128", "do not end within run.steps=128", id="C06-warm-up-of-the-whole-run"),
        pytest.param("actor.sampling.temperature=1e-40", "1e-6 or more", id="temperature-beyond-float32"),
        pytest.param("actor.sampling.top_k=4294967296", "below 2^31", id="top-k-beyond-int32"),
        pytest.param("actor.server.url=host:8000", "write http://HOST:PORT", id="server-without-scheme"),
        pytest.param("actor.server.url='http://a:1,b:1'", "'b:1': write http://HOST:PORT", id="second-server-without-scheme"),
        pytest.param("actor.server.url='http://a:1,'", "'': write http://HOST:PORT", id="server-without-address"),
        pytest.param("actor.server.url='http://a:1, http://a:1/v1'", "http://a:1 is named twice", id="same-server-twice"),
        pytest.param("actor.server.url=http://host:8000", "the server must get this run's weights", id="server-without-weights"),
        pytest.param(("actor.server.url=http://host:8000", "actor.publish.drain=true"), "settings of the server", id="server-with-drain"),
        pytest.param("actor.chunk_buckets=[]", "chunk_buckets needs one", id="no-chunks"),
        pytest.param("extractor.row_buckets=[0]", "positive", id="empty-rows"),
        pytest.param("extractor.parse_failure_reward=-2.0", "in [-1, 1]", id="parse-failure-reward"),
        pytest.param("run.group_size=5", "use an even group_size", id="even-split"),
        pytest.param("extractor.loss.eps_high=1.28", "for a cap of 1.28 write 0.28", id="L19-cispo-cap"),
        pytest.param("actor.loss.clip_high=1.2", "for a cap of 1.2 write 0.2", id="L19-grpo-cap"),
        pytest.param("actor.loss.correction=none", "use ratio, tis or icepop", id="asynchronous-without-correction"),
        pytest.param("actor.loss.correction_high=0.8", "are values of the ratio", id="correction-as-distance"),
        pytest.param("run.max_lag=-1", "must be 0 or more", id="lag"),
        pytest.param("run.sync=true", "a synchronous run has lag 0", id="sync-lag"),
        pytest.param("actor.microbatches=3", "does not divide the 128 episodes", id="actor-microbatches"),
        pytest.param("extractor.microbatches=3", "does not divide batch_size 64", id="extractor-microbatches"),
        pytest.param("extractor.buffer_capacity=8", "can never hold a batch of 64", id="buffer"),
        pytest.param("extractor.loss.max_lag=0", "use 1 or more, or null", id="extractor's lag"),
        pytest.param("run.name=../../x", "must stay inside run.dir", id="Z06-parent"),
        pytest.param("run.name=/etc/x", "must stay inside run.dir", id="Z06-absolute"),
        pytest.param("run.name=a/../../b", "must stay inside run.dir", id="Z06-inner"),
        pytest.param("run.dir=runs/../..", "without", id="Z06-dir"),
        pytest.param("actor.row_length=4096", "set it to 0, or actor.packing=sequences", id="row-length-without-packing"),
        pytest.param(("extractor.packing=prefixes", "extractor.row_length=64"), "must hold the longest sequence", id="C07-row-length"),
        pytest.param(("actor.packing=prefixes", "actor.attention=splash"), "cannot share beginnings", id="splash-prefixes"),
        pytest.param("actor.sequence_parallel=true", "actor.mesh.tensor, which is 1", id="sequence-parallel-on-one-device"),
        pytest.param(("actor.sequence_parallel=true", "actor.mesh.tensor=0"), "axis sizes must be positive", id="axis-of-no-device"),
        pytest.param(("actor.sequence_parallel=true", "actor.mesh.tensor=5"), "use a multiple of 5", id="sequence-does-not-divide"),
        pytest.param("actor.mesh.data=3", "128 rows of an update do not divide over 1 micro-batches x 3", id="actor-rows-over-shards"),
        pytest.param(
            ("extractor.mesh.fsdp=32", "extractor.microbatches=4"), "change extractor.batch_size", id="extractor-rows-over-shards"
        ),
        pytest.param("actor.max_length=-5", "use 2 or more", id="C07-no-length"),
        pytest.param("actor.attention=cudnn", "set actor.compute_dtype=bfloat16", id="cudnn-float32"),
        pytest.param("telemetry.profile_steps=[5,5]", "must not be empty", id="profile"),
        pytest.param("actor.lora.targets=[q,query]", "use one or more of ['q', 'k', 'v'", id="lora-target"),
        pytest.param("extractor.lora.rank=-1", "rank must be 0 (off) or more", id="lora-rank"),
        pytest.param("actor.publish.drain_timeout_s=0", "set actor.publish.drain=false", id="A13-drain-without-a-deadline"),
        pytest.param("extractor.serve_tensor=-1", "must be 0 (the learner's placement) or more", id="serve-tensor"),
        pytest.param("bank.merge_chunk=1", "2 or more entries", id="merge"),
    ],
)
def test_contradictions_are_refused(override: str | tuple[str, ...], message: str) -> None:
    assert message in problems_of(*([override] if isinstance(override, str) else override))


def test_a_constrained_action_has_no_tags() -> None:
    assert "the action alone, without tags" in problems_of("env.constrained=true", "env.action_format=tagged")


def test_C08_greedy_evaluation_is_fine() -> None:
    assert problems_of("run.eval_modes=[greedy]", "actor.sampling.temperature=1.0") == ""


def test_packed_rows_are_as_many_as_the_shards_need() -> None:
    assert problems_of("actor.mesh.data=3", "actor.packing=sequences") == ""


def test_all_problems_are_reported_together() -> None:
    text = problems_of("run.steps=0", "actor.sampling.top_p=0", "bank.top_k=0")
    assert all(key in text for key in ("`run.steps`", "`actor.sampling.top_p`", "`bank.top_k`"))


def test_the_baseline_needs_no_split_and_no_extractor() -> None:
    assert problems_of("run.method=baseline", "run.group_size=5", "extractor.buffer_capacity=8") == ""
    assert "no bank to ask" in problems_of("run.method=baseline", "ask.enabled=true")


def test_the_cross_group_ablation_may_have_halves_of_one() -> None:
    assert problems_of("run.group_size=2", "actor.loss.advantage_over=group") == ""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(["extractor.critic_reward=true"], "there is no critic: set actor.gate.enabled=true", id="critic-without-gate"),
        pytest.param(["actor.gate.enabled=true", "run.method=baseline"], "the baseline has no bank", id="gate-without-bank"),
        pytest.param(["actor.gate.enabled=true", "actor.gate.max_new_tokens=1024"], "use 1 to 1023", id="gate-without-room"),
        pytest.param(["actor.gate.enabled=true", "actor.gate.timeout_s=0"], "must be positive", id="gate-without-time"),
        pytest.param(
            ["extractor.reward=relative", "run.guided_fraction=1"], "`extractor.reward`: compares with the free half", id="relative"
        ),
        pytest.param(["extractor.entropy_bonus=log", "run.guided_fraction=1"], "`extractor.entropy_bonus`: compares", id="entropy"),
        pytest.param(["extractor.entropy_weight=.inf"], "finite", id="entropy-weight"),
    ],
)
def test_options_of_the_learning_signal(overrides: list[str], message: str) -> None:
    assert message in problems_of(*overrides)


def test_the_options_of_the_learning_signal_are_off_and_can_be_on_together() -> None:
    c = Config()
    assert (c.actor.gate.enabled, c.extractor.reward, c.extractor.critic_reward, c.extractor.entropy_bonus, c.bank.votes) == (
        False,
        "direct",
        False,
        "off",
        False,
    )
    on = ("actor.gate.enabled=true", "extractor.critic_reward=true", "extractor.reward=relative", "extractor.entropy_bonus=tanh")
    assert problems_of(*on, "bank.votes=true") == ""
