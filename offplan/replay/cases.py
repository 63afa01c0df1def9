"""The cases of ``offplan verify``, each with what it claims.

A case is a factory of ``case_views`` or ``case_steps``, mostly named after it, and goes through the
same door as a target of the user's.  Most are split by AOTAutograd's default partitioner, which
saves what the backward reads, views and all: min-cut would save what they are views of, and make
them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from offplan.errors import UsageError
from offplan.graph import Partitioner, TargetRef
from offplan.replay import case_steps as steps
from offplan.replay import case_views as views
from offplan.replay import claims
from offplan.replay.claims import (
    Claim,
    moves_at_least,
    moves_result_of,
    moves_storage,
    moves_view,
    runs,
    stays,
    transfer_that,
)
from offplan.target import Target

Kernel = Literal["math", "flash", "efficient", "cudnn"]


@dataclass(frozen=True)
class Case:
    """``kernel``: the attention kernel that it is about; ``only``: the one device that has it.

    The backward of the regions ``idle`` never runs, so that nothing of them is reloaded.  A case of
    several that one factory makes has ``params``, and a name and an ``about`` of its own.
    """

    build: Callable[[], Target]
    claims: tuple[Claim, ...]
    partitioner: Partitioner = "default"
    kernel: Kernel | None = None
    only: str = ""
    idle: frozenset[int] = frozenset()
    params: Mapping[str, str] = field(default_factory=dict)
    own_name: str = ""
    own_about: str = ""

    @property
    def name(self) -> str:
        return self.own_name or self.build.__name__.replace("_", "-")

    @property
    def about(self) -> str:
        return self.own_about or (self.build.__doc__ or "").strip().splitlines()[0]

    @property
    def target(self) -> TargetRef:
        return TargetRef(f"{self.build.__module__}:{self.build.__name__}", dict(self.params))


def _attention(
    kernel: Kernel,
    about: str,
    *claimed: Claim,
    name: str = "",
    only: str = "cuda",
    dtype: str = "float32",
    dropout: str = "0.25",
) -> Case:
    return Case(
        steps.attention,
        claimed or (runs(f"scaled_dot_product_{kernel}_attention"), moves_at_least(4)),
        kernel=kernel,
        only=only,
        params={"dtype": dtype, "dropout": dropout},
        own_name=name or f"{kernel}-attention",
        own_about=f"Attention {about}.",
    )


CASES = (
    Case(
        views.slice_of_a_larger_buffer,
        (
            moves_view("a part of its storage, from its middle", claims.is_part),
            moves_storage("one view, of less than half of it", claims.is_mostly_unsaved),
        ),
    ),
    Case(
        views.gaps_are_packed,
        (transfer_that("packs its bytes", claims.is_packed),),
    ),
    Case(views.alias_of_an_output, (stays("alias", "output"), moves_at_least(1))),
    Case(
        views.square_transpose,
        (moves_storage("a square and its transpose", claims.has_square_and_transpose),),
    ),
    Case(
        views.base_and_views,
        (moves_storage("a base and three views of it", claims.views_of(4)),),
    ),
    Case(
        views.interleaved_qkv,
        (moves_storage("three chunks of its rows", claims.chunks_of_rows),),
    ),
    Case(
        views.shifted_labels,
        (moves_view("of 64-bit integers from an odd one on", claims.is_offset_labels),),
    ),
    Case(views.expanded, (moves_view("expanded", claims.is_expanded),)),
    Case(views.stepped, (moves_view("stepped", claims.is_stepped),)),
    Case(
        views.unfolded,
        (moves_view("of overlapping windows", claims.is_overlapping),),
    ),
    Case(
        views.zero_size,
        (moves_view("of no elements", claims.is_empty), stays("empty")),
    ),
    Case(views.conjugate_view, (moves_result_of("aten._conj."),)),
    Case(
        views.negative_view,
        (
            # Inductor computes the negated numbers, which are then a part of no other storage.
            moves_result_of("aten._neg_view.", compiler="aot_eager"),
            runs("aten._neg_view."),
        ),
    ),
    Case(
        views.real_view_of_complex,
        (
            moves_result_of("aten.view_as_real."),
            moves_storage("two dtypes", claims.has_two_dtypes),
        ),
    ),
    Case(views.dtype_view, (moves_storage("two dtypes", claims.has_two_dtypes),)),
    Case(views.channels_last, (moves_view("channels-last", claims.is_channels_last),)),
    Case(
        views.saved_twice,
        (
            Claim(
                "a storage that is saved twice, through one window",
                claims.some_moved(claims.has_one_window_twice),
                # Inductor takes out what makes a second value of the same.
                compiler="aot_eager",
            ),
            moves_result_of("aten.exp."),
        ),
    ),
    Case(
        steps.in_place_after_save,
        (
            Claim("a buffer that is written", claims.writes_an_input),
            moves_result_of("aten.clone.", compiler="aot_eager"),
            moves_result_of("aten.relu."),
        ),
    ),
    Case(
        steps.batch_norm,
        (
            Claim("a buffer that is written", claims.writes_an_input),
            moves_result_of("batch_norm", compiler="aot_eager"),
            moves_result_of("aten.var_mean.", compiler="inductor"),
        ),
    ),
    Case(
        steps.sort_and_max_pool,
        (
            moves_result_of("aten.sort."),
            moves_result_of("aten.max_pool2d_with_indices.", compiler="aot_eager"),
            moves_result_of("max_pool", compiler="inductor"),
        ),
    ),
    Case(
        steps.bool_mask,
        (moves_view("of one byte an element", claims.is_bool),),
    ),
    Case(
        steps.cpu_tensor,
        (runs("rand"), stays("host", device="cuda"), moves_at_least(3)),
    ),
    Case(
        steps.last_made_first_used,
        (transfer_that("turns around at the end of the forward", claims.turns_around),),
    ),
    Case(steps.layers, (moves_at_least(12),), partitioner="min-cut"),
    Case(
        steps.shared_checkpointed,
        (Claim("an op that the backward computes again", claims.computes_again),),
        partitioner="min-cut",
    ),
    Case(
        steps.shared_graph,
        (Claim("two regions that are runs of one graph", claims.runs_one_graph_twice),),
    ),
    Case(
        steps.output_without_gradient,
        (
            Claim("an output without a gradient beside the loss", claims.returns(2)),
            moves_at_least(3),
        ),
    ),
    Case(
        steps.graph_without_backward,
        (Claim("transfers in region 2, which is idle", claims.moves_in_region(2)),),
        idle=frozenset({2}),
    ),
    _attention(
        "math",
        "with dropout, by matrix products",
        runs("aten.bmm."),
        runs("softmax", compiler="aot_eager"),
        moves_view("a mask", claims.is_bool),
        only="",
    ),
    _attention("flash", "with dropout, by the flash kernel", dtype="bfloat16"),
    _attention("efficient", "with dropout, by the memory-efficient kernel"),
    _attention("cudnn", "with dropout, by cuDNN", dtype="bfloat16"),
    _attention(
        "flash",
        "by the flash kernel of the CPU, which has no dropout",
        runs("scaled_dot_product_flash_attention_for_cpu"),
        moves_at_least(4),
        name="cpu-flash-attention",
        only="cpu",
        dropout="0.0",
    ),
    Case(
        steps.padded_bias,
        (moves_view("broadcast, with rows padded to a multiple of 8", claims.is_aligned_bias),),
        kernel="efficient",
    ),
)


def find_cases(names: Iterable[str]) -> tuple[Case, ...]:
    """The cases of those names, in the order of ``CASES``; all of them if there are none.

    Raises ``UsageError`` for a name that no case has.
    """
    asked = set(names)
    unknown = sorted(asked - {case.name for case in CASES})
    if unknown:
        raise UsageError(
            f"there is no case {unknown[0]!r}", fix="see their names: offplan verify --list"
        )
    return tuple(case for case in CASES if not asked or case.name in asked)
