"""Three Macs join the fleet of a fourth with the one line that `fleetctl up --join` prints on its terminal."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from store.etcd.member.binary import sound_binaries, unsafe_users
from tests.support import netns
from tests.support.fleet import model_deployment
from tests.support.netns import Networks
from tests.support.newcomers import Newcomer

AIM_S = 600.0
# Other machines reach no etcd with known holes.
ETCD = next(
    (binary for binary in sound_binaries(os.get_exec_path()) if not unsafe_users(binary.version)),
    None,
)

pytestmark = [
    pytest.mark.ci,
    pytest.mark.fleet,
    pytest.mark.etcd,
    pytest.mark.mlx,
    pytest.mark.timeout(420),
    pytest.mark.skipif(not netns.available(), reason="needs network namespaces"),
    pytest.mark.skipif(ETCD is None, reason="needs an etcd that other machines may reach"),
]

MANIFEST = model_deployment(replicas=4, contextLength=512, placement={"maxReplicasPerNode": 1})


@pytest.fixture
def macs(short_folder: Path, models_dir: Path) -> Iterator[list[Newcomer]]:
    """Yield four machines with names, addresses, ids and files of their own."""
    found = []
    with Networks(4).made() as networks:
        for number in range(4):
            place, home = networks.place(number), short_folder / f"mac-{number + 1}"
            # The agent of `up` reads the first folder, that of a service the second.
            for folder in ("models", ".local/share/mlx-fleet/data/models"):
                shutil.copytree(models_dir / "tiny", home / folder / "tiny")
            (home / "id").write_text(f"{number:032x}\n")
            (home / ".local" / "bin").mkdir(parents=True)
            for program in Path(sys.executable).parent.glob("fleet*"):
                (home / ".local" / "bin" / program.name).symlink_to(program)
            assert ETCD is not None
            (home / ".local" / "bin" / "etcd").symlink_to(ETCD.path)
            own = f'hostname {home.name} && mount --bind {home}/id /etc/machine-id && exec "$@"'
            prefix = (*place.prefix, "unshare", "--uts", "--mount", "sh", "-c", own, "sh")
            found.append(Newcomer(home, place.client_host, prefix))
        try:
            yield found
        finally:
            for mac in found:
                mac.end()


def test_one_line_adds_three_macs(macs: list[Newcomer]) -> None:
    first, *others = macs
    clock = SystemClock()
    begin = clock.monotonic()
    shown = first.type(f"fleetctl up --join {first.address} --detach")
    (join,) = re.findall(r"fleetctl join --service mf1\.\S+ \S+", shown)
    for mac in others:
        assert "joined the fleet" in mac.type(join)
    (first.home / "tiny.yaml").write_text(MANIFEST)
    first.type("fleetctl apply -f tiny.yaml")
    first.type("fleetctl wait md/tiny --for=condition=Available --timeout=180s")
    took_s = clock.monotonic() - begin
    nodes = first.type("fleetctl get endpoints -o custom-columns=NODE:.spec.node --no-headers")
    assert sorted(nodes.split()) == ["mac-2", "mac-3", "mac-4", "node-1"]
    first.type("fleetctl chat tiny -m hello --max-tokens 4")
    print(f"four machines served after {took_s:.0f} s")
    assert took_s < AIM_S
