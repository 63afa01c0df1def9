"""Compare arms: is a step with a plan, bit for bit, the step without one?

1.  Fingerprints of every completed arm are held against those of the *reference*: the arm without a
    plan, or, where that ran out of memory, the first plan that completed.
2.  A tensor whose bits differ is a difference, unless a *control* differs from the reference too.
    Then kernels do not repeat their results, and a tensor is excused as far as it is no further
    from the reference, relative to its norm, than ``NOISE_FACTOR`` times the furthest tensor of
    the control.  What was excused is kept as noise.
    Arms of another engine than the reference's are not held against it: compiled graphs may round
    otherwise than eager training does.
3.  Each step of a plan moves exactly the bytes and the number of transfers that the plan says, and
    an arm without one moves nothing.  Under hooks, every step from step 2 on moves what step 1 did.
4.  From step 1 on, the device bytes at the end of a step and the host bytes are the same in every
    step, except that an arm may do as the reference does: a model may keep something of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from offplan.measured import Arm, Difference, Noise, Planned, Step, Verification, What
from offplan.replay.messages import ArmResult, Fingerprint

# One control is one draw of the noise; ten times its largest distance is no draw of it any more.
NOISE_FACTOR = 10.0
_NOTHING = Planned(0, 0, 0, 0)

_Key = tuple[int, What, str]


def verify(results: Sequence[ArmResult]) -> Verification:
    """Everything that is not as it has to be in ``results``; roles tell what each arm is."""
    completed = [result for result in results if result.arm.completed]
    counted = [found for result in completed for found in _counted(result.arm)]
    if not completed:
        return Verification(not_compared="no arm completed")
    reference = completed[0]
    flat = [found for result in completed for found in _not_flat(result.arm, reference.arm)]
    others = [
        result
        for result in completed[1:]
        if result.arm.role != "control" and result.arm.engine == reference.arm.engine
    ]
    control = next((r for r in completed[1:] if r.arm.role == "control"), None)
    noise = () if control is None else tuple(_noise(reference, control, others))
    limit = 0.0 if control is None else NOISE_FACTOR * _furthest(reference, control)
    bits = [found for other in others for found in _beyond(reference, other, limit)]
    kinds = [found.what for found in reference.fingerprints[0]] if reference.fingerprints else []
    return Verification(
        reference=reference.arm.name if others else "",
        compared=tuple(other.arm.name for other in others),
        not_compared="" if others else _why_not(results),
        steps=len(reference.arm.steps),
        gradients=kinds.count("gradient"),
        buffers=kinds.count("buffer"),
        differences=(*bits, *counted, *flat),
        control="" if control is None else "differs" if noise else "same",
        noise=noise,
        nondeterministic=tuple(dict.fromkeys(w for r in completed for w in r.nondeterministic)),
    )


def needs_control(results: Sequence[ArmResult]) -> bool:
    """Whether bits differ and only a second run without a plan can tell why."""
    completed = [result for result in results if result.arm.completed]
    if any(result.arm.role == "control" for result in results) or not completed:
        return False
    reference = completed[0]
    return not reference.arm.moves and any(
        found
        for other in completed[1:]
        if other.arm.engine == reference.arm.engine
        for found in _differing(reference, other)
    )


def _why_not(results: Sequence[ArmResult]) -> str:
    out = [result.arm.name for result in results if not result.arm.completed]
    return f"out of memory: {', '.join(out)}" if out else "there is only one arm"


# --- bits -----------------------------------------------------------------------------------------


def _by_key(result: ArmResult) -> Mapping[_Key, Fingerprint]:
    return {
        (step, each.what, each.name): each
        for step, found in enumerate(result.fingerprints)
        for each in found
    }


def _differing(reference: ArmResult, other: ArmResult) -> Iterator[tuple[_Key, float]]:
    """Each fingerprint of ``other`` with other bits, and how far off it is (infinity: unknown)."""
    expected, found = _by_key(reference), _by_key(other)
    for key in dict.fromkeys((*expected, *found)):
        before, after = expected.get(key), found.get(key)
        if before is None or after is None:
            yield key, math.inf
        elif before.bits != after.bits:
            yield key, distance(before, after)


def distance(before: Fingerprint, after: Fingerprint) -> float:
    """The estimated distance of two tensors, relative to the norm of the first."""
    pairs = [*zip(before.sketch, after.sketch, strict=False)]
    apart = [b - a for a, b in pairs if a is not None and b is not None]
    if before.norm is None or not apart or len(apart) < len(pairs):
        return math.inf
    absolute = math.sqrt(sum(each * each for each in apart) / len(apart))
    # Other bits at no distance, or of zeros: signs of zeros, or a difference below rounding.
    return absolute / before.norm if before.norm else (math.inf if absolute else 0.0)


def _furthest(reference: ArmResult, control: ArmResult) -> float:
    """The largest finite distance of the control; 0 if it has the same bits."""
    return max((far for _, far in _differing(reference, control) if far < math.inf), default=0.0)


def _beyond(reference: ArmResult, other: ArmResult, limit: float) -> Iterator[Difference]:
    expected, found = _by_key(reference), _by_key(other)
    for key, far in _differing(reference, other):
        if limit and far <= limit:
            continue
        step, what, name = key
        yield Difference(
            what=what,
            name=name,
            arm=other.arm.name,
            step=step,
            expected=expected[key].bits if key in expected else "none",
            found=found[key].bits if key in found else "none",
        )


def _noise(
    reference: ArmResult, control: ArmResult, others: Iterable[ArmResult]
) -> Iterator[Noise]:
    """Tensors whose bits a control or a plan did not repeat; the furthest first."""
    own, planned = _by_tensor([control], reference), _by_tensor(others, reference)
    if not own:
        return
    rows = [
        Noise(what=what, name=name, control=own.get((what, name), 0.0), plan=far)
        for (what, name), far in planned.items()
    ]
    rows += [
        Noise(what=what, name=name, control=far, plan=0.0)
        for (what, name), far in own.items()
        if (what, name) not in planned
    ]
    yield from sorted(rows, key=lambda row: -max(row.control, row.plan))


def _by_tensor(arms: Iterable[ArmResult], reference: ArmResult) -> Mapping[tuple[What, str], float]:
    """The largest finite distance of each tensor from the reference, over arms and steps."""
    largest: dict[tuple[What, str], float] = {}
    for arm in arms:
        for (_, what, name), far in _differing(reference, arm):
            if far < math.inf:
                largest[what, name] = max(far, largest.get((what, name), 0.0))
    return largest


# --- bytes ----------------------------------------------------------------------------------------


def _counted(arm: Arm) -> Iterator[Difference]:
    """What each step moved, held against the plan (definition 3)."""
    planned, first = arm.planned or _NOTHING, 0
    if arm.role == "hooks" and len(arm.steps) > 1:
        planned, first = _moved(arm.steps[1]), 2
    for number, step in enumerate(arm.steps[first:], first):
        pairs: tuple[tuple[What, int, int], ...] = (
            ("bytes to the host", planned.to_host_bytes, step.to_host_bytes),
            ("bytes to the device", planned.to_device_bytes, step.to_device_bytes),
            ("transfers to the host", planned.to_host_count, step.to_host_count),
            ("transfers to the device", planned.to_device_count, step.to_device_count),
        )
        for what, expected, found in pairs:
            if expected != found:
                yield Difference(
                    what=what,
                    arm=arm.name,
                    step=number,
                    expected=f"{expected:,}",
                    found=f"{found:,}",
                )


def _moved(step: Step) -> Planned:
    return Planned(
        step.to_host_bytes, step.to_device_bytes, step.to_host_count, step.to_device_count
    )


def _not_flat(arm: Arm, reference: Arm) -> Iterator[Difference]:
    """Bytes that change from step to step, and not as the reference's do (definition 4)."""
    kinds: tuple[What, ...] = ("device bytes", "host bytes")
    for what in kinds:
        sizes, allowed = _held(arm.steps, what), _held(reference.steps, what)
        if reference.moves:
            allowed = [0] * len(sizes)
        for number in range(2, len(sizes)):
            if sizes[number] - sizes[1] != allowed[number] - allowed[1]:
                yield Difference(
                    what=what,
                    arm=arm.name,
                    step=number,
                    expected=f"{sizes[1]:,}",
                    found=f"{sizes[number]:,}",
                )


def _held(steps: Sequence[Step], what: What) -> list[int]:
    return [step.end_bytes if what == "device bytes" else step.host_bytes for step in steps]
