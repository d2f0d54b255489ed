#!/usr/bin/env python3
"""A server with the shape of a model: random weights that every token reads once. GET /generate?tokens=N answers a line for each token as it is made.

With PyTorch the weights are matrices that a vector is multiplied with. Without it, a kernel adds one to every cell through the driver API, and at the end of
each request all cells are checked (the fake driver of this repository has no PyTorch). Nothing else is needed but Python's standard library.

    MODEL_MIB   MiB of weights (16384)        PORT    port to listen on (8000)
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar, Protocol
from urllib.parse import parse_qs, urlsplit

MIB = 2**20
BLOCK_MIB = 64
WIDTH = 4096
"""Of a matrix of PyTorch's: 32 MiB in 16 bits."""
TOKENS_MOST = 1024
PTX = b"""//fake add us=0 does=add at=param0 bytes=param1 times=param2
.version 7.0
.target sm_70
.address_size 64
.visible .entry add(.param .u64 p_at, .param .u64 p_bytes, .param .u32 p_times)
{
 .reg .pred %p<2>;
 .reg .b32 %r<6>;
 .reg .b64 %rd<7>;
 ld.param.u64 %rd1, [p_at];
 ld.param.u64 %rd2, [p_bytes];
 ld.param.u32 %r1, [p_times];
 shr.u64 %rd2, %rd2, 2;
 mov.u32 %r2, %ctaid.x;
 mov.u32 %r3, %ntid.x;
 mov.u32 %r4, %tid.x;
 mul.wide.u32 %rd3, %r2, %r3;
 cvt.u64.u32 %rd4, %r4;
 add.u64 %rd3, %rd3, %rd4;
 mov.u32 %r2, %nctaid.x;
 mul.wide.u32 %rd4, %r2, %r3;
again:
 setp.ge.u64 %p1, %rd3, %rd2;
 @%p1 bra done;
 shl.b64 %rd5, %rd3, 2;
 add.u64 %rd5, %rd1, %rd5;
 ld.global.u32 %r5, [%rd5];
 add.u32 %r5, %r5, %r1;
 st.global.u32 [%rd5], %r5;
 add.u64 %rd3, %rd3, %rd4;
 bra again;
done:
 ret;
}
"""


class Model(Protocol):
    """What can make a token."""

    def token(self) -> None:
        """Read all weights once; return when it is done."""

    def healthy(self) -> bool:
        """Are the weights what they have to be?"""


class DriverModel:
    """Through the driver API."""

    BLOCKS, THREADS = 1056, 256

    def __init__(self, mib: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        context, module, self._add = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self._call("cuModuleLoadData", ctypes.byref(module), PTX)
        self._call("cuModuleGetFunction", ctypes.byref(self._add), module, b"add")
        self._blocks, self._tokens = [], 0
        for _ in range(mib // BLOCK_MIB):
            at = ctypes.c_uint64()
            self._call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(BLOCK_MIB * MIB))
            self._call("cuMemsetD32_v2", at, 0, ctypes.c_size_t(BLOCK_MIB * MIB // 4))
            self._blocks.append(at)

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._cuda, function)(*arguments)
        if code:
            raise RuntimeError(f"{function}: CUresult {code}")

    def token(self) -> None:
        size, once = ctypes.c_uint64(BLOCK_MIB * MIB), ctypes.c_uint32(1)
        for at in self._blocks:
            values = (ctypes.c_void_p * 3)(*(ctypes.addressof(one) for one in (at, size, once)))
            self._call("cuLaunchKernel", self._add, self.BLOCKS, 1, 1, self.THREADS, 1, 1, 0, None, values, None)
        self._call("cuStreamSynchronize", None)
        self._tokens += 1

    def healthy(self) -> bool:
        """Every cell counts the tokens. Of each block the first and the last 4 KiB are read."""
        right, page = ctypes.string_at((ctypes.c_uint32 * 1024)(*[self._tokens] * 1024), 4096), 4096
        seen = ctypes.create_string_buffer(page)
        for at in self._blocks:
            for offset in (0, BLOCK_MIB * MIB - page):
                self._call("cuMemcpyDtoH_v2", seen, ctypes.c_uint64(at.value + offset), ctypes.c_size_t(page))
                if seen.raw != right:
                    return False
        return True


class TorchModel:
    """Matrices of 16 bits with random weights."""

    def __init__(self, mib: int) -> None:
        import torch

        self._torch = torch
        torch.manual_seed(1)
        count = max(1, mib * MIB // (2 * WIDTH * WIDTH))
        made = [torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        self._layers, self._start = made, torch.randn(WIDTH, device="cuda", dtype=torch.bfloat16)
        self._right = self._run()

    def _run(self) -> Any:
        x = self._start
        for layer in self._layers:
            x = layer @ x
            x = x / x.norm()
        return x

    def token(self) -> None:
        self._last = self._run()
        self._torch.cuda.synchronize()

    def healthy(self) -> bool:
        """The same numbers come out as when the server started."""
        return bool(self._torch.equal(self._last, self._right))


class Handler(BaseHTTPRequestHandler):
    """One request at a time."""

    model: ClassVar[Model]

    def do_GET(self) -> None:  # the name is http.server's
        url = urlsplit(self.path)
        tokens = (parse_qs(url.query).get("tokens") or ["1"])[0]
        if url.path == "/healthz":
            self._start(200)
        elif url.path != "/generate":
            self._start(404)
        elif not tokens.isdigit() or not 1 <= int(tokens) <= TOKENS_MOST:
            self._start(400)
        else:
            self._start(200)
            for number in range(int(tokens)):
                self.model.token()
                self.wfile.write(f"token {number}\n".encode())
            self.wfile.write(b"right\n" if self.model.healthy() else b"wrong\n")

    def _start(self, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing for each request."""


def main() -> None:
    """Load the weights, then listen."""
    mib, began = int(os.environ.get("MODEL_MIB", "16384")), time.monotonic()
    try:
        Handler.model = TorchModel(mib)
    except ImportError:
        Handler.model = DriverModel(mib)
    server = HTTPServer((os.environ.get("HOST", "0.0.0.0"), int(os.environ.get("PORT", "8000"))), Handler)  # noqa: S104
    kind = type(Handler.model).__name__
    print(f"{kind}, {mib} MiB, ready after {time.monotonic() - began:.1f} s: port {server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
