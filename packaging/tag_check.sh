#!/bin/sh
# Refuses to publish a folder whose version is not that of the tag, or whose archives lack Python or etcd.
#
#     packaging/tag_check.sh FOLDER TAG
set -eu
version=${2#v}
for file in "mlx_fleet-$version-py3-none-any.whl" "mlx-fleet-$version-macos-arm64.tar" "mlx-fleet-$version.cdx.json"; do
  [ -f "$1/$file" ] || {
    echo "error: the tag is $2, and $1 has no $file: set project.version in pyproject.toml, and tag that commit" >&2
    exit 1
  }
done
for part in python etcd; do
  tar -tf "$1/mlx-fleet-$version-macos-arm64.tar" | grep -q "/$part\.[a-z.]*$" || {
    echo "error: the archive for macOS has no $part: build it with PARTS (packaging/parts.sh)" >&2
    exit 1
  }
done
