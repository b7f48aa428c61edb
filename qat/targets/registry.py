"""The one registry of targets: names of runtimes to their profiles."""

from collections.abc import Mapping
from types import MappingProxyType

from qat.targets.profile import TargetProfile
from qat.targets.shipped import SHIPPED

_profiles: dict[str, TargetProfile] = {profile.name: profile for profile in SHIPPED}

PROFILES: Mapping[str, TargetProfile] = MappingProxyType(_profiles)
"""All targets by name."""


def register_target(profile: TargetProfile) -> TargetProfile:
    """Make a runtime of your own a `target` of recipes and of `quantization.target`.

    Args:
        profile: what the runtime computes on; `dataclasses.replace` changes a shipped one.

    Raises:
        ValueError: if another profile has the name.

    >>> from dataclasses import replace
    >>> chip = replace(profile_of("tensorrt"), name="my_chip", quantizes_outputs=True)
    >>> register_target(profile_of("tensorrt")) is profile_of("tensorrt")  # so would be register_target(chip)
    True
    """
    known = _profiles.setdefault(profile.name, profile)
    if known != profile:
        raise ValueError(f"target {profile.name!r} is registered already; give the profile another name")
    return profile


def profile_of(target: str) -> TargetProfile:
    """The profile of a target.

    Raises:
        ValueError: for an unknown name.

    >>> sorted(profile_of("openvino").shared_grids)
    ['cat', 'max_pool']
    """
    if target not in tuple(PROFILES):
        raise ValueError(f"target must be one of {', '.join(PROFILES)}, got {target!r}")
    return PROFILES[target]
