"""Times of what moves between GPUs, in modules that are written by hand."""

import json

import pytest

from jaxmem._target.deviceless.gpu import links as links_of
from jaxmem._target.devices.rates import LINK_EFFICIENCY, Rates
from jaxmem._target.devices.target import Target
from jaxmem._target.hlo.costs import OF_ARITHMETIC, hlo_costs
from jaxmem._target.hlo.links import Links

RATES = Rates(1e30, 1e30, 1e30, link=1e30, codec=1e30)
LINKS = Links(devices=16, each=8, peers=1e9, network=1e8)
PART, WHOLE = 4 * 128 * 512, 4 * 1024 * 512  # bytes
ARGUMENTS = "%p = f32[128,512] parameter(0)"


def costs(microseconds: float) -> str:
    cost = [{"name": "sol", "exec_time_us": microseconds}]
    return "backend_config=" + json.dumps({"reification_cost": cost}).replace(" ", "")


def kernel(name: str, microseconds: float) -> str:
    microseconds /= OF_ARITHMETIC  # XLA's estimate of a kernel that reads little
    return f"%{name} = f32[128,512] fusion(%p), kind=kLoop, calls=%negated, {costs(microseconds)}"


def gather(groups: str) -> tuple[str, str]:
    """The start and the end of an all-gather."""
    start = "%g = (f32[128,512], f32[1024,512]) all-gather-start(%p)"
    return f"{start}, {groups}, dimensions={{0}}", "%h = f32[1024,512] all-gather-done(%g)"


def waited(*lines: str, links: Links | None = LINKS, more: str = "") -> float:
    """Seconds of a module with these instructions."""
    body = "\n".join(f"  {line}" for line in (ARGUMENTS, *lines))
    text = f"""HloModule step, is_scheduled=true

%negated (a: f32[128,512]) -> f32[128,512] {{
  %a = f32[128,512] parameter(0)
  ROOT %n = f32[128,512] negate(%a)
}}
{more}
ENTRY %main (p: f32[128,512]) -> f32[128,512] {{
{body}
  ROOT %r = f32[128,512] fusion(%p), kind=kLoop, calls=%negated, {costs(0)}
}}
"""
    seconds = hlo_costs(text, RATES, links).seconds
    assert seconds is not None
    return seconds


@pytest.mark.parametrize(
    ("groups", "members", "rate"),
    [
        ("replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}", 8, 1e9),
        ("replica_groups=[2,8]<=[16]", 8, 1e9),
        ("replica_groups=mesh['data'=2,'fsdp'=8] {'fsdp'}", 8, 1e9),
        # one device of each host: the share of one device
        ("replica_groups=[8,2]<=[2,8]T(1,0)", 2, 1e8),
        ("replica_groups=mesh['data'=2,'fsdp'=8] {'data'}", 2, 1e8),
        # two devices of each host, and all devices
        ("replica_groups=[4,4]<=[4,4]T(1,0)", 4, 2e8),
        ("replica_groups=mesh['data'=2,'fsdp'=8] {'data','fsdp'}", 16, 8e8),
        ("replica_groups={}", 16, 8e8),
    ],
)
def test_a_ring_takes_the_rate_of_its_slowest_link(groups, members, rate):
    seconds = (members - 1) / members * WHOLE / rate
    assert waited(*gather(groups)) == pytest.approx(seconds)
    assert waited(*gather(groups), links=None) == 0.0


def test_kernels_between_start_and_end_hide_a_collective():
    groups = "replica_groups=[2,8]<=[16]"
    start, done = gather(groups)
    alone = 7 / 8 * WHOLE / 1e9
    half, twice = kernel("k", alone / 2 * 1e6), kernel("k", 2 * alone * 1e6)
    assert waited(half, start, done) == pytest.approx(1.5 * alone)
    assert waited(start, half, done) == pytest.approx(alone)
    assert waited(start, twice, done) == pytest.approx(2 * alone)


def test_collectives_run_one_after_the_other():
    groups = "replica_groups=[2,8]<=[16]"
    one = gather(groups)
    other = [line.replace("%g", "%u").replace("%h", "%v") for line in one]
    alone = 7 / 8 * WHOLE / 1e9
    assert waited(one[0], other[0], one[1], other[1]) == pytest.approx(2 * alone)


def test_an_all_reduce_crosses_twice_and_waits():
    line = "%s = f32[128,512] all-reduce(%p), replica_groups=[2,8]<=[16], to_apply=%negated"
    assert waited(line) == pytest.approx(2 * 7 / 8 * PART / 1e9)


@pytest.mark.parametrize(("pairs", "rate"), [("{0,1},{1,0}", 1e9), ("{0,1},{7,8}", 1e8)])
def test_a_permute_between_hosts_takes_the_network(pairs, rate):
    line = f"%s = f32[128,512] collective-permute(%p), source_target_pairs={{{pairs}}}"
    assert waited(line) == pytest.approx(PART / rate)


def test_a_loop_waits_in_every_iteration():
    start, done = gather("replica_groups=[2,8]<=[16]")
    body = "\n  ".join(("", ARGUMENTS, start, done, "ROOT %q = f32[128,512] copy(%p)"))
    more = f"""
%body (p: f32[128,512]) -> f32[128,512] {{
{body}
}}

%condition (p: f32[128,512]) -> pred[] {{
  %p = f32[128,512] parameter(0)
  ROOT %t = pred[] constant(true)
}}
"""
    known = 'backend_config={"known_trip_count":{"n":"5"}}'
    line = f"%w = f32[128,512] while(%p), condition=%condition, body=%body, {known}"
    assert waited(line, more=more) == pytest.approx(5 * 7 / 8 * WHOLE / 1e9)


def test_the_links_of_a_target_are_its_gpus():
    target = Target.parse("h100-80gb:8x2")
    gpu = target.gpu
    assert gpu is not None
    found = links_of(target, gpu)
    assert (found.devices, found.each) == (16, 8)
    assert found.peers == LINK_EFFICIENCY * gpu.peers
    assert found.network == LINK_EFFICIENCY * gpu.network


HOST = "f32[128,512]{1,0:S(5)}"
LINK = Rates(1e30, 1e30, 1e30, link=1e9, codec=1e30)


def host_waited(*lines: str, times: int = 1) -> float:
    """Seconds in which a loop of so many iterations of these instructions waits for host memory."""
    body = "\n".join(f"  {line}" for line in lines)
    text = f"""HloModule step, is_scheduled=true

%negated (a: f32[128,512]) -> f32[128,512] {{
  %a = f32[128,512] parameter(0)
  ROOT %n = f32[128,512] negate(%a)
}}

%body (p: f32[128,512]) -> f32[128,512] {{
  %p = f32[128,512] parameter(0)
  %h = {HOST} custom-call(), custom_call_target="AllocateBuffer"
{body}
  ROOT %r = f32[128,512] fusion(%p), kind=kLoop, calls=%negated, {costs(0)}
}}

%again (q: f32[128,512]) -> pred[] {{
  %q = f32[128,512] parameter(0)
  ROOT %t = pred[] constant(true)
}}

ENTRY %main (x: f32[128,512]) -> f32[128,512] {{
  %x = f32[128,512] parameter(0)
  ROOT %w = f32[128,512] while(%x), condition=%again, body=%body,
    backend_config={{"known_trip_count":{{"n":"{times}"}}}}
}}
""".replace(",\n    backend_config", ", backend_config")
    found = hlo_costs(text, LINK)
    return found.host_seconds


OUT = f"%s = ({HOST}, f32[128,512], u32[]) copy-start(%p)", f"%e = {HOST} copy-done(%s)"
BACK = f"%u = (f32[128,512], {HOST}, u32[]) copy-start(%h)", "%v = f32[128,512] copy-done(%u)"
COPY = PART / 1e9  # seconds


def test_kernels_wait_for_copies_to_host_memory_in_each_iteration():
    assert host_waited(*OUT) == pytest.approx(COPY)
    assert host_waited(*OUT, times=3) == pytest.approx(3 * COPY)
    start, end = OUT
    hidden = kernel("k", 0.25 * COPY * 1e6)
    assert host_waited(start, hidden, end) == pytest.approx(0.75 * COPY)
    assert host_waited(hidden, start, end, times=2) == pytest.approx(2 * COPY)
    assert host_waited(start, kernel("k", 2e6 * COPY), end) == 0.0


def test_copies_of_one_direction_wait_for_each_other_and_not_for_the_other_direction():
    (out, sent), (back, came) = OUT, BACK
    assert host_waited(out, back, sent, came) == pytest.approx(COPY)
    again, done = out.replace("%s", "%s2"), sent.replace("%e", "%e2").replace("%s", "%s2")
    assert host_waited(out, again, sent, done) == pytest.approx(2 * COPY)


def test_a_step_without_copies_to_host_memory_waits_for_none():
    assert host_waited(kernel("k", 5.0)) == 0.0
