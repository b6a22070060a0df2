"""Asking for a pod and giving it back, against recorded answers of gcloud."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

States = Callable[..., list[Any]]
MACHINE = ("--accelerator-type", "v5litepod-16", "--runtime-version", "v2-alpha-tpuv5-lite")
NAME = ("--name", "learner", "--zone", "us-west4-a")
DESCRIBE, CREATE, DELETE = "queued-resources describe", "queued-resources create", "queued-resources delete"


def test_a_pod_is_asked_for_and_waited_for(cloud: Any, states: States) -> None:
    cloud.script((DESCRIBE, states(None, None, "WAITING_FOR_RESOURCES", "PROVISIONING", "PROVISIONING", "ACTIVE")))
    assert cloud.pod("create", *NAME, *MACHINE, "--spot", "--label", "team=rl", "--label", "run=x1", "--project", "my-project") == 0
    [asked] = cloud.calls(CREATE)
    assert asked[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "learner"]
    wanted = {"--node-id=learner", "--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite", "--spot"}
    assert wanted | {"--labels=team=rl,run=x1", "--zone=us-west4-a", "--project=my-project", "--quiet"} <= set(asked)
    assert [line for line in cloud.said if "PROVISIONING" in line] == ["learner in us-west4-a: PROVISIONING"]
    assert cloud.said[-1] == "learner is ACTIVE in us-west4-a"
    assert cloud.clock.now == pytest.approx(4 * 30)


def test_creating_twice_leaves_one_pod(cloud: Any, states: States) -> None:
    cloud.script((DESCRIBE, states(None, "ACTIVE")))
    assert cloud.pod("create", *NAME, *MACHINE) == 0
    assert cloud.pod("create", "--name", "learner") == 0  # the second time from what was remembered
    assert len(cloud.calls(CREATE)) == 1
    assert "not asked for again" in cloud.said[-1]


def test_a_pod_of_another_size_is_not_taken_for_the_one_asked_for(cloud: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.script((DESCRIBE, [{"state": {"state": "ACTIVE"}, "tpu": {"nodeSpec": [{"node": {"acceleratorType": "v5litepod-256"}}]}}]))
    assert cloud.pod("create", *NAME, *MACHINE) == 2
    assert "learner exists in us-west4-a as v5litepod-256, not v5litepod-16: delete it first" in capsys.readouterr().err


@pytest.mark.parametrize("lost", ["SUSPENDED", "FAILED"])
def test_what_is_left_of_a_lost_pod_is_deleted_first(cloud: Any, states: States, lost: str) -> None:
    cloud.script((DESCRIBE, states(lost, lost, None, "ACTIVE")))
    assert cloud.pod("create", *NAME, *MACHINE) == 0
    order = [next(verb for verb in ("describe", "delete", "create") if verb in argv) for argv in cloud.calls("queued-resources")]
    assert order == ["describe", "describe", "delete", "describe", "create", "describe"]
    assert "--force" in cloud.calls(DELETE)[0]


def test_zones_are_tried_in_order_and_refused_requests_are_taken_back(cloud: Any, states: States) -> None:
    zones = ("--zone", "us-west4-a", "--zone", "us-east5-b", "--zone", "europe-west4-b")
    full = ("ERROR: quota exceeded", 1)
    cloud.script(
        (f"{CREATE} --zone=us-west4-a", [full]),
        (f"{DESCRIBE} --zone=us-west4-a", states(None)),
        (f"{DESCRIBE} --zone=us-east5-b", states(None, *["WAITING_FOR_RESOURCES"] * 6, None)),
        (f"{DESCRIBE} --zone=europe-west4-b", states(None, "ACTIVE")),
    )
    assert cloud.pod("create", "--name", "learner", *zones, *MACHINE, "--wait-s", "90") == 0
    assert [argv[-2] for argv in cloud.calls(CREATE)] == ["--zone=us-west4-a", "--zone=us-east5-b", "--zone=europe-west4-b"]
    assert [argv[-2] for argv in cloud.calls(DELETE)] == ["--zone=us-east5-b"]
    assert cloud.said[-1] == "learner is ACTIVE in europe-west4-b"


def test_no_zone_left_is_an_error_with_every_reason(cloud: Any, states: States, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.script((CREATE, [("ERROR: quota exceeded", 1), ("ERROR: no such type here", 1)]), (DESCRIBE, states(None)))
    assert cloud.pod("create", *NAME, "--zone", "us-east5-b", *MACHINE) == 1
    said = capsys.readouterr().err
    assert "us-west4-a: ERROR: quota exceeded" in said
    assert "us-east5-b: ERROR: no such type here" in said


def test_looks_that_fail_are_repeated_but_not_for_ever(cloud: Any, states: States, capsys: pytest.CaptureFixture[str]) -> None:
    broken = ("ERROR: 503 backend unavailable", 1)
    cloud.script((DESCRIBE, [*states(None), broken, broken, *states("ACTIVE")]))
    assert cloud.pod("create", *NAME, *MACHINE) == 0
    cloud.script((DESCRIBE, [broken]))
    assert cloud.pod("create", *NAME, *MACHINE) == 1
    assert "503 backend unavailable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "flag", "command"),
    [
        (["--on-demand"], None, ["gcloud", "compute"]),
        (["--spot"], "--spot", ["gcloud", "compute"]),
        (["--reserved"], "--reserved", ["gcloud", "compute"]),
        (["--reserved", "--reservation", "mine"], "--reservation=mine", ["gcloud", "alpha"]),
    ],
)
def test_how_it_is_paid_for(cloud: Any, states: States, given: list[str], flag: str | None, command: list[str]) -> None:
    cloud.script((DESCRIBE, states(None, "ACTIVE")))
    assert cloud.pod("create", *NAME, *MACHINE, *given) == 0
    [asked] = cloud.calls(CREATE)
    assert [word for word in asked if word.startswith(("--spot", "--reserv"))] == ([flag] if flag else [])
    assert asked[:2] == command


def test_a_reservation_is_not_forgotten_and_not_mixed(cloud: Any, states: States, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.script((DESCRIBE, states(None, "ACTIVE", None, "ACTIVE")))
    assert cloud.pod("create", *NAME, *MACHINE, "--reservation", "mine") == 2
    assert "give --reserved with --reservation" in capsys.readouterr().err
    assert cloud.pod("create", *NAME, *MACHINE, "--reserved", "--reservation", "mine") == 0
    assert cloud.pod("create", "--name", "learner", "--spot") == 0  # changed one's mind
    assert [[w for w in argv if w in ("--spot", "--reservation=mine")] for argv in cloud.calls(CREATE)] == [
        ["--reservation=mine"],
        ["--spot"],
    ]
    (cloud.records / "learner.json").write_text('{"zones": [')
    assert cloud.pod("create", "--name", "learner") == 2
    assert "learner.json is damaged: delete it" in capsys.readouterr().err


def test_the_cost_line_comes_before_anything_is_asked_for(cloud: Any, states: States) -> None:
    cloud.script((DESCRIBE, states(None, "ACTIVE")))
    assert cloud.pod("create", *NAME, *MACHINE, "--spot", "--price", "0.5") == 0
    assert "16 chips (spot) x 0.5 USD per chip-hour (from --price) = 8.00 USD per hour, 192.00 per day" in cloud.said[0]
    cost, asked = (next(i for i, line in enumerate(cloud.said) if word in line) for word in ("cost:", CREATE))
    assert cost < asked
    cloud.said.clear()
    assert cloud.pod("create", *NAME, *MACHINE) == 0
    assert "price unknown" in cloud.said[0]


def test_deleting_twice_is_no_error(cloud: Any, states: States) -> None:
    cloud.script((DESCRIBE, states("ACTIVE", "DELETING", None)))
    assert cloud.pod("delete", *NAME) == 0
    assert cloud.pod("delete", *NAME) == 0
    assert len(cloud.calls(DELETE)) == 1
    assert "nothing to delete" in cloud.said[-1]


def test_a_pod_that_stays_is_an_error(cloud: Any, states: States, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.script((DESCRIBE, states("ACTIVE")), (DELETE, [("ERROR: permission denied", 1), ""]))
    assert cloud.pod("delete", *NAME) == 1
    assert "costs money while it exists: ERROR: permission denied" in capsys.readouterr().err
    assert cloud.pod("delete", *NAME, "--wait-s", "60") == 1
    assert "still exists 60 s after" in capsys.readouterr().err


def test_a_missing_gcloud_is_named_with_what_installs_it(
    cloud: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert cloud.pod("create", *NAME, *MACHINE) == 1
    assert (
        "gcloud is not installed here: install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install)" in capsys.readouterr().err
    )


def test_a_pod_that_nobody_described_is_refused(cloud: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cloud.pod("create", "--name", "other", "--zone", "us-west4-a") == 2
    assert "say what it is: --accelerator-type, --runtime-version" in capsys.readouterr().err
    assert cloud.pod("stop", "--name", "other") == 2
    assert "say where it is with --zone" in capsys.readouterr().err
    assert cloud.calls() == []
