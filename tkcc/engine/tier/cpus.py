"""The list of cores in TKCC_CPUS."""


def parse_cpus(text: str) -> set[int]:
    """ "0", "1-3" or "0,2-3" as a set of core numbers. Raises ValueError."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{part!r} is neither a core number nor a range")
        cpus |= set(range(int(first), int(last if dash else first) + 1))
    return cpus
