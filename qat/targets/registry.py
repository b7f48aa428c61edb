"""The one registry of targets: name of a runtime to its profile."""

from collections.abc import Mapping
from types import MappingProxyType

from qat.targets.profile import TargetProfile
from qat.targets.shipped import SHIPPED
from qat.text import did_you_mean

_profiles: dict[str, TargetProfile] = {profile.name: profile for profile in SHIPPED}

PROFILES: Mapping[str, TargetProfile] = MappingProxyType(_profiles)
"""All targets by name."""


def register_target(profile: TargetProfile) -> TargetProfile:
    """Make your own runtime available as `QuantRecipe(target=name)` and `quantization.target`.

    Args:
        profile: the profile; `dataclasses.replace` makes one from a shipped one.

    Raises:
        ValueError: if another profile has the same name.

    >>> from dataclasses import replace
    >>> chip = replace(profile_of("tensorrt"), name="my_chip", quantizes_outputs=True)
    >>> register_target(profile_of("tensorrt")).name  # register_target(chip) would return chip
    'tensorrt'
    """
    if not isinstance(profile, TargetProfile):
        raise TypeError(f"register_target: expected a TargetProfile, got {profile!r}")
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
    if target not in tuple(PROFILES):  # a tuple: what the user gives may be unhashable
        own = "import the module of one of your own first (in a config: imports)"
        hint = did_you_mean(str(target), PROFILES) or own
        raise ValueError(f"unknown target {target!r}; registered: {', '.join(PROFILES)}; {hint}")
    return PROFILES[target]
