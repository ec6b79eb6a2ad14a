"""The facts of platforms, which stand in for their names."""

import pytest

from jaxmem._target.devices.platforms import PLATFORMS, Platform, platform_of
from jaxmem._target.devices.target import Target
from jaxmem.errors import TargetError
from jaxmem.plans import Target as PublicTarget

FACTS = [("h200", "cuda"), ("v5e:4", "tpu"), ("local", "cpu")]


@pytest.mark.parametrize(("name", "facts"), FACTS)
def test_a_target_has_the_facts_of_its_platform(name, facts):
    assert Target.parse(name).traits is PLATFORMS[facts]


def test_a_plugin_has_host_memory_of_its_own_and_offloads_what_a_policy_names():
    found = platform_of("a platform of next year")
    assert found == Platform()
    assert found.host_is_apart
    assert found.offloads_unrolled
    assert found.offloads_nested


def test_only_a_cpu_shares_its_memory_with_the_host():
    assert [n for n, facts in PLATFORMS.items() if not facts.host_is_apart] == ["cpu"]
    assert PublicTarget is Target
    with pytest.raises(TargetError):
        Target.parse("cuda")
