#!/usr/bin/env bash
# One command on a machine with an NVIDIA GPU: makes an environment with CUDA (.venv-gpu, or CRL_VENV) and measures the learner's step on
# the first card. Arguments go to tests/bench/bench_gpu.py, e.g. launch/bench_gpu.sh --out docs/results/bench_gpu.json
# Without a card it stops with status 2; --tiny --allow-cpu runs the whole script on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cpu=no
for argument in "$@"; do
  if [[ $argument == --allow-cpu ]]; then cpu=yes; fi
done
if [[ $cpu == no ]] && ! nvidia-smi -L > /dev/null 2>&1; then
  echo "bench_gpu: no NVIDIA GPU here ('nvidia-smi -L' fails): run this on a machine with one and driver 525 or newer; to try the script without a card add --tiny --allow-cpu" >&2
  exit 2
fi
export CRL_VENV=${CRL_VENV:-$PWD/.venv-gpu}
bash launch/setup.sh
python=$CRL_VENV/bin/python
if [[ $cpu == no ]]; then
  version=$("$python" -c 'import importlib.metadata as m; print(m.version("jax"))')
  "$CRL_VENV/bin/uv" pip install --quiet --python "$python" "jax[cuda12]==$version"
  # Weights, moments and activations take most of the card; JAX reserves three quarters of it unless told otherwise.
  export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.93}
  unset JAX_PLATFORMS
else
  export JAX_PLATFORMS=cpu
fi
exec "$python" tests/bench/bench_gpu.py "$@"
