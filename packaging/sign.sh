#!/bin/sh
# Signs SHA256SUMS of a folder with the private key of OpenSSH on standard input, and writes SHA256SUMS.sig.
#
#     packaging/sign.sh FOLDER ALLOWED_SIGNERS <KEY
#
# Then it verifies the signature as a stranger does, with the public keys in ALLOWED_SIGNERS. ssh-keygen is a part of
# macOS. The key touches the disk for an instant, in a folder that only this user can read, and no command line.
set -eu
umask 077
signers=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
secret=$(mktemp -d)
trap 'rm -rf "$secret"' EXIT
trap 'exit 130' INT TERM HUP
cat >"$secret/key"
ssh-keygen -y -P '' -f "$secret/key" >/dev/null 2>&1 || {
  echo "error: sign: standard input is not a private key of OpenSSH without a passphrase" >&2
  exit 1
}
cd "$1"
rm -f SHA256SUMS.sig
ssh-keygen -q -Y sign -n mlx-fleet-release -f "$secret/key" SHA256SUMS
chmod 644 SHA256SUMS.sig
ssh-keygen -Y verify -f "$signers" -I release@mlx-fleet -n mlx-fleet-release -s SHA256SUMS.sig <SHA256SUMS || {
  rm -f SHA256SUMS.sig
  echo "error: sign: the key is not in $signers: strangers could not verify this release" >&2
  exit 1
}
