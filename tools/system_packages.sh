#!/usr/bin/env bash
# Make sure that the system packages a target needs are there; install only what is missing.
#
# Usage: tools/system_packages.sh NEED...     NEED: python, tests, shells, sharing, fuzz, benchmark
# Environment: PYTHON, the interpreter that .venv is made from (default python3).
#
# Installs as root, or by `sudo` where that asks no password; otherwise prints the command to run.
set -euo pipefail

PYTHON=${PYTHON:-python3}
CXX=${CXX:-c++}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

missing=()
need() { # need PACKAGE COMMAND...: PACKAGE is missing unless COMMAND succeeds
  local package=$1
  shift
  if [[ " ${missing[*]} " == *" $package "* ]] || "$@" >/dev/null 2>&1; then return; fi
  missing+=("$package")
}

has_header() { printf '#include <%s>\n' "$1" | "$CXX" -E -x c++ -o /dev/null -; }
has_python_header() {
  "$PYTHON" -c 'import os, sys, sysconfig
sys.exit(not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}
clang_fuzzes() {
  printf 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }\n' \
    | clang++ -x c++ -fsanitize=fuzzer,address,undefined -o "$scratch/fuzzer" -
}

check() {
  missing=()
  local what
  for what in "$@"; do
    case $what in
      python)
        need python3 command -v "$PYTHON"
        need python3-dev has_python_header
        need python3-venv "$PYTHON" -c 'import ensurepip, venv'
        need g++ command -v "$CXX"
        ;;
      tests)
        need g++ command -v "$CXX"
        need libgtest-dev has_header gtest/gtest.h
        need zlib1g-dev has_header zlib.h
        ;;
      shells) # without them the tests of completion skip
        need zsh command -v zsh
        need fish command -v fish
        ;;
      sharing) # without it the tests of files that share blocks skip
        need xfsprogs command -v mkfs.xfs
        ;;
      fuzz)
        if command -v clang++ >/dev/null; then
          need "libclang-rt-$(clang++ -dumpversion | cut -d. -f1)-dev" clang_fuzzes
        else
          missing+=(clang)
        fi
        ;;
      benchmark)
        need g++ command -v "$CXX"
        need libdeflate-dev has_header libdeflate.h
        need zlib1g-dev has_header zlib.h
        ;;
      *)
        echo "tools/system_packages.sh: unknown need '$what'" >&2
        exit 2
        ;;
    esac
  done
}

check "$@"
if ((${#missing[@]} == 0)); then exit 0; fi

as_root=()
if (($(id -u) != 0)); then as_root=(sudo -n); fi
command="apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
if ! command -v apt-get >/dev/null || { ((${#as_root[@]})) && ! sudo -n true 2>/dev/null; }; then
  echo "make needs these system packages: ${missing[*]}" >&2
  echo "On Debian or Ubuntu run:  sudo sh -c '$command'" >&2
  exit 1
fi

apt_get() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq "$@" </dev/null >/dev/null; }
apt_get update
previous=
# Once more if that brings up a further need: clang's runtime library is named after its version.
while ((${#missing[@]} > 0)) && [[ ${missing[*]} != "$previous" ]]; do
  echo "Installing system packages: ${missing[*]}"
  apt_get install -y --no-install-recommends "${missing[@]}"
  previous=${missing[*]}
  check "$@"
done
if ((${#missing[@]} > 0)); then
  echo "still missing after the installation: ${missing[*]} (PYTHON=$PYTHON, CXX=$CXX)" >&2
  exit 1
fi
