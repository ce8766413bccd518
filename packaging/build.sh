#!/bin/sh
# Builds the wheel, the sdist and the installer of the current work tree into a folder, with an SBOM and SHA256SUMS.
#
#     packaging/build.sh OUT PYTHON UV [CYCLONEDX]
#
# PYTHON has mlx-fleet's dependencies; without CYCLONEDX (the program cyclonedx-py) there is no SBOM. The wheel says its
# commit and carries the lock files, so that `fleetctl bundle create` needs nothing else. Same commit, same bytes.
# RELEASE_URL is the folder that the Homebrew formula downloads from; by default OUT on this machine.
# ARCHIVES names platforms to write archives for, with all packages (macos-arm64, linux-x86_64). PARTS is the folder of
# packaging/parts.sh: Python and etcd for them.
set -eu
umask 022
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd) python=$2 uv=$3 sbom=${4-}
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

# The work tree without ignored files: a commit that was not pushed is built as well, and marked if it is not clean.
cd "$root"
git ls-files -z --cached --others --exclude-standard -- . ':!tests' ':!docs' ':!bench' ':!.*' ':!requirements*' |
  tar -c -f - --null -T - | tar -x -f - -C "$tree"
commit=$(git rev-parse --short=12 HEAD)
test -z "$(git status --porcelain)" || commit="$commit-dirty"
echo "$commit" >"$tree/machinery/commit.txt"
cp requirements.txt requirements-build.txt "$tree/fleetctl/bundle/"

rm -f "$out"/mlx_fleet-* "$out"/mlx-fleet-* "$out"/SHA256SUMS*
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
"$uv" build --quiet --no-config --python "$python" --build-constraints requirements-build.txt --require-hashes \
  --out-dir "$out" "$tree"
rm -f "$out/.gitignore"
wheel=$(ls "$out"/mlx_fleet-*.whl)
version=${wheel##*/mlx_fleet-}
version=${version%%-*}
PYTHONPATH=$tree "$python" -P -m fleetctl bundle create --online --wheel "$wheel" --out "$out/mlx-fleet-$version.tar"
for platform in ${ARCHIVES-}; do
  set --
  for part in python etcd; do
    for file in "${PARTS-}/$platform-$part".*; do
      [ -z "${PARTS-}" ] || [ ! -f "$file" ] || set -- "$@" "--$part-archive" "$file"
    done
  done
  PYTHONPATH=$tree "$python" -P -m fleetctl bundle create --platform "$platform" --wheel "$wheel" \
    --out "$out/mlx-fleet-$version-$platform.tar" "$@"
done
if [ -n "$sbom" ]; then
  PYTHONWARNINGS=ignore "$sbom" requirements --output-reproducible --pyproject pyproject.toml --validate \
    --output-file "$out/mlx-fleet-$version.cdx.json" requirements.txt
fi
cd "$out"
if command -v shasum >/dev/null; then sha256="shasum -a 256"; else sha256=sha256sum; fi
sum=$($sha256 "mlx-fleet-$version.tar" | cut -d ' ' -f 1)
url=${RELEASE_URL:-file://$out}/mlx-fleet-$version.tar
sed -e "s|@URL@|$url|" -e "s|@VERSION@|$version|" -e "s|@SHA256@|$sum|" "$root/packaging/homebrew/mlx-fleet.rb" >mlx-fleet.rb
$sha256 mlx_fleet-* mlx-fleet-* mlx-fleet.rb >SHA256SUMS
ls -l "$out"
