"""Builds and runs cuda/decode.cu on the CPU, against the unfriendly machine of cuda_on_cpu.h."""

import ctypes
import subprocess
from pathlib import Path

from torch import Tensor

from tkcc.kernels import nvrtc
from tkcc.kernels.persistent_decode import FILES, Params, PersistentDecode, defines

HEADER = Path(__file__).parent / "cuda_on_cpu.h"
ENTRY = """
extern "C" int run(const Params* params, unsigned ctas, unsigned long long seed) {
  return emulator::launch<Params>(&decode_steps, *params, ctas, THREADS, sizeof(Shared), seed);
}
"""


class EmulatedDecode(PersistentDecode):
    """A `PersistentDecode` on the CPU whose launches run in the emulator."""

    def build(self, directory: Path) -> None:
        source = nvrtc.read_source(FILES[1:], defines(self.shape, self.batch, self.layout))
        path = directory / "decode.cpp"
        path.write_text(f'#include "{HEADER}"\n{source}\n#line 1 "entry"\n{ENTRY}')
        library = directory / "decode.so"
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
        subprocess.run(["g++", *flags, str(path), "-o", str(library)], check=True, timeout=100)
        self._library = ctypes.CDLL(str(library))

    def run(self, num_steps: int, out_tokens: Tensor, with_logits: bool = False, seed: int = 1) -> None:
        params: Params = self.params(out_tokens, num_steps, with_logits)
        stuck_at = self._library.run(ctypes.byref(params), self.grid, ctypes.c_ulonglong(seed))
        assert stuck_at == 0, f"the emulated launch got stuck at {stuck_at}"
