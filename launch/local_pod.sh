#!/usr/bin/env bash
# A pod on this machine: the actor's job, the extractor's job and a bank, each process as it runs on a host. See launch/README.md, or add --help.
# E.g. launch/local_pod.sh configs/local_pod.yaml run.steps=10
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHONPATH=$root exec "${CRL_VENV:-$root/.venv}/bin/python" -m launch.local_pod "$@"
