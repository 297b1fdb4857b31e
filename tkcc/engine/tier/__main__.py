"""Entry point of the process that the supervisor starts: `python -m tkcc.engine.tier`, the forkserver."""

import argparse
import sys

from tkcc.engine.tier import forkserver


def main() -> int:
    parser = argparse.ArgumentParser(prog="tkcc.engine.tier")
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    return forkserver.main(args.channel_fd, args.threads)


if __name__ == "__main__":
    sys.exit(main())
