"""How long tests wait: one figure for all of them.

A wait ends as soon as its condition holds, so patience costs nothing where all is well; a test
that gives up early fails on a machine that is only busy. NTT_TEST_PATIENCE sets another figure, in
seconds. What a test says about time is not for here: that is the outcome, and stands in the test.
"""

from __future__ import annotations

import os
from typing import Final

PATIENCE: Final = float(os.environ.get("NTT_TEST_PATIENCE", "600"))
