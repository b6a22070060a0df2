#!/usr/bin/env bash
# Runs on a TPU VM host: puts the project's files in place and sets its environment up. Runs and the environment of an earlier time stay.
#
#   bash unpack.sh ARCHIVE FOLDER
set -euo pipefail
archive=$1
folder=$2
new=$folder.new
rm -rf "$new"
mkdir -p "$new" "$folder"
tar -xzf "$archive" -C "$new"
for kept in .venv runs .cache; do
  if [[ -e $folder/$kept ]]; then
    rm -rf "${new:?}/$kept"
    mv "$folder/$kept" "$new/$kept"
  fi
done
rm -rf "$folder"
mv "$new" "$folder"
cd "$folder"

python=
for candidate in python3.12 python3.13 python3.11; do
  if "$candidate" -c 'import venv, ensurepip' > /dev/null 2>&1; then
    python=$candidate
    break
  fi
done
if [[ -z $python ]]; then # the system's Python of TPU VM images is 3.10
  tools=$HOME/.crl-tools
  if [[ ! -x $tools/bin/uv ]]; then
    python3 -m venv "$tools" || {
      echo "unpack: python3 cannot make a virtual environment here: sudo apt-get install --yes python3-venv" >&2
      exit 1
    }
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check uv
  fi
  "$tools/bin/uv" python install --quiet 3.12
  python=$("$tools/bin/uv" python find 3.12)
fi
PYTHON=$python bash launch/setup.sh
bash launch/tpu_packages.sh .venv
echo "unpack: $folder is ready"
