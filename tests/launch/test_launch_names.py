"""What may be a name, and what happens to words that are not."""

import os
import pathlib
import subprocess
from typing import Any

import pytest

from launch.cloud.cost import slice_of
from launch.cloud.errors import Refused
from launch.cloud.names import checked

ROOT = pathlib.Path(__file__).resolve().parents[2]
BAD = ["a; touch x", "$(touch x)", "`touch x`", "a b", "-a", "A", "a'", "a\ntouch x", "", "a" * 41, "../a", "a-"]


@pytest.mark.parametrize("script", ["launch/tpu_vm/pod.sh", "launch/gke/job.sh"])
def test_T05_a_name_with_a_command_in_it_is_refused_and_nothing_runs(cloud: Any, tmp_path: pathlib.Path, script: str) -> None:
    environment = {**os.environ, "PATH": f"{cloud.bin}:/usr/local/bin:/usr/bin:/bin"}
    command = ["bash", str(ROOT / script), "status", "--name", "a; touch x"]
    command += ["--zone", "us-west4-a"] if "pod" in script else []
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "name 'a; touch x' is not accepted: 1 to 40 lower-case letters, digits and hyphens" in done.stderr
    assert not (tmp_path / "x").exists()
    assert cloud.calls() == []


@pytest.mark.parametrize("name", BAD)
def test_T05_no_command_takes_such_a_name(cloud: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    zone = ("--zone", "us-west4-a")
    assert cloud.pod("delete", f"--name={name}", *zone) == 2
    assert cloud.pod("status", "--name=good", f"--zone={name}") == 2
    machine = ("--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite")
    assert cloud.pod("create", "--name=good", *zone, *machine, f"--label={name}") == 2
    assert cloud.pod("create", "--name=good", *zone, f"--accelerator-type={name}", "--runtime-version=v2-alpha-tpuv5-lite") == 2
    assert "is not accepted: " in capsys.readouterr().err
    assert cloud.calls() == []
    assert not cloud.records.exists()


@pytest.mark.parametrize("recipe", ["../x.yaml", "/etc/passwd", "configs/../../x.yaml", "configs/a b.yaml", "-x.yaml", "x.json"])
def test_T05_a_recipe_lies_in_the_project(cloud: Any, recipe: str) -> None:
    machine = ("--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite")
    assert cloud.pod("run", "--name=good", "--zone=us-west4-a", *machine, "--", recipe) == 2
    assert cloud.calls() == []


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("bucket", "gs://lab-1/runs/a", "gs://lab/../a"),
        ("bucket", "gs://lab", "s3://lab"),
        ("image", "us-docker.pkg.dev/p/r/crl:1.2", "crl:1;x"),
        ("image", "localhost:5000/crl@sha256:" + "a" * 64, "CRL"),
        ("reservation", "projects/p-1/reservations/mine", "projects/p/mine"),
        ("topology", "2x2x4", "2x2;x"),
        ("setting", "run.name=$(x) 'y'", "run.name=a\nb"),
        ("folder", "/mnt/runs", "runs/../x"),
        ("service account", "t@p.iam.gserviceaccount.com", "t@p --x"),
        ("project", "my-project", "--x"),
    ],
)
def test_rules(kind: str, good: str, bad: str) -> None:
    assert checked(kind, good) == good
    with pytest.raises(Refused, match="is not accepted"):
        checked(kind, bad)


@pytest.mark.parametrize(
    ("accelerator", "chips", "hosts"),
    [
        ("v5litepod-4", 4, 1),
        ("v5litepod-8", 8, 1),
        ("v5litepod-16", 16, 4),
        ("v5p-8", 4, 1),
        ("v5p-128", 64, 16),
        ("v6e-256", 256, 64),
        ("v4-16", 8, 2),
    ],
)
def test_sizes(accelerator: str, chips: int, hosts: int) -> None:
    """As the documentation of each version lists them: v2 to v4 and v5p count TensorCores, two per chip; v5e and v6e count chips."""
    assert (slice_of(accelerator).chips, slice_of(accelerator).hosts) == (chips, hosts)


def test_sizes_that_are_none() -> None:
    with pytest.raises(Refused, match="no whole number of hosts"):
        slice_of("v5p-7")
    with pytest.raises(Refused, match="family 'v99' is not in"):
        slice_of("v99-8")
