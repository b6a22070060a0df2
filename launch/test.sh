#!/usr/bin/env bash
# Lint, type-check and test, in that order; stops at the first that fails. Arguments go to pytest, e.g. launch/test.sh tests/config -k C09
# Two test files run at a time; CRL_TEST_JOBS says how many (0: in one process, as a debugger wants it).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
bin=${CRL_VENV:-.venv}/bin
export JAX_PLATFORMS=cpu PYTHONHASHSEED=0
"$bin/ruff" check --no-cache .
"$bin/ruff" format --check --quiet --no-cache .
"$bin/basedpyright" --pythonpath "$bin/python"
exec "$bin/python" -m pytest -p no:cacheprovider -ra -n "${CRL_TEST_JOBS:-2}" --dist loadfile "$@"
