"""Target profiles: a runtime's grids, and what it computes in integers."""

from qat.targets.profile import GridLimits, Reason, TargetProfile
from qat.targets.shipped import PROFILES, profile_of, register_target

__all__ = ["PROFILES", "GridLimits", "Reason", "TargetProfile", "profile_of", "register_target"]
