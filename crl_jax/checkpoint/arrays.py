"""Trees of arrays to and from disk by Orbax.

Owns: naming leaves, PRNG keys as raw data, host copies, the comparison of a saved tree with a template.
Promises: ``write_tree`` returns when the values are on disk, and ``on_host`` when they are in memory of their own: after either the caller
may donate its buffers; ``read_tree`` gives every leaf the template's sharding and never casts: another dtype, shape or key set is an error
that names the leaf.
Does not: accept Python numbers as leaves (their dtype would be a guess): put those into the records.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from crl_jax.checkpoint.manifest import CheckpointError, Leaf


class Held(NamedTuple):
    """A tree as it is written: the table of its leaves, and their values (of PRNG keys the raw data) by name."""

    table: tuple[Leaf, ...]
    data: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all values together."""
        return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in self.data.values())

    @property
    def gathered(self) -> bool:
        """Whether this process holds every value whole."""
        return all(not isinstance(leaf, jax.Array) or leaf.is_fully_addressable for leaf in self.data.values())


def hold(tree: Any) -> Held:
    """``tree`` (JAX or NumPy arrays, typed PRNG keys), by reference. Raises CheckpointError for another leaf."""
    named = _named(tree)
    table = tuple(_describe(path, leaf) for path, leaf in named)
    return Held(table, {_key(i): _raw(leaf) for i, (_, leaf) in enumerate(named)})


def on_host(held: Held) -> Held:
    """The same values in host memory that nothing else uses (on a CPU a plain fetch would be the device's own buffer)."""
    return Held(held.table, {name: np.array(leaf, copy=True) for name, leaf in jax.device_get(held.data).items()})


def write_tree(folder: pathlib.Path, tree: Any) -> tuple[Leaf, ...]:
    """Saves the leaves of ``tree`` (as in `hold`, or what it made) below ``folder`` and returns their table."""
    held = tree if isinstance(tree, Held) else hold(tree)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder.resolve(), args=ocp.args.PyTreeSave(held.data))
    return held.table


_copied: Any = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def begin_tree(folder: pathlib.Path, held: Held, *, wait_s: float) -> Callable[[], None]:
    """Begins to save what several processes hold, in all of them: the values are in host memory when it returns. The function it returns
    waits until this process's part is on disk, from any thread; ``wait_s`` bounds the processes' waits for each other.
    """
    data = held.data
    if jax.default_backend() == "cpu":  # there a fetch would be the device's own buffer, which the next step reuses
        data = _copied(data)
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), timeout_secs=int(wait_s))
    checkpointer.save(folder.resolve(), args=ocp.args.PyTreeSave(data))

    def finish() -> None:
        try:
            checkpointer.wait_until_finished()
        finally:
            checkpointer.close()

    return finish


def read_tree(folder: pathlib.Path, table: tuple[Leaf, ...], like: Any, name: str) -> Any:
    """The saved tree with the structure and shardings of ``like`` (arrays or ``ShapeDtypeStruct``). Raises CheckpointError (see above)."""
    named = _named(like)
    _compare(table, {path: _describe(path, leaf) for path, leaf in named}, name)
    index = {leaf.path: i for i, leaf in enumerate(table)}
    shardings = _shardings([leaf for _, leaf in named])
    wanted = {_key(index[path]): _restore_args(leaf, sharding) for (path, leaf), sharding in zip(named, shardings, strict=True)}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            data = checkpointer.restore(folder.resolve(), args=ocp.args.PyTreeRestore(item=dict.fromkeys(wanted, 0), restore_args=wanted))
    except Exception as error:  # the format's own check of its content: its readers raise errors of many types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        step = folder.parent.parent
        raise CheckpointError(f"{folder} cannot be read ({reason[:200]}): delete {step} to go on from the checkpoint before it") from error
    leaves = [_cooked(data[_key(index[path])], leaf) for path, leaf in named]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _key(i: int) -> str:
    return f"leaf_{i:05d}"


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(leaf: Any) -> str:
    return str(leaf.dtype)  # e.g. key<fry>: names the implementation for arrays and ShapeDtypeStructs alike


def _describe(path: str, leaf: Any) -> Leaf:
    if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        raise CheckpointError(f"leaf {path} is a {type(leaf).__name__}, not an array: put numbers and texts into the records")
    if _is_key(leaf):
        return Leaf(path, tuple(leaf.shape), "prng_key", _key_impl(leaf))
    return Leaf(path, tuple(leaf.shape), np.dtype(leaf.dtype).name)


def _raw(leaf: Any) -> Any:
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _compare(saved: tuple[Leaf, ...], wanted: dict[str, Leaf], name: str) -> None:
    have = {leaf.path: leaf for leaf in saved}
    missing, extra = sorted(wanted.keys() - have.keys()), sorted(have.keys() - wanted.keys())
    if missing or extra:
        parts = [f"not in the checkpoint: {', '.join(missing)}"] * bool(missing) + [f"only in the checkpoint: {', '.join(extra)}"] * bool(
            extra
        )
        raise CheckpointError(f"tree {name!r} has other leaves than the checkpoint; " + "; ".join(parts))
    for path, leaf in wanted.items():
        if have[path] != leaf:
            saved_as, wanted_as = (f"{x.dtype}{list(x.shape)}{x.key_impl}" for x in (have[path], leaf))
            raise CheckpointError(f"tree {name!r}, leaf {path}: saved {saved_as}, wanted {wanted_as}")


def _shardings(leaves: list[Any]) -> list[jax.sharding.Sharding | None]:
    """One sharding per leaf. In a tree that lives on a mesh, a leaf on a single device (a step counter) is replicated over the mesh."""
    found = [getattr(leaf, "sharding", None) for leaf in leaves]
    meshes = [s.mesh for s in found if isinstance(s, jax.sharding.NamedSharding)]
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if not meshes:
        return [None if isinstance(leaf, np.ndarray | np.generic) else s or default for leaf, s in zip(leaves, found, strict=True)]
    replicated = jax.sharding.NamedSharding(meshes[0], jax.sharding.PartitionSpec())
    return [
        None if isinstance(leaf, np.ndarray | np.generic) else s if isinstance(s, jax.sharding.NamedSharding) else replicated
        for leaf, s in zip(leaves, found, strict=True)
    ]


def _restore_args(leaf: Any, sharding: jax.sharding.Sharding | None) -> Any:
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    if _is_key(leaf):  # the raw data has one dimension more than the keys; replicated, or on the leaf's device
        return ocp.ArrayRestoreArgs(sharding=sharding)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=tuple(leaf.shape), dtype=leaf.dtype)


def _cooked(data: Any, like: Any) -> Any:
    if not _is_key(like):
        return data
    keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(like) if isinstance(like, jax.Array) else None)
    if keys.dtype != like.dtype:
        raise CheckpointError(f"keys of {like.dtype} need a template with real keys: a ShapeDtypeStruct does not name their implementation")
    return keys
