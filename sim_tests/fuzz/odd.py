# SPDX-License-Identifier: Apache-2.0
"""Odd values: texts and bytes that were tampered with, and what nobody should pass."""

from __future__ import annotations

from hypothesis import strategies as st

# Numbers as text, of every kind that a reader may stumble over.
NUMBERS = (
    *("0", "-1", "1", "2", "3", "1.5", "-0.0", "1e-400", "1e30", "1e999", "-1e999", "nan", "inf", "-inf", "NaN"),
    *("Infinity", "0x10", "1_000", "99999999999999999999", "9223372036854775807", "9" * 5000, "1e", "01", "+3"),
)
WORDS = ("", " ", "x", "é", "\u0663", "\u202e", "a\nb", "\x1b[31m", "%s", "{}", "|", "'", '"', "\\", "../x", "-", "--")


def spliced(text: bytes, most: int = 4) -> st.SearchStrategy[bytes]:
    """``text`` with up to ``most`` cuts, repetitions, overwritten bytes and odd insertions."""
    tokens = [number.encode() for number in NUMBERS] + [word.encode() for word in WORDS]
    tokens += [b"\x00", b"\xff\xfe", b"\r\n", b"[", b"]", b"{", b"}", b"=", b":", b",", b"#", b"[[", b"[" * 3000]
    edit = st.tuples(st.integers(0, len(text)), st.integers(0, 40), st.sampled_from([b"", *tokens]), st.booleans())

    @st.composite
    def build(draw: st.DrawFn) -> bytes:
        made = text
        for at, length, token, again in draw(st.lists(edit, min_size=1, max_size=most)):
            cut = made[at : at + length]
            made = made[:at] + token + (cut if again else b"") + made[at + length :]
        return made[: draw(st.integers(0, len(made)))] if draw(st.booleans()) else made

    return build()
