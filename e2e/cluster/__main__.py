"""`python -m e2e.cluster`: build, start, look at and stop local clusters."""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from e2e.cluster import debian, images, progress, toolchain
from e2e.cluster.cluster import DEFAULT_NAME, Cluster, require_root
from e2e.cluster.errors import ClusterError
from e2e.cluster.sandbox import running


def main() -> int:
    args = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # asked to end: clean up as after ^C
    command: Callable[[argparse.Namespace], None] = args.command
    try:
        command(args)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description="A real Kubernetes on this machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], None], says: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=says, description=says)
        added.set_defaults(command=command)
        added.add_argument("--name", default=DEFAULT_NAME, help=f"which cluster (default {DEFAULT_NAME})")
        return added

    build = add("build", _build, "install Debian packages, build Kubernetes and the images; cached")
    build.add_argument("--programs-only", action="store_true", help="what a control plane needs: no root, no images")
    add("up", _up, "start a cluster, ending first what runs under its name; prints its kubeconfig")
    add("down", _down, "stop a cluster and remove all of it")
    add("status", _status, "show a cluster's daemons, node and pods")
    add("kubeconfig", _kubeconfig, "print the path of the administrator's kubeconfig")
    load = add("load", _load, "import docker-archive files into a running cluster")
    load.add_argument("archives", nargs="+", type=Path, metavar="IMAGE_TAR")
    says = "build operator, worker and engine, for clusters started after; prints their references"
    build_images = add("build-images", _build_images, says)
    build_images.add_argument(
        "--torch", choices=("mounted", "pip"), default="mounted", help="where the engine's torch is"
    )
    return parser


def _build(args: argparse.Namespace) -> None:
    if args.programs_only:
        toolchain.build()
        return
    require_root()
    debian.install()
    toolchain.build()
    images.build_all()


def _up(args: argparse.Namespace) -> None:
    cluster = Cluster(args.name)
    cluster.up()
    print(cluster.kubeconfig)


def _down(args: argparse.Namespace) -> None:
    Cluster(args.name).down()


def _status(args: argparse.Namespace) -> None:
    names = running()
    if args.name not in names:
        others = f"; running: {', '.join(names)}" if names else ""
        raise ClusterError(f"cluster {args.name} is not up{others}")
    print(Cluster(args.name).attach().status())


def _kubeconfig(args: argparse.Namespace) -> None:
    print(Cluster(args.name).attach().kubeconfig)


def _load(args: argparse.Namespace) -> None:
    Cluster(args.name).attach().load(args.archives)


def _build_images(args: argparse.Namespace) -> None:
    require_root()
    with progress.step("build images"):
        built = images.build_all(torch=args.torch)
    print(json.dumps(built, indent=2))


if __name__ == "__main__":
    sys.exit(main())
