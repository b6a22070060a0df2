"""The conformance suite of the `Index` protocol: every implementation gives what brute force gives, and survives bad input."""

import numpy as np
import pytest

from crl_jax.experience.index import ExactIndex
from crl_jax.experience.retrieve import nearest
from crl_jax.experience.scann_index import ScannIndex

DIM = 16


@pytest.fixture(params=["exact", "scann", "scann-built"])
def index(request):
    if request.param == "exact":
        made = ExactIndex(DIM)
    elif request.param == "scann":
        made = ScannIndex(DIM)
    else:  # everything beyond one vector moves into ScaNN, so even the smallest cases go through it
        made = ScannIndex(DIM, tail_min=0, tail_fraction=0.0, tail_max=0, exact_below=0)
    yield made
    made.close()


def settle(index):
    if isinstance(index, ScannIndex):
        index.wait_builds(30.0)


def rows(n, seed=0):
    return np.random.default_rng(seed).normal(size=(n, DIM)).astype(np.float32)


def vector(*values):
    return np.asarray([[*values, *([0.0] * (DIM - len(values)))]], np.float32)


def brute(vectors, ids, query, k):
    """The oracle: cosine by its definition, in float64, one pair at a time."""
    cosine = {
        i: float(v @ query / (np.linalg.norm(v) * np.linalg.norm(query))) for i, v in zip(ids, vectors.astype(np.float64), strict=True)
    }
    return sorted(cosine.items(), key=lambda pair: -pair[1])[:k]


def test_equals_brute_force_through_adds_and_removals(index):
    vectors, ids = rows(300), [f"id{n}" for n in range(300)]
    for start in range(0, 300, 50):
        index.add(ids[start : start + 50], vectors[start : start + 50], namespace="a")
        settle(index)
    index.remove(ids[10:60])
    index.remove(ids[290:])
    keep = [n for n in range(300) if not (10 <= n < 60 or n >= 290)]
    queries = rows(9, seed=1)
    for moment in ("before the build", "after it"):
        found = index.search(queries, 7, namespace="a")
        for query, hits in zip(queries, found, strict=True):
            expected = brute(vectors[keep], [ids[n] for n in keep], query, 7)
            assert [hit.id for hit in hits] == [i for i, _ in expected], moment
            np.testing.assert_allclose([hit.similarity for hit in hits], [score for _, score in expected], atol=1e-5)
        settle(index)
    assert index.size("a") == len(keep)


def test_X01_more_neighbours_than_entries(index):
    index.add(["a", "b", "c"], rows(3), namespace="n")
    settle(index)
    hits = index.search(rows(1, seed=5), 10, namespace="n")[0]
    assert {hit.id for hit in hits} == {"a", "b", "c"}
    assert len(hits) == 3


@pytest.mark.parametrize("n_queries", [1, 25])
def test_X02_empty_index_returns_nothing(index, n_queries):
    assert index.search(rows(n_queries), 3, namespace="n") == [[]] * n_queries
    index.add(["a"], rows(1), namespace="n")
    settle(index)
    index.remove(["a"])
    settle(index)
    assert index.search(rows(n_queries), 3, namespace="n") == [[]] * n_queries
    assert index.search(rows(n_queries), 3, namespace="another") == [[]] * n_queries


def test_X06_length_of_a_vector_does_not_matter(index):
    index.add(["short", "long"], np.concatenate([vector(0.1, 0.0), vector(3.0, 3.0)]), namespace="n")
    settle(index)
    hits = index.search(vector(1.0, 0.0), 2, namespace="n")[0]
    assert [hit.id for hit in hits] == ["short", "long"]
    np.testing.assert_allclose([hit.similarity for hit in hits], [1.0, 0.7071], atol=1e-4)


def test_X07_vectors_without_direction_are_refused(index):
    index.add(["good"], rows(1), namespace="n")
    for bad in (vector(float("nan"), 0.0), vector(float("inf")), vector(0.0, 0.0), vector(3e38, 3e38), vector(1e-40), rows(1)[:, :-1]):
        with pytest.raises(ValueError, match="vector"):
            index.add(["bad"], bad, namespace="n")
    settle(index)
    assert index.size("n") == 1
    assert index.search(vector(0.0), 1, namespace="n") == [[]]
    good = vector(1.0)
    beside = np.concatenate([vector(float("nan")), good, vector(float("inf"))])
    assert [len(hits) for hits in index.search(beside, 1, namespace="n")] == [0, 1, 0], "one that is not finite fails no other"


def test_X08_one_score_direction(index):
    index.add(["same", "orthogonal", "opposite"], np.concatenate([vector(2.0), vector(0.0, 1.0), vector(-1.0)]), namespace="n")
    settle(index)
    scores = {hit.id: hit.similarity for hit in index.search(vector(1.0), 3, namespace="n")[0]}
    assert scores == pytest.approx({"same": 1.0, "orthogonal": 0.0, "opposite": -1.0}, abs=1e-5)
    assert max(scores.values()) <= 1.0
    assert [hit.id for hit in nearest(index.search(vector(1.0), 3, namespace="n")[0], k=3, min_similarity=0.9)] == ["same"]


def test_X10_search_is_scoped(index):
    index.add(["in-a"], rows(1), namespace="a")
    index.add(["in-b"], rows(1), namespace="b")
    settle(index)
    assert [hit.id for hit in index.search(rows(1), 5, namespace="a")[0]] == ["in-a"]
    index.remove(["in-a"])
    assert [hit.id for hit in index.search(rows(1), 5, namespace="b")[0]] == ["in-b"]


@pytest.mark.parametrize(("n", "k"), [(5, 5), (50, 2000)])
def test_X16_small_indexes_and_large_k(index, n, k):
    vectors, ids = rows(n), [f"id{i}" for i in range(n)]
    index.add(ids, vectors, namespace="n")
    settle(index)
    query = rows(1, seed=3)
    hits = index.search(query, k, namespace="n")[0]
    assert [hit.id for hit in hits] == [i for i, _ in brute(vectors, ids, query[0], k)]
    assert len(hits) == n


def test_stats_count_what_is_there(index):
    index.add([f"id{n}" for n in range(30)], rows(30), namespace="n")
    index.remove(["id3"])
    settle(index)
    stats = index.stats()
    assert (stats["entries"], stats["recall"], stats["rebuilds_for_recall"]) == (29, 1.0, 0)
    assert stats["tail"] <= 29
    assert stats["dead"] <= 1


def test_bad_ids_change_nothing(index):
    index.add(["a"], rows(1), namespace="n")
    for ids in (["a"], ["b", "b"], ["b", "c", "d"]):
        with pytest.raises(ValueError, match="id"):
            index.add(ids, rows(2)[: len(ids)], namespace="n")
    with pytest.raises(KeyError):
        index.remove(["a", "missing"])
    index.remove([])
    assert index.size("n") == 1
    index.add(["b"], rows(1), namespace="n")
    index.remove(["b"])
    with pytest.raises(ValueError, match="or were in the index"):
        index.add(["b"], rows(1, seed=1), namespace="n")
    with pytest.raises(ValueError, match="k=0"):
        index.search(rows(1), 0, namespace="n")
