#!/usr/bin/env bash
# Resolves pyproject.toml into requirements-lock.txt: one file of exact versions with markers for all supported Pythons.
# Run it after changing a dependency. Needs the environment of launch/setup.sh (for uv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${CRL_VENV:-$PWD/.venv}
{
  echo "# Exact versions for Python 3.11 to 3.13, resolved from pyproject.toml (all extras but tpu, serve-tpu and alfworld). Made by launch/lock.sh; do not edit."
  # No header, index or find-links lines: the file must not depend on where it was made.
  "$venv/bin/uv" pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
    --extra text --extra jetstream --extra serve --extra bank --extra minihack --extra webshop --extra models --extra profile --extra plot --extra dev pyproject.toml "$@"
} > requirements-lock.txt.new
mv requirements-lock.txt.new requirements-lock.txt
