#!/bin/sh
# Builds ptsave against another torch, in a copy of the tree, and runs the Python tests there.
#
#   tools/test_torch.sh TORCH [PYTEST_ARGUMENT...]    for example 2.9.1, or 2.13.0 with PYTHON=python3.13
#
# PYTHON and CXX choose the interpreter and the compiler. Everything is put below build/torch-...
# (some GB, if pip's index has torch for CUDA only); what is there already is used again.
set -eu

torch=$1
shift
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
place=$root/build/torch-$torch-$("$python" -c 'import sys; print(sys.implementation.cache_tag)')-$(basename "${CXX:-c++}")
venv=$place/venv
tree=$place/tree
mkdir -p "$tree"

if ! [ -e "$venv/.complete" ]; then
  "$python" -m venv --clear "$venv"
  # The pins are Python 3.11's: where one of them is not to be had, any version has to do.
  sed -e '/^torch==/d' -e '/^# Linters/,/^$/d' -e '/^# Documentation/,/^$/d' "$root/requirements-dev.txt" >"$place/pinned.txt"
  sed -e '/^# What the above need/,$d' -e 's/==.*//' "$place/pinned.txt" >"$place/names.txt"
  pip="$venv/bin/python -m pip install --disable-pip-version-check --no-input --quiet"
  # Named each time, or pip takes a newer one for a package that asks for it; that one is left out then.
  $pip "torch==$torch" -r "$place/pinned.txt" || $pip "torch==$torch" -r "$place/names.txt" || {
    sed -i '/^torch[_-]/d' "$place/names.txt"
    $pip "torch==$torch" -r "$place/names.txt"
  }
  touch "$venv/.complete"
fi

# The files of the working tree, and none of what was built or removed there.
find "$tree" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
(cd "$root" && git ls-files -z --cached --others --exclude-standard --deduplicate |
  xargs -0 sh -c 'for file; do [ ! -e "$file" ] || printf "%s\0" "$file"; done' sh |
  tar -c --null -T -) | tar -x -C "$tree"

cd "$tree"
PATH=$venv/bin:$PATH
export PATH PYTHONPATH="$tree"
python setup.py --quiet build_ext --inplace
python - <<'EOF'
import platform, subprocess, os, torch
compiler = subprocess.run([os.environ.get("CXX", "c++"), "--version"], capture_output=True, text=True)
print(f"torch {torch.__version__}, Python {platform.python_version()}, {compiler.stdout.splitlines()[0]}")
EOF
exec python -m pytest -n "${JOBS:-$(nproc)}" --maxprocesses 8 --timeout 600 "$@"
