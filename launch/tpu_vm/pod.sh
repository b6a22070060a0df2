#!/usr/bin/env bash
# Cloud TPU VM pods by queued resources: create, sync, run, status, logs, stop, delete. See launch/README.md, or add --help.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHONPATH=$root exec python3 -m launch.tpu_vm.pod "$@"
