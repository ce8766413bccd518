#!/bin/sh
# Fetch the modules of the dashboard's page that others wrote, and compare them with what was reviewed.
# The page is served as it is in the repository: nobody needs npm to run, install or change it.
set -eu
target=$(cd "$(dirname "$0")/../dashboard/static/vendor" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

# fetch NAME VERSION SHA256: unpack a package of the registry into the folder NAME.
fetch() {
  npm pack --silent "$1@$2" >/dev/null
  echo "$3  $1-$2.tgz" | sha256sum --check --quiet
  mkdir "$1"
  tar -xzf "$1-$2.tgz" -C "$1" --strip-components=1
}

fetch htm 3.1.1 2425b9bee11409177bcabc7f32e319926fc6690c1701c0b257c88bdff2d5ba90
cp htm/preact/standalone.module.js "$target/htm-preact.js"
cp htm/LICENSE "$target/LICENSE-htm"

# The smallest build of uPlot is a classic script, which the page's policy does not let another script load:
# one more line makes it a module.
fetch uplot 1.6.32 4b8a8191e425658e3ea8c8c1314b0fc679c861ee3a1af2b20c7b16ba50b5133d
{ cat uplot/dist/uPlot.iife.min.js; echo "export default uPlot;"; } >"$target/uplot.js"
cp uplot/dist/uPlot.min.css "$target/uplot.css"
cp uplot/LICENSE "$target/LICENSE-uplot"

fetch marked 18.2.1 d66c5213fc203466186060105b01f51896764ba64b3797d2620d02e28e34b8ca
cp marked/lib/marked.esm.js "$target/marked.js"
cp marked/LICENSE* "$target/LICENSE-marked"

echo "vendored htm 3.1.1 (with Preact), uPlot 1.6.32 and marked 18.2.1 into $target"
