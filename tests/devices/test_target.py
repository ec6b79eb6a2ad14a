import dataclasses

import jax
import pytest

from jaxmem._target.devices.chips import GPUS, chip_of_kind, target_config
from jaxmem._target.devices.rates import rates_of
from jaxmem._target.devices.target import Target, host_memory_bytes
from jaxmem.errors import TargetError
from tests.shared.refused import refused


@pytest.mark.parametrize("name", GPUS)
def test_named_target_is_the_tables(name):
    target, gpu = Target.parse(name), GPUS[name]
    assert (target.name, target.kind, target.platform) == (name, gpu.description, "cuda")
    assert (target.devices, target.local) == (1, False)
    assert 0.9 * gpu.memory_bytes < target.usable_bytes < gpu.memory_bytes
    assert target.matmul_flops > target.flops_f32 > 1e12
    assert target.bandwidth > 10 * target.link > 1e11
    assert target.host_bytes >= 16 * 2**30
    assert chip_of_kind(gpu.description) is gpu
    assert target.gpu is gpu


@pytest.mark.parametrize("name", GPUS)
def test_target_config_describes_the_gpu(name):
    gpu, text = GPUS[name], target_config(GPUS[name])
    for line in (
        f"core_count: {gpu.cores}\n",
        f"device_memory_size: {gpu.memory_bytes}\n",
        f"major: {gpu.capability[0]} minor: {gpu.capability[1]}",
        f'device_description_str: "{gpu.description}"',
    ):
        assert line in text
    assert text.count("{") == text.count("}")


def test_devices_are_counted_and_printed():
    target = Target.parse(" H200:8 ")
    assert (target.name, target.devices, str(target)) == ("h200", 8, "h200:8")
    assert dataclasses.replace(target, devices=1) == Target.parse("h200") == Target.parse("h200:1")
    assert str(Target.parse("t4")) == "t4"
    assert Target.parse(target) is target
    assert Target.parse(str(target)) == target


@refused(
    TargetError,
    ("h200:0", "is '0'; it must be a whole number"),
    ("h200:", "is ''; it must be a whole number"),
    ("h200:２", "is '２'; it must be"),
    ("h200:²", "is '²'; it must be"),
    ("h200:1_0", "is '1_0'; it must be"),
    ("h200:00", "is '00'; it must be"),
    ("h20", "did you mean 'h200'"),
    ("a100", "did you mean 'a100-40gb' or 'a100-80gb'"),
    ("rtx-4090", "did you mean 'rtx4090'"),
    ("cpu", "did you mean 'local'"),
    ("v5litepod-8", "did you mean 'v5e'"),
    ("", "not known. Expected 'local', one of t4, a10g"),
    ("v100", "Use 't4'"),
    ("v100-32gb:8", "h200"),
    ("local:2", "takes no number of devices"),
    (3, "must be text or a Target, got int"),
)
def test_unknown_targets_say_what_is_known(text):
    Target.parse(text)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", None),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx6000-pro"),
        ("NVIDIA B300 SXM6 AC", "b300"),
    ],
)
def test_device_kinds(kind, name):
    assert chip_of_kind(kind) == GPUS.get(name)


def test_local_cpu_is_this_machine():
    target = Target.parse("local")
    assert target.local
    assert target.gpu is None
    assert target.platform == jax.devices()[0].platform == "cpu"
    assert target.kind == jax.devices()[0].device_kind
    assert target.devices == jax.local_device_count()
    assert target.usable_bytes * target.devices == pytest.approx(
        0.9 * host_memory_bytes(), abs=target.devices
    )
    assert str(target) == "local"


class FakeGpu:
    platform, device_kind = "gpu", "NVIDIA H200"
    client = type("Client", (), {"platform_version": "PJRT C API cuda 13000"})()

    def memory_stats(self):
        return {"bytes_limit": 123_456}


def test_local_gpu_has_what_the_runtime_gives(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeGpu(), FakeGpu()])
    target = Target.parse("local")
    assert (target.usable_bytes, target.devices, target.platform) == (123_456, 2, "cuda")
    assert target.bandwidth == rates_of(GPUS["h200"]).bandwidth
    monkeypatch.setattr(FakeGpu, "memory_stats", lambda _: None)
    with pytest.raises(TargetError, match="does not report its memory"):
        Target.parse("local")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1000 * 1024),
        ({"sys/fs/cgroup/memory.max": "4096\n"}, 4096),
        ({"sys/fs/cgroup/memory.max": "max\n"}, 1000 * 1024),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "8192\n"}, 8192),
        ({"sys/fs/cgroup/memory.max": f"{2**60}\n"}, 1000 * 1024),
    ],
)
def test_host_memory_is_the_least_limit(tmp_path, files, expected):
    for path, text in ({"proc/meminfo": "MemTotal:   1000 kB\nMemFree:  10 kB\n"} | files).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert host_memory_bytes(str(tmp_path)) == expected
