"""Benches of the gateway beside other gateways: `speed`, `faults`, `hostile`. Engines are stand-ins, written in C."""
