"""The Kubernetes objects of a run, as text.

Owns: filling ``jobset.yaml`` and ``bank.yaml``. Promises: every value is put in as JSON, so that none becomes structure; commands are
lists, no shell reads them; a placeholder without a value is an error. Does not: talk to a cluster.

JobSet's fields: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/; its rules for restarts:
https://jobset.sigs.k8s.io/docs/tasks/failure_policy/
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import string
from typing import Any

from launch.cloud.cost import Slice, slice_of
from launch.cloud.errors import Refused
from launch.cloud.names import all_checked, checked

FOLDER = pathlib.Path(__file__).parent
COORDINATOR_PORT = 8476
SERVE_PORT = 8002  # of the extractor's servers, one on each of its hosts, which the bank samples from
TOKEN = "/secrets/bank/token"
GRACE_S = 60.0  # from SIGTERM to SIGKILL of a pod: 10 s before it the watcher kills its trainer, which has left by itself 5 s before that
HOLD_S = 90.0  # longer: a failure waits for a sibling's preemption to be seen first


@dataclasses.dataclass(frozen=True)
class Job:
    """A run on a cluster: two roles with a slice each, and a bank."""

    name: str
    image: str
    recipe: str
    accelerator_type: str
    topology: str
    settings: tuple[str, ...] = ()
    actor_settings: tuple[str, ...] = ()
    extractor_settings: tuple[str, ...] = ()
    bank_settings: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    queue: str | None = "multislice-queue"  # the Kueue queue that xpk makes
    volume: str | None = None  # a claim that every host can write: the runs
    bank_disk: str = "20Gi"
    spot: bool = False
    max_failures: int = 3
    stall_s: float = 1800.0

    def __post_init__(self) -> None:
        checks = (
            *(("name", self.name), ("image", self.image), ("recipe", self.recipe), ("accelerator type", self.accelerator_type)),
            *(("topology", self.topology), ("size", self.bank_disk)),
        )
        optional = (("object name", self.queue), ("object name", self.volume))
        for kind, value in (*checks, *((kind, value) for kind, value in optional if value is not None)):
            checked(kind, value)
        all_checked("setting", (*self.settings, *self.actor_settings, *self.extractor_settings, *self.bank_settings))
        all_checked("label", self.labels)
        slice_ = self.slice
        if math.prod(int(n) for n in self.topology.split("x")) != slice_.chips:
            raise Refused(f"topology {self.topology} has not the {slice_.chips} chips of {self.accelerator_type}")
        if slice_.gke is None:
            raise Refused(f"{self.accelerator_type} has no node label for GKE in launch/cloud/accelerators.json")

    @property
    def slice(self) -> Slice:
        """One role's slice."""
        return slice_of(self.accelerator_type)

    @property
    def bank(self) -> str:
        """The name of the bank's service."""
        return f"{self.name}-bank"

    @property
    def token(self) -> str:
        """The name of the secret with the bank's token."""
        return f"{self.name}-bank-token"

    def host(self, role: str, index: int) -> str:
        """Host ``index`` of ``role``: a name, which after a restart leads to the new pod."""
        return f"{self.name}-{role}-0-{index}.{self.name}"

    def coordinator(self, role: str) -> str:
        """Where the processes of ``role`` meet."""
        return self.host(role, 0)


def jobset(job: Job) -> str:
    """The JobSet."""
    kueue = {"kueue.x-k8s.io/queue-name": job.queue} if job.queue else {}
    values = {
        "name": job.name,
        "labels": {**_labels(job), **kueue},
        "max_failures": job.max_failures,
        "hosts": job.slice.hosts,
        "actor_pod": _pod(job, "actor", job.actor_settings),
        "extractor_pod": _pod(job, "extractor", job.extractor_settings),
    }
    return _filled("jobset.yaml", values)


def bank(job: Job) -> str:
    """The bank's Service and StatefulSet."""
    servers = ",".join(f"http://{job.host('extractor', index)}:{SERVE_PORT}" for index in range(job.slice.hosts))
    extractor = [f"extractor.server.url={servers}", f"extractor.server.token_file={TOKEN}", "extractor.serve_tensor=0"]
    settings = [*_literal(job.settings), *extractor, *_literal(job.bank_settings)]
    command = ["crl", "bank", "serve", job.recipe, "run.dir=/data", *settings]
    values = {
        "bank": job.bank,
        "token": job.token,
        "labels": _labels(job),
        "image": job.image,
        "bank_command": [*command, "--host", "0.0.0.0", "--port", "8100", "--token-file", TOKEN],
        "bank_disk": job.bank_disk,
    }
    return _filled("bank.yaml", values)


def _pod(job: Job, role: str, settings: tuple[str, ...]) -> dict[str, Any]:
    slice_ = job.slice
    mounts = [{"name": "token", "mountPath": "/secrets/bank", "readOnly": True}, {"name": "runs", "mountPath": "/data"}]
    runs: dict[str, Any] = {"persistentVolumeClaim": {"claimName": job.volume}} if job.volume else {"emptyDir": {}}
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container = {
        "name": "trainer",
        "image": job.image,
        "command": _trainer(job, role, settings),
        "env": [{"name": "PROCESS_INDEX", "valueFrom": index}],
        "ports": [{"containerPort": COORDINATOR_PORT}],
        "resources": {"limits": {"google.com/tpu": slice_.chips_per_host}},
        "volumeMounts": mounts,
    }
    selector = {"cloud.google.com/gke-tpu-accelerator": slice_.gke, "cloud.google.com/gke-tpu-topology": job.topology}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(GRACE_S),
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "nodeSelector": {**selector, **({"cloud.google.com/gke-spot": "true"} if job.spot else {})},
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists"}, {"key": "cloud.google.com/gke-spot", "operator": "Exists"}],
        "containers": [container],
        "volumes": [{"name": "token", "secret": {"secretName": job.token}}, {"name": "runs", **runs}],
    }


def _trainer(job: Job, role: str, settings: tuple[str, ...]) -> list[str]:
    shared = ["run.dir=/data", f"run.name={job.name}-{role}", f"bank.server.url=grpc://{job.bank}:8100"]
    shared += [f"bank.server.token_file={TOKEN}", f"bank.server.run={job.name}"]
    shared.append(f"run.preempt_grace_s={GRACE_S - 15:g}")
    if role == "extractor":
        shared += ["extractor.listen.host=0.0.0.0", f"extractor.listen.port={SERVE_PORT}", f"extractor.listen.token_file={TOKEN}"]
    return [
        *("python3", "/app/launch/worker.py", "run", "--in-container", "--echo", "--folder", "/tmp/launch", "--cwd", "/app"),
        # Kubernetes puts the pod's index in; no shell does.
        *("--process-id", "$(PROCESS_INDEX)", "--processes", str(job.slice.hosts)),
        *("--coordinator", f"{job.coordinator(role)}:{COORDINATOR_PORT}"),
        *("--stall-s", f"{job.stall_s:g}", "--grace-s", f"{GRACE_S - 10:g}", "--hold-failure-s", f"{HOLD_S:g}", "--"),
        *("crl", "train", job.recipe, *_literal(job.settings), *shared, *_literal(settings)),
        *("--role", role, "--resume"),
    ]


def _literal(settings: tuple[str, ...]) -> list[str]:
    """Settings as they are: Kubernetes reads $(NAME) in a command, and $$ as a dollar."""
    return [setting.replace("$", "$$") for setting in settings]


def _labels(job: Job) -> dict[str, str]:
    own = {"app.kubernetes.io/name": "crl-jax", "app.kubernetes.io/instance": job.name}
    return {**dict(label.split("=", 1) for label in job.labels), **own}


def _filled(file: str, values: dict[str, Any]) -> str:
    template = string.Template((FOLDER / file).read_text(encoding="utf-8"))
    return template.substitute({name: json.dumps(value) for name, value in values.items()})
