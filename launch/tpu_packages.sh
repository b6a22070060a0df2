#!/usr/bin/env bash
# Adds the TPU runtime (libtpu) that fits the locked version of JAX to an environment that launch/setup.sh or the Dockerfile made.
#
#   launch/tpu_packages.sh VENV
set -euo pipefail
venv=$1
version=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("jax"))')
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "jax[tpu]==$version"
