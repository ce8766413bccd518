"""A whole fleet whose processes all speak to etcd over its JSON gateway: etcd3-py's way."""

import json
from pathlib import Path

import pytest

from tests.support.fleet import Fleet
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.waiting import until_async

HTTP = ("--etcd-transport", "http")
MANIFEST = """\
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: tiny}
spec: {model: {path: tiny}, contextLength: 512}
"""


@pytest.mark.ci
@pytest.mark.fleet
@pytest.mark.etcd
@pytest.mark.timeout(240)
async def test_a_fleet_over_the_json_gateway(tmp_path: Path, models_dir: Path) -> None:
    async with TcpEtcd(tmp_path) as etcd:
        fleet = Fleet(tmp_path, models_dir, etcd=etcd)
        try:
            fleet.start_reconciler(*HTTP)
            fleet.start_agent("mac-1", *HTTP)
            fleet.start_gateway(*HTTP)
            await fleet.joined(1)
            applied = await fleet.ctl("apply", "-f", "-", *HTTP, stdin=MANIFEST.encode())
            assert applied.code == 0, applied.err
            await fleet.available("tiny", limit_s=120)
            await fleet.routed("tiny", 1)
            asked = await fleet.ctl("chat", "tiny", "-m", "hello", "--max-tokens", "4", *HTTP)
            assert asked.code == 0, asked.err
            assert asked.out.strip()
            scaled = await fleet.ctl("scale", "md/tiny", "--replicas=0", *HTTP)
            assert scaled.code == 0, scaled.err

            async def is_empty() -> bool:
                shown = await fleet.ctl("get", "replicas,endpoints", "-o", "json", *HTTP)
                assert shown.code == 0, shown.err
                return not json.loads(shown.out)["items"]

            await until_async(is_empty, limit_s=60, what="the replica to end")
            logs = "\n".join(log.read_text() for log in tmp_path.glob("logs/*.log"))
            assert "Traceback" not in logs
        finally:
            await fleet.stop()
