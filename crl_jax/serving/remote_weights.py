"""Weights to a server through a folder both can read.

Owns: the files in it. Promises: a file is whole before the server hears of it; one post at a time, so that an older version sent again
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


class SharedFolder:
    """A hook for ``RemoteSampler``: ``hook(params, version)`` writes ``NAME-VERSION.safetensors`` into ``folder`` and posts it to the
    ``/v1/weights`` of the server at ``url``, started with ``--weights-folder`` on the same folder.
    """

    def __init__(self, url: str, folder: pathlib.Path, name: str, *, token: str = "", keep: int = 2, timeout_s: float = 600.0) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/weights"
        self._folder, self._name, self._keep, self._timeout_s = folder, name, keep, timeout_s
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._written: list[pathlib.Path] = []
        self._newest: dict[str, Any] | None = None  # of those the server took
        self._one_at_a_time = threading.Lock()

    def __call__(self, params: Any, version: int) -> None:
        """Returns when the server samples with ``params``. Raises PublishFailed, OSError from the disk."""
        path = self._folder / f"{self._name}-{version}.safetensors"
        save_params(params, path)
        self._written = [p for p in self._written if p != path] + [path]
        with self._one_at_a_time:
            body = {"path": path.name, "version": version}
            self._post(body)
            self._newest = body
        for old in self._written[: -self._keep]:
            old.unlink(missing_ok=True)
        self._written = self._written[-self._keep :]

    def again(self) -> None:
        """Posts the newest file the server took once more, for one that restarted. Raises PublishFailed."""
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
            raise PublishFailed(f"{self._url} could not be told of weights version {body['version']} ({error}): is it up?") from error


def _said(error: urllib.error.HTTPError) -> str:
    raw = error.read()[:2000]
    try:
        return json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return raw.decode("utf-8", "replace")
