"""Weights to a server, or to several, through a folder all can read.

Owns: the files in it. Promises: a file is whole before a server hears of it; one post at a time, so that an older version sent again
never comes after a newer one; only the newest ``keep`` files stay after a publish; a server that refuses is an error. Does not: retry
(publishing is the learner's step, and a server without the new weights must not be sampled from).
"""

from __future__ import annotations

import http.client
import json
import pathlib
import threading
import urllib.error
import urllib.request
from typing import Any

from crl_jax.errors import UserError
from crl_jax.models.safetensors_io import save_params


class PublishFailed(UserError, RuntimeError):
    """The server did not take the weights."""


class ServerAway(PublishFailed):
    """The server could not be told of the weights."""


class WeightFiles:
    """``NAME-VERSION.safetensors`` in ``folder``."""

    def __init__(self, folder: pathlib.Path, name: str, *, keep: int = 2) -> None:
        self._folder, self._name, self._keep = folder, name, keep
        self._written: list[pathlib.Path] = []

    def write(self, params: Any, version: int) -> str:
        """The name of the file, which is whole. Raises OSError."""
        path = self._folder / f"{self._name}-{version}.safetensors"
        save_params(params, path)
        self._written = [p for p in self._written if p != path] + [path]
        return path.name

    def prune(self) -> None:
        """Removes all but the newest ``keep``."""
        for old in self._written[: -self._keep]:
            old.unlink(missing_ok=True)
        self._written = self._written[-self._keep :]


class Posts:
    """A hook for a ``RemoteSampler`` that is one of several: ``hook(name, version)`` posts a file to the ``/v1/weights`` of the server at
    ``url``, started with ``--weights-folder`` on its folder.
    """

    def __init__(self, url: str, *, token: str = "", timeout_s: float = 600.0) -> None:
        self._url, self._timeout_s = url.rstrip("/").removesuffix("/v1") + "/v1/weights", timeout_s
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._newest: dict[str, Any] | None = None  # of those the server took, or would have taken had it been there
        self._one_at_a_time = threading.Lock()

    def __call__(self, name: str, version: int) -> None:
        """Returns when the server samples with the file's weights. Raises PublishFailed."""
        with self._one_at_a_time:
            body = {"path": name, "version": version}
            try:
                self._post(body)
            except ServerAway:
                self._newest = body
                raise
            self._newest = body

    def again(self) -> None:
        """Posts the newest file once more, for a server that restarted. Raises PublishFailed."""
        with self._one_at_a_time:
            if self._newest is not None:
                self._post(self._newest)

    def _post(self, body: dict[str, Any]) -> None:
        request = urllib.request.Request(self._url, json.dumps(body).encode(), self._headers, method="POST")
        try:
            with self._open(request, timeout=self._timeout_s) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            raise PublishFailed(f"{self._url} refused weights version {body['version']}: {error.code} {_said(error)}") from error
        except (OSError, http.client.HTTPException) as error:  # the latter: half an answer
            raise ServerAway(f"{self._url} could not be told of weights version {body['version']} ({error}): is it up?") from error


class SharedFolder:
    """A hook for a ``RemoteSampler`` alone: ``hook(params, version)`` writes a file and posts it."""

    def __init__(self, url: str, folder: pathlib.Path, name: str, *, token: str = "", keep: int = 2, timeout_s: float = 600.0) -> None:
        self._files, self._posts = WeightFiles(folder, name, keep=keep), Posts(url, token=token, timeout_s=timeout_s)
        self.again = self._posts.again

    def __call__(self, params: Any, version: int) -> None:
        """Returns when the server samples with ``params``. Raises PublishFailed, OSError from the disk."""
        self._posts(self._files.write(params, version), version)
        self._files.prune()


def _said(error: urllib.error.HTTPError) -> str:
    raw = error.read()[:2000]
    try:
        return json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return raw.decode("utf-8", "replace")
