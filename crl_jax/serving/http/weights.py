"""New weights for a running server.

Owns: which files may be loaded, and one load at a time. Promises: only safetensors files inside the folder given at start are read, also
through links; a file that does not fit the model changes nothing; the request returns when the next dispatch uses the new weights; a
client that leaves earlier changes nothing about that. Does not: write files.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from crl_jax.serving.http.errors import ApiError
from crl_jax.serving.http.fields import Fields
from crl_jax.serving.sampler import Sampler, SamplerClosed

Load = Callable[[pathlib.Path], Any]
_VERSION_MAX = 2**31 - 1


class WeightUpdates:
    """``load(path)`` gives parameters as the sampler serves them; ``resolve(name)`` the file, ValueError when it lies outside."""

    def __init__(self, sampler: Sampler, resolve: Callable[[str], pathlib.Path], load: Load) -> None:
        self._sampler, self._resolve, self._load = sampler, resolve, load
        self._one_at_a_time = asyncio.Lock()
        self.published = 0

    async def publish(self, body: dict[str, Any]) -> int:
        """Loads ``path`` and serves it as ``version``, which is returned. Raises ApiError (400) and leaves everything as it was."""
        fields = Fields(body)
        name = fields.text("path")
        version = fields.optional_integer("version", 0, _VERSION_MAX)
        fields.finish()
        if not name or version is None:
            raise ApiError(400, 'give both, e.g. {"path": "actor-3.safetensors", "version": 3}', param="version" if name else "path")
        try:
            path = self._resolve(name)
        except ValueError as error:
            raise ApiError(400, str(error), param="path", code="outside_folder") from error
        if path.suffix != ".safetensors" or not os.path.isfile(path):  # unlike is_file of the path, false for a name that is too long
            raise ApiError(400, f"{name!r} is no safetensors file in the folder of --weights-folder", param="path", code="no_such_file")
        await asyncio.shield(asyncio.create_task(self._take(name, path, version)))  # a client that leaves does not end a load
        return version

    async def _take(self, name: str, path: pathlib.Path, version: int) -> None:
        async with self._one_at_a_time:
            try:
                params = await asyncio.to_thread(self._load, path)
            except (ValueError, OSError) as error:
                raise ApiError(400, f"{name!r} cannot be served: {error}", param="path", code="wrong_weights") from error
            if not await asyncio.to_thread(_finite, params):  # they would stop the engine at its next token, for good
                raise ApiError(400, f"{name!r} holds weights that are not finite", param="path", code="wrong_weights")
            try:
                await asyncio.to_thread(self._sampler.publish, params, version)  # waits for requests to end if the sampler drains
            except TimeoutError as error:
                raise ApiError(504, str(error), code="deadline") from error
            except SamplerClosed as error:
                raise ApiError(503, str(error), code="shutting_down", retry_after_s=5) from error
            self.published += 1


def _finite(params: Any) -> bool:
    return all(jax.device_get([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]))
