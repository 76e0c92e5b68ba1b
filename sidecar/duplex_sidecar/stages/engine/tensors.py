"""Envelope tensors <-> torch, in the stage process."""

import torch

from duplex_sidecar.stages.envelope import ElementType, Tensor

_TORCH_TYPES = {
    ElementType.FLOAT32: torch.float32,
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.INT64: torch.int64,
}


def to_torch(tensor: Tensor) -> torch.Tensor:
    """A copy of its own: vLLM keeps rows for the life of a stream."""
    data = torch.frombuffer(bytearray(tensor.data), dtype=_TORCH_TYPES[tensor.element_type])
    return data.reshape(tensor.shape)
