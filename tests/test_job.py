"""What cannot be run as a job of this shape is refused before anything starts, with the fix."""

import pytest

from crl_jax import train
from crl_jax.config.load import parse_text
from crl_jax.config.parse import ConfigError
from crl_jax.config.schema import Config
from crl_jax.job import Job, RoleName
from crl_jax.processes import Processes, Topology

SHARED = "bank.server.url=grpc://127.0.0.1:8100"
FREE = "run.sync=false"
SERVED = ("extractor.server.url=http://h:1", "extractor.server.weights_folder=/w")


def config(*overrides: str) -> Config:
    return parse_text("env: {family: dungeon}\n", ["run.method=complementary", *overrides])


def job(role: RoleName | None = None, processes: int = 1) -> Job:
    return Job(role, Processes(0, processes, None))


@pytest.mark.parametrize(
    ("role", "processes", "overrides", "message"),
    [
        ("extractor", 1, ["run.method=baseline", SHARED, FREE], "--role extractor: run.method=baseline does not train it"),
        ("extractor", 1, ["run.method=static", SHARED, FREE], "--role extractor: run.method=static does not train it"),
        ("extractor", 1, [SHARED, FREE, *SERVED], "`extractor.server.url`: this job serves the extractor itself"),
        ("extractor", 1, [FREE], "--role extractor: the models' jobs share a bank, so start `crl bank serve`"),
        ("actor", 1, [FREE], "--role actor: the models' jobs share a bank"),
        (None, 1, [SHARED, FREE], "`extractor.server.url`: lessons are written where the bank is"),
        (None, 2, [FREE], "2 processes train one model: start a job with --role actor and one with --role extractor"),
        ("actor", 2, [SHARED, "run.sync=true", "run.max_lag=0"], "`run.sync`: a synchronous run is one process with both models"),
        ("actor", 1, [SHARED, "run.sync=true", "run.max_lag=0"], "`run.sync`: a synchronous run is one process with both models"),
        ("actor", 3, [SHARED, FREE, "run.groups_per_step=4"], "`run.groups_per_step`: does not divide over 3 processes: use"),
        # eight rows divide over four processes, two groups do not
        ("actor", 4, [SHARED, FREE, "run.groups_per_step=2", "run.group_size=4"], "`run.groups_per_step`: does not divide over 4"),
        ("extractor", 3, [SHARED, FREE, "extractor.batch_size=4"], "`extractor.batch_size`: does not divide over 3 processes"),
        ("actor", 2, [SHARED, FREE, "run.groups_per_step=2", "actor.gate.enabled=true"], "`actor.gate.enabled`: the gate's tally"),
    ],
)
def test_a_job_that_cannot_be_is_refused(role: RoleName | None, processes: int, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        job(role, processes).check(config(*overrides))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("role", "processes", "overrides", "roles"),
    [
        (None, 1, ["run.sync=true", "run.max_lag=0"], ("actor", "extractor")),
        (None, 1, [SHARED, FREE, *SERVED], ("actor", "extractor")),
        (None, 1, ["run.method=baseline"], ("actor",)),
        ("actor", 1, ["run.method=baseline", FREE], ("actor",)),
        (None, 2, ["run.method=baseline", FREE, "run.groups_per_step=4"], ("actor",)),
        ("actor", 4, [SHARED, FREE, "run.groups_per_step=4"], ("actor",)),
        # what the other job's rows are is none of this one's business
        ("actor", 2, [SHARED, FREE, "run.groups_per_step=2", "extractor.batch_size=3"], ("actor",)),
        ("extractor", 3, [SHARED, FREE, "extractor.batch_size=6", "run.groups_per_step=4"], ("extractor",)),
        ("extractor", 2, [SHARED, FREE, "extractor.batch_size=4", "actor.gate.enabled=true"], ("extractor",)),
        (None, 1, ["actor.gate.enabled=true"], ("actor", "extractor")),
    ],
)
def test_the_roles_of_a_job_that_can_be(role: RoleName | None, processes: int, overrides: list[str], roles: tuple[str, ...]) -> None:
    one = job(role, processes)
    one.check(config(*overrides))
    assert one.roles(config(*overrides)) == roles


def test_A08_a_process_that_cannot_be_does_not_wait_for_the_others_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "join", lambda *_: pytest.fail("it met the others first"))
    with pytest.raises(ConfigError, match="2 processes train one model"):
        train.main(config(FREE), topology=Topology("127.0.0.1:1", 1, 2))
