"""The profiler trace of a whole run: every part is in it under its name, on the line of its thread."""

import collections
import gzip
import pathlib

import jax
import pytest

pytestmark = pytest.mark.system

NAMES = {
    *("rollout", "merge", "search", "actor_step", "extractor_step", "publish/actor", "publish/extractor"),
    *("prefill/actor", "decode/actor", "prefill/extractor", "decode/extractor", "phase/collect", "phase/bank", "train"),
}


@pytest.fixture(scope="module")
def trace(finished) -> pathlib.Path:
    (found,) = (finished[0] / "smoke" / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb")
    return found


@pytest.fixture(scope="module")
def found(trace: pathlib.Path) -> dict[str, list[tuple[str, float, float]]]:
    """Line, beginning and end (ns) of every event that has one of our names."""
    events = collections.defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name in NAMES:
                    events[event.name].append((line.name, event.start_ns, event.end_ns))
    return events


def test_every_part_is_in_the_trace_under_its_name(found) -> None:
    assert set(found) == NAMES
    assert len(found["train"]) == 2, "two steps"
    assert len(found["actor_step"]) == len(found["publish/actor"]) == 2


def test_each_role_has_a_line_of_its_own_and_no_name_overlaps_another_on_its_line(found) -> None:
    assert {line for line, _, _ in found["decode/actor"]} == {"sampler-actor"}
    assert {line for line, _, _ in found["decode/extractor"]} == {"sampler-extract"}
    rollouts = {line for line, _, _ in found["rollout"]}
    assert not rollouts & {line for name in NAMES - {"rollout", "merge"} for line, _, _ in found[name]}
    for _, began, _ in found["rollout"]:
        assert any(a <= began < b for _, a, b in found["phase/collect"]), "a synchronous run collects while the learner waits"


def test_the_memory_of_the_devices_is_beside_the_trace(trace: pathlib.Path) -> None:
    profile = trace.with_name(trace.name.replace(".xplane.pb", ".memory.pprof"))
    assert len(gzip.decompress(profile.read_bytes())) > 100


def test_the_run_says_where_its_time_went(finished) -> None:
    folder, _, text = finished
    assert "0 restarts; goodput" in text
    assert "waited for episodes" in text
    assert "actor's sampler busy" in text
    assert f"a profiler trace is in {folder}" in text
