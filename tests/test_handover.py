"""Prefill and decoding apart: gloo between two processes, NCCL between two GPUs."""

from __future__ import annotations

import pytest

from cudnn_ops.generation import KVSender
from tests.cases.generation import make_engine
from tests.distributed import handover_checks
from tests.distributed.processes import run_in_processes


def test_on_cpus():
    """One group for all checks: most of the time goes into starting its processes."""
    run_in_processes(handover_checks.check_pair, 2)


@pytest.mark.gpu
@pytest.mark.alone
def test_on_gpus():
    run_in_processes(handover_checks.check_pair, 2, backend="nccl")


def test_a_receiver_that_is_killed():
    """It leaves no result; what the sender checks would raise another error."""
    with pytest.raises(FileNotFoundError, match="1'"):
        run_in_processes(handover_checks.check_a_killed_receiver, 2)


def test_without_a_group():
    with pytest.raises(ValueError, match="init_process_group was not called"):
        KVSender(make_engine("cpu", 20), 1)
