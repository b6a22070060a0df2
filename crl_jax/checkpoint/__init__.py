"""Checkpoints: one manifest, written last, commits everything of a step.

Owns: ``save``, ``restore``, ``latest``, ``prune`` and the path rule ``inside``.
Promises: see ``store``. Does not: decide when to save, or know what the trees mean.
"""

from crl_jax.checkpoint.manifest import CheckpointError
from crl_jax.checkpoint.paths import inside
from crl_jax.checkpoint.store import Restored, latest, prune, read_records, restore, save

__all__ = ["CheckpointError", "Restored", "inside", "latest", "prune", "read_records", "restore", "save"]
