from __future__ import annotations
import sys, time
from .world import simulate
