"""cuDNN's graph engine as ordinary PyTorch operators.

Importing registers ``torch.ops.cudnn_ops.*``; the public functions are listed below.
"""

from importlib import import_module as _import_module

from cudnn_ops import _library as _library  # first: it registers the operators
from cudnn_ops import support
from cudnn_ops._library import cmake_prefix_path
from cudnn_ops.compiler.report import Candidate, CompileReport, compile_report
from cudnn_ops.ops import _batch_norm_fold as _batch_norm_fold
from cudnn_ops.ops import _vmap_adaptive_norm as _vmap_adaptive_norm
from cudnn_ops.ops import _vmap_attention as _vmap_attention
from cudnn_ops.ops import _vmap_batch_norm as _vmap_batch_norm
from cudnn_ops.ops import _vmap_conv as _vmap_conv
from cudnn_ops.ops import _vmap_group_norm as _vmap_group_norm
from cudnn_ops.ops import _vmap_linear as _vmap_linear
from cudnn_ops.ops import _vmap_max_pool as _vmap_max_pool
from cudnn_ops.ops import _vmap_moe as _vmap_moe
from cudnn_ops.ops import _vmap_rows as _vmap_rows
from cudnn_ops.ops._when_imported import when_imported as _when_imported
from cudnn_ops.ops.adaptive_norm import (
    adaptive_layer_norm,
    adaptive_rms_norm,
    gate_add_adaptive_layer_norm,
    gate_add_adaptive_rms_norm,
)
from cudnn_ops.ops.alibi import alibi_slopes
from cudnn_ops.ops.batch_norm import batch_norm
from cudnn_ops.ops.call import show_to_dynamo as _show_to_dynamo
from cudnn_ops.ops.checkpointing import checkpoint_ops
from cudnn_ops.ops.conv import conv1d, conv2d, conv3d
from cudnn_ops.ops.conv_transpose import conv_transpose1d, conv_transpose2d, conv_transpose3d
from cudnn_ops.ops.decomposition import decompositions
from cudnn_ops.ops.fallback import FallbackReport, FallbackRow, fallback
from cudnn_ops.ops.gated import geglu, swiglu
from cudnn_ops.ops.group_norm import add_group_norm, group_norm
from cudnn_ops.ops.instance_norm import instance_norm
from cudnn_ops.ops.linear import linear, mlp
from cudnn_ops.ops.max_pool import max_pool2d
from cudnn_ops.ops.merge import merge_attention_states
from cudnn_ops.ops.moe import grouped_linear, moe_combine, moe_experts, moe_permute
from cudnn_ops.ops.moe_routing import load_balancing_loss, moe_route
from cudnn_ops.ops.mxfp8 import AttentionMxFp8, QuantizedMxFp8, quantize_mxfp8, sdpa_mxfp8
from cudnn_ops.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from cudnn_ops.ops.paged import (
    paged_attention,
    paged_attention_with_lse,
    paged_kv_append_,
)
from cudnn_ops.ops.paged_plan import paged_plan
from cudnn_ops.ops.quantize import (
    QuantizedFp8,
    QuantizedQKV,
    dequantize_fp8,
    quantize_fp8,
    quantize_qkv_fp8,
)
from cudnn_ops.ops.rotary import rotary_embedding, rotary_embedding_qk
from cudnn_ops.ops.rotary_fp8 import RotaryFp8, rotary_embedding_qkv_fp8
from cudnn_ops.ops.rows_fp8 import (
    RowsFp8,
    add_rms_norm_fp8,
    linear_fp8,
    quantize_rows_fp8,
    rms_norm_fp8,
    swiglu_fp8,
)
from cudnn_ops.ops.sdpa import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_with_lse,
)
from cudnn_ops.ops.sdpa_fp8 import (
    AttentionFp8,
    scaled_dot_product_attention_fp8,
    sdpa_fp8,
    sdpa_fp8_with_stats,
)
from cudnn_ops.ops.sdpa_fp8_backward import AttentionFp8Gradients, sdpa_fp8_backward
from cudnn_ops.ops.varlen import varlen_attention, varlen_attention_with_lse
from cudnn_ops.ops.varlen_fp8 import PackedAttentionFp8, varlen_attention_fp8
from cudnn_ops.plans import packaged as _packaged
from cudnn_ops.plans.bundle import (
    BundleReport,
    PlanBundle,
    build_bundle,
    load_bundle,
    unload_bundle,
)
from cudnn_ops.plans.cache import (
    CacheInfo,
    StoreInfo,
    cache_clear,
    cache_info,
    set_cache_limit,
    set_store,
    store_clear,
    store_info,
    wait_for_plans,
)
from cudnn_ops.plans.linear_tuning import tune_linear
from cudnn_ops.plans.monitor import OperatorProfile, Profile, profile
from cudnn_ops.plans.norm_tuning import tune_norms
from cudnn_ops.plans.policy import plan_policy, set_autotune, set_plan_policy, using_plan_policy
from cudnn_ops.plans.profile import profile_names
from cudnn_ops.plans.request_file import load_requests, save_requests
from cudnn_ops.plans.tables import LinearTiming, NormTiming
from cudnn_ops.plans.tune import TunedPlan, tune_sdpa
from cudnn_ops.plans.warmup import PlanRequest, WarmupReport, plan_requests, record_shapes, warmup
from cudnn_ops.serving import CachedKV, CacheUsage, KVCache, KVSequence, OutOfPages, PagedKVCache
from cudnn_ops.support.known_bad import KnownBad, known_bad

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """What imports torch.fx and modules, when it is asked for."""
    if name in ("optimize_", "OptimizeReport"):
        return getattr(_import_module("cudnn_ops.integrations.optimize"), name)
    raise AttributeError(f"module 'cudnn_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_packaged.register()
_when_imported("torch._dynamo", _show_to_dynamo)
_when_imported("torch.utils.flop_counter", lambda _: _import_module("cudnn_ops.ops.flops"))
_when_imported(
    "torch._dynamo.backends.registry",
    lambda module: _import_module("cudnn_ops.compiler").register(module),
)
_when_imported(
    "torch._inductor.lowering",
    lambda module: _import_module("cudnn_ops.ops.inductor").register(module),
)
_when_imported(
    "torch.distributed.tensor", lambda _: _import_module("cudnn_ops.distributed.sharding")
)
_when_imported(
    "torch.distributed.tensor.experimental._context_parallel._attention",
    lambda module: _import_module("cudnn_ops.distributed.context").watch(module),
)

__all__ = [
    "AttentionFp8",
    "AttentionFp8Gradients",
    "AttentionMxFp8",
    "BundleReport",
    "CacheInfo",
    "CacheUsage",
    "CachedKV",
    "Candidate",
    "CompileReport",
    "FallbackReport",
    "FallbackRow",
    "KVCache",
    "KVSequence",
    "KnownBad",
    "LinearTiming",
    "NormTiming",
    "OperatorProfile",
    "OptimizeReport",
    "OutOfPages",
    "PackedAttentionFp8",
    "PagedKVCache",
    "PlanBundle",
    "PlanRequest",
    "Profile",
    "QuantizedFp8",
    "QuantizedMxFp8",
    "QuantizedQKV",
    "RotaryFp8",
    "RowsFp8",
    "StoreInfo",
    "TunedPlan",
    "WarmupReport",
    "adaptive_layer_norm",
    "adaptive_rms_norm",
    "add_group_norm",
    "add_layer_norm",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "alibi_slopes",
    "batch_norm",
    "build_bundle",
    "cache_clear",
    "cache_info",
    "checkpoint_ops",
    "cmake_prefix_path",
    "compile_report",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "decompositions",
    "dequantize_fp8",
    "fallback",
    "gate_add_adaptive_layer_norm",
    "gate_add_adaptive_rms_norm",
    "geglu",
    "group_norm",
    "grouped_linear",
    "instance_norm",
    "known_bad",
    "layer_norm",
    "linear",
    "linear_fp8",
    "load_balancing_loss",
    "load_bundle",
    "load_requests",
    "max_pool2d",
    "merge_attention_states",
    "mlp",
    "moe_combine",
    "moe_experts",
    "moe_permute",
    "moe_route",
    "optimize_",
    "paged_attention",
    "paged_attention_with_lse",
    "paged_kv_append_",
    "paged_plan",
    "plan_policy",
    "plan_requests",
    "profile",
    "profile_names",
    "quantize_fp8",
    "quantize_mxfp8",
    "quantize_qkv_fp8",
    "quantize_rows_fp8",
    "record_shapes",
    "rms_norm",
    "rms_norm_fp8",
    "rotary_embedding",
    "rotary_embedding_qk",
    "rotary_embedding_qkv_fp8",
    "save_requests",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_fp8",
    "scaled_dot_product_attention_with_lse",
    "sdpa_fp8",
    "sdpa_fp8_backward",
    "sdpa_fp8_with_stats",
    "sdpa_mxfp8",
    "set_autotune",
    "set_cache_limit",
    "set_plan_policy",
    "set_store",
    "store_clear",
    "store_info",
    "support",
    "swiglu",
    "swiglu_fp8",
    "tune_linear",
    "tune_norms",
    "tune_sdpa",
    "unload_bundle",
    "using_plan_policy",
    "varlen_attention",
    "varlen_attention_fp8",
    "varlen_attention_with_lse",
    "wait_for_plans",
    "warmup",
]
