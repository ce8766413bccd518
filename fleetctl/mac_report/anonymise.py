"""Anonymiser of reports: replaces personal details by one keyed hash, so that equal values stay equal. Pure.

UUIDs, hardware addresses and IP addresses keep their form; addresses keep their class and the length of the prefix that
two of them share, so that networks, and the two ends of a cable, can still be recognised.
"""

import hmac
import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from machinery import redaction

Detail: TypeAlias = Literal["serial", "uuid", "hardware address", "IPv4", "IPv6", "host", "user", "SSID", "secret"]  # fmt: skip

_UUID: Final = re.compile(r"(?<![0-9A-Fa-f-])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![0-9A-Fa-f-])")  # fmt: skip
# arp prints bytes without leading zeros.
_MAC: Final = re.compile(r"(?<![0-9A-Fa-f:.])[0-9A-Fa-f]{1,2}(?:[:-][0-9A-Fa-f]{1,2}){5}(?![0-9A-Fa-f:-])")  # fmt: skip
# ibv_devinfo's GUIDs; identifiers of Thunderbolt switches, whose first bytes are the vendor's.
_GUID: Final = re.compile(r"(?<![0-9A-Fa-f:])[0-9A-Fa-f]{4}(?::[0-9A-Fa-f]{4}){3}(?![0-9A-Fa-f:])")
_SWITCH: Final = re.compile(r"(?i)\b(0x05AC)([0-9A-F]{12})\b")
# netstat appends a port after a dot.
_IPV4: Final = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w])")
_IPV6: Final = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])")
# Keys whose values are serial numbers: of system_profiler, in JSON and as text, and of ioreg, as text and as bytes.
_SERIAL: Final = re.compile(
    r"(?i)(\"?(?:[\w.-]{0,40}serial[-_ ]?number(?:_key)?|provisioning[-_ ]udid|IOPlatformSerialNumber|USB Serial Number)"
    r"(?: \(system\))?\"?\s{0,4}[:=]\s{0,4})(\"[^\"\n]{4,80}\"|<[0-9a-f]{8,400}>|[A-Za-z0-9-]{4,40})"
)
_SSID: Final = re.compile(r"(?i)(\b(?:current_)?(?:B?SSID|network name)\"?\s{0,4}[:=]\s{0,4})(\"[^\"\n]{1,64}\"|[^\s\",;]{1,64})")  # fmt: skip
_HOME: Final = re.compile(r"(?<![\w.])/(?:Users|home)/([A-Za-z0-9._-]{1,64})")
_SYSTEM_USERS: Final = frozenset(("root", "daemon", "nobody", "Shared", "Guest", "mlxfleet", "runner"))  # fmt: skip
# The first bytes of IPv4 addresses that say a class, and the number of leading bits that stay.
_CLASSES: Final = tuple(
    (ipaddress.IPv4Network(network), bits)
    for network, bits in (
        ("10.0.0.0/8", 8), ("172.16.0.0/12", 12), ("192.168.0.0/16", 16), ("169.254.0.0/16", 16), ("100.64.0.0/10", 10),
    )
)  # fmt: skip
_PLAIN_V4: Final = tuple(map(ipaddress.IPv4Network, ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3")))
_MAX_NAMES: Final = 64


class Anonymiser:
    """The replacements of one report."""

    def __init__(self, key: str, *, hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        """`hosts` and `users` are the names that this Mac knows of itself; names in home folders are found as well."""
        self._key = key.encode() or b"-"
        self._names: dict[str, Detail] = {}
        for names, kind in ((hosts, "host"), (users, "user")):
            for name in list(names)[:_MAX_NAMES]:
                # A name of one or two letters would change words; a home folder still hides it.
                if len(name) > 2 and name not in _SYSTEM_USERS and name != "localhost":
                    self._names[name] = "host" if kind == "host" else "user"
        self._replaced: dict[str, tuple[Detail, str]] = {}
        self._secrets = 0

    def text(self, text: str) -> str:
        """Return the text without personal details."""
        text = _SERIAL.sub(lambda match: match[1] + self._serial(match[2]), text)
        text = _SSID.sub(lambda match: match[1] + self._quoted("SSID", match[2], "ssid-"), text)
        for name in sorted(self._names, key=len, reverse=True):
            pattern = rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"
            replace = partial(self._name, self._names[name])
            text = re.sub(pattern, replace, text, flags=re.IGNORECASE)
        text = _HOME.sub(self._home, text)
        text = _UUID.sub(self._uuid, text)
        text = _SWITCH.sub(self._switch, text)
        text = _MAC.sub(self._mac, text)
        text = _GUID.sub(lambda match: self._hex("hardware address", match[0].lower(), match[0]), text)  # fmt: skip
        text = _IPV4.sub(self._ipv4, text)
        text = _IPV6.sub(self._ipv6, text)
        # Values of secrets need not stay equal, and must not be guessed.
        clean = redaction.redact_text(text)
        self._secrets += clean != text
        return clean

    def tree(self, tree: Any) -> Any:
        """Return a JSON document without personal details, in keys and values."""
        match tree:
            case str():
                return self.text(tree)
            case Mapping():
                return {self.text(str(key)): self.tree(value) for key, value in tree.items()}
            case list() | tuple():
                return [self.tree(value) for value in tree]
            case _:
                return tree

    def counts(self) -> Mapping[str, int]:
        """Return the number of different values that were replaced."""
        kinds: list[str] = [kind for kind, _ in self._replaced.values()]
        return Counter(kinds + ["secret"] * self._secrets)

    def leaks(self, text: str) -> list[str]:
        """Return the kinds of personal details that are still in a text of this report.

        It looks for the values themselves, in any spelling, and for the patterns of secrets and home folders.
        """
        folded = text.casefold()
        replacements = {new.casefold() for _, new in self._replaced.values()}
        kinds: set[str] = {
            kind
            for value, (kind, _) in self._replaced.items()
            if len(value) > 3
            and value.casefold() in folded
            and value.casefold() not in replacements
            and re.search(rf"(?<![a-z0-9]){re.escape(value.casefold())}(?![a-z0-9])", folded)
        }
        home = _HOME.search(text)
        if home and home[1] not in _SYSTEM_USERS and not home[1].startswith("user-"):
            kinds.add("user")
        if redaction.redact_text(text) != text:
            kinds.add("secret")
        return sorted(kinds)

    def _digest(self, value: str) -> int:
        return int.from_bytes(hmac.digest(self._key, value.encode(), "sha256"))

    def _record(self, kind: Detail, value: str, new: str) -> str:
        self._replaced[value] = (kind, new)
        return new

    def _hex(self, kind: Detail, value: str, shape: str) -> str:
        """Return a text with other hexadecimal digits in the same places; those of letters keep their case."""
        digits = f"{self._digest(value):064x}"
        digits *= 1 + len(shape) // len(digits)
        is_upper = shape != shape.lower()
        new = "".join(
            digit if old in "0123456789abcdefABCDEF" else old
            for old, digit in zip(shape, digits.upper() if is_upper else digits, strict=False)
        )
        return self._record(kind, shape, new)

    def _quoted(self, kind: Detail, value: str, prefix: str) -> str:
        inner = value.strip('"')
        new = self._record(kind, inner, f"{prefix}{self._digest(inner):064x}"[: len(prefix) + 6])
        return value.replace(inner, new)

    def _serial(self, value: str) -> str:
        if value.startswith("<"):
            return self._hex("serial", value, value)
        inner = value.strip('"')
        if inner.lower() in ("none", "null", "redacted", "available"):
            return value
        # As many letters and digits as before, in the alphabet of serial numbers.
        letters, number = "0123456789ABCDEFGHJKLMNPQRSTUVWX", self._digest(inner)
        new = "".join(
            letters[number >> 5 * (place % 48) & 31] if old.isalnum() else old
            for place, old in enumerate(inner)
        )
        return value.replace(inner, self._record("serial", inner, new))

    def _name(self, kind: Detail, match: re.Match[str]) -> str:
        return self._hidden_name(kind, match[0])

    def _hidden_name(self, kind: Detail, value: str) -> str:
        folded = value.casefold()
        return self._record(kind, value, f"{kind}-{self._digest(folded):064x}"[: len(kind) + 7])

    def _home(self, match: re.Match[str]) -> str:
        name = match[1]
        is_known = name in _SYSTEM_USERS or name.startswith("user-")
        # redact_text removes what is left of the folder.
        return (
            match[0]
            if is_known
            else f"{match[0].removesuffix(name)}{self._hidden_name('user', name)}"
        )

    def _uuid(self, match: re.Match[str]) -> str:
        value = match[0]
        return value if set(value) <= {"0", "-"} else self._hex("uuid", value.lower(), value)

    def _switch(self, match: re.Match[str]) -> str:
        new = f"{match[1]}{self._digest(match[0].lower()):064X}"[: len(match[0])]
        return self._record("serial", match[0], new)

    def _mac(self, match: re.Match[str]) -> str:
        value = match[0]
        octets = [int(part, 16) for part in re.split("[:-]", value)]
        if set(octets) in ({0}, {255}):
            return value
        number = self._digest(":".join(f"{octet:02x}" for octet in octets))
        new = [number >> 8 * place & 255 for place in range(6)]
        # The bits for multicast and for local administration stay.
        new[0] = new[0] & 0xFC | octets[0] & 3
        has_zeros = all(len(part) == 2 for part in re.split("[:-]", value))
        mark = "-" if "-" in value else ":"
        shown = mark.join(f"{octet:02x}" if has_zeros else f"{octet:x}" for octet in new)
        return self._record("hardware address", value, shown.upper() if value != value.lower() else shown)  # fmt: skip

    def _ipv4(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.IPv4Address(match[0])
        except ValueError:
            return match[0]
        if any(address in network for network in _PLAIN_V4):
            return match[0]
        bits = next((bits for network, bits in _CLASSES if address in network), 0)
        new = ipaddress.IPv4Address(self._flip(int(address), 32, bits))
        return self._record("IPv4", match[0], str(new))

    def _ipv6(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.IPv6Address(match[0])
        except ValueError:
            return match[0]
        if int(address) < 2 or address.is_multicast:
            return match[0]
        prefix_bits = 64 if address.is_link_local else 16
        new = ipaddress.IPv6Address(self._flip(int(address), 128, prefix_bits))
        return self._record("IPv6", match[0], str(new))

    def _flip(self, number: int, width: int, prefix_bits: int) -> int:
        """Return a number whose bits after the first ones are flipped by a hash of all bits before each.

        It is a bijection that keeps common prefixes (the scheme of Crypto-PAn).
        """
        flips = 0
        for place in range(prefix_bits, width):
            prefix = number >> (width - place)
            flips = flips << 1 | self._digest(f"{width}/{place}/{prefix}") & 1
        return number ^ flips
