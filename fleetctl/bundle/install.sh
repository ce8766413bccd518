#!/bin/sh
# Installs the mlx-fleet of this folder below PREFIX, as versions/VERSION with a link `current`, or moves that link.
# A version is complete or is not used: the link moves last, in one step. See docs/install.md.
set -eu
umask 022
LC_ALL=C
export LC_ALL

usage() {
  cat <<'END'
usage: install.sh [OPTIONS]                 install the version of this folder, and use it
       install.sh [OPTIONS] --use VERSION   use a version that is installed already (upgrade, rollback)
       install.sh [OPTIONS] --list          show the installed versions
       install.sh [OPTIONS] --uninstall     remove all versions; models and data stay

  --prefix DIR     default: where this script is installed; in an archive /opt/mlx-fleet as root, else a folder in your home
  --link-dir DIR   where the programs are linked; default: /usr/local/bin as root, ~/.local/bin, or PREFIX/bin with --prefix
  --keep-current   install beside the version in use, and go on using that one
  --python FILE    the Python to use, instead of the one in this folder or one that uv downloads
  --uv FILE        the uv to use, instead of the one in this folder or on PATH
END
}

say() { printf '%s\n' "$*"; }

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Print a field of release.txt.
field() { sed -n "s/^$1=//p" "$here/release.txt"; }

check_mac() {
  if [ "$(sysctl -n sysctl.proc_translated 2>/dev/null || echo 0)" = 1 ]; then
    fail "this shell runs under Rosetta, where MLX does not exist. Run: arch -arm64 /bin/sh $0"
  fi
  [ "$(uname -m)" = arm64 ] ||
    fail "this Mac has a $(uname -m) processor; MLX needs Apple silicon. Use a Mac with an M1 or newer"
  macos=$(sw_vers -productVersion)
  case ${macos%%.*} in
    '' | *[!0-9]*) fail "sw_vers says macOS '$macos', which is no version. Check: sw_vers -productVersion" ;;
  esac
  [ "${macos%%.*}" -ge 14 ] ||
    fail "this Mac has macOS $macos; mlx needs macOS 14 or newer. Update in System Settings > General > Software Update"
  mlx_system=${macos%%.*}.0
  case $macos in
    # MLX's wheel for macOS 26 needs 26.2, which its name cannot say (mlx#4525).
    26 | 26.[01] | 26.[01].*)
      mlx_system=15.0
      say "warning: this Mac has macOS $macos. It gets MLX's build for macOS 15: RDMA and the neural accelerators of an M5 need macOS 26.2. Update, and run this script again"
      ;;
  esac
}

# Refuse a machine that cannot run the packages of this folder.
check_machine() {
  system=$(uname -s)
  case $system in
    Darwin) check_mac ;;
    Linux) ;;
    *) fail "$system is not supported; mlx-fleet runs on macOS on Apple silicon, and on Linux for trials" ;;
  esac
  case $platform in
    any) ;;
    macos-arm64) [ "$system" = Darwin ] || fail "this archive is for macOS; create one with: --platform linux-x86_64" ;;
    linux-x86_64)
      [ "$system $(uname -m)" = "Linux x86_64" ] ||
        fail "this archive is for Linux on x86_64, and this is $system on $(uname -m); create one with: --platform macos-arm64"
      ;;
    *) fail "release.txt names the platform '$platform', which this script does not know. Get the archive again" ;;
  esac
}

# Print how many KiB an installation takes: unpacked and compiled, packages are four times their wheels.
needed_kib() {
  if [ "$platform" = any ]; then
    echo 2097152
  else
    size=$(du -sk "$here" | cut -f 1)
    echo $((size * 4))
  fi
}

check_disk() {
  folder=$prefix
  while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
  free=$(df -Pk "$folder" | awk 'NR == 2 { print $4 }')
  needed=$(needed_kib)
  [ "$free" -ge "$needed" ] ||
    fail "$folder has $((free / 1024)) MiB free, and $((needed / 1024)) MiB are needed. Free some space, or give another --prefix"
}

# macOS has shasum; its newer sha256sum takes other flags than Linux's.
sha256() { if command -v shasum >/dev/null; then shasum -a 256 "$@"; else sha256sum "$@"; fi; }

# Refuse a folder with a file that SHA256SUMS does not list, or lists with other bytes. What Finder adds is not used.
check_files() {
  cd "$here"
  [ -z "$(find . -type l)" ] || fail "$here has symbolic links, which the archive has not: $(find . -type l). Unpack it again"
  find . -type f ! -name SHA256SUMS ! -name .DS_Store ! -name '._*' ! -name "Icon$(printf '\r')" | sed 's|^\./||' | sort >"$scratch/found"
  sed 's/^[0-9a-f]*  //' SHA256SUMS | sort >"$scratch/listed"
  cmp -s "$scratch/found" "$scratch/listed" ||
    fail "the files of $here are not those of its SHA256SUMS: $(diff "$scratch/listed" "$scratch/found" | grep '^[<>]' | tr '\n' ' '). Unpack the archive again"
  sha256 --check SHA256SUMS >"$scratch/checked" 2>&1 ||
    fail "changed since the archive was made: $(grep FAILED "$scratch/checked" | tr '\n' ' '). Get the archive again, and compare its SHA-256"
  cd "$prefix"
}

# Gatekeeper does not start a downloaded program without a notarised signature, and asks in a window that ssh never shows.
# The files are those of SHA256SUMS, so this takes the mark of the download from them.
clear_quarantine() {
  is_quarantined || return 0
  say "step: remove com.apple.quarantine, the mark of a download, from $here"
  xattr -dr com.apple.quarantine "$here" || true
  ! is_quarantined ||
    fail "$here is marked as a download, and macOS does not start its programs. Unpack the archive with tar in Terminal, or run: sudo xattr -dr com.apple.quarantine '$here'"
}

is_quarantined() {
  [ "$system" = Darwin ] || return 1
  for one in "$here/install.sh" "$here/bin/uv" "$here/python.tar.gz"; do
    if [ -f "$one" ] && xattr -p com.apple.quarantine "$one" >/dev/null 2>&1; then return 0; fi
  done
  return 1
}

# One installation at a time. The lock is a link to the number of the process that holds it; one that is gone does not count.
take_lock() {
  mkdir -p "$prefix" 2>/dev/null || fail "cannot create $prefix. Use sudo, or give another --prefix"
  [ -w "$prefix" ] || fail "cannot write to $prefix. Use sudo, or give another --prefix"
  owner=$(readlink "$prefix/.lock" || true)
  if [ -n "$owner" ] && kill -0 "$owner" 2>/dev/null; then
    fail "another installation (process $owner) works in $prefix. Wait for it, or end it"
  fi
  [ -z "$owner" ] || rm -f "$prefix/.lock"
  ln -s $$ "$prefix/.lock" 2>/dev/null || fail "another installation works in $prefix. Wait for it"
  scratch=$prefix/.install
  trap 'rm -rf "$scratch" "$prefix/.lock"' EXIT
  trap 'exit 130' INT TERM HUP
  rm -rf "$scratch"
  mkdir "$scratch"
}

find_uv() {
  if [ -z "$uv" ] && [ -f "$here/bin/uv" ]; then
    uv=$here/bin/uv
  elif [ -z "$uv" ]; then
    # sudo's PATH has no folder of Homebrew.
    uv=$(PATH=$PATH:/opt/homebrew/bin:/usr/local/bin command -v uv) || fail "uv was not found. Install it (brew install uv), or give its path with --uv FILE"
  fi
  "$uv" --version >/dev/null 2>&1 || fail "$uv does not run on this machine. Give another one with --uv FILE"
}

# uv must use nothing from a home folder, and nothing that the environment says about other projects.
isolate_uv() {
  unset PYTHONPATH PYTHONHOME VIRTUAL_ENV UV_PYTHON UV_PROJECT_ENVIRONMENT UV_CONSTRAINT UV_OVERRIDE UV_TARGET
  UV_CACHE_DIR=$scratch/cache UV_PYTHON_INSTALL_DIR=$prefix/python UV_TOOL_DIR=$prefix/tools
  UV_NO_CONFIG=1 UV_LINK_MODE=copy UV_PYTHON_PREFERENCE=only-managed UV_NO_PROGRESS=1
  if [ -n "$mlx_system" ]; then
    MACOSX_DEPLOYMENT_TARGET=$mlx_system
    export MACOSX_DEPLOYMENT_TARGET
  fi
  export UV_CACHE_DIR UV_PYTHON_INSTALL_DIR UV_TOOL_DIR UV_NO_CONFIG UV_LINK_MODE UV_PYTHON_PREFERENCE UV_NO_PROGRESS
  if [ "$platform" != any ]; then
    UV_OFFLINE=1 UV_NO_INDEX=1
    export UV_OFFLINE UV_NO_INDEX
  fi
}

# Unpack NAME.tar.gz, and set $shared to its folder. Versions with the same file share it: the application firewall of
# macOS knows a program by its path.
unpack_shared() {
  shared=$prefix/$1/$(sha256 <"$here/$1.tar.gz" | cut -c 1-16)
  if [ -d "$shared" ]; then return; fi
  say "step: unpack $1"
  mkdir "$scratch/$1"
  tar -xzof "$here/$1.tar.gz" -C "$scratch/$1" || fail "$1.tar.gz cannot be unpacked. Is the disk full?" # -o: files belong to us
  sync
  mkdir -p "$prefix/$1"
  mv "$scratch/$1" "$shared"
}

# Set $python to the Python of this version, or to what uv shall look for.
choose_python() {
  wanted=$(field python)
  if [ -n "$python" ]; then
    UV_PYTHON_PREFERENCE=system
    case $(id -u):$python in
      0:/Users/* | 0:/home/*) say "warning: services will run $python, which the owner of that home can change" ;;
    esac
  elif [ -f "$here/python.tar.gz" ]; then
    unpack_shared python
    python=$shared/python/bin/python3
    UV_PYTHON_PREFERENCE=system
  elif [ "$platform" != any ]; then
    fail "this archive has no Python. Give one with --python FILE (a Python $wanted), or create the archive with --python-archive"
  else
    python=$wanted
    return
  fi
  found=$("$python" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    fail "$python does not run on this machine. Give a Python $wanted with --python FILE"
  [ "$platform" = any ] || [ "$found" = "$wanted" ] ||
    fail "$python is Python $found, and the packages of this archive are for $wanted. Give another one with --python FILE"
}

install_packages() {
  say "step: create the environment"
  "$uv" venv --quiet --allow-existing --python "$python" "$target" ||
    fail "no environment could be made with Python '$python'. Give a Python $wanted with --python FILE"
  say "step: install the packages"
  install_wheels
  # etcd 3.5.1 must not hide a sound etcd on PATH; fleetctl up finds its own.
  rm -f "$target/bin/etcd" "$target/bin/etcdctl" "$target/bin/etcdutl"
  if [ -f "$here/etcd.tar.gz" ]; then
    unpack_shared etcd
    ln -s "$shared"/etcd* "$target/bin"
  fi
  cp "$uv" "$target/bin/uv"
  cp "$here/install.sh" "$target/install.sh"
}

# Arguments are further flags of uv. The version of macOS decides which builds of MLX fit (MACOSX_DEPLOYMENT_TARGET).
install_wheels() {
  [ -z "$mlx_system" ] || set -- "$@" --python-platform aarch64-apple-darwin
  "$uv" pip install --quiet --python "$target/bin/python" --require-hashes --no-deps --only-binary :all: \
    --compile-bytecode --find-links "$here/wheels" --requirement "$here/requirements.txt" "$@" ||
    fail "the packages could not be installed. The message above says why; $prefix/current is what it was"
  [ -z "$mlx_system" ] || echo "$mlx_system" >"$target/.mlx-system"
}

# Put the version into its folder, and mark it as complete.
install_version() {
  sum=$(sha256 <"$here/SHA256SUMS" | cut -d ' ' -f 1)
  if [ -f "$target/.complete" ]; then
    [ "$(cat "$target/.complete")" = "$sum" ] ||
      fail "$target was installed from another archive. Give this one another version, or remove that folder if it is not in use"
    if [ "$(cat "$target/.mlx-system" 2>/dev/null)" != "$mlx_system" ]; then
      say "step: install MLX's build for this macOS"
      find_uv
      isolate_uv
      install_wheels --reinstall-package mlx --reinstall-package mlx-metal
      say "engines use it when they start again"
    fi
    return
  fi
  check_disk
  find_uv
  isolate_uv
  say "step: prepare $target"
  rm -rf "$target"
  mkdir -p "$target"
  choose_python
  install_packages
  say "step: try it"
  shown=$("$target/bin/fleetctl" --version) ||
    fail "the installed fleetctl does not run. $prefix/current is what it was; please report the message above"
  case "$shown" in
    "fleetctl: $version" | "fleetctl: $version ("*) ;;
    *) fail "the installed fleetctl says '$shown' instead of $version. $prefix/current is what it was" ;;
  esac
  sync
  echo "$sum" >"$target/.complete.new"
  mv "$target/.complete.new" "$target/.complete"
}

# Make a version current. rename(2) replaces the link in one step; `mv` follows it on macOS.
use_version() {
  [ -f "$prefix/versions/$1/.complete" ] ||
    fail "version $1 is not installed in $prefix. Installed: $(list_versions | tr '\n' ' ')"
  if [ "$(readlink "$prefix/current" 2>/dev/null)" = "versions/$1" ]; then
    say "mlx-fleet $1 is in use in $prefix; nothing to do"
  else
    say "step: use $1"
    ln -s "versions/$1" "$scratch/current"
    "$prefix/versions/$1/bin/python" -I -c 'import os, sys; os.replace(*sys.argv[1:])' "$scratch/current" "$prefix/current"
    sync
    say "mlx-fleet $1 is in use in $prefix"
  fi
  link_programs
}

# Link both names of the program: company Macs may have another product's fleetctl.
link_programs() {
  for name in fleetctl mlx-fleet; do
    link=$link_dir/$name
    if [ "$(readlink "$link" 2>/dev/null)" = "$prefix/current/bin/$name" ]; then
      continue
    fi
    if [ -e "$link" ] || [ -L "$link" ]; then
      say "warning: $link is something else and stays; mlx-fleet's is $prefix/current/bin/$name"
    elif ! { mkdir -p "$link_dir" && ln -s "$prefix/current/bin/$name" "$link"; } 2>/dev/null; then
      say "warning: cannot write $link; mlx-fleet's is $prefix/current/bin/$name"
    fi
  done
  case ":$PATH:" in
    *":$link_dir:"*) ;;
    *) [ ! -L "$link_dir/mlx-fleet" ] || say "add it to your shell's PATH: export PATH=\"$link_dir:\$PATH\"" ;;
  esac
}

list_versions() {
  for one in "$prefix"/versions/*/.complete; do
    [ -f "$one" ] || continue
    name=${one%/.complete}
    say "${name##*/}"
  done
}

show_versions() {
  used=$(readlink "$prefix/current" 2>/dev/null || true)
  list_versions | while read -r one; do
    if [ "versions/$one" = "$used" ]; then say "$one (current)"; else say "$one"; fi
  done
}

# Print the prefix that this script is installed in, by the name that it was called by; nothing in an unpacked archive.
own_prefix() {
  at=$(cd "$(dirname "$0")" && pwd)
  [ -f "$at/.complete" ] || return 0
  case $at in
    */current) say "${at%/current}" ;;
    */versions/*) say "${at%/versions/*}" ;;
  esac
}

uninstall() {
  for running in versions current python etcd; do
    if ps -axww -o args= | grep -F "$prefix/$running/" | grep -v -e grep -e install.sh >"$scratch/running"; then
      fail "processes run from $prefix: $(head -n 3 "$scratch/running" | cut -c 1-120). Stop them first (fleetctl down)"
    fi
  done
  for name in fleetctl mlx-fleet; do
    if [ "$(readlink "$link_dir/$name" 2>/dev/null)" = "$prefix/current/bin/$name" ]; then
      rm -f "$link_dir/$name"
    fi
  done
  rm -rf "$prefix/current" "$prefix/versions" "$prefix/python" "$prefix/etcd" "$prefix/tools"
  say "removed the programs in $prefix; models and data of fleets stay"
}

here=$(cd "$(dirname "$0")" && pwd -P)
# In a home, `mlx-fleet` is the data folder of fleetctl up, which only its owner may read.
prefix='' link_dir='' mlx_system='' python='' uv='' action=install chosen='' keeps=''
while [ $# -gt 0 ]; do
  case $1 in
    --prefix | --link-dir | --python | --uv | --use)
      [ $# -ge 2 ] || fail "$1 needs a value. See: $0 --help"
      case $1 in
        --prefix) prefix=$2 ;;
        --link-dir) link_dir=$2 ;;
        --python) python=$2 ;;
        --uv) uv=$2 ;;
        --use) action=use chosen=$2 ;;
      esac
      shift
      ;;
    --keep-current) keeps=yes ;;
    --list) action=list ;;
    --uninstall) action=uninstall ;;
    -h | --help) usage && exit 0 ;;
    *) fail "unknown option $1. See: $0 --help" ;;
  esac
  shift
done
if [ "$(id -u)" = 0 ]; then
  usual=/opt/mlx-fleet usual_links=/usr/local/bin
elif [ "$(uname -s)" = Darwin ]; then
  usual="$HOME/Library/Application Support/mlx-fleet-programs" usual_links=$HOME/.local/bin
else
  usual=$HOME/.local/share/mlx-fleet-programs usual_links=$HOME/.local/bin
fi
given=$prefix
prefix=${given:-$(own_prefix)}
prefix=${prefix:-$usual}
if [ -n "$given" ] || [ "$prefix" != "$usual" ]; then usual_links=$prefix/bin; fi
link_dir=${link_dir:-$usual_links}
for one in "$prefix" "$link_dir" "${python:-/}" "${uv:-/}"; do
  case $one in /*) ;; *) fail "$one: give a full path, which starts with /" ;; esac
done
case $chosen in */* | .*) fail "--use $chosen: expected a version, such as 0.1.0" ;; esac

case $action in
  list) show_versions ;;
  use)
    take_lock
    use_version "$chosen"
    ;;
  uninstall)
    [ -d "$prefix/versions" ] || fail "nothing is installed in $prefix. Give the folder with --prefix DIR"
    take_lock
    uninstall
    ;;
  install)
    [ -f "$here/release.txt" ] ||
      fail "$here is not an unpacked archive of mlx-fleet; an installed one takes --use, --list or --uninstall"
    version=$(field version) platform=$(field platform)
    target=$prefix/versions/$version
    check_machine
    take_lock
    check_files
    clear_quarantine
    install_version
    if [ -n "$keeps" ] && [ -L "$prefix/current" ]; then
      say "mlx-fleet $version is installed in $prefix, beside $(readlink "$prefix/current" | sed 's|^versions/||')"
    else
      use_version "$version"
    fi
    ;;
esac
