#!/usr/bin/env bash
# From a fresh clone to a finished small run: sets the environment up if needed and trains configs/quickstart.yaml.
# Arguments are passed on, e.g. launch/quickstart.sh run.steps=10 run.seed=7
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
exec "${CRL_VENV:-.venv}/bin/crl" train configs/quickstart.yaml "$@"
