#!/bin/sh
# Downloads the programs of parts.txt into a folder, as PLATFORM-PART.SUFFIX, and compares their hashes.
#
#     packaging/parts.sh FOLDER [PLATFORM...]
#
# A file that is there with the right hash is not downloaded again. PARTS_LIST is a list to read instead of parts.txt.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
list=${PARTS_LIST:-$here/parts.txt}
folder=$1
shift
mkdir -p "$folder"
if command -v shasum >/dev/null; then sha256="shasum -a 256"; else sha256=sha256sum; fi

grep -v '^#' "$list" | while read -r platform part hash url; do
  case " ${*:-$platform} " in *" $platform "*) ;; *) continue ;; esac
  case $url in *.zip) suffix=zip ;; *) suffix=tar.gz ;; esac
  file=$folder/$platform-$part.$suffix
  if ! printf '%s  %s\n' "$hash" "$file" | $sha256 --check --status 2>/dev/null; then
    echo "parts: download $url"
    rm -f "$file"
    curl --proto '=https,file' --tlsv1.2 --fail --silent --show-error --location --retry 3 --connect-timeout 20 \
      --max-time 600 --output "$file.new" "$url" || { echo "error: parts: $url cannot be downloaded" >&2; exit 1; }
    printf '%s  %s\n' "$hash" "$file.new" | $sha256 --check --status || {
      echo "error: parts: $url has the SHA-256 $($sha256 <"$file.new" | cut -d ' ' -f 1), and $list says $hash. Do not use it" >&2
      exit 1
    }
    mv "$file.new" "$file"
  fi
  echo "parts: $file"
done
