"""ARP frames of a floating address (RFC 826, RFC 5227), and macOS's packet filter buffers (bpf(4)). Pure."""

import struct
from collections.abc import Iterator
from ipaddress import IPv4Address

ETHERTYPE = 0x0806
_ETHERNET_IPV4 = struct.pack("!HHBB", 1, 0x0800, 6, 4)
_BROADCAST, _NOBODY = b"\xff" * 6, b"\x00" * 6
_REQUEST, _REPLY = 1, 2
_HEADER, _FRAME_BYTES = 14, 42
# struct bpf_hdr of macOS: a timestamp of two 32-bit numbers, captured length, length on the wire, header length.
_BPF_HEADER = struct.Struct("=iiIIH")
_BPF_ALIGNMENT = 4


def announcements(address: IPv4Address, mac: bytes) -> tuple[bytes, bytes]:
    """Return the two forms of a gratuitous ARP, because some switches and systems heed only one."""
    head = _BROADCAST + mac + struct.pack("!H", ETHERTYPE) + _ETHERNET_IPV4
    own = mac + address.packed
    request = head + struct.pack("!H", _REQUEST) + own + _NOBODY + address.packed
    reply = head + struct.pack("!H", _REPLY) + own + _BROADCAST + address.packed
    return request, reply


def claimant(frame: bytes, address: IPv4Address, mac: bytes) -> str:
    """Return the Ethernet address of another machine that says in this frame that it has the address; else ""."""
    if len(frame) < _FRAME_BYTES or frame[12:14] != ETHERTYPE.to_bytes(2, "big"):
        return ""
    if frame[_HEADER : _HEADER + 6] != _ETHERNET_IPV4:
        return ""
    sender, sender_address = frame[22:28], frame[28:32]
    if sender_address != address.packed or sender == mac:
        return ""
    return sender.hex(":")


def bpf_frames(buffer: bytes) -> Iterator[bytes]:
    """Yield the frames in a buffer that was read from /dev/bpf; a damaged end is ignored."""
    at = 0
    while at + _BPF_HEADER.size <= len(buffer):
        _, _, captured, _, header = _BPF_HEADER.unpack_from(buffer, at)
        start = at + header
        if header < _BPF_HEADER.size or start + captured > len(buffer):
            return
        yield buffer[start : start + captured]
        step = header + captured
        at += (step + _BPF_ALIGNMENT - 1) // _BPF_ALIGNMENT * _BPF_ALIGNMENT
