"""Compiles the decode block for GPUs that need not be there; a script of its own, since tests turn the interpreter on.

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
from mreader.kernels import decode
from mreader.kernels.decode import Blocks, DecodeLayer, Router, Stages
from mreader.kernels.layout import TILE, Tiles
from mreader.reader import ReadSettings

STAGES = ("rotate", "screen", "score", "select", "exact", "finish")
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int8: "i8", torch.bool: "i1",
}  # fmt: skip


def empty_stages(
    shape: tuple[int, int, int], slots: int, settings: ReadSettings, shared: bool = False, routed: bool = False
) -> Stages:
    """Stages of two tokens of E, H, I without numbers in their tensors."""

    def empty(*sizes: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

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
    )
    ids, weights = empty(2, slots, dtype=torch.int64), empty(2, slots, dtype=torch.float32)
    padding = empty(2, dtype=torch.bool) if E > 1 else None
    router = Router(empty(2, E, dtype=bf16), slots, renormalize=True, padding=padding) if routed else None
    blocks = Blocks(screen_ahead=1, screen_registers=80, exact_ahead=1)
    return Stages(empty(2, H, dtype=bf16), ids, weights, layer, settings, blocks, shared=shared, router=router)


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
            signature[parameter.name] = "i32"
        if not parameter.is_constexpr and value is not None and (isinstance(value, Tensor) or value % 16 == 0):
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, known, attributes)
    compiled = triton.compile(source, target=target, options={"num_warps": warps, **options})
    if "maxnreg" in options and f".maxnreg {options['maxnreg']}" not in compiled.asm["ptx"]:
        raise SystemExit(f"{kernel.fn.__name__} is compiled without a limit of {options['maxnreg']} registers")
    return str(compiled.asm["ptx"])


def main(capability: int) -> None:
    """Compile all stages, for experts on one rank, on several, and chosen on the way, down to the smallest numbers."""
    target, dependent = GPUTarget("cuda", capability, 32), capability >= 90
    limited: list[int] = []
    decode.has_dependent_launch = lambda device: dependent  # type: ignore[assignment]
    for stages in (
        empty_stages((3, 130, 37), 2, ReadSettings(20, 80, "variance", 8)),
        empty_stages((1, 128, 64), 1, ReadSettings(1, 8, "rho", 5), shared=True),
        empty_stages((200, 130, 37), 3, ReadSettings(20, 80, "variance", 8), routed=True),
        empty_stages((1, 128, 64), 1, ReadSettings(1, 8, "rho", 5), routed=True),
    ):

        def launch(kernel: Any, grid: tuple[int, ...], warps: int, *arguments: Any, **constants: Any) -> None:
            more = decode.launch_options(dependent)
            limited.extend(value for name, value in constants.items() if name == "maxnreg")
            ptx = compile_launch(target, kernel, warps, arguments, **constants, **more)
            if dependent and constants.get("ROUTED") and ptx.find("griddepcontrol.wait") > ptx.index("ld.global"):
                raise SystemExit("the screen reads before it has waited for the experts")

        stages._launch = launch  # type: ignore[method-assign]
        for stage in STAGES:
            limited.clear()
            getattr(stages, stage)()
            if stage == "screen" and limited != [80]:
                raise SystemExit(f"the screen is launched with limits of registers {limited}, not 80")


if __name__ == "__main__":
    main(int(sys.argv[1]))
