"""A run on GKE: the objects that are made, and the commands, against recorded answers of kubectl and xpk."""

import shlex
from typing import Any

import pytest
import yaml

from launch.gke import job as command
from launch.gke.render import GRACE_S, HOLD_S, Job, bank, jobset

RECIPE = ("configs/smoke.yaml", "run.seed=1")
WHAT = ("--image", "us-docker.pkg.dev/p/r/crl:1", "--accelerator-type", "v5litepod-16", "--topology", "4x4")
CREATE = ("create", "--name", "duo", *RECIPE, *WHAT)


def made(**changes: Any) -> Job:
    fields: dict[str, Any] = {"name": "duo", "image": "crl:1", "recipe": "configs/smoke.yaml", "accelerator_type": "v5litepod-16"}
    return Job(**(fields | {"topology": "4x4"} | changes))


def roles(job: Job) -> dict[str, Any]:
    return {role["name"]: role["template"]["spec"] for role in yaml.safe_load(jobset(job))["spec"]["replicatedJobs"]}


def pod_of(job: Job, role: str) -> dict[str, Any]:
    return roles(job)[role]["template"]["spec"]


def trainer_of(job: Job, role: str) -> list[str]:
    return pod_of(job, role)["containers"][0]["command"]


def test_every_role_has_a_slice_to_itself() -> None:
    made_set = yaml.safe_load(jobset(made(spot=True, labels=("team=rl",))))
    assert made_set["metadata"]["annotations"] == {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert made_set["metadata"]["labels"] == {
        "app.kubernetes.io/name": "crl-jax",
        "app.kubernetes.io/instance": "duo",
        "team": "rl",
        "kueue.x-k8s.io/queue-name": "multislice-queue",
    }
    assert [role["name"] for role in made_set["spec"]["replicatedJobs"]] == ["actor", "extractor"]
    for role in made_set["spec"]["replicatedJobs"]:
        spec, pod = role["template"]["spec"], role["template"]["spec"]["template"]["spec"]
        assert (role["replicas"], spec["parallelism"], spec["completions"], spec["completionMode"]) == (1, 4, 4, "Indexed")
        assert pod["nodeSelector"] == {
            "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
            "cloud.google.com/gke-tpu-topology": "4x4",
            "cloud.google.com/gke-spot": "true",
        }
        assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}}
        assert (pod["securityContext"]["runAsNonRoot"], pod["restartPolicy"]) == (True, "Never")


def test_T02_processes_meet_at_a_name_that_leads_to_the_new_pod() -> None:
    words = trainer_of(made(), "extractor")
    assert words[words.index("--coordinator") + 1] == "duo-extractor-0-0.duo:8476"
    assert words[words.index("--process-id") + 1] == "$(PROCESS_INDEX)"
    assert words[words.index("--processes") + 1] == "4"
    assert yaml.safe_load(jobset(made()))["spec"]["network"] == {
        "enableDNSHostnames": True,
        "subdomain": "duo",
        "publishNotReadyAddresses": True,
    }
    [index] = pod_of(made(), "extractor")["containers"][0]["env"]
    assert index["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def test_the_trainer_of_each_role_resumes_and_uses_the_bank() -> None:
    job = made(settings=("run.steps=9",), actor_settings=("actor.group=4",))
    words = {role: trainer_of(job, role) for role in ("actor", "extractor")}
    for role, given in words.items():
        train = given[given.index("--") + 1 :]
        assert train[:4] == ["crl", "train", "configs/smoke.yaml", "run.steps=9"]
        assert {f"run.name=duo-{role}", "run.dir=/data", "bank.server.url=grpc://duo-bank:8100"} <= set(train)
        assert train[-3:] == ["--role", role, "--resume"]
    assert "actor.group=4" in words["actor"]
    assert "actor.group=4" not in words["extractor"]


def test_T03_a_preemption_restarts_without_being_counted_and_anything_else_counts() -> None:
    policy = yaml.safe_load(jobset(made(max_failures=2)))["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 2
    [rule] = policy["rules"]  # what no rule matches is RestartJobSet: it counts
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    for spec in roles(made()).values():
        disruption, codes = spec["podFailurePolicy"]["rules"]
        assert (spec["backoffLimit"], disruption["action"], codes["action"]) == (0, "FailJob", "FailJob")
        assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        assert codes["onExitCodes"] == {"containerName": "trainer", "operator": "In", "values": [75, 143]}
    words = trainer_of(made(), "actor")
    assert float(words[words.index("--hold-failure-s") + 1]) == HOLD_S > GRACE_S  # a sibling's end is seen first
    assert float(words[words.index("--grace-s") + 1]) < GRACE_S == pod_of(made(), "actor")["terminationGracePeriodSeconds"]


def test_T08_a_trainer_that_hangs_is_ended() -> None:
    words = trainer_of(made(stall_s=600), "actor")
    assert words[words.index("--stall-s") + 1] == "600"


def test_the_bank_lives_beside_the_job_on_its_own_disk() -> None:
    service, stateful = yaml.safe_load_all(bank(made(bank_settings=("bank.top_k=2",))))
    assert (service["kind"], service["metadata"]["name"], service["spec"]["ports"][0]["port"]) == ("Service", "duo-bank", 8100)
    container = stateful["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][:4] == ["crl", "bank", "serve", "configs/smoke.yaml"]
    assert "bank.top_k=2" in container["command"]
    assert container["command"][-2:] == ["--token-file", "/secrets/bank/token"]  # it listens on all addresses: never without
    assert stateful["spec"]["replicas"] == 1
    assert "kueue.x-k8s.io/queue-name" not in stateful["metadata"]["labels"]
    assert "google.com/tpu" not in str(stateful)
    assert stateful["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] == "20Gi"


HOSTILE = (
    'run.name=x"\n',
    "run.name=\": {a: b}, 'c': [\"",
    "run.name=$(PROCESS_INDEX) ${image} $$ `x` ; touch x",
    "run.name=- &a *b !!python/object:x",
)


@pytest.mark.parametrize("setting", HOSTILE[1:])
def test_T05_what_a_setting_holds_stays_text(setting: str) -> None:
    plain, hostile = trainer_of(made(), "actor"), trainer_of(made(settings=(setting,)), "actor")
    at = hostile.index("configs/smoke.yaml") + 1
    assert hostile[at].replace("$$", "$") == setting
    assert hostile[:at] + hostile[at + 1 :] == plain
    assert "$(PROCESS_INDEX)" not in hostile[at].replace("$$", "")


def test_T05_what_cannot_be_a_name_or_a_setting_is_refused(cloud: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["create", "--name", "duo", "configs/smoke.yaml", HOSTILE[0], *WHAT]) == 2
    assert command.main(["create", "--name", "duo; x", *RECIPE, *WHAT]) == 2
    assert command.main([*CREATE, "--topology", "2x2"]) == 2
    assert "topology 2x2 has not the 16 chips of v5litepod-16" in capsys.readouterr().err
    assert command.main([*CREATE, "--context", "x --y"]) == 2
    assert command.main(["cluster", "--cluster", "c;x", "--zone", "us-west4-a", "--accelerator-type", "v5litepod-16"]) == 2
    assert cloud.calls("apply") == cloud.calls("xpk") == []


def test_create_makes_the_token_once_then_bank_and_job(cloud: Any) -> None:
    said: list[str] = []
    cloud.script(("get secret", ["", "secret/duo-bank-token"]))
    for _ in range(2):
        assert command.main([*CREATE, "--token-file", "token.txt", "--volume", "runs", "--price", "1"], out=said.append) == 0
    [secret] = cloud.calls("create secret")
    assert secret == ["kubectl", "--namespace=default", "create", "secret", "generic", "duo-bank-token", "--from-file=token=token.txt"]
    kinds = [[part["kind"] for part in yaml.safe_load_all(text)] for text in cloud.applied()]
    assert kinds == [["Service", "StatefulSet"], ["JobSet"]] * 2
    price = "x 1 USD per chip-hour (from --price) = 32.00 USD per hour, 768.00 per day, until deleted"
    assert said[0] == f"cost: 2 x v5litepod-16 = 32 chips (on-demand) {price}"


def test_create_without_a_token_is_refused(cloud: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(CREATE) == 2
    assert "no secret duo-bank-token yet: give --token-file" in capsys.readouterr().err
    assert cloud.applied() == []


def test_stop_keeps_the_bank_and_delete_keeps_its_disk(cloud: Any) -> None:
    name = ["--name", "duo", "--namespace", "lab", "--context", "gke_p_us-west4_c"]
    for words in (["stop"], ["delete"], ["delete", "--purge"]):
        assert command.main([*words, *name]) == 0
    deleted = [argv[argv.index("delete") + 1 : argv.index("delete") + 3] for argv in cloud.calls("delete")]
    job, rest = ["jobset", "duo"], [["statefulset", "duo-bank"], ["service", "duo-bank"]]
    assert deleted == [job, job, *rest, job, *rest, ["pvc", "bank-duo-bank-0"], ["secret", "duo-bank-token"]]
    assert all("--ignore-not-found" in argv and "--context=gke_p_us-west4_c" in argv for argv in cloud.calls("delete"))


def test_status_and_logs(cloud: Any) -> None:
    said: list[str] = []
    cloud.script(("get jobset", ["duo running"]), ("logs", ["step 3/9"]))
    assert command.main(["status", "--name", "duo"], out=said.append) == 0
    assert "duo running" in said
    assert "# no pods" in said
    assert command.main(["logs", "--name", "duo", "--role", "extractor", "--worker", "2"], out=said.append) == 0
    [logs] = cloud.calls("logs")
    assert "jobset.sigs.k8s.io/replicatedjob-name=extractor,batch.kubernetes.io/job-completion-index=2" in str(logs)
    assert said[-1] == "step 3/9"


def test_a_cluster_has_one_slice_per_role(cloud: Any) -> None:
    where = ["--cluster", "lab", "--zone", "us-west4-a", "--project", "my-project"]
    assert command.main(["cluster", *where, "--accelerator-type", "v5litepod-16", "--spot"]) == 0
    assert command.main(["cluster", *where, "--accelerator-type", "v5litepod-16", "--reservation", "mine"]) == 0
    assert command.main(["delete-cluster", *where]) == 0
    spot, reserved, deleted = cloud.calls("xpk")
    assert spot == [
        *("xpk", "cluster", "create", "--cluster=lab", "--tpu-type=v5litepod-16", "--num-slices=2", "--spot"),
        *("--zone=us-west4-a", "--project=my-project"),
    ]
    assert "--reservation=mine" in reserved
    assert deleted == ["xpk", "cluster", "delete", "--cluster=lab", "--zone=us-west4-a", "--project=my-project", "--quiet"]


def test_a_dry_run_prints_commands_with_what_they_read_and_runs_nothing(cloud: Any) -> None:
    said: list[str] = []
    assert command.main([*CREATE, "--dry-run", "--token-file", "t"], out=said.append) == 0
    assert command.main(["delete", "--name", "duo", "--dry-run"], out=said.append) == 0
    assert cloud.calls() == []
    text = "\n".join(said)
    inputs = text.split("<< 'END_OF_INPUT'\n")[1:]
    kinds = [part["kind"] for given in inputs for part in yaml.safe_load_all(given.split("\nEND_OF_INPUT")[0])]
    assert kinds == ["Service", "StatefulSet", "JobSet"]
    assert shlex.split(said[-1]) == ["kubectl", "--namespace=default", "delete", "service", "duo-bank", "--ignore-not-found"]


def test_a_missing_tool_is_named_with_what_installs_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main(["stop", "--name", "duo"]) == 1
    assert "kubectl is not installed here: `gcloud components install kubectl gke-gcloud-auth-plugin`" in capsys.readouterr().err
    assert command.main(["delete-cluster", "--cluster", "lab", "--zone", "us-west4-a"]) == 1
    assert "xpk is not installed here: `pip install xpk`" in capsys.readouterr().err
