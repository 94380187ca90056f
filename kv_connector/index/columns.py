"""Columns of the index as NumPy sees them."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray


def column(values: array[Any] | bytearray) -> NDArray[Any]:
    """The numbers of a column, of shape (len(values),) and of its type: writing to them writes to the column.

    For use within one expression: keep a part that was copied, and not what this returns. A column that is looked at
    cannot grow, and a local variable may live on, as a profiler in the process, or an exception's traceback, keeps the
    frame that it is in.
    """
    return np.frombuffer(values, values.typecode if isinstance(values, array) else np.uint8)
