#!/bin/sh
# Refuses to publish a folder whose version is not that of the tag, which was built from a changed work tree, or whose
# archive for macOS lacks Python or etcd.
#
#     packaging/tag_check.sh FOLDER TAG
set -eu
version=${2#v}
name=mlx-fleet-$version-macos-arm64

fail() {
  echo "error: $*" >&2
  exit 1
}

for file in "mlx_fleet-$version-py3-none-any.whl" "$name.tar" "mlx-fleet-$version.cdx.json"; do
  [ -f "$1/$file" ] ||
    fail "the tag is $2, and $1 has no $file: set project.version in pyproject.toml, and tag that commit"
done
commit=$(tar -xOf "$1/$name.tar" "$name/release.txt" | sed -n 's/^commit=//p')
case $commit in
  '' | *-dirty) fail "the archive was built from the commit '$commit', not from the tag as it is" ;;
esac
for part in python etcd; do
  tar -tf "$1/$name.tar" | grep -q "^$name/$part\.[a-z.]*$" ||
    fail "the archive for macOS has no $part: build it with PARTS (packaging/parts.sh)"
done
