"""What only the ScaNN index promises: the import, background builds, searching while writing."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from crl_jax.experience import scann_index
from crl_jax.experience.index import ExactIndex
from crl_jax.experience.scann_index import ScannIndex, build_searcher, import_scann


def rows(n, dim=24, seed=0):
    return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


def test_importing_scann_leaves_tensorflow_alone():
    code = (
        "import sys, types; sys.modules['tensorflow'] = fake = types.ModuleType('tensorflow')\n"
        "from crl_jax.experience.scann_index import import_scann\n"
        "scann = import_scann(); assert scann.scann_ops_pybind\n"
        "assert sys.modules['tensorflow'] is fake; del sys.modules['tensorflow']\n"
        "assert import_scann() is scann and 'tensorflow' not in sys.modules and 'tensorflow.python' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("kind", "least"), [({"brute_below": 10}, 0.95), ({"brute_below": 10, "tree_from": 100}, 0.7)]
)  # a tree over 1,000 vectors is a recall trap (why it starts at 100,000), and its training is not seeded
def test_hashed_search_finds_what_exact_search_finds(kind, least):
    centres = rows(40, seed=1)
    vectors = centres.repeat(25, axis=0) + 0.2 * rows(1000, seed=2)
    index, exact = ScannIndex(24, **kind), ExactIndex(24)
    ids = [f"v{n}" for n in range(1000)]
    for made in (index, exact):
        made.add(ids, vectors, namespace="n")
    index.wait_builds(60.0)
    assert index.builds == 1
    queries = centres + 0.1 * rows(40, seed=3)
    found, expected = index.search(queries, 5, namespace="n"), exact.search(queries, 5, namespace="n")
    recall = np.mean([len({h.id for h in a} & {h.id for h in b}) / 5 for a, b in zip(found, expected, strict=True)])
    assert recall >= least
    index.close()


def test_search_does_not_wait_for_a_build_and_sees_what_came_meanwhile(monkeypatch):
    release = threading.Event()

    def slow_build(vectors, **kind):
        assert release.wait(20.0)
        return build_searcher(vectors, **kind)

    monkeypatch.setattr(scann_index, "build_searcher", slow_build)
    index, vectors = ScannIndex(24, tail_min=4), rows(12)
    index.add([f"v{n}" for n in range(8)], vectors[:8], namespace="n")  # starts the build of these eight
    index.add([f"v{n}" for n in range(8, 12)], vectors[8:], namespace="n")
    index.remove(["v0", "v9"])
    during = index.search(vectors, 12, namespace="n")
    release.set()
    index.wait_builds(30.0)
    after = index.search(vectors, 12, namespace="n")
    for hits in (during, after):
        assert [h[0].id for n, h in enumerate(hits) if n not in (0, 9)] == [f"v{n}" for n in range(12) if n not in (0, 9)]
        assert all({h.id for h in hit} == {f"v{n}" for n in range(12)} - {"v0", "v9"} for hit in hits)
    index.close()


def test_A08_a_failed_build_is_raised_by_the_next_write(monkeypatch):
    def broken(vectors, **kind):
        raise ValueError("no memory")

    monkeypatch.setattr(scann_index, "build_searcher", broken)
    index = ScannIndex(24, tail_min=1)
    index.add(["a", "b"], rows(2), namespace="n")
    for thread in list(index._builds.values()):
        thread.join(10.0)
    with pytest.raises(RuntimeError, match="build failed"):
        index.add(["c"], rows(1), namespace="n")


def test_searches_while_one_writer_adds_and_removes():
    index, vectors = ScannIndex(24, tail_min=16), rows(400)
    stop, errors = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                for hits in index.search(vectors[:4], 10, namespace="n"):
                    assert all(hit.id[0] == "v" and np.isfinite(hit.similarity) for hit in hits)
                    assert len({hit.id for hit in hits}) == len(hits)
            except BaseException as error:
                errors.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for n in range(400):
        index.add([f"v{n}"], vectors[n : n + 1], namespace="n")
        if n % 3 == 2:
            index.remove([f"v{n - 2}"])
    stop.set()
    for reader in readers:
        reader.join(20.0)
    assert not errors
    index.wait_builds(30.0)
    alive = [n for n in range(400) if not (n % 3 == 0 and n + 2 < 400)]
    assert index.size("n") == len(alive)
    assert {h.id for h in index.search(vectors[:1], 400, namespace="n")[0]} == {f"v{n}" for n in alive}
    index.close()


def test_import_scann_is_the_same_module_from_many_threads():
    found = []
    threads = [threading.Thread(target=lambda: found.append(import_scann())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len({id(module) for module in found}) == 1
