"""What a merge will hold in memory."""

from collections.abc import Sequence
from typing import Final

from darelib.core.tuning import TUNING
from darelib.kernels.records import Buffers
from darelib.models.checkpoint import Checkpoint
from darelib.output.prepare import FilePlan
from darelib.run.matrices import estimate_matrices

# What a merge holds besides its buffers, as measured: the process with all that it has loaded, and
# what is known of each tensor of each model.
PROCESS_BYTES: Final = 92_000_000
TENSOR_BYTES: Final = 900


def estimate_memory(plan: FilePlan, inputs: Sequence[Checkpoint]) -> int:
    """About what the process will hold: itself, what is known of the tensors, and the buffers."""
    kinds = {look.kernel for tensor in plan.tensors for look in tensor.looks}
    buffers = Buffers(len(plan.models), plan.chunk * plan.itemsize, kinds, plan.ranked).nbytes
    held = [model.held_bytes for model in inputs]
    kept = min(plan.threads * sum(held), TUNING.expand_elements * 4)
    waiting = [tensor.encoding.count_held(tensor.base, plan.chunk) for tensor in plan.tensors]
    threads = kept + plan.threads * (buffers + max(held) + max(waiting, default=0))
    known = TENSOR_BYTES * len(plan.tensors) * len(inputs)
    return PROCESS_BYTES + known + threads + estimate_matrices(plan)
