"""`fleetctl cert`: certificates in the store, their revocation, and the exchange of the authority."""

from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from identity.authority import Authority, load_authorities, load_certificate, read_request
from identity.authority_folder import AuthorityFolder
from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.names import Role
from identity.renewal import Applicant, Renewal
from identity.signing_controller import SigningController
from machinery.clock import SystemClock
from schemas.trust import FleetTrust, TlsMode
from store import codec, keys
from store.errors import PermissionDeniedError
from store.etcd.connect import connect
from tests.support.fleetctl_runner import MemoryFleet, run_fleetctl
from tests.support.identities import handshake
from tests.support.signing import UUID, SigningFleet, node_status, running
from tests.support.store_guarded_etcd import guarded_etcd
from tests.support.waiting import until, until_async

NODE = Applicant(role=Role.NODE, name="mac-1", hardware_uuid=UUID)


@pytest.fixture
async def signing(fleet: MemoryFleet, tmp_path: Path) -> SigningFleet:
    """Return a fleet with an authority whose store fleetctl reaches."""
    signing_fleet = SigningFleet(tmp_path / "signing", clock=SystemClock())
    signing_fleet.store = fleet.store
    await signing_fleet.publish(TlsMode.STRICT)
    return signing_fleet


async def trust(fleet: MemoryFleet) -> FleetTrust:
    item = await fleet.store.get(keys.FLEET_TRUST)
    assert item is not None
    return codec.decode(FleetTrust, item)


async def test_certificates_requests_and_revocations_are_listed(
    fleet: MemoryFleet, signing: SigningFleet
) -> None:
    await signing.join()
    await signing.join(Role.GATEWAY, "edge")
    await signing.ask(signing.identity(name="mac-2"), None)
    done = await fleet.ctl("cert", "revoke", "gateway/edge", "--reason", "stolen")
    assert done.code == 0, done.err
    listed = await fleet.ctl("cert", "list")
    title, node, waiting, revoked = listed.out.splitlines()
    assert title.split() == ["NAME", "STATE", "EXPIRES", "SERIAL", "AUTHORITY"]
    assert node.split()[:4] == ["node/mac-1", "Valid", "in", "29d"]
    assert node.split()[-1] == signing.authority.spki_hash.hex()[:16]
    assert waiting.split() == ["node/mac-2", "Pending"]
    assert revoked.split()[:2] == ["gateway/edge", "Revoked"]
    described = await fleet.ctl("cert", "describe", "node/mac-1")
    assert signing.identity().uri in described.out
    assert UUID in described.out


async def test_an_authority_is_exchanged_in_three_steps(
    fleet: MemoryFleet, signing: SigningFleet
) -> None:
    own = await signing.join()
    rotate = ("cert", "rotate-authority", "--authority-dir", str(signing.folder.path))
    early = await fleet.ctl(*rotate, "--activate")
    assert "no exchange is in progress" in early.err
    begun = await fleet.ctl(*rotate)
    assert begun.code == 0, begun.err
    bundle = (await trust(fleet)).authorities
    old, new = load_authorities(bundle)
    assert old == signing.authority.certificate
    assert (await fleet.ctl(*rotate)).code == 1
    assert "5 minutes to learn" in (await fleet.ctl(*rotate, "--activate")).err
    assert "does not sign yet" in (await fleet.ctl(*rotate, "--finish")).err
    activated = await fleet.ctl(*rotate, "--activate", "--settle", "0s")
    assert activated.code == 0, activated.err
    assert load_authorities((await trust(fleet)).authorities) == (new, old)
    refused = await fleet.ctl(*rotate, "--finish")
    assert refused.code == 1
    assert "1 certificates are by the old authority: node/mac-1" in refused.err
    controller = SigningController(fleet.store, SystemClock(), signing.folder)
    async with running(controller.run()):
        assert await Renewal(fleet.store, SystemClock(), own, NODE).renew()
    load_certificate(own.certificate()).verify_directly_issued_by(new)
    finished = await fleet.ctl(*rotate, "--finish")
    assert finished.code == 0, finished.err
    assert load_authorities((await trust(fleet)).authorities) == (new,)
    assert signing.folder.load().certificate == new
    assert signing.folder.following() is None


async def test_a_mac_without_the_key_cannot_begin_an_exchange(
    fleet: MemoryFleet, signing: SigningFleet, tmp_path: Path
) -> None:
    other = AuthorityFolder(tmp_path / "other")
    other.write(Authority.create(SystemClock().now()))
    done = await fleet.ctl("cert", "rotate-authority", "--authority-dir", str(other.path))
    assert done.code == 1
    assert "has not the key of the authority that signs now" in done.err
    assert (await trust(fleet)).exchange is None


class Pki:
    """An own PKI: a root, and an intermediate authority that signs."""

    def __init__(self, *, is_strict: bool = True) -> None:
        self.is_strict = is_strict
        self.root, root_key = self._authority("Example Root", None)
        self.intermediate, self._key = self._authority("Example Issuing", (self.root, root_key))

    def _authority(
        self, name: str, parent: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None
    ) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer, signer = (subject, key) if parent is None else (parent[0].subject, parent[1])
        builder = self._builder(key.public_key(), timedelta(days=365)).subject_name(subject)
        builder = builder.issuer_name(issuer).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        if self.is_strict:
            own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
            above = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
            builder = builder.add_extension(own, critical=False)
            builder = builder.add_extension(above, critical=False)
            builder = builder.add_extension(_SIGNS, critical=True)
        return builder.sign(signer, hashes.SHA256()), key

    def sign(self, request: str, lifetime: timedelta = timedelta(days=30), **changes: bool) -> str:
        """Return the certificate for a request, with the names in it, and the intermediate authority."""
        asked = x509.load_pem_x509_csr(request.encode())
        names = asked.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        public = read_request(request.encode())
        if changes.get("other_key"):
            public = ec.generate_private_key(ec.SECP256R1()).public_key()
        if changes.get("more_names"):
            names = x509.SubjectAlternativeName([*names, x509.DNSName("fleet.example.com")])
        if changes.get("other_uri"):
            others = [
                name for name in names if not isinstance(name, x509.UniformResourceIdentifier)
            ]
            uri = f"mlxfleet://{'0' * 32}/node/mac-1"
            names = x509.SubjectAlternativeName([*others, x509.UniformResourceIdentifier(uri)])
        builder = self._builder(public, lifetime).issuer_name(self.intermediate.subject)
        builder = builder.subject_name(x509.Name([])).add_extension(names, critical=True)
        usages = [ExtendedKeyUsageOID.SERVER_AUTH]
        if not changes.get("for_servers_only"):
            usages.append(ExtendedKeyUsageOID.CLIENT_AUTH)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        signed = builder.add_extension(own, critical=False).sign(self._key, hashes.SHA256())
        chain = [signed] if changes.get("without_intermediate") else [signed, self.intermediate]
        return "".join(_pem(certificate) for certificate in chain)

    @staticmethod
    def _builder(key: ec.EllipticCurvePublicKey, life: timedelta) -> x509.CertificateBuilder:
        now = SystemClock().now()
        builder = x509.CertificateBuilder().public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - timedelta(minutes=1)).not_valid_after(now + life)


_SIGNS = x509.KeyUsage(
    **{
        **dict.fromkeys(
            (
                *("digital_signature", "content_commitment", "key_encipherment"),
                *("data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
            ),
            False,
        ),
        "key_cert_sign": True,
        "crl_sign": True,
    }
)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


@pytest.fixture
async def external(fleet: MemoryFleet, signing: SigningFleet) -> Pki:
    """Return the PKI that the fleet trusts, and no signer."""
    pki = Pki()
    fleet_trust = FleetTrust(fleet=signing.authority.fleet, authorities=_pem(pki.root))
    await signing.put(keys.FLEET_TRUST, fleet_trust)
    return pki


async def asked_for(fleet: MemoryFleet, name: str = "node/mac-1") -> str:
    """Return what `fleetctl cert csr` prints once the process has asked."""

    async def request() -> str | None:
        done = await fleet.ctl("cert", "csr", name)
        return done.out if done.code == 0 else None

    return await until_async(request)


async def test_an_external_authority_signs_what_csr_prints(
    fleet: MemoryFleet, external: Pki, tmp_path: Path
) -> None:
    own = IdentityFolder(tmp_path / "own")
    own.write_authorities(_pem(external.root))
    renewal = Renewal(fleet.store, SystemClock(), own, NODE)
    async with running(renewal.run()):
        chain = external.sign(await asked_for(fleet))
        done = await fleet.ctl("cert", "install", "node/mac-1", "-", stdin=chain.encode())
        assert done.code == 0, done.err
        await until(lambda: own.is_issued)
        await until(lambda: renewal.renewals == 1)
        # An intermediate authority is no reason to renew at once.
        assert renewal.due_at() > SystemClock().now() + timedelta(days=17)
    assert own.certificate() == chain
    # Its connections are accepted, with all of OpenSSL's strict checks.
    credentials = Credentials(own, SystemClock())
    server, client = (
        credentials.server(frozenset({Role.NODE})),
        credentials.client(frozenset({Role.NODE})),
    )
    peer = handshake(client.context, server.context, credentials.identity.dns_name)
    assert peer.identity == credentials.identity
    assert await fleet.store.get(keys.request_key("node", "mac-1")) is None
    listed = await fleet.ctl("cert", "list")
    assert "node/mac-1" in listed.out


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"other_key": True}, "for another key than the request"),
        ({"other_uri": True}, "expected the URI mlxfleet://"),
        ({"more_names": True}, "role node must not have fleet.example.com"),
        ({"for_servers_only": True}, "must be for servers and clients"),
        ({"without_intermediate": True}, "no authority of the fleet has signed it"),
    ],
)
async def test_an_external_certificate_that_cannot_be_used_is_refused(
    fleet: MemoryFleet,
    signing: SigningFleet,
    external: Pki,
    changes: dict[str, bool],
    why: str,
) -> None:
    identity = signing.identity()
    asked = await signing.ask(identity, None, named=True)
    chain = external.sign(asked.request, timedelta(days=30), **changes)
    done = await fleet.ctl("cert", "install", "node/mac-1", "-", stdin=chain.encode())
    assert done.code == 1
    assert why in done.err
    assert await signing.issued(identity) is None


async def test_an_external_certificate_that_ends_soon_or_is_foreign_is_refused(
    fleet: MemoryFleet, signing: SigningFleet, external: Pki
) -> None:
    asked = await signing.ask(signing.identity(), None, named=True)
    for chain, why in (
        (external.sign(asked.request, timedelta(minutes=5)), "at least an hour"),
        (Pki().sign(asked.request), "no authority of the fleet has signed it"),
        ("no certificate", "expected certificates"),
        (_pem(external.root), "for another key"),
    ):
        done = await fleet.ctl("cert", "install", "node/mac-1", "-", stdin=chain.encode())
        assert done.code == 1
        assert why in done.err


async def test_an_authority_that_strict_clients_refuse_is_refused(
    fleet: MemoryFleet, signing: SigningFleet
) -> None:
    pki = Pki(is_strict=False)
    trusted = FleetTrust(fleet=signing.authority.fleet, authorities=_pem(pki.root))
    await signing.put(keys.FLEET_TRUST, trusted)
    asked = await signing.ask(signing.identity(), None, named=True)
    chain = pki.sign(asked.request).encode()
    done = await fleet.ctl("cert", "install", "node/mac-1", "-", stdin=chain)
    assert done.code == 1
    assert "has no extension keyUsage" in done.err


async def test_an_external_renewal_must_prove_the_current_key(
    fleet: MemoryFleet, signing: SigningFleet, external: Pki
) -> None:
    await signing.join()
    asked = await signing.ask(signing.identity(), None, named=True)
    chain = external.sign(asked.request)
    done = await fleet.ctl("cert", "install", "node/mac-1", "-", stdin=chain.encode())
    assert done.code == 1
    assert "not signed with its current key" in done.err


async def test_a_deleted_node_is_revoked_and_its_name_is_free(
    fleet: MemoryFleet, signing: SigningFleet
) -> None:
    await signing.register()
    await signing.join()
    issued = await signing.issued(signing.identity())
    assert issued is not None
    done = await fleet.ctl("delete", "node", "mac-1")
    assert done.code == 0, done.err
    assert f"certificate {issued.serial} of mac-1 was revoked" in done.err
    assert await fleet.store.get(keys.named(keys.REVOKED_PREFIX, issued.serial)) is not None
    assert await signing.issued(signing.identity()) is None


async def test_a_node_that_is_not_deleted_keeps_its_certificate(
    fleet: MemoryFleet, signing: SigningFleet
) -> None:
    await signing.register()
    await signing.join()
    assert (await fleet.ctl("delete", "node", "mac-1", "--dry-run=server")).code == 0
    assert (await fleet.ctl("delete", "node", "mac-2")).code == 1
    assert await signing.issued(signing.identity()) is not None


@pytest.mark.etcd
async def test_the_user_of_a_deleted_node_goes_where_roots_password_is_at_hand(
    tmp_path: Path,
) -> None:
    async with guarded_etcd(tmp_path / "etcd") as etcd:
        root = connect(etcd.address("root"))
        await root.commit([], node_status("mac-1", UUID))
        agent = connect(etcd.address("node-mac-1"))
        await agent.get(keys.node_lease_key("mac-1"))
        place = ("--etcd", str(etcd.etcd.address), "--etcd-password-file", str(etcd.file("admin")))
        done = await run_fleetctl("delete", "node", "mac-1", *place)
        assert done.code == 0, done.err
        assert "fleetctl delete node mac-1 --ignore-not-found --authority-dir DIR" in done.err
        await agent.get(keys.node_lease_key("mac-1"))
        folder = ("--authority-dir", str(etcd.passwords))
        gone = await run_fleetctl("delete", "node", "mac-1", "--ignore-not-found", *folder, *place)
        assert gone.code == 0, gone.err
        assert "etcd's user of mac-1 was deleted" in gone.err
        with pytest.raises(PermissionDeniedError):
            await agent.get(keys.node_lease_key("mac-1"))
        others = connect(etcd.address("node-mac-10"))
        await others.get(keys.node_lease_key("mac-10"))
        for transport in (root, agent, others):
            await transport.close()
