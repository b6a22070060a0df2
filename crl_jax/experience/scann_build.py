"""ScaNN searchers: how one is built for a number of rows, how strong its search is set, and what recall that gives.

Owns: the import of ScaNN, the ladder of settings, the measure of recall. Promises: a searcher never changes once built; a stronger setting
of the same structure shares the built searcher, so it takes effect at once; exact reference answers come from brute force on one thread.
Does not: hold ids, lock, or decide when to build. (ScaNN lets other threads run Python while it builds and searches: measured with 1.4.2.)
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
import threading
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from crl_jax.experience.index_rows import Vectors

TREE_FROM = 100_000  # rows; a tree over fewer loses recall
HASH_FROM = 256  # rows; hashing trains its code book on them
RECALL_K = 8
RECALL_GOAL = 0.98
_CHUNK = 16_384  # rows of one brute-force pass
_import_lock = threading.Lock()


class Setting(NamedTuple):
    """How a searcher works. ``leaves`` is the share of the tree's leaves that a search visits (1 = no tree); ``reorder`` is how many
    hashed candidates are scored exactly (0 = brute force)."""

    leaves: float
    reorder: int

    @property
    def structure(self) -> str:
        """What has to be built for it: ``tree``, ``hash`` or ``brute``."""
        return "brute" if self.reorder == 0 else "tree" if self.leaves < 1 else "hash"


LADDER = (  # from fast to exact; each step has more recall, or a structure that can have it
    Setting(0.1, 100),
    Setting(0.1, 200),
    Setting(0.25, 300),
    Setting(0.5, 500),
    Setting(1.0, 100),
    Setting(1.0, 200),
    Setting(1.0, 500),
    Setting(1.0, 0),
)
_FIRST_HASH = next(level for level, setting in enumerate(LADDER) if setting.structure == "hash")


def first_level(n: int, *, tree_from: int = TREE_FROM) -> int:
    """Where on the ladder ``n`` rows begin."""
    return 0 if n >= tree_from else _FIRST_HASH if n >= HASH_FROM else len(LADDER) - 1


def import_scann() -> Any:
    """The module ``scann``, imported while TensorFlow looks absent.

    ScaNN imports TensorFlow if it can find it: that takes many seconds, and fails with an undefined symbol for all but one TensorFlow
    version. Only its TensorFlow ops need it. TensorFlow itself is left as it was. Raises ImportError naming the package to install.
    """
    with _import_lock:
        if "scann" in sys.modules:
            return sys.modules["scann"]
        absent = object()
        saved: Any = sys.modules.get("tensorflow", absent)
        sys.modules["tensorflow"] = None  # type: ignore[assignment]  # makes `import tensorflow` raise ModuleNotFoundError
        try:
            return importlib.import_module("scann")
        except ImportError as error:
            raise ImportError("ScannIndex needs ScaNN: pip install 'scann==1.4.2', or use the exact index") from error
        finally:
            if saved is absent:
                del sys.modules["tensorflow"]
            else:
                sys.modules["tensorflow"] = saved


@dataclasses.dataclass(frozen=True)
class Searcher:
    """A built ScaNN searcher over ``n`` unit rows (dot product = cosine), and the setting it is asked with."""

    raw: Any
    n: int
    setting: Setting

    def search(self, unit: Vectors, k: int) -> tuple[Int[np.ndarray, "q m"], Float[np.ndarray, "q m"]]:
        """Row numbers and cosines of the ``m = min(k, n)`` nearest, best first. Answers a tree could not fill end in -1 and NaN."""
        wanted = min(k, self.n)
        rows, scores = self.raw.search_batched(unit, final_num_neighbors=wanted, **self.options(wanted))
        rows = rows.astype(np.int64)
        filled = np.isfinite(scores) & (rows >= 0) & (rows < self.n)
        if not filled.all():
            rows, scores = np.where(filled, rows, -1), np.where(filled, scores, np.nan)
        return rows, scores

    def options(self, wanted: int) -> dict[str, int]:
        """What the setting means to ``search_batched`` for so many neighbours."""
        made: dict[str, int] = {}
        if self.setting.structure != "brute":
            made["pre_reorder_num_neighbors"] = min(self.n, max(self.setting.reorder, 4 * wanted))
        if self.setting.structure == "tree":
            made["leaves_to_search"] = max(1, round(self.setting.leaves * leaf_count(self.n)))
        return made

    def set_to(self, setting: Setting) -> Searcher:
        """The same searcher asked another way. Raises ValueError if that needs another structure."""
        if setting.structure != self.setting.structure:
            raise ValueError(f"a {self.setting.structure} searcher cannot be asked as {setting}: build another one")
        return dataclasses.replace(self, setting=setting)


def leaf_count(n: int) -> int:
    """Leaves of a tree over ``n`` rows."""
    return int(math.sqrt(n))


def build_searcher(vectors: Vectors, setting: Setting, *, threads: int = 1) -> Searcher:
    """Build over unit rows. Takes about 5 s for 20,000 rows of 384 numbers and under a minute for 200,000, on one core."""
    n = len(vectors)
    builder = import_scann().scann_ops_pybind.builder(vectors, 10, "dot_product").set_n_training_threads(threads)
    if setting.structure == "brute":
        return Searcher(builder.score_brute_force().build(), n, setting)
    if setting.structure == "tree":
        leaves = leaf_count(n)
        sample = min(n, 128 * leaves)  # rows that place the leaves' centres: more take longer and find no better ones
        builder = builder.tree(num_leaves=leaves, num_leaves_to_search=max(1, leaves // 10), training_sample_size=sample)
    return Searcher(builder.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(setting.reorder).build(), n, setting)


def recall(searcher: Searcher, vectors: Vectors, unit: Vectors, *, k: int = RECALL_K) -> Float[np.ndarray, " q"]:
    """Per query the share of the ``k`` nearest of ``vectors`` that the searcher found; an equally near row counts as the right one."""
    if searcher.setting.structure == "brute":
        return np.ones(len(unit), np.float32)
    k = min(k, searcher.n)
    kth = np.full((len(unit), k), -np.inf, np.float32)
    for start in range(0, len(vectors), _CHUNK):
        part = build_searcher(vectors[start : start + _CHUNK], LADDER[-1])
        scores = np.concatenate([kth, part.search(unit, k)[1]], axis=1)
        kth = -np.partition(-scores, k - 1, axis=1)[:, :k]
    _, found = searcher.search(unit, k)
    return (found >= kth.min(axis=1)[:, None] - 1e-5).mean(axis=1, dtype=np.float32)  # NaN is not


def sample_queries(vectors: Vectors, count: int, rng: np.random.Generator) -> Vectors:
    """Unit queries like those to come: rows drawn at random and moved by noise half as long as they are (cosine about 0.9)."""
    rows = vectors[rng.integers(0, len(vectors), count)]
    noise = rng.standard_normal(rows.shape, np.float32)
    moved = rows + 0.5 * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    return moved / np.linalg.norm(moved, axis=1, keepdims=True)
