"""A font of 5 by 8 dots for pictures that are made without a font library.

1.  A glyph is five columns of eight dots, the lowest bit of each being the highest dot.  The eighth
    dot is below the line, for the tails of ``g`` and ``y``.
2.  Characters that the font lacks are drawn as ``?``.
"""

from __future__ import annotations

GLYPH_WIDTH, GLYPH_HEIGHT = 5, 8
# From one character to the next.
ADVANCE = GLYPH_WIDTH + 1

_FIRST = 0x20
# Printable ASCII from the space on, five columns of two digits each.
_COLUMNS = (
    "0000000000 00005f0000 0007000700 147f147f14 242a7f2a12 2313086462 3649562050 0000070000"
    "001c224100 0041221c00 2a1c7f1c2a 08083e0808 0080603000 0808080808 0000606000 2010080402"
    "3e5149453e 00427f4000 6251494946 2241494936 1814127f10 2745454539 3c4a494930 0171090503"
    "3649494936 064949291e 0000360000 0000563600 0008142241 1414141414 4122140800 0201590906"
    "3e415d594e 7c1211127c 7f49494936 3e41414122 7f4141413e 7f49494941 7f09090901 3e4149497a"
    "7f0808087f 00417f4100 2040413f01 7f08142241 7f40404040 7f020c027f 7f0408107f 3e4141413e"
    "7f09090906 3e4151215e 7f09192946 2649494932 01017f0101 3f4040403f 1f2040201f 3f4038403f"
    "6314081463 0304780403 6151494543 00007f4141 0204081020 41417f0000 0402010204 4040404040"
    "0001020400 2054545478 7f48444438 3844444428 384444487f 3854545418 087e090102 18a4a4a47c"
    "7f08040478 00447d4000 4080847d00 007f102844 00417f4000 7c04180478 7c08040478 3844444438"
    "fc24242418 18242418fc 7c08040408 4854545424 043f444020 3c4040207c 1c2040201c 3c4030403c"
    "4428102844 1ca0a0a07c 4464544c44 0008364100 00007f0000 0041360800 0201020402"
)


def glyph(character: str) -> tuple[int, ...]:
    """The columns of ``character`` (definition 1)."""
    place = ord(character) - _FIRST
    columns = bytes.fromhex(_COLUMNS)
    if not 0 <= place < len(columns) // GLYPH_WIDTH:
        place = ord("?") - _FIRST
    return tuple(columns[place * GLYPH_WIDTH : (place + 1) * GLYPH_WIDTH])
