"""Compiles a decode step's kernels for GPUs that need not be there; a script of its own: tests turn the interpreter on.

The interpreter knows neither types nor the constants that small numbers become in a launch: a kernel may run in it that
no GPU's compiler takes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mreader.formats.codes import TERNARY
from mreader.kernels import attention, decode, product
from mreader.kernels.attention_kernel import attention_kernel, combine_parts_kernel
from mreader.kernels.decode import Blocks, DecodeLayer, Gate, Router, Stages
from mreader.kernels.layout import TILE, Tiles
from mreader.kernels.product_kernel import product_kernel
from mreader.reader import ReadSettings

WAIT = "griddepcontrol.wait"
STAGES = ("rotate", "screen", "score", "select", "exact", "finish")
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int8: "i8", torch.bool: "i1",
}  # fmt: skip


def empty(*size: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def empty_stages(
    shape: tuple[int, int, int], slots: int, settings: ReadSettings, shared: bool = False, router: str = ""
) -> Stages:
    """Stages of two tokens of E, H, I without numbers in their tensors."""
    E, H, I = shape
    nb, T, bf16 = -(-H // 128), -(-I // TILE), torch.bfloat16
    tiles = Tiles(
        empty(E, nb * 128, T, 2, 4, dtype=torch.int32), empty(E, nb, T, 2, TILE), empty(E, nb, T, 2, TILE, dtype=bf16)
    )
    layer = DecodeLayer(
        gate_up=empty(E, 2, I, H, dtype=bf16),
        down=empty(E, I, H, dtype=bf16),
        tiles=tiles,
        signs=empty(H, dtype=torch.int8),
        down_norms=empty(E, I),
        basis=empty(H, 8),
        coeffs=empty(E, I, 8),
        code=TERNARY,
        activation="silu",
        arrived=empty(128, dtype=torch.int32),
    )
    ids, weights = empty(2, slots, dtype=torch.int64), empty(2, slots, dtype=torch.float32)
    padding = empty(2, dtype=torch.bool) if E > 1 else None
    chooses = None
    if router:
        gate = Gate(empty(E, H, dtype=bf16), empty(H, dtype=bf16), 1e-6) if router == "gate" else None
        chooses = Router(empty(2, E, dtype=bf16), slots, renormalize=True, padding=padding, gate=gate)
    blocks = Blocks(screen_ahead=1, screen_registers=80, exact_ahead=1)
    return Stages(empty(2, H, dtype=bf16), ids, weights, layer, settings, blocks, shared=shared, router=chooses)


def compile_launch(target: GPUTarget, kernel: Any, warps: int, arguments: tuple[Any, ...], **constants: Any) -> str:
    """PTX of what a launch with these arguments would run: a number of 1 is a constant to it."""
    options = {name: constants.pop(name) for name in ("maxnreg", "launch_pdl") if name in constants}
    values = {**dict(zip(kernel.arg_names, arguments, strict=False)), **constants}
    signature, known, attributes = {}, {}, {}
    for at, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if isinstance(value, Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
        elif parameter.is_constexpr or value in (None, 1):
            signature[parameter.name], known[(at,)] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        is_aligned = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        if not parameter.is_constexpr and is_aligned:
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, known, attributes)
    compiled = triton.compile(source, target=target, options={"num_warps": warps, **options})
    if "maxnreg" in options and f".maxnreg {options['maxnreg']}" not in compiled.asm["ptx"]:
        raise SystemExit(f"{kernel.fn.__name__} is compiled without a limit of {options['maxnreg']} registers")
    return str(compiled.asm["ptx"])


def main(capability: int) -> None:
    """Compile all kernels but the dense ones."""
    target, dependent = GPUTarget("cuda", capability, 32), capability >= 90
    compile_stages(target, dependent)
    compile_attention(target, dependent)
    compile_product(target, dependent)


def compile_stages(target: GPUTarget, dependent: bool) -> None:
    """For experts on one rank, on several, and chosen on the way, down to the smallest numbers."""
    limited: list[int] = []
    decode.has_dependent_launch = lambda device: dependent  # type: ignore[assignment]
    for stages in (
        empty_stages((3, 130, 37), 2, ReadSettings(20, 80, "variance", 8)),
        empty_stages((1, 128, 64), 1, ReadSettings(1, 8, "rho", 5), shared=True),
        empty_stages((200, 130, 37), 3, ReadSettings(20, 80, "variance", 8), router="logits"),
        empty_stages((200, 130, 37), 3, ReadSettings(20, 80, "variance", 8), router="gate"),
        empty_stages((1, 128, 64), 1, ReadSettings(1, 8, "rho", 5), router="logits"),
        empty_stages((1, 128, 64), 1, ReadSettings(1, 8, "rho", 5), router="gate"),
    ):

        def launch(kernel: Any, grid: tuple[int, ...], warps: int, *arguments: Any, **constants: Any) -> None:
            more = decode.launch_options(dependent)
            limited.extend(value for name, value in constants.items() if name == "maxnreg")
            ptx = compile_launch(target, kernel, warps, arguments, **constants, **more)
            if dependent and constants.get("ROUTED") and reads_before_it_waits(ptx):
                raise SystemExit("the screen reads before it has waited for the experts")

        stages._launch = launch  # type: ignore[method-assign]
        for stage in STAGES:
            limited.clear()
            getattr(stages, stage)()
            if stage == "screen" and limited != [80]:
                raise SystemExit(f"the screen is launched with limits of registers {limited}, not 80")


class Launched:
    """In place of a kernel: its launches are compiled, and what was made kept."""

    def __init__(self, kernel: Any, target: GPUTarget) -> None:
        self.kernel, self.target = kernel, target
        self.ptx: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            self.ptx.append(compile_launch(self.target, self.kernel, num_warps, arguments, **constants))

        return launch


def compile_attention(target: GPUTarget, dependent: bool) -> None:
    """Of one part and of several, with every kind of mask, none of which may be read before the wait."""
    attention.has_dependent_launch = lambda device: dependent  # type: ignore[assignment]
    of_part, of_all = (Launched(kernel, target) for kernel in (attention_kernel, combine_parts_kernel))
    attention.attention_kernel, attention.combine_parts_kernel = of_part, of_all
    for length in (1, 300):
        for dtype in (None, torch.bool, torch.float32):
            mask = None if dtype is None else empty(1, length, dtype=dtype)
            query = empty(2, 6, 80, dtype=torch.bfloat16)
            key, value = (empty(2, 3, length, size, dtype=torch.bfloat16) for size in (80, 48))
            attention.attend(query, key, value, mask, 0.1)
    if dependent and any(reads_before_it_waits(ptx) for ptx in of_part.ptx + of_all.ptx):
        raise SystemExit("attention reads before it has waited")


def compile_product(target: GPUTarget, dependent: bool) -> None:
    """Of 4 rows of 2048 numbers a program: 8 loads of 16 bytes a thread, and nothing else, may come before the wait."""
    product.has_dependent_launch = lambda device: dependent  # type: ignore[assignment]
    launched = product.product_kernel = Launched(product_kernel, target)
    x, weight, addend = (empty(*size, dtype=torch.bfloat16) for size in ((1, 2048), (130, 2048), (1, 130)))
    product.product(x, weight, addend)
    (ptx,) = launched.ptx
    if dependent and ptx[: ptx.index(WAIT)].count("ld.global") != 8:
        raise SystemExit("a product reads more than its matrix before it has waited")


def reads_before_it_waits(ptx: str) -> bool:
    return ptx.find(WAIT) > ptx.index("ld.global")


if __name__ == "__main__":
    main(int(sys.argv[1]))
