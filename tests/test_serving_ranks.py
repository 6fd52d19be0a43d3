"""The generation engine on several ranks: gloo on CPUs, NCCL on GPUs. A mesh of one."""

from __future__ import annotations

import pytest
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from cudnn_ops.generation import Engine, SamplingParams
from tests.cases.generation import make_cache, make_model, make_prompts
from tests.distributed import serving_checks
from tests.distributed.processes import run_in_processes


def test_on_cpus():
    """One group for all checks: most of the time goes into starting its processes."""
    run_in_processes(serving_checks.check_pairs_and_all, 4)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("overlaps", [False, True])
def test_on_gpus(overlaps):
    run_in_processes(serving_checks.check_on_gpus, 2, overlaps, backend="nccl")


def test_a_mesh_of_one_is_no_mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        outputs = []
        for given in (None, mesh, mesh.get_group()):
            with Engine(make_model("cpu").serve, make_cache("cpu", 40), mesh=given) as engine:
                assert engine.is_leader
                requests = [engine.submit(p, SamplingParams(5)) for p in make_prompts(3, 4)]
                list(engine.run())
            outputs.append([request.output for request in requests])
            with pytest.raises(RuntimeError, match="this rank is the first one"):
                engine.follow()
        assert outputs == outputs[:1] * 3
    finally:
        distributed.destroy_process_group()
    with pytest.raises(TypeError, match="Engine: mesh must be a DeviceMesh or a ProcessGroup, got"):
        Engine(make_model("cpu").serve, make_cache("cpu", 40), mesh="tp")
