#!/bin/sh
# Runs `make wheels` with Debian 13's Python 3.13, gcc 14 and glibc 2.41, in a chroot, as root.
#
#   tools/debian13.sh [ARGUMENT OF tools/wheels...]
#
# The chroot (1 GB) is build/debian13 and stays; the wheel is in build/wheels/debian13/dist.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
chroot=$root/build/debian13

if ! [ -e "$chroot/.complete" ]; then
  command -v debootstrap >/dev/null || apt-get -qq install -y --no-install-recommends debootstrap
  rm -rf "$chroot"
  debootstrap --variant=minbase \
    --include=ca-certificates,g++,git,make,python3,python3-dev,python3-venv trixie "$chroot"
  touch "$chroot/.complete"
fi

# What this machine needs to reach its package index.
cp /etc/resolv.conf "$chroot/etc/"
cp -rT /etc/ssl/certs "$chroot/etc/ssl/certs"
for file in /etc/pip.conf "$HOME/.config/pip/pip.conf"; do
  [ ! -e "$file" ] || cp "$file" "$chroot/etc/pip.conf"
done

# In a mount namespace of its own, so that nothing stays mounted whatever happens.
# Those of a worktree are elsewhere.
git_files=$(cd "$root" && git rev-parse --path-format=absolute --git-common-dir)
mkdir -p "$chroot/ptsave" "$chroot$git_files" "$root/build/wheels"
exec unshare --mount sh -c '
  chroot=$1 root=$2 git_files=$3
  shift 3
  mount --bind "$root" "$chroot/ptsave"
  mount --bind "$git_files" "$chroot$git_files"
  mount -t proc proc "$chroot/proc"
  mount --rbind /dev "$chroot/dev"
  mount --bind /sys "$chroot/sys" 2>/dev/null || true
  exec chroot "$chroot" env HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 \
    sh -c "cd /ptsave && git config --global --replace-all safe.directory \"*\" && exec python3 tools/wheels --dist build/wheels/debian13/dist --python 3.13 \"\$@\"" sh "$@"
' sh "$chroot" "$root" "$git_files" "$@"
