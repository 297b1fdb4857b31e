"""Candidates that cheat, break or attack: each ends in the outcome and for the reason that it declares, the tier lives
on, and its honest twin is not refused."""

from dataclasses import dataclass

import pytest

from tests.verify.tiny import TinyTier, changed
from tkcc.api.candidate import Candidate
from tkcc.api.report import Outcome

pytestmark = [pytest.mark.adversarial, pytest.mark.timeout(240)]

RIGHT = {Outcome.ACCEPTED, Outcome.FUTILE, Outcome.REGRESSED}  # correct, whatever its speed


@dataclass(frozen=True)
class Case:
    name: str
    body: str  # methods of the cheat
    outcome: Outcome
    reason: str  # part of the reason
    twin: str  # methods of an honest look-alike
    imports: str = ""


CASES = [
    Case(
        "replays the output of the first call with these shapes",
        """
    def decode(self, batch, kv):
        key = tuple(batch.pages_bp.shape)
        memory = self.__dict__.setdefault("memory", {})
        if key not in memory:
            memory[key] = self.inner.decode(batch, kv)
        return memory[key]
""",
        Outcome.WRONG,
        "logit error",
        """
    def decode(self, batch, kv):
        key = tuple(batch.pages_bp.shape)
        memory = self.__dict__.setdefault("memory", {})
        memory[key] = self.inner.decode(batch, kv)
        return memory[key]
""",
    ),
    Case(
        "returns at once and computes in a thread",
        """
    def decode(self, batch, kv):
        out = torch.zeros(batch.pages_bp.shape[0], self.spec.config.vocab_size)
        def late():
            with torch.inference_mode():
                time.sleep(0.005)
                out.copy_(self.inner.decode(batch, kv))
        threading.Thread(target=late).start()
        return out
""",
        Outcome.WRONG,
        "logit error",
        """
    def decode(self, batch, kv):
        out = torch.zeros(batch.pages_bp.shape[0], self.spec.config.vocab_size)
        def now():
            with torch.inference_mode():
                out.copy_(self.inner.decode(batch, kv))
        thread = threading.Thread(target=now)
        thread.start()
        thread.join()
        return out
""",
        imports="import threading, time",
    ),
    Case(
        "does not write the last layer's keys and values",
        """
    def decode(self, batch, kv):
        hidden = KVCache(kv.k_lnksd.clone(), kv.v_lnksd.clone())
        out = self.inner.decode(batch, hidden)
        kv.k_lnksd[:-1] = hidden.k_lnksd[:-1]
        kv.v_lnksd[:-1] = hidden.v_lnksd[:-1]
        return out
""",
        Outcome.WRONG,
        "error",
        """
    def decode(self, batch, kv):
        hidden = KVCache(kv.k_lnksd.clone(), kv.v_lnksd.clone())
        out = self.inner.decode(batch, hidden)
        kv.k_lnksd.copy_(hidden.k_lnksd)
        kv.v_lnksd.copy_(hidden.v_lnksd)
        return out
""",
    ),
    Case(
        "returns NaN, which no difference is larger than",
        """
    def decode(self, batch, kv):
        return self.inner.decode(batch, kv) * float("nan")
""",
        Outcome.WRONG,
        "logit error median nan",
        """
    def decode(self, batch, kv):
        return self.inner.decode(batch, kv) * 1.0
""",
    ),
    Case(
        "attends to the nearest 48 tokens only",
        """
    def decode(self, batch, kv):
        S = self.spec.block_tokens
        first = [max(0, -(-c // S) - 3) for c in batch.context_lens]
        width = max(-(-c // S) - f for c, f in zip(batch.context_lens, first))
        pages = torch.zeros(len(first), width, dtype=torch.int64)
        for b, f in enumerate(first):
            row = batch.pages_bp[b, f : -(-batch.context_lens[b] // S)]
            pages[b, : len(row)] = row
        lens = tuple(c - f * S for c, f in zip(batch.context_lens, first))
        near = replace(batch, pages_bp=pages, context_lens=lens, context_b=torch.tensor(lens))
        return self.inner.decode(near, kv)
""",
        Outcome.WRONG,
        "error",
        """
    def decode(self, batch, kv):
        return self.inner.decode(replace(batch, pages_bp=batch.pages_bp.clone()), kv)
""",
        imports="from dataclasses import replace",
    ),
    Case(
        "attends beyond the context",
        """
    def decode(self, batch, kv):
        S = self.spec.block_tokens
        lens = tuple(-(-c // S) * S for c in batch.context_lens)
        return self.inner.decode(replace(batch, context_lens=lens, context_b=torch.tensor(lens)), kv)
""",
        Outcome.WRONG,
        "error",
        """
    def decode(self, batch, kv):
        return self.inner.decode(replace(batch, context_b=batch.context_b.clone()), kv)
""",
        imports="from dataclasses import replace",
    ),
    Case(
        "takes rows for sorted by length",
        """
    def decode(self, batch, kv):
        out = self.inner.decode(batch, kv)
        order = sorted(range(len(batch.context_lens)), key=lambda b: batch.context_lens[b])
        return out[order]
""",
        Outcome.WRONG,
        "logit error",
        """
    def decode(self, batch, kv):
        out = self.inner.decode(batch, kv)
        return out[list(range(len(batch.context_lens)))]
""",
    ),
    Case(
        "writes keys and values of its padding into a block that nobody gave it",
        """
    def decode(self, batch, kv):
        out = self.inner.decode(batch, kv)
        used = set(batch.pages_bp.flatten().tolist())
        for block in range(1, kv.k_lnksd.shape[1]):
            if block not in used:
                kv.k_lnksd[:, block] += 1.0
        return out
""",
        Outcome.WRONG,
        "",
        """
    def decode(self, batch, kv):
        out = self.inner.decode(batch, kv)
        kv.k_lnksd[:, 0] += 1.0  # the scratch block is for that
        return out
""",
    ),
    Case(
        "skips a layer",
        """
    def __init__(self, spec, weights, cells):
        super().__init__(spec, weights, cells)
        self.inner.layers = self.inner.layers[:-1] + (self.inner.layers[0],)
""",
        Outcome.WRONG,
        "error",
        """
    def __init__(self, spec, weights, cells):
        super().__init__(spec, weights, cells)
        self.inner.layers = self.inner.layers[:-1] + (self.inner.layers[-1],)
""",
    ),
    Case(
        "is right until it has been called often, then replays",
        """
    def decode(self, batch, kv):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 16:
            return self.last[: batch.pages_bp.shape[0]]
        out = self.inner.decode(batch, kv)
        if not hasattr(self, "last") or len(out) > len(self.last):
            self.last = out
        return out
""",
        Outcome.WRONG,
        "",
        """
    def decode(self, batch, kv):
        self.calls = getattr(self, "calls", 0) + 1
        return self.inner.decode(batch, kv)
""",
    ),
    Case(
        "is honest only under norm weights that it does not know",
        """
    def decode(self, batch, kv):
        norms = self.weights["model.norm.weight"]
        if abs(float(norms.sum()) - TRUE_SUM) > 1e-3:  # perturbed: a challenge
            return self.inner.decode(batch, kv)
        return torch.zeros(batch.pages_bp.shape[0], self.spec.config.vocab_size)
""",
        Outcome.WRONG,
        "of a timed step",
        """
    def decode(self, batch, kv):
        norms = self.weights["model.norm.weight"]
        assert abs(float(norms.sum()) - TRUE_SUM) > -1.0
        return self.inner.decode(batch, kv)
""",
    ),
    Case(
        "returns a lazy tensor subclass",
        """
    def decode(self, batch, kv):
        class Lazy(torch.Tensor):
            pass
        return self.inner.decode(batch, kv).as_subclass(Lazy)
""",
        Outcome.WRONG,
        "a plain torch.Tensor is asked for",
        """
    def decode(self, batch, kv):
        class Lazy(torch.Tensor):
            pass
        return self.inner.decode(batch, kv).as_subclass(Lazy).as_subclass(torch.Tensor)
""",
    ),
    Case(
        "returns half precision",
        """
    def decode(self, batch, kv):
        return self.inner.decode(batch, kv).half()
""",
        Outcome.WRONG,
        "torch.float16",
        """
    def decode(self, batch, kv):
        return self.inner.decode(batch, kv).double().float()
""",
    ),
    Case(
        "rounds to bfloat16 on the way",
        """
    def decode(self, batch, kv):
        return self.inner.decode(batch, kv).bfloat16().float()
""",
        Outcome.WRONG,
        "logit error",
        """
    def decode(self, batch, kv):
        return self.inner.decode(batch, kv).float().clone()
""",
    ),
    Case(
        "returns rows that are not there",
        """
    def decode(self, batch, kv):
        return self.inner.decode(batch, kv)[:1]
""",
        Outcome.WRONG,
        "asked for is",
        """
    def decode(self, batch, kv):
        return self.inner.decode(batch, kv)[:]
""",
    ),
    Case(
        "changes a weight in place",
        """
    def prefill(self, batch, kv):
        self.weights["model.embed_tokens.weight"].mul_(1.0)
        return self.inner.prefill(batch, kv)
""",
        Outcome.CRASHED,
        "SIGSEGV",
        """
    def prefill(self, batch, kv):
        self.weights["model.embed_tokens.weight"].clone().mul_(2.0)
        return self.inner.prefill(batch, kv)
""",
    ),
    Case(
        "hangs in a step",
        """
    def decode(self, batch, kv):
        while True:
            pass
""",
        Outcome.TIMEOUT,
        "no answer to decode",
        """
    def decode(self, batch, kv):
        for _ in range(10_000):
            pass
        return self.inner.decode(batch, kv)
""",
    ),
    Case(
        "ends its process as if all were well",
        """
    def decode(self, batch, kv):
        os._exit(0)
""",
        Outcome.CRASHED,
        "exited with code 0",
        """
    def decode(self, batch, kv):
        os.getpid()
        return self.inner.decode(batch, kv)
""",
        imports="import os",
    ),
    Case(
        "raises SystemExit",
        """
    def decode(self, batch, kv):
        raise SystemExit(0)
""",
        Outcome.CRASHED,
        "decode: SystemExit",
        """
    def decode(self, batch, kv):
        try:
            raise SystemExit(0)
        except SystemExit:
            return self.inner.decode(batch, kv)
""",
    ),
    Case(
        "reads address 0",
        """
    def decode(self, batch, kv):
        ctypes.string_at(0)
""",
        Outcome.CRASHED,
        "SIGSEGV",
        """
    def decode(self, batch, kv):
        ctypes.string_at(b"a")
        return self.inner.decode(batch, kv)
""",
        imports="import ctypes",
    ),
    Case(
        "floods its output",
        """
    def decode(self, batch, kv):
        while True:
            print("x" * 10_000)
""",
        Outcome.CRASHED,
        "to its output",
        """
    def decode(self, batch, kv):
        print("step", batch.context_lens)
        return self.inner.decode(batch, kv)
""",
    ),
    Case(
        "forks",
        """
    def decode(self, batch, kv):
        os.fork()
        return self.inner.decode(batch, kv)
""",
        Outcome.CRASHED,
        "PermissionError",
        """
    def decode(self, batch, kv):
        try:
            os.fork()
        except PermissionError:
            return self.inner.decode(batch, kv)
""",
        imports="import os",
    ),
    Case(
        "kills its parent",
        """
    def decode(self, batch, kv):
        os.kill(os.getppid(), 9)
        return self.inner.decode(batch, kv)
""",
        Outcome.CRASHED,
        "PermissionError",
        """
    def decode(self, batch, kv):
        os.getppid()
        return self.inner.decode(batch, kv)
""",
        imports="import os",
    ),
    Case(
        "opens a socket",
        """
    def decode(self, batch, kv):
        socket.create_connection(("127.0.0.1", 80), 1)
        return self.inner.decode(batch, kv)
""",
        Outcome.CRASHED,
        "PermissionError",
        """
    def decode(self, batch, kv):
        socket.gethostname()
        return self.inner.decode(batch, kv)
""",
        imports="import socket",
    ),
    Case(
        "reads a file that is none of its business",
        """
    def decode(self, batch, kv):
        open("/etc/passwd").read()
        return self.inner.decode(batch, kv)
""",
        Outcome.CRASHED,
        "PermissionError",
        """
    def decode(self, batch, kv):
        open("/proc/cpuinfo").read()
        return self.inner.decode(batch, kv)
""",
    ),
    Case(
        "moves to another core",
        """
    def decode(self, batch, kv):
        os.sched_setaffinity(0, set(range(os.cpu_count())))
        return self.inner.decode(batch, kv)
""",
        Outcome.CRASHED,
        "PermissionError",
        """
    def decode(self, batch, kv):
        os.sched_getaffinity(0)
        return self.inner.decode(batch, kv)
""",
        imports="import os",
    ),
    Case(
        "asks for all memory",
        """
    def decode(self, batch, kv):
        self.hoard = [torch.empty(1 << 28) for _ in range(100)]
        return self.inner.decode(batch, kv)
""",
        Outcome.CRASHED,
        "can't allocate memory",
        """
    def decode(self, batch, kv):
        self.hoard = torch.ones(1 << 22)
        return self.inner.decode(batch, kv)
""",
    ),
    Case(
        "fills the disk",
        """
    def decode(self, batch, kv):
        for i in range(100_000):
            with open(f"fill-{i}", "wb") as file:
                file.write(b"x" * (1 << 20))
        return self.inner.decode(batch, kv)
""",
        Outcome.CRASHED,
        "MiB of files",
        """
    def decode(self, batch, kv):
        with open("note", "wb") as file:
            file.write(b"x" * 1024)
        return self.inner.decode(batch, kv)
""",
    ),
    Case(
        "answers on its socket before it has worked",
        """
    def decode(self, batch, kv):
        for fd in os.listdir("/proc/self/fd"):
            try:
                if "socket" in os.readlink(f"/proc/self/fd/{fd}"):
                    os.write(int(fd), b"TKR1" + bytes(409))
            except OSError:
                pass
        return self.inner.decode(batch, kv)
""",
        Outcome.CRASHED,
        "answered request",
        """
    def decode(self, batch, kv):
        os.listdir("/proc/self/fd")
        return self.inner.decode(batch, kv)
""",
        imports="import os",
    ),
]


def candidate(tier: TinyTier, body: str, imports: str) -> Candidate:
    return changed(body, f"{imports}\nTRUE_SUM = {tier.norm_sum}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_cheat_is_refused_for_its_own_reason(tier: TinyTier, case: Case) -> None:
    report = tier.judge(candidate(tier, case.body, case.imports))
    assert (report.outcome, case.reason in report.reason) == (case.outcome, True), report.reason


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_its_honest_twin_is_right(tier: TinyTier, case: Case) -> None:
    report = tier.judge(candidate(tier, case.twin, case.imports), pairs=2)
    assert report.outcome in RIGHT, f"{report.outcome}: {report.reason}"


def test_a_slow_candidate_with_patched_clocks_is_not_faster(tier: TinyTier) -> None:
    body = """
    def decode(self, batch, kv):
        time.sleep(0.01)
        time.perf_counter = time.monotonic = time.time = lambda: 0.0
        return self.inner.decode(batch, kv)
"""
    report = tier.judge(changed(body, "import time"), pairs=10)
    assert report.outcome is Outcome.FUTILE and report.log_gain < -0.5, (report.outcome, report.log_gain)


def test_a_thread_that_would_slow_the_incumbent_down_stands_still_meanwhile(tier: TinyTier) -> None:
    body = """
    def prepare(self, kv):
        def burn():
            while True:
                sum(range(1000))
        threading.Thread(target=burn, daemon=True).start()
        self.inner.prepare(kv)
"""
    report = tier.judge(changed(body, "import threading"), pairs=10)
    assert report.outcome is Outcome.FUTILE, (report.outcome, report.log_gain)


@pytest.mark.parametrize(
    "source, state, reason",
    [
        ("def build(:", Outcome.REJECTED_STATIC, "not Python"),
        ("x = 1", Outcome.REJECTED_STATIC, "defines no function `build"),
        ("#" * 1_000_000 + "\ndef build(s, w, c): pass", Outcome.REJECTED_STATIC, "at most 900000"),
        ("raise ValueError('no')\ndef build(s, w, c): pass", Outcome.BUILD_FAIL, "ValueError: no"),
        ("def build(s, w, c): return 1", Outcome.BUILD_FAIL, "prepare"),
        ("while True: pass\ndef build(s, w, c): pass", Outcome.TIMEOUT, "the build took longer"),
        ("import os; os._exit(3)\ndef build(s, w, c): pass", Outcome.CRASHED, "exited with code 3"),
    ],
)
def test_what_does_not_build_ends_by_name(tier: TinyTier, source: str, state: Outcome, reason: str) -> None:
    report = tier.judge(Candidate(source, {}))
    assert (report.outcome, reason in report.reason) == (state, True), (report.outcome, report.reason)


def test_a_fork_bomb_in_the_build_is_bounded_and_leaves_nothing(tier: TinyTier) -> None:
    report = tier.judge(Candidate("import os\nwhile True: os.fork()\ndef build(s, w, c): pass", {}))
    # Every fork beyond the limit raises; on a busy machine the deadline may come first.
    assert report.outcome in (Outcome.BUILD_FAIL, Outcome.TIMEOUT), (report.outcome, report.reason)
    if report.outcome is Outcome.BUILD_FAIL:
        assert "BlockingIOError" in report.reason


def test_the_tier_still_judges_after_all_that(tier: TinyTier) -> None:
    report = tier.judge(changed("    pass  # nothing"))
    assert report.outcome in RIGHT and report.correctness is not None and report.correctness.passed
