"""A run on a pod over starts, preemptions, failures and stops, against recorded answers of gcloud."""

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from launch.cloud.outcome import HostState, Verdict, read_states, verdict

States = Callable[..., list[Any]]
MACHINE = ("--accelerator-type", "v5litepod-16", "--runtime-version", "v2-alpha-tpuv5-lite", "--spot")
RUN = ("run", "--name", "learner", "--zone", "us-west4-a", *MACHINE, "--bucket", "gs://lab/learner", "configs/smoke.yaml", "run.name=a b")
LOOK, NODE = "queued-resources describe", "tpu-vm describe"
START, STATUS, STOP = "ssh worker.py start", "ssh worker.py status", "ssh worker.py stop"
RUNNING = "crl-worker 0 running\ncrl-worker 1 running"
DONE = "crl-worker 0 exited 0\ncrl-worker 1 exited 0"
IDLE = "crl-worker 0 absent\ncrl-worker 0 absent"


def node(*addresses: str) -> dict[str, Any]:
    return {"networkEndpoints": [{"ipAddress": address} for address in addresses]}


def started(argv: list[str]) -> list[str]:
    """The words that the shell of a host sees in a call of ssh."""
    return shlex.split(next(word for word in argv if word.startswith("--command=")).removeprefix("--command="))


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_every_host_is_started_once_and_the_end_is_handed_back(cloud: Any, states: States) -> None:
    cloud.script((LOOK, states("ACTIVE")), (NODE, [node("10.0.0.7", "10.0.0.8")]), (STATUS, [IDLE, RUNNING, DONE]))
    assert cloud.pod(*RUN) == 0
    starts = sorted(cloud.calls(START), key=lambda argv: argv[6])
    assert [argv[6] for argv in starts] == ["--worker=0", "--worker=1"]
    for i, words in enumerate(map(started, starts)):
        assert (option(words, "--process-id"), option(words, "--processes"), option(words, "--coordinator")) == (
            str(i),
            "2",
            "10.0.0.7:8476",
        )
        assert (option(words, "--bucket"), option(words, "--runs")) == ("gs://lab/learner", "crl_jax/runs")
        assert words[words.index("--") + 1 :] == [".venv/bin/crl", "train", "configs/smoke.yaml", "run.name=a b"]
    assert cloud.said[-2:] == [
        "done: host 0 exited 0, host 1 exited 0",
        "the pod still exists and costs money: pod.sh delete --name learner",
    ]


def test_code_goes_to_every_host_of_a_new_pod(cloud: Any, states: States) -> None:
    cloud.script(
        (LOOK, states(None, None, "ACTIVE")),
        ("git", ["README.md\0launch/worker.py\0deleted.py"]),
        (NODE, [node("10.0.0.7")]),
        (STATUS, [IDLE, "crl-worker 0 exited 0"]),
    )
    assert cloud.pod(*RUN) == 0
    [copied], [unpacked] = cloud.calls("scp"), cloud.calls("unpack.sh ssh")
    assert "--worker=all" in copied
    assert [word.rsplit("/", 1)[-1] for word in copied[5:9]] == ["crl_jax.tar.gz", "unpack.sh", "worker.py", "learner:"]
    assert started(unpacked) == ["bash", "unpack.sh", "crl_jax.tar.gz", "crl_jax"]


def test_a_host_that_does_not_yet_let_one_in_is_tried_again(cloud: Any, states: States) -> None:
    refused = ("ssh: connect to host 10.0.0.7 port 22: Connection refused", 255)
    cloud.script((LOOK, states("ACTIVE")), (NODE, [node("10.0.0.7")]), (START, [refused, refused, ""]), (STATUS, [IDLE, DONE]))
    assert cloud.pod(*RUN) == 0
    assert len(cloud.calls(START)) == 3
    cloud.script((LOOK, states("ACTIVE")), (NODE, [node("10.0.0.7")]), (START, [("python3: not there", 127)]), (STATUS, [IDLE]))
    assert cloud.pod(*RUN) == 1
    assert len(cloud.calls(START)) == 4


def test_T02_a_restart_uses_the_addresses_of_the_new_pod(cloud: Any, states: States, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.9.9.9:8476")
    cloud.script(
        (LOOK, states("ACTIVE", "ACTIVE", "SUSPENDED", *["SUSPENDED"] * 4, None, "ACTIVE")),
        (NODE, [node("10.0.0.7", "10.0.0.8"), node("10.0.0.31", "10.0.0.30")]),
        (STATUS, [IDLE, RUNNING, IDLE, RUNNING, DONE]),
    )
    assert cloud.pod(*RUN) == 0
    words = [started(argv) for argv in cloud.calls(START)]
    assert [option(w, "--coordinator") for w in words] == ["10.0.0.7:8476"] * 2 + ["10.0.0.31:8476"] * 2
    assert not any("10.9.9.9" in part for argv in cloud.calls() for part in argv)


def test_T03_a_preemption_makes_a_new_pod_that_resumes_and_uses_up_no_retry(cloud: Any, states: States) -> None:
    cloud.script(
        (LOOK, states("ACTIVE", "ACTIVE", "SUSPENDED", *["SUSPENDED"] * 4, None, "ACTIVE")),
        (NODE, [node("10.0.0.7", "10.0.0.8")]),
        (STATUS, [IDLE, RUNNING, IDLE, RUNNING, DONE]),
    )
    assert cloud.pod(*RUN, "--max-failures", "0") == 0
    assert [("--resume" in started(argv)) for argv in cloud.calls(START)] == [False, False, True, True]
    verbs = ("queued-resources delete", "queued-resources create", "scp")
    order = [verb for argv in cloud.calls() for verb in verbs if all(any(w == part for part in argv) for w in verb.split())]
    assert order == list(verbs)
    assert "again, with --resume: preemption 1, failure retries left 0" in cloud.said


def test_T03_a_host_that_leaves_makes_its_siblings_end_a_preemption_too(cloud: Any, states: States) -> None:
    first_sibling = "crl-worker 0 running\ncrl-worker 1 exited 1"
    both = "crl-worker 0 exited 75\ncrl-worker 1 exited 1"
    cloud.script(
        (LOOK, states("ACTIVE")),
        (NODE, [node("10.0.0.7", "10.0.0.8")]),
        (STATUS, [IDLE, first_sibling, both, both, RUNNING, DONE]),
    )
    assert cloud.pod(*RUN, "--max-failures", "0") == 0
    assert "preempted: host 0 exited 75, host 1 exited 1" in cloud.said
    assert "again, with --resume: preemption 1, failure retries left 0" in cloud.said
    assert cloud.calls("queued-resources create") == []  # the machines are still there


def test_T03_a_failure_beside_a_host_that_is_silent_waits_for_what_became_of_it(cloud: Any, states: States) -> None:
    cloud.script(
        (LOOK, states(*["ACTIVE"] * 5, *["SUSPENDED"] * 5, None, "ACTIVE")),
        (NODE, [node("10.0.0.7", "10.0.0.8")]),
        (STATUS, [IDLE, RUNNING, *["crl-worker 1 exited 1"] * 3, IDLE, RUNNING, DONE]),
    )
    assert cloud.pod(*RUN, "--max-failures", "0", "--siblings-s", "15") == 0
    assert "preempted: the pod is SUSPENDED" in cloud.said


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], Verdict.DONE),
        ([143, 1], Verdict.PREEMPTED),
        ([1, 75, 134], Verdict.PREEMPTED),
        ([1, 134], Verdict.FAILED),
        ([0, 1], Verdict.FAILED),
        ([137, 137], Verdict.FAILED),
        ([124, 0], Verdict.FAILED),
    ],
)
def test_T03_what_the_codes_of_all_hosts_mean(codes: list[int], expected: Verdict) -> None:
    hosts = {i: HostState("exited", code) for i, code in enumerate(codes)}
    assert verdict(hosts) is expected
    assert verdict(hosts | {9: HostState("running")}) is Verdict.RUNNING
    assert verdict(hosts, machine_gone=True) is Verdict.PREEMPTED


def test_a_failure_uses_up_a_retry_and_the_last_one_ends_the_run_with_its_code(cloud: Any, states: States) -> None:
    failed = "crl-worker 0 exited 0\ncrl-worker 1 exited 3"
    cloud.script((LOOK, states("ACTIVE")), (NODE, [node("10.0.0.7", "10.0.0.8")]), (STATUS, [IDLE, failed]))
    assert cloud.pod(*RUN, "--max-failures", "2") == 3
    assert [("--resume" in started(argv)) for argv in cloud.calls(f"{START} --worker=0")] == [False, True, True]
    assert [line for line in cloud.said if line.startswith("again")] == [
        "again, with --resume: preemption 0, failure retries left 1",
        "again, with --resume: preemption 0, failure retries left 0",
    ]
    assert "2 retries are used up: see `logs`" in cloud.said[-2]


def test_a_host_that_waits_for_one_that_failed_is_stopped(cloud: Any, states: States) -> None:
    half = "crl-worker 0 running\ncrl-worker 1 exited 1"
    cloud.script((LOOK, states("ACTIVE")), (NODE, [node("10.0.0.7", "10.0.0.8")]), (STATUS, [IDLE, half]))
    assert cloud.pod(*RUN, "--max-failures", "0", "--siblings-s", "15") == 1
    [stopped] = cloud.calls(STOP)
    assert "--worker=all" in stopped
    assert cloud.clock.now == pytest.approx(30)


def test_hosts_that_never_answer_are_not_waited_for_without_end(cloud: Any, states: States) -> None:
    cloud.script((LOOK, states("ACTIVE")), (NODE, [node("10.0.0.7", "10.0.0.8")]), (STATUS, [("ssh: timed out", 255)]))
    assert cloud.pod(*RUN, "--max-failures", "0", "--silent-s", "80") == 1
    assert "failed: 2 of 2 hosts did not answer for 80 s" in cloud.said
    assert cloud.clock.now == pytest.approx(90)


def test_preemptions_are_bounded_too(cloud: Any, states: States, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.script((LOOK, states("ACTIVE")), (NODE, [node("10.0.0.7")]), (STATUS, ["crl-worker 0 exited 75"]))
    assert cloud.pod(*RUN, "--max-preemptions", "1") == 1
    assert "preempted 2 times: allow more with --max-preemptions" in capsys.readouterr().err


def test_a_supervisor_that_is_started_again_watches_the_run_that_is_there(cloud: Any, states: States) -> None:
    cloud.script((LOOK, states("ACTIVE")), (STATUS, [RUNNING, RUNNING, DONE]))
    assert cloud.pod(*RUN) == 0
    assert cloud.calls(START) == []
    assert "2 hosts run the trainer already: watching" in cloud.said


@pytest.mark.parametrize(("seen", "answer"), [("stopped", "crl-worker 0 stopped 75"), ("deleted", RUNNING)])
def test_what_was_stopped_or_deleted_is_not_started_again(cloud: Any, states: States, seen: str, answer: str) -> None:
    look = states("ACTIVE") if seen == "stopped" else states("ACTIVE", "ACTIVE", "DELETING")
    cloud.script((LOOK, look), (NODE, [node("10.0.0.7")]), (STATUS, [IDLE, answer]))
    assert cloud.pod(*RUN) == 75
    assert seen in cloud.said[-2]
    assert len(cloud.calls(START)) == 1


@pytest.mark.parametrize(("end", "code", "deleted"), [("exited 0", 0, 1), ("exited 3", 3, 0)])
def test_a_pod_can_be_given_back_when_the_run_is_done(cloud: Any, states: States, end: str, code: int, deleted: int) -> None:
    gone = states(None) if deleted else states("ACTIVE")
    cloud.script((LOOK, [*states(*["ACTIVE"] * 3), *gone]), (NODE, [node("10.0.0.7")]), (STATUS, [IDLE, f"crl-worker 0 {end}"]))
    assert cloud.pod(*RUN, "--delete-when-done", "--max-failures", "0") == code
    assert len(cloud.calls("queued-resources delete")) == deleted


def test_status_logs_and_stop(cloud: Any, states: States) -> None:
    where = ("--name", "learner", "--zone", "us-west4-a")
    cloud.script((LOOK, states("ACTIVE")), (STATUS, ["noise\ncrl-worker 0 running\ncrl-worker 1 exited 3\n"]), ("tail", ["step 3/9"]))
    assert cloud.pod("status", *where) == 0
    assert cloud.said[-3:] == ["learner: ACTIVE in us-west4-a", "host 0: running", "host 1: exited 3"]
    assert cloud.pod("logs", *where, "--worker", "1", "--lines", "5") == 0
    assert cloud.said[-1] == "step 3/9"
    [tail] = cloud.calls("tail")
    assert (started(tail), "--worker=1" in tail) == (["tail", "-n", "5", "launch-learner/log"], True)
    assert cloud.pod("stop", *where, "--grace-s", "60") == 0
    [stop] = cloud.calls(STOP)
    assert started(stop) == ["python3", "worker.py", "stop", "--folder", "launch-learner", "--grace-s", "60"]
    cloud.script((LOOK, states(None)))
    assert cloud.pod("status", *where) == 1


def test_a_dry_run_prints_what_would_run_and_runs_nothing(cloud: Any) -> None:
    assert cloud.pod(*RUN, "--dry-run", "--sync") == 0
    assert cloud.pod("create", "--dry-run", "--name", "learner", "--zone", "us-west4-a", *MACHINE) == 0
    assert cloud.pod("delete", "--dry-run", "--name", "learner", "--zone", "us-west4-a") == 0
    for command in ("stop", "status", "logs", "sync"):
        assert cloud.pod(command, "--dry-run", "--name", "learner", "--zone", "us-west4-a") == 0
    assert cloud.calls() == []
    assert not cloud.records.exists()
    printed = [shlex.split(line) for line in cloud.said if line and not line.startswith("#")]
    assert {words[0] for words in printed} == {"gcloud", "git"}
    starts = [started(words) for words in printed if "worker.py start" in str(words)]
    assert [option(words, "--process-id") for words in starts] == ["0", "1", "2", "3"]  # v5litepod-16 has four hosts
    assert any(words[3:5] == ["queued-resources", "delete"] for words in printed)


def test_lines_of_hosts_are_read_between_others() -> None:
    text = "Using ssh batch size of 1.\nSSH: crl-worker 3 exited 75\ncrl-worker 0 running\ncrl-worker x running"
    assert read_states(text) == {3: HostState("exited", 75), 0: HostState("running")}
