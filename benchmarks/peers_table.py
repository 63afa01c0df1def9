"""What the measured arms of ``peers.py`` come to: judgement, tables, and the points of its plot.

1.  Each arm's peak and step are laid beside those of its own *baseline*: the arm without offload
    that the same process measured before it.  Steps of two processes are only compared so.
2.  *Results* are those of the eager baseline.  An arm without a compiler runs the same kernels, so
    its losses and gradient norms may be off by ``MOST_OFF_EAGER``.  Another may be off by
    ``MOST_OFF``, by ``AS_MUCH`` times what Inductor is without offload, or, where the model draws
    random numbers, by ``AS_MUCH`` times what other seeds make of the eager baseline.
3.  A peer is held against the fastest arm of offplan whose peak is not over the peer's by more than
    ``SAME_PEAK``: eager peers against offplan's hooks, compiled ones against its plans under
    Inductor.  DeepCompile holds other things at rest (ZeRO's partitions), so that it is held
    against an arm of offplan that lowers Inductor's peak by as many bytes as it lowers its own.
4.  The *levels* that offplan is measured at are the peaks of the peers that no other peer beats in
    both peak and step, at most ``MOST_LEVELS``, no two within ``APART`` of each other.

No part of this imports torch.  Arms of the joint benchmark are taken from its result file, where
that was measured on the same GPU with the same torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_OFF_EAGER, MOST_OFF, AS_MUCH = 1e-3, 1e-2, 3.0
SAME_PEAK, SAME_STEP = 0.005, 0.02
MOST_LEVELS, APART = 4, 0.03

# Baseline arms by engine: what a part measures first.
BASELINES = {
    "eager": "eager",
    "inductor": "Inductor",
    "aot_eager": "AOT graphs",
    "deepcompile": "DeepCompile",
}
OURS = "offplan"
# An engine's peers, and the engine of the arms of offplan that they are held against.
AGAINST = {"eager": "eager", "inductor": "inductor", "deepcompile": "inductor"}
# Words that an arm's name begins with, and the head of its column.
FAMILIES = {
    "save_on_cpu": "`save_on_cpu`",
    "torchtune": "torchtune",
    "TRL": "TRL",
    "eager checkpointing": "checkpointing, eager",
    "PyTorch's pass": "PyTorch's pass",
    "memory budget": "`activation_memory_budget`",
    "checkpointing": "checkpointing, Inductor",
    "DeepCompile offload": "DeepCompile",
}

Models = Mapping[str, Mapping[str, Any]]


# --- what was measured elsewhere ------------------------------------------------------------------


def from_joint(path: Path, machine: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Arms of the joint benchmark by model, each with the baseline of its part; {} if not ours."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    if _what_counts(found["machine"]) != _what_counts(machine):
        return {}
    return {
        model: {arm["name"]: arm for part in _JOINT for arm in _joint_arms(part, parts, path)}
        for model, parts in found["models"].items()
    }


def _what_counts(machine: Mapping[str, Any]) -> tuple[Any, ...]:
    return machine.get("gpu"), machine.get("versions", {}).get("torch")


# Of each part of the joint benchmark that is of use here: what its arms are called here.
_JOINT: dict[str, Callable[[str], str]] = {
    "budgets": lambda share: f"memory budget {share}",
    "checkpoint": lambda every: (
        "checkpointing all layers" if every == "1" else f"checkpointing one of {every} layers"
    ),
    "plans": lambda level: f"offplan Inductor {level}",
}


def _joint_arms(part: str, parts: Mapping[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    """The arms of a part's groups, each with the baseline that its steps were in turn with; of
    earlier results, the one that its group begins with."""
    for group in parts.get(part, ()):
        arms = group.get("arms", [])
        for number, arm in enumerate(arms):
            yield {
                "name": _JOINT[part](arm["name"]) if number else BASELINES["inductor"],
                "engine": "inductor",
                "part": part,
                "peak_allocated_bytes": arm["peak_allocated_bytes"],
                "step_ms": arm["step_ms"],
                "moved_bytes": arm.get("moved_bytes", 0),
                "baseline": {
                    "name": BASELINES["inductor"],
                    "peak_allocated_bytes": arms[0]["peak_allocated_bytes"],
                    "step_ms": arm.get("beside", arms[0])["step_ms"],
                },
                "from": path.name,
            }


def with_joint(models: Models, joint: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """``models``, with the arms of the joint benchmark; what was measured here goes before them."""
    return {
        name: {**found, "arms": {**joint.get(name, {}), **found.get("arms", {})}}
        for name, found in models.items()
    }


# --- levels ---------------------------------------------------------------------------------------


def is_ours(arm: Mapping[str, Any]) -> bool:
    return str(arm["name"]).startswith(OURS)


def is_baseline(arm: Mapping[str, Any]) -> bool:
    return arm["name"] == BASELINES[arm["engine"]]


def over(arm: Mapping[str, Any]) -> float:
    """The step over that of the arm's own baseline."""
    return float(arm["step_ms"] / arm["baseline"]["step_ms"])


def _peers(arms: Iterable[Mapping[str, Any]], engine: str) -> list[Mapping[str, Any]]:
    return [a for a in arms if a["engine"] == engine and not is_ours(a) and not is_baseline(a)]


def unbeaten(arms: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The arms that no other is at least as good as in peak and in step, largest peak first."""
    found: list[Mapping[str, Any]] = []
    for arm in sorted(arms, key=lambda a: (a["peak_allocated_bytes"], over(a))):
        if not found or over(arm) < over(found[-1]):
            found.append(arm)
    return found[::-1]


def levels(arms: Iterable[Mapping[str, Any]], engine: str) -> dict[str, int]:
    """Peer and peak, to measure offplan at (definition 4), largest peak first."""
    found: dict[str, int] = {}
    for arm in unbeaten(_peers(arms, engine)):
        peak = int(arm["peak_allocated_bytes"])
        lowers = peak <= (1 - SAME_PEAK) * arm["baseline"]["peak_allocated_bytes"]
        if lowers and all(abs(peak / other - 1) > APART for other in found.values()):
            found[arm["name"]] = peak
    # The lowest are the ones that matter most.
    return dict(list(found.items())[-MOST_LEVELS:])


# --- results --------------------------------------------------------------------------------------


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference, of the larger of the two, of steps that both have."""
    return max(
        (abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in zip(one, other, strict=False)),
        default=0.0,
    )


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float]:
    return (
        _apart(one["losses"], other["losses"]),
        _apart(one.get("gradient_norms", ()), other.get("gradient_norms", ())),
    )


def _spread(values: Sequence[float]) -> float:
    return _apart([max(values)], [min(values)]) if values else 0.0


def results_of(arm: Mapping[str, Any], arms: Mapping[str, Mapping[str, Any]]) -> str:
    """``same``, ``differ by ...``, or ``not compared``: the arm's results, by definition 2."""
    eager = arms.get(BASELINES["eager"])
    if eager is None or not arm.get("losses"):
        return "not compared"
    most = [MOST_OFF_EAGER, MOST_OFF_EAGER]
    if arm["engine"] != "eager":
        control = arms.get(BASELINES["inductor"], {})
        apart = _distance(control, eager) if control.get("losses") else (0.0, 0.0)
        seeds = (_spread(eager["losses"]), _spread(eager.get("gradient_norms", ())))
        most = [max(MOST_OFF, AS_MUCH * a, AS_MUCH * b) for a, b in zip(apart, seeds, strict=True)]
    found = _distance(arm, eager)
    if all(each <= limit for each, limit in zip(found, most, strict=True)):
        return "same"
    what = "loss" if found[0] > most[0] else "gradients"
    return f"{what} off by {max(found):.1%}"


# --- who is faster at a peak ----------------------------------------------------------------------


@dataclass(frozen=True)
class Match:
    """A peer, and the fastest arm of offplan that is within its peak, if there is one."""

    model: str
    peer: str
    engine: str
    peak_bytes: int
    peer_over: float
    ours: str | None
    our_peak_bytes: int | None
    our_over: float | None

    @property
    def ratio(self) -> float | None:
        """offplan's step over the peer's."""
        return None if self.our_over is None else self.our_over / self.peer_over

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "only the peer gets there"
        if abs(self.ratio - 1) <= SAME_STEP:
            return "equal"
        if self.ratio < 1:
            return f"offplan, {1 - self.ratio:.0%} faster"
        return f"the peer, {1 - 1 / self.ratio:.0%} faster"


def matches(model: str, arms: Mapping[str, Mapping[str, Any]]) -> list[Match]:
    """Each peer of a model against offplan (definition 3), largest peak first."""
    found = []
    for engine, against in AGAINST.items():
        ours = [a for a in arms.values() if a["engine"] == against and is_ours(a)]
        if ours:
            found += [
                _match(model, peer, ours, _peak_for_ours(peer, arms))
                for peer in _peers(arms.values(), engine)
            ]
    return sorted(found, key=lambda match: (-match.peak_bytes, match.peer))


def _peak_for_ours(peer: Mapping[str, Any], arms: Mapping[str, Mapping[str, Any]]) -> int:
    peak = int(peer["peak_allocated_bytes"])
    base = arms.get(BASELINES["inductor"])
    if peer["engine"] != "deepcompile" or base is None:
        return peak
    lowered = int(peer["baseline"]["peak_allocated_bytes"]) - peak
    return int(base["peak_allocated_bytes"]) - lowered


def _within(arms: Iterable[Mapping[str, Any]], peak_bytes: int) -> list[Mapping[str, Any]]:
    return [a for a in arms if a["peak_allocated_bytes"] <= (1 + SAME_PEAK) * peak_bytes]


def _match(
    model: str, peer: Mapping[str, Any], ours: Sequence[Mapping[str, Any]], peak_bytes: int
) -> Match:
    within = _within(ours, peak_bytes)
    # Where offplan has to do nothing, it does nothing: the baseline is its arm too.
    best = min(within, key=over, default=None)
    return Match(
        model=model,
        peer=peer["name"],
        engine=peer["engine"],
        peak_bytes=int(peer["peak_allocated_bytes"]),
        peer_over=over(peer),
        ours=None if best is None else best["name"],
        our_peak_bytes=None if best is None else int(best["peak_allocated_bytes"]),
        our_over=None if best is None else over(best),
    )


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One arm, beside the eager and the Inductor baseline of its model (None: not measured)."""

    model: str
    arm: str
    engine: str
    peak_bytes: int
    step_ms: float
    over_own: float
    peak_over_eager: float | None
    step_over_eager: float | None
    peak_over_inductor: float | None
    step_over_inductor: float | None
    results: str
    source: str


def rows(model: str, arms: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Baselines first, then by engine, largest peak first."""
    engines = list(BASELINES)

    def place(arm: Mapping[str, Any]) -> tuple[Any, ...]:
        engine, ours = engines.index(arm["engine"]), is_ours(arm)
        return engine, not is_baseline(arm), ours, -arm["peak_allocated_bytes"]

    return [_row(model, arm, arms) for arm in sorted(arms.values(), key=place)]


def _row(model: str, arm: Mapping[str, Any], arms: Mapping[str, Mapping[str, Any]]) -> Row:
    eager, inductor = _beside(arm, "eager", arms), _beside(arm, "inductor", arms)
    return Row(
        model=model,
        arm=arm["name"],
        engine=arm["engine"],
        peak_bytes=int(arm["peak_allocated_bytes"]),
        step_ms=float(arm["step_ms"]),
        over_own=over(arm),
        peak_over_eager=_share(arm, eager, "peak_allocated_bytes"),
        step_over_eager=_share(arm, eager, "step_ms"),
        peak_over_inductor=_share(arm, inductor, "peak_allocated_bytes"),
        step_over_inductor=_share(arm, inductor, "step_ms"),
        results=results_of(arm, arms),
        source=arm.get("from", ""),
    )


def _beside(
    arm: Mapping[str, Any], engine: str, arms: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """The baseline of an engine to lay an arm beside: its own one, if that is of this engine."""
    own: Mapping[str, Any] = arm["baseline"]
    return own if own["name"] == BASELINES[engine] else arms.get(BASELINES[engine])


def _share(arm: Mapping[str, Any], base: Mapping[str, Any] | None, what: str) -> float | None:
    return arm[what] / base[what] if base and base[what] else None


def judged(models: Models) -> dict[str, Any]:
    """What the result file says beside the arms; ``ok`` where the measuring itself went well.

    Who is faster is found out, not asked for.
    """
    all_matches = [m for name, found in models.items() for m in matches(name, found["arms"])]
    ours = [
        (arm, results_of(arm, found["arms"]))
        for found in models.values()
        for arm in found["arms"].values()
        if is_ours(arm)
    ]
    met = {
        "every part finished": all(
            part.get("exit_code") == 0
            for found in models.values()
            for part in found.get("parts", {}).values()
        ),
        "offplan changes no results": all(said in ("same", "not compared") for _, said in ours),
        "plans keep to their budgets": all(
            arm["peak_allocated_bytes"] <= arm["budget_bytes"]
            for arm, _ in ours
            if arm.get("budget_bytes") and arm["engine"] != "eager"
        ),
    }
    return {
        "ok": all(met.values()),
        "met": met,
        "rows": [vars(row) for name, found in models.items() for row in rows(name, found["arms"])],
        "matches": [{**vars(m), "ratio": m.ratio, "verdict": m.verdict} for m in all_matches],
    }


def as_text(models: Models) -> str:
    """Every arm, then who is faster at each peer's peak; one block for each measured model."""
    blocks = [_block(name, found) for name, found in models.items() if found["arms"]]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks) + "\n"


def _block(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    yield _line(name, "peak", "step", f"{'of eager':^11}", f"{'of Inductor':^11}", "results")
    yield _line("", "", "", " peak  step", " peak  step")
    for row in rows(name, found["arms"]):
        yield _line(
            f"  {row.arm}",
            f"{row.peak_bytes / 1e9:.2f} GB",
            f"{row.step_ms:.1f} ms",
            f"{_times(row.peak_over_eager)} {_times(row.step_over_eager)}",
            f"{_times(row.peak_over_inductor)} {_times(row.step_over_inductor)}",
            row.results + (f" ({row.source})" if row.source else ""),
        )
    for arm, why in found["not_measured"].items():
        yield _line(f"  {arm}", "", "", f"not measured: {why}")
    fought = matches(name, found["arms"])
    if not fought:
        return
    yield ""
    yield _line("  within the peak of", "its step", "offplan's", "faster")
    for match in fought:
        ours = "" if match.our_over is None else f"{match.our_over:.2f}"
        yield _line(f"  {match.peer}", f"{match.peer_over:.2f}", ours, match.verdict)


def _line(name: str, peak: str, step: str, *others: str) -> str:
    return "  ".join((f"{name:52}", f"{peak:>10}", f"{step:>10}", *others))


def _times(share: float | None) -> str:
    return " " * 5 if share is None else f"{share:5.2f}"


# --- for people to read ---------------------------------------------------------------------------

# Columns of offplan: what the names of its arms begin with.
_OURS = {
    "hooks": "offplan hooks",
    "AOT graphs": "offplan AOT",
    "Inductor": "offplan Inductor",
}


def as_markdown(models: Models) -> str:
    """A row for each family of peers and model, with offplan's fastest arms within that peak.

    Of a family, the arm that offplan does worst against.  Steps are over that of the model's
    Inductor without offload; the fastest of a row is bold.
    """
    heads = ["model", "way", "peak", "step", *(f"offplan, {name}" for name in _OURS)]
    lines = ["| " + " | ".join(heads) + " |", "|---|---" + "|---:" * (len(heads) - 2) + "|"]
    for model, found in models.items():
        arms = found["arms"]
        base = arms.get(BASELINES["inductor"])
        if base is None:
            continue
        first = f"{model}: {base['peak_allocated_bytes'] / 1e9:.1f} GB, {base['step_ms']:.0f} ms"
        for family, head in FAMILIES.items():
            duels = [_duel(arm, arms, base) for arm in _family(family, arms)]
            if duels:
                lines.append(
                    "| " + " | ".join([first, *_cells(max(duels, key=_worst), head)]) + " |"
                )
                first = ""
        floors = [_floor(start, arms, base) for start in _OURS.values()]
        lines.append("| " + " | ".join([first, "lowest of offplan", "", "", *floors]) + " |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Duel:
    """A peer's step, and of each column of offplan's the fastest within its peak, if any."""

    peak_bytes: int
    step: float
    ours: tuple[float | None, ...]


def _family(start: str, arms: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [arm for name, arm in arms.items() if name.startswith(start) and not is_baseline(arm)]


def step_over(arm: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    """The step over Inductor's: as its own process has it, or else of two processes."""
    return over(arm) if arm["engine"] == "inductor" else float(arm["step_ms"] / base["step_ms"])


def _duel(
    peer: Mapping[str, Any], arms: Mapping[str, Mapping[str, Any]], base: Mapping[str, Any]
) -> _Duel:
    peak_bytes = _peak_for_ours(peer, arms)
    ours = (
        [step_over(arm, base) for arm in _within(_family(start, arms), peak_bytes)]
        for start in _OURS.values()
    )
    return _Duel(
        int(peer["peak_allocated_bytes"]),
        step_over(peer, base),
        tuple(min(found, default=None) for found in ours),
    )


def _worst(duel: _Duel) -> float:
    best = min((step for step in duel.ours if step is not None), default=float("inf"))
    return best / duel.step


def _cells(duel: _Duel, head: str) -> Iterator[str]:
    yield head
    yield f"{duel.peak_bytes / 1e9:.1f} GB"
    steps = [duel.step, *duel.ours]
    least = min(step for step in steps if step is not None)
    for step in steps:
        text = "-" if step is None else f"{step:.2f}"
        yield f"**{text}**" if step == least else text


def _floor(start: str, arms: Mapping[str, Mapping[str, Any]], base: Mapping[str, Any]) -> str:
    found = min(_family(start, arms), key=lambda a: a["peak_allocated_bytes"], default=None)
    if found is None:
        return ""
    return f"{step_over(found, base):.2f} at {found['peak_allocated_bytes'] / 1e9:.1f} GB"


# --- for the plot ---------------------------------------------------------------------------------

NO_OFFLOAD = "without offload"
GROUPS = {
    "offplan, Inductor": ("offplan Inductor", "o-"),
    "offplan, hooks": ("offplan hooks", "s-"),
    "offplan, AOT graphs": ("offplan AOT", "D-"),
    "activation_memory_budget": ("memory budget", "x:"),
    "checkpointing, Inductor": ("checkpointing", "^:"),
    "checkpointing, eager": ("eager checkpointing", "v:"),
    "PyTorch's pass": ("PyTorch's pass", "P:"),
    "save_on_cpu": ("save_on_cpu", "1:"),
    "torchtune": ("torchtune", "2:"),
    "TRL": ("TRL", "3:"),
    "DeepCompile": ("DeepCompile", "*:"),
    NO_OFFLOAD: ("", "+"),
}


def points(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Of each group: peak in GB and step over Inductor's, by peak; nothing without Inductor's."""
    base = arms.get(BASELINES["inductor"])
    if base is None:
        return {}
    found: dict[str, list[tuple[float, float]]] = {}
    for arm in arms.values():
        point = (arm["peak_allocated_bytes"] / 1e9, step_over(arm, base))
        found.setdefault(_group(arm), []).append(point)
    return {name: sorted(found[name]) for name in GROUPS if name in found}


def _group(arm: Mapping[str, Any]) -> str:
    if is_baseline(arm):
        return NO_OFFLOAD
    return next(group for group, (start, _) in GROUPS.items() if arm["name"].startswith(start))
