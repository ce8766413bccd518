#!/bin/bash
# Builds a release as CI does, signs it with a throw-away key, verifies it as a stranger, and installs it for a clean user.
#
#     packaging/release_check.sh OUT PYTHON UV CYCLONEDX
#
# OUT must not exist or be a release. The user is `nobody` where root runs this, else you; a home folder of its own, and
# an environment with nothing but PATH and what package managers need to reach their index. What needs GitHub is left
# out: Python and etcd in the archives (set PARTS to a folder of packaging/parts.sh to have them), the upload.
set -euo pipefail
umask 022
here=$(cd "$(dirname "$0")" && pwd)
out=$1 python=$2 uv=$3 cyclonedx=$4
case $(uname -sm) in
  'Darwin arm64') platform=macos-arm64 ;;
  'Linux x86_64') platform=linux-x86_64 ;;
  *) echo "error: release-check: no archive is for $(uname -sm)" >&2 && exit 1 ;;
esac

step() { printf 'release-check: %4d s  %s\n' "$SECONDS" "$*"; }
fail() { printf 'error: release-check: %s\n' "$*" >&2 && exit 1; }
# Print the lines of a command only if it fails.
quietly() { "$@" >"$scratch/log" 2>&1 || { tail -n 40 "$scratch/log" >&2; fail "failed: $*"; }; }

# Short: sockets of a fleet are below the home.
scratch=$(mktemp -d /tmp/mlx-fleet-check.XXXXXX)
chmod 755 "$scratch"
cleanup() {
  status=$?
  [ ! -x "$scratch/home/.local/bin/mlx-fleet" ] || as_user "$scratch/home/.local/bin/mlx-fleet" down >/dev/null 2>&1 || true
  rm -rf "$scratch"
  exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT TERM HUP

# Run a command as the clean user.
as_user() {
  local variables=(HOME="$home" PATH="$home/.local/bin:/usr/local/bin:/usr/bin:/bin" UV_PYTHON_DOWNLOADS=never TMPDIR="$home/tmp")
  local name
  for name in UV_SYSTEM_CERTS UV_DEFAULT_INDEX PIP_CERT PIP_INDEX_URL PIP_FIND_LINKS SSL_CERT_FILE; do
    [ -z "${!name-}" ] || variables+=("$name=${!name}")
  done
  (cd "$home" && ${become[@]+"${become[@]}"} env -i "${variables[@]}" "$@")
}

step "build the wheel, the sdist, the installer, the archives of both platforms, the SBOM and the formula"
ARCHIVES="macos-arm64 linux-x86_64" "$here/build.sh" "$out" "$python" "$uv" "$cyclonedx" 2>&1 |
  sed 's/^/release-check:         /' || fail "packaging/build.sh failed; the lines above say why"
out=$(cd "$out" && pwd)
wheel=$(ls "$out"/mlx_fleet-*.whl)
version=${wheel##*/mlx_fleet-} version=${version%%-*}

step "sign SHA256SUMS with a throw-away key"
quietly ssh-keygen -q -t ed25519 -N '' -C release@mlx-fleet -f "$scratch/key"
printf 'release@mlx-fleet namespaces="mlx-fleet-release" %s\n' "$(cat "$scratch/key.pub")" >"$scratch/signers"
quietly "$here/sign.sh" "$out" "$scratch/signers" <"$scratch/key"

step "verify as a stranger: signature, hashes, formula; a changed file must be refused"
if command -v shasum >/dev/null; then sha256=(shasum -a 256); else sha256=(sha256sum); fi
(cd "$out" && quietly "${sha256[@]}" --check SHA256SUMS)
listed=$(sed 's/^[0-9a-f]*  //' "$out/SHA256SUMS" | sort | tr '\n' ' ')
present=$(cd "$out" && find . -type f ! -name 'SHA256SUMS*' | sed 's|^\./||' | sort | tr '\n' ' ')
[ "$listed" = "$present" ] || fail "SHA256SUMS lists $listed, and $out holds $present"
(sed 's/^./0/' "$out/SHA256SUMS" | ssh-keygen -Y verify -f "$scratch/signers" -I release@mlx-fleet \
  -n mlx-fleet-release -s "$out/SHA256SUMS.sig" >/dev/null 2>&1) && fail "a changed SHA256SUMS passes the signature"
grep -q "$(grep "mlx-fleet-$version.tar\$" "$out/SHA256SUMS" | cut -d ' ' -f 1)" "$out/mlx-fleet.rb" ||
  fail "the formula does not have the hash of mlx-fleet-$version.tar"
if command -v ruby >/dev/null; then quietly ruby -c "$out/mlx-fleet.rb"; else step "  no ruby here: the formula is not parsed"; fi
"$python" -P - "$out/mlx-fleet-$version.cdx.json" "$here/../requirements.txt" <<'PY' || fail "the SBOM lacks packages"
import json, re, sys
known = {part["name"].lower() for part in json.load(open(sys.argv[1]))["components"]}
locked = {match[1].lower() for match in re.finditer(r"(?m)^([\w.-]+)==", open(sys.argv[2]).read())}
print(f"release-check:         the SBOM names {len(known)} packages")
sys.exit(f"not in the SBOM: {sorted(locked - known)}" if locked - known or not locked else 0)
PY

"$python" -P - "$wheel" "$here/.." <<'PY' || fail "the wheel lacks files that pyproject.toml names as its data"
import pathlib, sys, tomllib, zipfile
root, packed = pathlib.Path(sys.argv[2]), set(zipfile.ZipFile(sys.argv[1]).namelist())
data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
folders = {name: root / name.replace(".", "/") for name in data}
files = {path.relative_to(root).as_posix() for name, folder in folders.items() for glob in data[name] for path in folder.glob(glob + "/*" * glob.endswith("**")) if path.is_file()}
print(f"release-check:         the wheel has {len(files)} files of data")
sys.exit(f"not in the wheel: {sorted(files - packed)}" if files - packed or not files else 0)
PY

home=$scratch/home become=()
mkdir -p "$home/.local/bin" "$home/tmp" "$home/release"
cp "$uv" "$home/.local/bin/uv"
cp "$wheel" "$out/mlx-fleet-$version-$platform.tar" "$home/release/"
base=$("$python" -c 'import sys; print(sys._base_executable)')
if [ "$(id -u)" = 0 ]; then
  if command -v setpriv >/dev/null; then become=(setpriv --reuid=nobody --regid="$(id -g nobody)" --clear-groups); else become=(sudo -u nobody); fi
  chown -R nobody "$home"
  # A Python below /root is not for others.
  if ! as_user "$base" -c 'import ensurepip' 2>/dev/null; then
    minor=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    if as_user "$minor" -c 'import ensurepip' 2>/dev/null; then
      base=$(PATH=/usr/local/bin:/usr/bin:/bin command -v "$minor")
    else
      step "  nobody can run no $minor here: root is the clean user"
      become=()
      chown -R "$(id -u)" "$home"
    fi
  fi
fi
port=$("$python" -c 'import random; print(random.randrange(20000, 30000))')

step "clean user $(as_user id -un): uv tool install, from the wheel alone"
quietly as_user uv tool install --quiet --python "$base" "$home/release/${wheel##*/}"
for name in mlx-fleet fleetctl; do
  shown=$(as_user "$name" --version)
  case $shown in "fleetctl: $version"*) ;; *) fail "$name --version says '$shown'" ;; esac
done
step "the demo, with the model from PyPI"
quietly as_user mlx-fleet demo --once --port "$port"
grep -q "The capital of France is Paris" "$scratch/log" || { cat "$scratch/log" >&2; fail "the demo gave no right answer"; }
quietly as_user uv tool uninstall mlx-fleet

step "clean user: pipx install, from the wheel alone, and the demo"
quietly as_user uv tool install --quiet --python "$base" pipx==1.18.4
quietly as_user pipx install --quiet --python "$base" "$home/release/${wheel##*/}"
quietly as_user mlx-fleet demo --once --port "$port"
grep -q "The capital of France is Paris" "$scratch/log" || { cat "$scratch/log" >&2; fail "the demo gave no right answer"; }
quietly as_user pipx uninstall mlx-fleet

step "clean user: install.sh of the $platform archive, which downloads nothing, and the demo"
quietly as_user tar -xf "release/mlx-fleet-$version-$platform.tar"
unpacked=$home/mlx-fleet-$version-$platform
with_python=()
[ -f "$unpacked/python.tar.gz" ] || with_python=(--python "$base")
quietly as_user "$unpacked/install.sh" ${with_python[@]+"${with_python[@]}"}
quietly as_user mlx-fleet demo --once --port "$port"
grep -q "The capital of France is Paris" "$scratch/log" || { cat "$scratch/log" >&2; fail "the demo gave no right answer"; }
quietly as_user "$unpacked/install.sh" --uninstall
rest=$(find "$home/.local/bin" -name '*fleet*')
[ -z "$rest" ] || fail "uninstalling leaves $rest"
step "done: $out is a release of $version, signed by a throw-away key; do not publish that signature"
