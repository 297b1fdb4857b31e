"""Entry point of the processes that the supervisor starts: `python -m tkcc.engine.tier holder|forkserver`."""

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="tkcc.engine.tier")
    parser.add_argument("process", choices=("holder", "forkserver"))
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    if args.process == "holder":
        from tkcc.engine.tier import holder

        return holder.main(args.channel_fd, args.model, args.layers, args.dtype)
    from tkcc.engine.tier import forkserver

    return forkserver.main(args.channel_fd, args.threads)


if __name__ == "__main__":
    sys.exit(main())
