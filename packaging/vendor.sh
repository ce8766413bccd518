#!/bin/sh
# Fetch the modules of the dashboard's page that others wrote, and compare them with what was reviewed.
# The page is served as it is in the repository: nobody needs npm to run, install or change it.
set -eu
target=$(cd "$(dirname "$0")/../dashboard/static/vendor" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm pack --silent htm@3.1.1 >/dev/null
echo "2425b9bee11409177bcabc7f32e319926fc6690c1701c0b257c88bdff2d5ba90  htm-3.1.1.tgz" | sha256sum --check --quiet
tar -xzf htm-3.1.1.tgz
cp package/preact/standalone.module.js "$target/htm-preact.js"
cp package/LICENSE "$target/LICENSE-htm"
echo "vendored htm 3.1.1 (with Preact) into $target"
