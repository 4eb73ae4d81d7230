"""Pictures of docs/concepts/precision-and-fp8.md."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from scripts.figures.svg import Drawing

FORMATS = {"float32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
FORMATS |= {"fp8 e4m3": ml_dtypes.float8_e4m3fn, "fp8 e5m2": ml_dtypes.float8_e5m2}


def number_formats() -> Drawing:
    """The bits of five number formats, with their largest and smallest normal numbers."""
    drawing = Drawing(640, 250, "float32, bf16, fp16 and fp8 as bits: the exponent gives range, the fraction precision")
    for row, (name, dtype) in enumerate(FORMATS.items()):
        info, y = ml_dtypes.finfo(dtype), 30 + row * 38
        drawing.text(4, y + 13, name, bold=True, size=15)
        x = 98.0
        for count, color in ((1, "grey"), (info.nexp, "orange"), (info.nmant, "blue")):
            for _ in range(count):
                drawing.box(x, y, 10, 26, color=color, fill="strong", radius=1)
                x += 11
            x += 3
        largest, smallest = (_power(float(number)) for number in (info.max, info.smallest_normal))
        drawing.text(466, y + 13, f"{smallest} to {largest}", size=15)
    drawing.text(466, 12, "normal numbers", size=14, italic=True)
    for x, color, text in (
        (98, "grey", "sign"),
        (164, "orange", "exponent: range"),
        (324, "blue", "fraction: precision"),
    ):
        drawing.box(x, 227, 10, 16, color=color, fill="strong", radius=1)
        drawing.text(x + 18, 235, text, size=14)
    return drawing


def precision_in_step() -> Drawing:
    """The dtype of each array of a train step, from master weights to Adam."""
    drawing = Drawing(640, 330, "A train step: float32 at both ends, bf16 between, and fp8 only inside linear layers")
    boxes = {  # label: x, y, width, height, color
        "master weights\nfloat32": (8, 14, 136, 54, "orange"),
        "weights\nbf16": (196, 14, 104, 54, "blue"),
        "layers\nbf16": (352, 14, 104, 54, "blue"),
        "loss\nfloat32": (508, 14, 124, 54, "orange"),
        "gradients\nbf16": (508, 134, 124, 54, "blue"),
        "accumulator\nfloat32": (346, 134, 116, 54, "orange"),
        "sum over data\nfloat32": (184, 134, 122, 54, "orange"),
        "Adam\nfloat32": (8, 134, 136, 54, "orange"),
    }
    for label, (x, y, width, height, color) in boxes.items():
        drawing.box(x, y, width, height, label, color, size=15)
    drawing.arrow((144, 41), (194, 41), label="cast", size=14, label_at=(169, 26))
    drawing.arrow((300, 41), (350, 41))
    drawing.arrow((456, 41), (506, 41))
    drawing.arrow((570, 68), (570, 132))
    drawing.text(560, 100, "backward", size=14, anchor="end")
    drawing.arrow((508, 161), (464, 161), label="add", size=14, label_at=(485, 146))
    drawing.arrow((346, 161), (308, 161))
    drawing.arrow((184, 161), (146, 161))
    drawing.arrow((76, 134), (76, 70), label="update", size=14, label_at=(112, 102))
    drawing.box(8, 226, 624, 92, color="grey", fill="none", dashed=True, radius=8)
    drawing.text(20, 244, "inside layers and their backward pass: a linear layer with fp8", size=14, bold=True)
    drawing.box(20, 262, 110, 44, "operands\nbf16", "blue", size=14)
    drawing.arrow((130, 284), (166, 284))
    drawing.box(168, 262, 110, 44, "round\nto fp8", "pink", size=14)
    drawing.arrow((278, 284), (314, 284))
    drawing.box(316, 262, 152, 44, "matmul, adds\nin float32", "pink", size=14)
    drawing.arrow((468, 284), (504, 284))
    drawing.box(506, 262, 114, 44, "result\nbf16", "blue", size=14)
    return drawing


def fp8_scaling() -> Drawing:
    """Four values on a line of powers of two, before and after division by the scale, and the range of e4m3."""
    drawing = Drawing(
        640, 214, "One power of two moves an array into fp8's range: the largest value fits, tiny ones vanish"
    )
    low, high, left, width = -14, 12, 150, 470

    def at(value: float) -> float:
        return left + (math.log2(abs(value)) - low) / (high - low) * width

    info = ml_dtypes.finfo(ml_dtypes.float8_e4m3fn)
    smallest = float(info.smallest_subnormal)
    begin, end = at(smallest), at(float(info.max))
    drawing.box(begin, 14, end - begin, 150, color="pink", fill="faint", radius=0)
    drawing.text((begin + end) / 2, 28, "e4m3, with subnormals", size=14, anchor="middle", color="pink")
    values, scale = (1000.0, 3.14159, 0.37, 3e-3), 4.0
    for y, title, divisor in ((66, "values", 1.0), (126, "values / 4", scale)):
        drawing.text(4, y, title, bold=True, size=15)
        drawing.line([(left, y), (left + width, y)])
        for value in values:
            scaled = value / divisor
            color, fill = "blue", "solid"
            if scaled > float(info.max):
                color = "orange"
            elif scaled <= smallest / 2:  # rounded to zero
                color, fill = "grey", "faint"
            drawing.circle(at(scaled), y, 7, color=color, fill=fill)
    for value, label in zip(values, ("1000", "3.14", "−0.37", "0.003"), strict=True):
        drawing.text(at(value) + (15 if value < 0.01 else 0), 48, label, size=14, anchor="middle")
        drawing.arrow((at(value), 75), (at(value / scale), 116), width=1.2)
    for power in (-12, -8, -4, 0, 4, 8):
        drawing.text(at(2.0**power), 180, f"2{_superscript(power)}", size=14, anchor="middle")
    drawing.text(left, 202, "orange: too large. Grey: rounds to 0", size=14, italic=True)
    return drawing


def _power(number: float) -> str:
    """'3·10³⁸' for a number below 0.001 or of more than five digits, else its digits."""
    if 0.001 <= number < 1e5:
        return f"{number:,.0f}" if number > 1 else f"{number:.3f}"
    power = math.floor(math.log10(number))
    return f"{number / 10.0**power:.0f}·10{_superscript(power)}"


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
