#!/bin/bash
# Installs the archive on a Mac, runs all of it there, and removes it: what CI does on its virtual Macs.
#
#     packaging/check_mac.sh RELEASE OUT
#
# RELEASE holds the archive for macos-arm64; OUT gets the reports of the Mac and the logs, also after a failure. It needs
# sudo without a password, and turns on Remote Login. It changes the machine: run it on one that is thrown away.
set -euo pipefail
mkdir -p "$2"
release=$(cd "$1" && pwd) out=$(cd "$2" && pwd)
[ "$(uname -sm)" = "Darwin arm64" ] || { echo "error: check-mac: needs a Mac with Apple silicon" >&2 && exit 1; }
sudo -n true 2>/dev/null || { echo "error: check-mac: needs sudo without a password" >&2 && exit 1; }

step() { printf 'check-mac: %4d s  %s\n' "$SECONDS" "$*"; }
fail() { printf 'error: check-mac: %s\n' "$*" >&2 && exit 1; }
# Print what an installation may change: power, users, jobs, folders.
machine() {
  pmset -g custom
  dscl . -list /Users UniqueID
  sudo find /Library/LaunchDaemons /Library/Logs/mlx-fleet /opt/mlx-fleet /usr/local/bin -mindepth 1 -maxdepth 1 2>/dev/null | sort || true
}

fleet='' data=$HOME/check-mac-fleet
collect() {
  status=$?
  if [ "$status" != 0 ]; then
    step "failed: collect logs into $out"
    sudo cp -R /Library/Logs/mlx-fleet "$out/service-logs" 2>/dev/null || true
    fleetctl support-bundle --data-dir "$data" --output "$out/support-bundle.tar.gz" >"$out/support-bundle.txt" 2>&1 || true
    sudo chown -R "$(id -u)" "$out"
  fi
  [ -z "$fleet" ] || kill "$fleet" 2>/dev/null || true
}
trap collect EXIT

sw_vers
machine >"$out/machine-before.txt"

step "install from the archive"
work=$(mktemp -d)
archive=$(ls "$release"/mlx-fleet-*-macos-arm64.tar)
tar -xf "$archive" -C "$work"
sudo "$work"/mlx-fleet-*/install.sh
export PATH=/usr/local/bin:$PATH
mlx-fleet version --client
/opt/mlx-fleet/current/bin/python -c 'import mlx.core as mx; assert mx.default_device() == mx.gpu, mx.default_device(); print("Metal:", mx.device_info())'

step "doctor: exit code 0, or 1 for findings"
fleetctl doctor --local -o json >"$out/doctor.json" || [ $? = 1 ] || fail "fleetctl doctor --local broke"

step "one deployment of SmolLM2 on Metal"
fleetctl demo --once | tee "$out/demo.txt"
grep -q Paris "$out/demo.txt" || fail "the demo gave no right answer"

step "a fleet, and this Mac as a node that is added over ssh"
address=$(ipconfig getifaddr "$(route -n get default | awk '/interface:/ { print $2 }')")
fleetctl up --join "$address" --data-dir "$data" --agent-port 4201 --engine-port 4300 >"$out/up.log" 2>&1 &
fleet=$!
for _ in $(seq 60); do
  kill -0 "$fleet" 2>/dev/null || { tail -n 20 "$out/up.log"; fail "fleetctl up ended"; }
  if fleetctl get nodes --data-dir "$data" >/dev/null 2>&1; then break; fi
  sleep 2
done
sudo launchctl load -w /System/Library/LaunchDaemons/ssh.plist 2>/dev/null || true
ssh-keygen -q -t ed25519 -N '' -f "$work/key"
mkdir -p ~/.ssh
cat "$work/key.pub" >>~/.ssh/authorized_keys
chmod -R go= ~/.ssh
host_key=$(sudo ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub | awk '{ print $2 }')
over_ssh=(--data-dir "$data" --identity "$work/key" --host-key "$host_key")
fleetctl node add "$USER@localhost" --bundle "$archive" --name added "${over_ssh[@]}" --join-address "$address:4002"
sudo launchctl print system/io.mlxfleet.nodeagent >"$out/launchctl-print.txt"

step "ten restarts of the service"
for number in 1 2 3 4 5 6 7 8 9 10; do
  sudo fleetctl service restart nodeagent || fail "restart $number"
done
fleetctl service status
fleetctl wait node/added --for=condition=Ready --timeout=2m --data-dir "$data"

step "kill -9: launchd starts the agent again"
before=$(sudo launchctl print system/io.mlxfleet.nodeagent | awk '$1 == "pid" { print $3 }')
sudo kill -9 "$before"
for _ in $(seq 30); do
  after=$(sudo launchctl print system/io.mlxfleet.nodeagent | awk '$1 == "pid" { print $3 }')
  [ -z "$after" ] || [ "$after" = "$before" ] || break
  sleep 1
done
[ -n "$after" ] && [ "$after" != "$before" ] || fail "launchd did not start the agent within 30 s of kill -9"
fleetctl wait node/added --for=condition=Ready --timeout=2m --data-dir "$data"
fleetctl doctor --node added --data-dir "$data" -o json >"$out/doctor-service.json" || [ $? = 1 ] || fail "fleetctl doctor broke"

step "the report"
fleetctl mac-report -o "$out/mac.tar.gz" --sudo || echo "check-mac: the report found differences; a virtual Mac has some"
[ -s "$out/mac.tar.gz" ] || fail "fleetctl mac-report wrote nothing"

step "remove it all"
fleetctl node remove "$USER@localhost" --delete-models "${over_ssh[@]}"
kill "$fleet" && wait "$fleet" || true
fleet=''
# It refuses while a process runs from the prefix, such as an engine.
sudo /opt/mlx-fleet/current/install.sh --uninstall
machine >"$out/machine-after.txt"
diff "$out/machine-before.txt" "$out/machine-after.txt" || fail "the machine is not as it was; the lines above differ"
step "done: $out/mac.tar.gz is the report of this Mac"
