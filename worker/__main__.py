"""Entry of the serving process: first make sure not to outlive the supervisor, then the rest."""

import argparse

from veloxquant.worker import deadman


def main() -> None:
    """Parse the two arguments, arm every net, serve."""
    parser = argparse.ArgumentParser(prog="veloxquant-worker")
    parser.add_argument("--parent", type=int, required=True, help="process id of the supervisor")
    parser.add_argument("--link", type=int, required=True, help="descriptor of the socketpair")
    args = parser.parse_args()
    deadman.watch_parent(args.parent)
    deadman.show_stacks_on_request()
    timer = deadman.DeadMan()

    import socket

    from veloxquant.worker.server import Worker, leave

    leave(Worker(socket.socket(fileno=args.link), timer).run())


if __name__ == "__main__":
    main()
