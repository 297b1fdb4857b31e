"""Certificates and tokens of one cluster, made new at each start and thrown away with it."""

import secrets
from pathlib import Path

from e2e.cluster.progress import output

# Static tokens: a user each, with the groups that RBAC's built-in bindings and the Node authorizer look for.
USERS = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "proxy": ("system:kube-proxy", ""),
    "node": ("system:node:{node}", "system:nodes"),
}
_NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


def make(directory: Path, *, addresses: list[str], names: list[str], node: str) -> dict[str, str]:
    """Write ca.crt, apiserver.{crt,key}, sa.{key,pub} and tokens.csv; gives the token of each user in USERS."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    ca = ["-keyout", str(directory / "ca.key"), "-out", str(directory / "ca.crt"), "-subj", "/CN=tkcc-local-ca"]
    usage = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"]
    output(["openssl", "req", "-x509", *_NEW_KEY, "-days", "30", *ca, *usage])

    subject = ",".join([*(f"DNS:{name}" for name in names), *(f"IP:{address}" for address in addresses)])
    leaf = [
        "-keyout",
        str(directory / "apiserver.key"),
        "-out",
        str(directory / "apiserver.crt"),
        "-subj",
        "/CN=kube-apiserver",
    ]
    issuer = [
        "-CA",
        str(directory / "ca.crt"),
        "-CAkey",
        str(directory / "ca.key"),
        "-days",
        "30",
        "-subj",
        "/CN=kube-apiserver",
    ]
    usage = ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", "extendedKeyUsage=serverAuth"]
    output(["openssl", "req", "-x509", *_NEW_KEY, *leaf, *issuer, *usage, "-addext", f"subjectAltName={subject}"])

    key = str(directory / "sa.key")
    output(["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key])
    output(["openssl", "pkey", "-in", key, "-pubout", "-out", str(directory / "sa.pub")])

    tokens = {user: secrets.token_hex(16) for user in USERS}
    rows = []
    for user, (name, groups) in USERS.items():
        rows.append(f'{tokens[user]},{name.format(node=node)},{user},"{groups}"')
    (directory / "tokens.csv").write_text("\n".join(rows) + "\n")
    return tokens
