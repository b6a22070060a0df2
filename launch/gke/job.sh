#!/usr/bin/env bash
# A run on GKE: cluster, create, render, status, logs, stop, delete, delete-cluster. See launch/README.md, or add --help.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHONPATH=$root exec python3 -m launch.gke.job "$@"
