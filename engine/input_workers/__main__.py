"""Entry point of the fork server: `python -m engine.input_workers`. The engine starts it, with a socket as stdin."""

from engine.input_workers.fork_server import main

if __name__ == "__main__":
    main()
