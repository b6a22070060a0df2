#!/usr/bin/env bash
# Makes crl_jax/bank_service/bank_pb2.py (and its types) from bank.proto. Run it after changing bank.proto. Needs grpcio-tools:
# pip install grpcio-tools into an environment of your own, and name its Python.
#
#   PYTHON=/some/venv/bin/python launch/proto.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
"${PYTHON:-python3}" -m grpc_tools.protoc -I . --python_out=. --pyi_out=. crl_jax/bank_service/bank.proto
