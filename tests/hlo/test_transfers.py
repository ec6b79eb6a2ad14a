"""What moves data to host memory and back, read from the text of optimized modules."""

import pytest

from jaxmem._target.hlo.transfers import fault, transfers

KNOWN = ', backend_config={"dynamic_slice_config":{"byte_offset":"0","byte_stride":"64"}}'
# A loop of 5 turns that fetches a row of a stack beside a product, and puts it back after it.
MODULE = """HloModule step

%%slice (p: f32[5,4,4], i: s32[]) -> f32[1,4,4] {
  %%p = f32[5,4,4]{2,1,0:S(5)} parameter(0)
  %%i = s32[] parameter(1)
  ROOT %%s = f32[1,4,4]{2,1,0} dynamic-slice(%%p, %%i, %%i, %%i)%(fetch)s
}

%%fetch (p: f32[5,4,4], i: s32[]) -> f32[1,4,4] {
  %%p = f32[5,4,4]{2,1,0:S(5)} parameter(0)
  %%i = s32[] parameter(1)
  ROOT %%f = f32[1,4,4]{2,1,0} fusion(%%p, %%i), kind=kLoop, calls=%%slice
}

%%update (p: f32[5,4,4], n: f32[1,4,4], i: s32[]) -> f32[5,4,4] {
  %%p = f32[5,4,4]{2,1,0:S(5)} parameter(0)
  %%n = f32[1,4,4]{2,1,0} parameter(1)
  %%i = s32[] parameter(2)
  ROOT %%u = f32[5,4,4]{2,1,0:S(5)} dynamic-update-slice(%%p, %%n, %%i, %%i, %%i)%(store)s
}

%%body (arg: (s32[], f32[5,4,4], f32[4,4])) -> (s32[], f32[5,4,4], f32[4,4]) {
  %%arg = (s32[], f32[5,4,4]{2,1,0:S(5)}, f32[4,4]{1,0}) parameter(0)
  %%i = s32[] get-tuple-element(%%arg), index=0
  %%stack = f32[5,4,4]{2,1,0:S(5)} get-tuple-element(%%arg), index=1
  %%x = f32[4,4]{1,0} get-tuple-element(%%arg), index=2
%(copy)s
  %%start = ((f32[5,4,4]{2,1,0:S(5)}, s32[]), f32[1,4,4]{2,1,0}, u32[]) \
async-start(%%stack, %%i), calls=%%fetch, \
metadata={op_name="jit(step)/fetch"}
  %%y = f32[4,4]{1,0} dot(%%x, %%x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %%done = f32[1,4,4]{2,1,0} async-done(%%start)
  %%new = f32[5,4,4]{2,1,0:S(5)} fusion(%%stack, %%done, %%i), kind=kLoop, calls=%%update, \
metadata={op_name="jit(step)/store"}
  ROOT %%out = (s32[], f32[5,4,4]{2,1,0:S(5)}, f32[4,4]{1,0}) tuple(%%i, %%new, %%y)
}

%%condition (arg: (s32[], f32[5,4,4], f32[4,4])) -> pred[] {
  %%arg = (s32[], f32[5,4,4]{2,1,0:S(5)}, f32[4,4]{1,0}) parameter(0)
  ROOT %%true = pred[] constant(true)
}

ENTRY %%main (stack: f32[5,4,4], x: f32[4,4]) -> f32[5,4,4] {
  %%stack = f32[5,4,4]{2,1,0:S(5)} parameter(0), metadata={op_name="args[3]"}
  %%x = f32[4,4]{1,0} parameter(1), metadata={op_name="args[4]"}
  %%own = f32[5,4,4]{2,1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %%zero = s32[] constant(0)
  %%first = f32[1,4,4]{2,1,0} fusion(%%stack, %%zero), kind=kLoop, calls=%%slice
  %%init = (s32[], f32[5,4,4]{2,1,0:S(5)}, f32[4,4]{1,0}) tuple(%%zero, %%stack, %%x)
  %%loop = (s32[], f32[5,4,4]{2,1,0:S(5)}, f32[4,4]{1,0}) \
while(%%init), condition=%%condition, body=%%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %%result = f32[5,4,4]{2,1,0:S(5)} get-tuple-element(%%loop), index=1
}
"""


def module(fetch=KNOWN, store=KNOWN, copy=""):
    return MODULE % {"fetch": fetch, "store": store, "copy": copy}


def told(text):
    return [
        (t.name, t.op, t.to_host, t.how, t.nbytes, t.runs, t.in_loop, t.products)
        for t in transfers(text)
    ]


def test_copies_with_known_offsets_are_dma():
    assert told(module()) == [
        ("first", "", False, "dma", 64, 1, False, 0),
        ("start", "jit(step)/fetch", False, "dma", 64, 5, True, 1),
        ("new", "jit(step)/store", True, "dma", 64, 5, True, 0),
    ]
    assert fault(transfers(module())) is None


def test_memory_that_is_taken_for_a_stack_is_no_transfer():
    taken = '  %taken = f32[5,4,4]{2,1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"'
    found = transfers(module(copy=taken))
    assert found == transfers(module())
    assert fault(found) is None
    filled = transfers(module(copy=taken.replace("AllocateBuffer", "another")))
    assert [(t.name, t.how, t.in_loop) for t in filled if t.name == "taken"] == [
        ("taken", "kernel", True)
    ]


def test_arguments_are_followed_into_loops_and_through_updates():
    assert [t.argument for t in transfers(module())] == ["args[3]"] * 3
    # the loop's own stack, which no argument is, instead of the argument
    own = module().replace("tuple(%zero, %stack, %x)", "tuple(%zero, %own, %x)")
    found = {t.name: t.argument for t in transfers(own)}
    assert found == {"first": "args[3]", "start": "", "new": ""}


def test_arguments_are_followed_into_calls_and_branches():
    called = """
%there (a: f32[4,4], b: f32[5,4,4]) -> f32[5,4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  %b = f32[5,4,4]{2,1,0:S(5)} parameter(1)
  ROOT %read = f32[5,4,4]{2,1,0} copy(%b)
}

%other (a: f32[5,4,4]) -> f32[5,4,4] {
  %a = f32[5,4,4]{2,1,0:S(5)} parameter(0)
  ROOT %branch = f32[5,4,4]{2,1,0} copy(%a)
}

ENTRY"""
    lines = """  %called = f32[5,4,4]{2,1,0} call(%x, %stack), to_apply=%there
  %which = s32[] constant(1)
  %held = f32[5,4,4]{2,1,0} conditional(%which, %own, %stack), \
branch_computations={%other, %other}
  %zero"""
    text = module().replace("\nENTRY", called).replace("  %zero", lines, 1)
    found = [(t.name, t.argument) for t in transfers(text)]
    assert found[:3] == [("read", "args[3]"), ("branch", ""), ("branch", "args[3]")]


@pytest.mark.parametrize(("which", "verb"), [("fetch", "reads"), ("store", "writes")])
def test_slices_of_unknown_offset_are_kernels(which, verb):
    found = transfers(module(**{which: ""}))
    assert {t.how for t in found if t.to_host == (which == "store")} == {"kernel"}
    said = fault(found)
    assert f"XLA {verb} host memory by 1 kernels in loops" in said
    assert "64 bytes" in said
    assert "5 times a step" in said
    assert f"jit(step)/{which}" in said


def test_a_kernel_outside_of_loops_is_no_fault():
    before_the_loop = [t for t in transfers(module(fetch="")) if not t.in_loop]
    assert [t.how for t in before_the_loop] == ["kernel"]
    assert fault(tuple(before_the_loop)) is None


def test_a_stack_that_is_copied_within_host_memory_is_a_fault():
    copy = "  %again = f32[5,4,4]{2,1,0:S(5)} copy(%stack)"
    found = transfers(module(copy=copy))
    assert [(t.how, t.nbytes, t.runs) for t in found if t.name == "again"] == [("stack", 320, 5)]
    assert "XLA copies 1 arrays within host memory, 320 bytes in again" in fault(found)


@pytest.mark.parametrize(
    ("line", "to_host"),
    [
        ("  %there = f32[4,4]{1,0:S(5)} copy(%x)", True),
        ("  %here = f32[5,4,4]{2,1,0} copy(%stack)", False),
        (
            "  %there = (f32[4,4]{1,0:S(5)}, f32[4,4]{1,0}, u32[]) copy-start(%x)",
            True,
        ),
    ],
)
def test_whole_arrays_cross_by_dma(line, to_host):
    (found,) = (t for t in transfers(module(copy=line)) if t.name in ("here", "there"))
    assert (found.how, found.to_host) == ("dma", to_host)
    assert fault(transfers(module(copy=line))) is None


def test_a_module_without_host_memory_has_no_transfers():
    assert transfers(module().replace("S(5)", "S(0)")) == ()
    assert transfers("") == ()
