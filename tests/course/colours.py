"""How colours look to people with the common kinds of colour blindness, and how far apart they then are."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

# G. M. Machado, M. M. Oliveira, L. A. F. Fernandes, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", IEEE Transactions on Visualization and Computer Graphics 15 (6), 2009; severity 1.0, for linear RGB.
KINDS: dict[str, Any] = {
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
# IEC 61966-2-1: linear sRGB to CIE XYZ, and the white of D65.
_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
_WHITE = _XYZ.sum(axis=1)


def linear(colour: str) -> Any:
    """``"#0072B2"`` -> linear RGB, by sRGB's transfer function."""
    if not re.fullmatch(r"#[0-9A-Fa-f]{6}", colour):
        raise ValueError(f"{colour!r} is no colour such as #0072B2")
    encoded = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def seen(colour: str, kind: str) -> Any:
    """Linear RGB as it looks with a kind of colour blindness; with ``"normal"`` as it is."""
    rgb = linear(colour)
    return rgb if kind == "normal" else np.clip(KINDS[kind] @ rgb, 0, 1)


def lab(rgb: Any) -> Any:
    """Linear RGB -> CIE L*a*b* (1976)."""
    ratio = _XYZ @ rgb / _WHITE
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(one: str, other: str, kind: str) -> float:
    """How far apart two colours look (CIE 1976 delta E); about 2.3 is the least that is noticed side by side."""
    return float(np.linalg.norm(lab(seen(one, kind)) - lab(seen(other, kind))))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.2, from 1 to 21."""
    light, dark = sorted((float(_XYZ[1] @ linear(colour)) for colour in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
