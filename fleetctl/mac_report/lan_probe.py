"""Probe of the local network, started as `python -I -S -c SOURCE TARGETS` in several kinds of processes.

It uses the standard library only, and prints one line of JSON: what connecting and sending from each interface gave.
"""

import json
import socket
import sys

CONNECT_S = 3.0
MULTICAST = ("224.0.0.251", 5353)  # mDNS
# An empty query, which nobody answers.
QUERY = bytes(12)


def attempt(source: str, kind: socket.SocketKind, target: tuple[str, int]) -> int:
    """Return the errno of one attempt; 0 for success and for a refusal, -1 for no answer in time."""
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.bind((source, 0))
            if kind == socket.SOCK_STREAM:
                probe.connect(target)
            else:
                probe.setsockopt(
                    socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(source)
                )
                probe.sendto(QUERY, target)
        except ConnectionError:
            return 0
        except TimeoutError:
            return -1
        except OSError as error:
            return error.errno or -1
    return 0


def main() -> None:
    """Print the results for the targets: [[interface, address, [[host, port], ...]], ...]."""
    results = []
    for interface, source, targets in json.loads(sys.argv[1]):
        code = attempt(source, socket.SOCK_DGRAM, MULTICAST)
        results.append([interface, "multicast", MULTICAST[0], code])
        for host, port in targets:
            code = attempt(source, socket.SOCK_STREAM, (host, port))
            results.append([interface, "connect", host, code])
    sys.stdout.write(f"{json.dumps(results)}\n")


if __name__ == "__main__":
    main()
