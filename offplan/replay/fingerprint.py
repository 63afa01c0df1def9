"""Fingerprints of tensors: do two processes hold the same bits, and if not, how far apart are they.

1.  A tensor's elements are read as integers, in the order of their indexes, whatever its strides.
    ``bits`` is the sum, modulo 2**64, of a mixing function of each integer and its index; so two
    tensors that differ in one bit, or in the order of two elements, differ in it but for a chance
    of 2**-64.  NaNs compare by their bits.
2.  ``sketch`` are ``SKETCHES`` sums of the elements, each with signs drawn by the index.  The
    difference of two sketches is the sketch of the difference, and the mean of its squares
    estimates the squared Euclidean distance of the two tensors (within a factor of two, mostly).

All of it is computed on the tensor's device, in pieces: a fingerprint needs some 100 MB, however
large the tensor is.  Integers are added in any order to the same sum, so that the device does not
matter to ``bits``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from offplan.measured import What
from offplan.replay.messages import Fingerprint

SKETCHES = 8
_PIECE_ELEMENTS = 2**21
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Signs are taken from these upward; the lowest bits of the mixed index go into ``bits``, too.
_SIGN_BIT = 24


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


# The multipliers of splitmix64's output function.
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_STEP = _signed(0x9E3779B97F4A7C15)


def fingerprints(named: Iterable[tuple[What, str, torch.Tensor]]) -> tuple[Fingerprint, ...]:
    """A fingerprint of each tensor.  All are computed before the device is waited for."""
    tensors = list(named)
    with torch.no_grad():
        sums = [_sums(tensor) for _, _, tensor in tensors]
    return tuple(
        _fingerprint(what, name, tensor, int(bits), values.tolist())
        for (what, name, tensor), (bits, values) in zip(tensors, sums, strict=True)
    )


def _fingerprint(
    what: What, name: str, tensor: torch.Tensor, bits: int, values: list[float]
) -> Fingerprint:
    square, *sketch = values
    shape = "x".join(map(str, tensor.shape))
    return Fingerprint(
        what=what,
        name=name,
        bits=f"{str(tensor.dtype).removeprefix('torch.')}[{shape}] {bits % 2**64:016x}",
        norm=math.sqrt(square) if math.isfinite(square) else None,
        sketch=tuple(value if math.isfinite(value) else None for value in sketch),
    )


def _sums(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of definition 1; the sum of squares and those of definition 2."""
    flat = tensor.detach().resolve_conj().resolve_neg()
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    device = flat.device
    bits = torch.zeros((), dtype=torch.int64, device=device)
    values = torch.zeros(1 + SKETCHES, dtype=torch.float64, device=device)
    start = 0
    for piece in _pieces(flat):
        index = torch.arange(start, start + len(piece), device=device, dtype=torch.int64)
        _mix(index.mul_(_STEP))
        # Not in place: ``to`` hands back the tensor itself where it has the type already.
        bits += _mix(piece.view(_BITS[piece.itemsize]).to(torch.int64) + index).sum()
        numbers = piece.to(torch.float64)
        values[0] += numbers.square().sum()
        for number in range(SKETCHES):
            sign = (index >> (_SIGN_BIT + number)).bitwise_and_(1).mul_(2).sub_(1)
            values[1 + number] += sign.to(torch.float64).mul_(numbers).sum()
        start += len(piece)
    return bits, values


def _mix(integers: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function, in place.  Its shifts are arithmetic here, which is as good."""
    integers.bitwise_xor_(integers >> 30).mul_(_FIRST)
    integers.bitwise_xor_(integers >> 27).mul_(_SECOND)
    return integers.bitwise_xor_(integers >> 31)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Elements in the order of their indexes, as contiguous one-dimensional tensors."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(_PIECE_ELEMENTS)
    elif tensor.numel() <= _PIECE_ELEMENTS:
        yield tensor.reshape(-1)
    else:
        row_elements = tensor[0].numel()
        for rows in tensor.split(max(1, _PIECE_ELEMENTS // row_elements)):
            yield from _pieces(rows if len(rows) > 1 else rows[0])
