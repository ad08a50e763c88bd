"""Numba's kernels as machine code: compiled and proved once, kept on disk, loaded without Numba.

Loading Numba takes longer than merging a billion parameters, and which vectors it uses can only be
set for a whole process. So child processes compile, and this one loads the object files by llvmlite
alone.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import numpy as np

from darelib.core.formats import FORMATS
from darelib.core.interrupts import Interrupts
from darelib.core.mask import TILE
from darelib.core.text import LOG
from darelib.core.tuning import TUNING
from darelib.kernels import Kernel, KernelSpec
from darelib.kernels.compiler import compile_objects
from darelib.kernels.machine import load_llvmlite, target_machine
from darelib.kernels.objects import (
    can_keep,
    find_cache,
    find_doubt,
    is_announced,
    object_name,
    read_objects,
    store,
)
from darelib.kernels.records import ADD, ADD_SIZES, AVERAGE, ELECT, MODEL, MULTIPLY

# Kinds of kernels that share one function: its name, and what it is asked for.
SHARED: Final = {
    "sum": ("merge", ADD),
    "elect": ("merge", ELECT),
    "average": ("merge", AVERAGE),
    "products": ("totals", MULTIPLY),
    "sums": ("totals", ADD_SIZES),
}
# Kernels that merge a type in other ways, or show what a merge would do: who needs one of them soon
# wants another. On two cores a process compiles merge, count, pack and unpack, another the rest:
# all but measure are there soon after merge.
COMPANIONS: Final = ("merge", "totals", "count", "rank", "pack", "measure", "unpack")

Function = Callable[..., Any]  # of nine addresses, then whole numbers

_loaded: dict[KernelSpec, Function] = {}


def load_kernels(specs: Collection[KernelSpec], interrupts: Interrupts) -> dict[KernelSpec, Kernel]:
    """The kernels as functions that run without the interpreter's lock."""
    codes = {spec: find_code(spec) for spec in specs}
    wanted = sorted({*codes.values()} - _loaded.keys(), key=str)
    if wanted:
        for code, machine_code in _find_objects(wanted, interrupts).items():
            _loaded[code] = load_object(code, machine_code)
    return {spec: bind(spec, _loaded[code]) for spec, code in codes.items()}


def find_code(spec: KernelSpec) -> KernelSpec:
    """The function that a kernel is in. All but one write no values of the output's type."""
    kind, _ = SHARED.get(spec.kind, (spec.kind, None))
    output = spec.output if kind == "merge" else spec.real
    return KernelSpec(kind, spec.base, spec.finetuned, output)


def list_kinds(code: KernelSpec) -> list[str]:
    """The kinds of kernels that are in a function."""
    return [kind for kind, (name, _) in SHARED.items() if name == code.kind] or [code.kind]


def list_companions(code: KernelSpec) -> list[KernelSpec]:
    """Other functions of the same types."""
    output = code.output if code.kind == "merge" else code.base
    kinds = [kind for kind in COMPANIONS if kind != code.kind] if code.kind in COMPANIONS else []
    return [find_code(KernelSpec(kind, code.base, code.finetuned, output)) for kind in kinds]


def _find_objects(
    wanted: Collection[KernelSpec], interrupts: Interrupts
) -> dict[KernelSpec, bytes]:
    """The machine code of kernels; what was never compiled is compiled now."""
    folder = find_cache()
    paths = {code: folder / object_name(code) for code in wanted}
    for path in (folder, *paths.values()):
        if doubt := find_doubt(path):
            LOG.warning(f"{doubt}, so no kernel there is run: they are compiled for this run only")
            return compile_objects(wanted, {}, interrupts, kept=False)
    _await(paths.values(), interrupts)
    known = read_objects(paths)
    missing = [code for code in wanted if code not in known]
    if missing:
        kept = can_keep(folder)
        companions = [other for code in missing for other in list_companions(code)]
        others = {code: folder / object_name(code) for code in companions if code not in paths}
        unmade = {
            code: path
            for code, path in others.items()
            if kept and not os.path.exists(path) and not is_announced(path)
        }
        known |= compile_objects(missing, unmade, interrupts, kept)
        for code in missing:
            store(known[code], paths[code])
    return known


def _await(paths: Collection[Path], interrupts: Interrupts) -> None:
    """Wait for what another process is about to store."""
    announced = False
    while any(is_announced(path) and not os.path.exists(path) for path in paths):
        if not announced:
            LOG.info("waiting for what another process is compiling for this machine")
        announced = True
        time.sleep(TUNING.poll_seconds / 5)
        interrupts.check()


def load_object(code: KernelSpec, machine_code: bytes) -> Function:
    llvm = load_llvmlite().binding
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
    engine.finalize_object()
    numbers = 5 if code.kind in ("merge", "totals") else 4
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, *[ctypes.c_void_p] * 11, *[ctypes.c_ssize_t] * numbers
    )
    function = prototype(engine.get_function_address("kernel"))
    # For a returned value and an exception, of which there are none.
    slots = ctypes.create_string_buffer(16)
    first = ctypes.addressof(slots)

    # What it owns must live as long as the function.
    def call(*arguments: int, _owners: Any = (engine, slots)) -> None:
        if function(first, first + 8, *arguments):
            raise RuntimeError(f"the kernel {code.kind} failed")

    return call


def bind(spec: KernelSpec, function: Function) -> Kernel:
    """A kernel as it is called, whatever arguments its function has."""
    itemsize = FORMATS[spec.finetuned].itemsize
    way = SHARED[spec.kind][1:] if spec.kind in SHARED else ()

    def run_chunk(buffers: Any, count: int, models: int, first_tile: int) -> None:
        stride = buffers.finetuned.shape[1] // itemsize
        function(*buffers.addresses, count, stride, models, first_tile, *way)

    def expand(left: Any, right: Any, made: Any, first: int, ranks_before: int) -> None:
        before = ctypes.c_int64(ranks_before)
        addresses = [array.ctypes.data for array in (left, right, made)]
        sizes = (len(made), right.shape[1], left.shape[1])
        function(*addresses, ctypes.addressof(before), 0, 0, 0, 0, 0, *sizes, first)

    def rank(
        base: Any, values: Any, by_rank: Any, order: Any, limits: Any, skipped: int, is_delta: bool
    ) -> None:
        addresses = [array.ctypes.data for array in (base, values, by_rank, order, limits)]
        function(*addresses, 0, 0, 0, 0, len(limits), len(by_rank), skipped, is_delta)

    def unpack(
        values: Any, entries: Any, key: tuple[int, int], threshold: int, first_tile: int
    ) -> int:
        model = np.zeros(1, MODEL)
        model["key_0"], model["key_1"] = key
        model["limit"] = threshold - 1
        bits = np.empty((2, TILE), np.uint16)
        addresses = [values.ctypes.data, entries.ctypes.data, 0, model.ctypes.data]
        addresses += [0, bits.ctypes.data, 0, 0, 0]
        function(*addresses, len(values), len(entries), 1, first_tile)
        return int(model["kept"][0])

    others: dict[str, Kernel] = {"expand": expand, "rank": rank, "unpack": unpack}
    return others.get(spec.kind, run_chunk)
