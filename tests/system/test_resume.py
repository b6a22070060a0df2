"""A synchronous run that is stopped, killed in the middle of a collection and killed in the middle of a checkpoint equals the one that
was left alone, to the last bit. Each part goes on where the one before it ended, so four starts tell everything. Their guided episodes
ask, and the answers come in an order that no seed fixes."""

import dataclasses
import json
import pathlib
import sqlite3

import numpy as np
import pytest
from smoke_runs import ASKING, DEADLINE_S, changed, children_of_session, start

from crl_jax.checkpoint.arrays import read_tree
from crl_jax.checkpoint.store import read_manifest, read_records
from crl_jax.telemetry.exact import exact

pytestmark = pytest.mark.system

IN_COLLECT = """
import signal
answered = []
async def stopped(self, query):
    given = await late(self, query)
    answered.append(self.plan.id.startswith("s1/"))
    if sum(answered) == 2:
        os.kill(os.getpid(), signal.{signal})
    return given
a._Play._answer = stopped
"""
IN_CHECKPOINT = """
import os, signal
import crl_jax.checkpoint.manifest as m
write = m.write
def stopped(folder, manifest):
    if manifest.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    write(folder, manifest)
m.write = stopped
"""
TABLES = {  # what the bank holds; log rows and generations of the futures that were given up are marked, and left out
    "entries": "SELECT * FROM entries ORDER BY id",
    "usage": "SELECT * FROM usage ORDER BY id",
    "transfer": "SELECT * FROM transfer ORDER BY reader, source",
    "guided": "SELECT * FROM guided ORDER BY revision, episode_id, experience_id",
    "embeddings": "SELECT * FROM embeddings ORDER BY id",
    "generations": "SELECT * FROM generations WHERE id NOT LIKE '%~%' ORDER BY id",
    "buffer": "SELECT data FROM buffer",
    "log": "SELECT base_revision, revision, kind, namespace, text, targets, op_index, generation_id, author_version, step, episode_ids, "
    "shown, outcome, decay FROM ops WHERE abandoned=0 ORDER BY seq",
    "revision": "SELECT value FROM meta WHERE key='revision'",
}


def run_with(change: str, folder: pathlib.Path, *more: str) -> tuple[int, str]:
    """The exit code and the output of a run in which ``change`` was made first."""
    log = folder / "log.txt"
    process = start(changed(ASKING + change, folder, *more), log)
    code = process.wait(DEADLINE_S)
    assert children_of_session(process.pid, wait_s=15) == []
    return code, log.read_text()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[tuple[int, str]]]:
    """The folder of a run that was ended three times, and how each of its four parts ended."""
    folder = tmp_path_factory.mktemp("broken")
    ended = [
        run_with(IN_COLLECT.format(signal="SIGTERM"), folder, "run.save_every=0"),
        run_with(IN_COLLECT.format(signal="SIGKILL"), folder, "--resume"),
        run_with(IN_CHECKPOINT, folder, "--resume"),
        run_with("", folder, "--resume"),
    ]
    return folder / "smoke", ended


def test_sigterm_saves_the_finished_steps_and_exits_with_75(broken: tuple[pathlib.Path, list[tuple[int, str]]]) -> None:
    _, ((code, text), *_) = broken
    assert code == 75, text
    assert "checkpoint of step 1 is saved" in text
    assert "--resume" in text


def test_K02_every_part_goes_on_after_the_newest_whole_checkpoint(broken: tuple[pathlib.Path, list[tuple[int, str]]]) -> None:
    _, (_, *resumed) = broken
    assert [code for code, _ in resumed] == [-9, -9, 0], resumed[-1][1]
    assert all("from step 1 of 3" in text for _, text in resumed), "the second checkpoint was never committed"


def test_K02_weights_and_optimisers_are_the_same_bit_for_bit(finished, broken: tuple[pathlib.Path, list[tuple[int, str]]]) -> None:
    for step in (2, 3):
        assert arrays(finished[0] / "smoke", step) == arrays(broken[0], step)
        assert records(finished[0] / "smoke", step) == records(broken[0], step)
    two, three = arrays(finished[0] / "smoke", 2), arrays(finished[0] / "smoke", 3)
    learned = {name for (name, path), value in two.items() if path.startswith(".params") and value != three[name, path]}
    assert learned == {"actor", "extractor"}, "a run that learns nothing tests nothing"


def test_K02_the_bank_is_the_same_bit_for_bit(finished, broken: tuple[pathlib.Path, list[tuple[int, str]]]) -> None:
    one, two = (sqlite3.connect(folder / "bank.sqlite") for folder in (finished[0] / "smoke", broken[0]))
    for name, query in TABLES.items():
        assert one.execute(query).fetchall() == two.execute(query).fetchall(), name
    assert two.execute("SELECT count(*) FROM ops WHERE abandoned<>0").fetchone()[0] > 0, "nothing was ever given up: the test tests nothing"
    answers = "SELECT count(*) FROM generations WHERE kind='ask' AND id LIKE ?"
    assert one.execute(answers, ("%+s_/g_/_/_",)).fetchone()[0] == 8, "of two steps with four guided episodes each"
    assert two.execute(answers, ("%~%",)).fetchone()[0] >= 4, "two were given before each stop in the middle of a collection"
    one.close()
    two.close()


def test_K02_every_row_of_metrics_is_there_once_and_the_same(finished, broken: tuple[pathlib.Path, list[tuple[int, str]]]) -> None:
    whole, mended = (
        [exact(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (finished[0] / "smoke", broken[0])
    )
    assert whole == mended
    assert {"actor/grad_norm", "bank/searches", "serve/actor/decoded_tokens", "env/steps"} <= set(whole[-1]) | set(whole[-4])


def arrays(folder: pathlib.Path, step: int) -> dict[tuple[str, str], bytes]:
    root = folder / "checkpoints"
    found: dict[tuple[str, str], bytes] = {}
    for name, table in read_manifest(root, step).leaves.items():
        like = {leaf.path: np.zeros(leaf.shape, leaf.dtype) for leaf in table}
        renamed = tuple(dataclasses.replace(leaf, path=f"[{leaf.path!r}]") for leaf in table)  # as the paths of a flat dictionary
        tree = read_tree(root / f"step_{step:08d}" / "arrays" / name, renamed, like, name)
        found |= {(name, path): np.asarray(value).tobytes() for path, value in tree.items()}
    assert len(found) > 20
    return found


def records(folder: pathlib.Path, step: int) -> dict[str, object]:
    saved = read_records(folder / "checkpoints", step)
    saved["run"]["totals"] = exact(saved["run"]["totals"])
    del saved["bank"]["carry"]["log_row"]  # what was given up stays in the log, marked
    return saved
