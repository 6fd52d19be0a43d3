// Attention over a paged cache, and writing into one: schemas and the checks of their arguments.
// Kernels: paged_cuda.cpp here and ../kernels/paged_append_cuda.cpp, the CPU and fake ones in
// cudnn_ops/ops/paged.py.

#include "ops/attention/paged/paged.h"
#include "ops/attention/paged/paged_choice.h"
#include "ops/attention/paged/paged_plan_key.h"
#include "ops/attention/check.h"
#include "ops/context_parallel.h"

#include "kernels/paged_decode_call.h"

#include <ATen/ops/arange.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr const char* kOp = "cudnn_ops.paged_attention: ";
constexpr const char* kAppend = "cudnn_ops.paged_kv_append_: ";
constexpr const char* kPlan = "cudnn_ops.paged_plan: ";
constexpr auto kFp8 = at::kFloat8_e4m3fn;

const char* layout_of(bool head_major) {
  return head_major ? "[pages, heads, page size, head size]"
                    : "[pages, page size, heads, head size]";
}

void check_cache(const at::Tensor& cache, const at::Tensor& like, const char* name,
                 const char* like_name, bool head_major, const char* op) {
  TORCH_CHECK_VALUE(
      cache.layout() == at::kStrided && cache.dim() == 4 && holds(cache.sym_stride(3).sym_eq(1)),
      op, name, " must be ", layout_of(head_major), " with a last stride of 1; got ",
      cache.sym_sizes(), " with strides ", cache.sym_strides());
  TORCH_CHECK_TYPE(cache.scalar_type() == like.scalar_type() || cache.scalar_type() == kFp8, op,
                   like_name, " has dtype ", like.scalar_type(), " and ", name, " ",
                   cache.scalar_type(),
                   "; they must be of one dtype, or the cache of float8_e4m3fn");
  TORCH_CHECK_VALUE(cache.device() == like.device(), op, like_name, " is on ", like.device(),
                    " and ", name, " on ", cache.device(), "; move them to one device");
}

void check_caches(const at::Tensor& key_cache, const at::Tensor& value_cache, const char* op) {
  TORCH_CHECK_TYPE(key_cache.scalar_type() == value_cache.scalar_type(), op, "key_cache has dtype ",
                   key_cache.scalar_type(), " and value_cache ", value_cache.scalar_type(),
                   "; they must be of one dtype");
  for (const int64_t dim : {0, 1, 2}) {
    TORCH_CHECK_VALUE(holds(key_cache.sym_size(dim).sym_eq(value_cache.sym_size(dim))), op,
                      "key_cache is ", key_cache.sym_sizes(), " and value_cache ",
                      value_cache.sym_sizes(), "; pages, page size and heads must be equal");
  }
}

void check_descale(const OptionalTensor& descale, const char* name, const at::Tensor& key_cache,
                   int64_t head_dim, const char* op) {
  if (!descale) return;
  TORCH_CHECK_VALUE(key_cache.scalar_type() == kFp8, op, name,
                    " belongs to caches of float8_e4m3fn; these are ", key_cache.scalar_type());
  const c10::SymInt heads = key_cache.sym_size(head_dim), count = descale->sym_numel();
  TORCH_CHECK_VALUE(descale->scalar_type() == at::kFloat && descale->dim() <= 1 &&
                        (known(count.sym_eq(1)) || holds(count.sym_eq(heads))) &&
                        descale->device() == key_cache.device(),
                    op, name, " must be float32, one number or one for each key head, [", heads,
                    "] on ", key_cache.device(), "; got ", descale->scalar_type(), " ",
                    descale->sym_sizes(), " on ", descale->device());
}

void check_plan_of(const Paged& args, const c10::SymInt& batch) {
  if (!args.plan) return;
  TORCH_CHECK_VALUE(
      args.plan->scalar_type() == at::kInt && args.plan->dim() == 1 && args.plan->is_contiguous() &&
          holds(args.plan->sym_size(0).sym_eq(paged_plan_size(batch))) &&
          args.plan->device() == args.query.device(),
      kOp, "plan must be what cudnn_ops.paged_plan returned for these ", batch,
      " sequences, int32 [", paged_plan_size(batch), "] on ", args.query.device(), "; got ",
      args.plan->scalar_type(), " ", args.plan->sym_sizes(), " on ", args.plan->device());
}

void check_index(const at::Tensor& tensor, const c10::SymInt& batch, int64_t dim,
                 const at::Tensor& query, const char* name, const char* shape) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kInt && tensor.dim() == dim &&
                        holds(tensor.sym_size(0).sym_eq(batch)) &&
                        tensor.device() == query.device(),
                    kOp, name, " must be an int32 tensor ", shape, ", for ", batch,
                    " sequences, on ", query.device(), "; got ", tensor.scalar_type(), " ",
                    tensor.sym_sizes(), " on ", tensor.device());
}

void check_page_size(const Paged& args) {
  // Plans differ by it, so there is little to gain from keeping it symbolic.
  const int64_t size = args.key_cache.sym_size(args.token_dim()).guard_int(__FILE__, __LINE__);
  TORCH_CHECK_VALUE(size > 0 && (size & (size - 1)) == 0, kOp, "key_cache has pages of ", size,
                    " tokens (as ", layout_of(args.head_major),
                    "); the page size must be a power of 2");
}

// What lies behind the last token of a sequence in its last page: cuDNN multiplies it by 0.
void check_tails(const Paged& args) {
  const int64_t page_size = args.key_cache.size(args.token_dim());
  const at::Tensor last = args.seq_lens_kv.sub(1).clamp_min(0).to(at::kLong).unsqueeze(1);
  const at::Tensor pages = args.page_table.gather(1, last.floor_divide(page_size)).squeeze(1);
  const at::Tensor slots = at::arange(page_size, args.page_table.options());
  const at::Tensor behind =
      slots.gt(last.remainder(page_size)).logical_and(args.seq_lens_kv.gt(0).unsqueeze(1));
  const at::Tensor used = args.seq_lens_kv.gt(0);
  const at::Tensor finite = args.value_cache.index_select(0, pages.masked_fill(~used, 0))
                                .isfinite()
                                .all(3)
                                .all(args.head_dim());
  const at::Tensor bad = behind.logical_and(~finite).any(1).nonzero();
  TORCH_CHECK_VALUE(bad.numel() == 0, kOp, "sequence ", bad[0].item<int64_t>(),
                    " ends inside a page, and value_cache has NaN or infinity behind its last "
                    "token there; several queries a sequence need finite values in its place");
}

void check_contents(const Paged& args) {
  if (!checks_values(args.seq_lens_kv) || args.seq_lens_kv.numel() == 0) return;
  const int64_t page_size = args.key_cache.size(args.token_dim());
  const int64_t reach = args.page_table.size(1) * page_size;
  const auto least = args.seq_lens_kv.min().item<int64_t>();
  const auto most = args.seq_lens_kv.max().item<int64_t>();
  TORCH_CHECK_VALUE(least >= 0, kOp, "seq_lens_kv must not be negative, got ", least);
  TORCH_CHECK_VALUE(most <= reach, kOp, "seq_lens_kv has ", most, ", and the page table reaches ",
                    reach, " tokens: ", args.page_table.size(1), " pages of ", page_size);
  if (most == 0) return;
  const at::Tensor first =
      at::arange(args.page_table.size(1), args.page_table.options()).mul(page_size);
  const at::Tensor used = first.lt(args.seq_lens_kv.unsqueeze(1));
  const at::Tensor pages = args.page_table.masked_select(used);
  const auto lowest = pages.min().item<int64_t>(), highest = pages.max().item<int64_t>();
  TORCH_CHECK_VALUE(lowest >= 0 && highest < args.key_cache.size(0), kOp, "page_table holds page ",
                    lowest < 0 ? lowest : highest, ", and there are ", args.key_cache.size(0),
                    " pages");
  // Our kernel, the only one for 8 bits, does not read them.
  if (!args.has_one_query_each() && !args.has_fp8_cache()) check_tails(args);
}

}  // namespace

void check_paged(const Paged& args) {
  refuse_context_parallel(kOp);
  const auto& query = args.query;
  check_options(args, query, kOp);
  TORCH_CHECK_VALUE(query.layout() == at::kStrided && query.dim() == (args.is_packed() ? 3 : 4) &&
                        holds(query.sym_stride(-1).sym_eq(1)),
                    kOp,
                    "query must be [batch, length, heads, head size], or with cu_seqlens_q "
                    "[tokens, heads, head size], with a last stride of 1; got ",
                    query.sym_sizes(), " with strides ", query.sym_strides());
  check_supported(query, "query", kOp);
  check_cache(args.key_cache, query, "key_cache", "query", args.head_major, kOp);
  check_cache(args.value_cache, query, "value_cache", "query", args.head_major, kOp);
  if (!args.has_fp8_cache()) check_supported(args.value_cache, "value_cache", kOp);
  check_caches(args.key_cache, args.value_cache, kOp);
  check_descale(args.descale_k, "descale_k", args.key_cache, args.head_dim(), kOp);
  check_descale(args.descale_v, "descale_v", args.key_cache, args.head_dim(), kOp);
  TORCH_CHECK_VALUE(holds(query.sym_size(-1).sym_eq(args.key_cache.sym_size(3))), kOp,
                    "query has head size ", query.sym_size(-1), " and key_cache ",
                    args.key_cache.sym_size(3), "; they must be equal");
  const c10::SymInt heads = query.sym_size(-2), heads_kv = args.key_cache.sym_size(args.head_dim());
  TORCH_CHECK_VALUE(is_multiple(heads, heads_kv), kOp, "query has ", heads, " heads and key_cache ",
                    heads_kv, " (as ", layout_of(args.head_major),
                    "); the first must be a multiple of the second");
  check_page_size(args);
  c10::SymInt batch = args.is_packed() ? args.cu_seqlens_q->sym_size(0) - 1 : query.sym_size(0);
  check_index(args.page_table, batch, 2, query, "page_table", "[batch, pages of a sequence]");
  check_index(args.seq_lens_kv, batch, 1, query, "seq_lens_kv", "[batch]");
  check_per_head(args, query, kOp, query.dim() - 2);
  if (args.is_packed()) {
    check_offsets(*args.cu_seqlens_q, query, args.max_seqlen_q, "cu_seqlens_q", "max_seqlen_q",
                  kOp);
  }
  check_plan_of(args, batch);
  check_contents(args);
}

void check_paged_out(const Paged& args, const at::Tensor& out) {
  auto sizes = args.query.sym_sizes().vec();
  sizes.back() = args.value_cache.sym_size(3);
  TORCH_CHECK_VALUE(out.sym_sizes() == sizes && out.scalar_type() == args.query.scalar_type() &&
                        out.device() == args.query.device() && out.is_contiguous(),
                    kOp, "out must be ", c10::SymIntArrayRef(sizes), ", ", args.query.scalar_type(),
                    " and contiguous, on ", args.query.device(), "; got ", out.sym_sizes(), ", ",
                    out.scalar_type(), " with strides ", out.sym_strides(), ", on ", out.device());
}

void check_paged_append(const PagedAppend& args) {
  const auto& [key_cache, value_cache, key, value, slot_mapping, head_major, descale_k, descale_v] =
      args;
  check_cache(key_cache, key, "key_cache", "key", head_major, kAppend);
  check_cache(value_cache, value, "value_cache", "value", head_major, kAppend);
  check_caches(key_cache, value_cache, kAppend);
  TORCH_CHECK_TYPE(key.scalar_type() == value.scalar_type(), kAppend, "key has dtype ",
                   key.scalar_type(), " and value ", value.scalar_type());
  TORCH_CHECK_TYPE(!args.is_rounded() || key.scalar_type() == at::kHalf ||
                       key.scalar_type() == at::kBFloat16 || key.scalar_type() == at::kFloat ||
                       (key.scalar_type() == at::kDouble && !key.is_cuda()),
                   kAppend, "what is rounded to float8_e4m3fn must be float16, bfloat16 or float32",
                   " (on a CPU float64 too); key has dtype ", key.scalar_type());
  const int64_t head_dim = head_major ? 1 : 2;
  check_descale(descale_k, "descale_k", key_cache, head_dim, kAppend);
  check_descale(descale_v, "descale_v", key_cache, head_dim, kAppend);
  TORCH_CHECK_VALUE(args.is_rounded() || (!descale_k && !descale_v), kAppend,
                    "descale_k and descale_v are for tokens that are rounded; key is ",
                    key.scalar_type(), " already");
  const std::array<std::tuple<const at::Tensor&, const at::Tensor&, const char*>, 2> pairs{
      {{key, key_cache, "key"}, {value, value_cache, "value"}}};
  for (const auto& [tensor, cache, name] : pairs) {
    TORCH_CHECK_VALUE(
        tensor.dim() == 3 && holds(tensor.sym_size(1).sym_eq(cache.sym_size(head_dim))) &&
            holds(tensor.sym_size(2).sym_eq(cache.sym_size(3))) &&
            (TORCH_GUARD_OR_FALSE(tensor.sym_size(0).sym_eq(0)) ||
             holds(tensor.sym_stride(2).sym_eq(1))),
        kAppend, name, " must be [tokens, heads, head size] as ", name, "_cache has them, ",
        cache.sym_size(head_dim), " and ", cache.sym_size(3), ", with a last stride of 1; got ",
        tensor.sym_sizes(), " with strides ", tensor.sym_strides());
  }
  TORCH_CHECK_VALUE(slot_mapping.scalar_type() == at::kLong && slot_mapping.dim() == 1 &&
                        holds(slot_mapping.sym_size(0).sym_eq(key.sym_size(0))) &&
                        holds(key.sym_size(0).sym_eq(value.sym_size(0))) &&
                        slot_mapping.device() == key.device() && value.device() == key.device(),
                    kAppend,
                    "slot_mapping must be an int64 tensor [tokens] for as many keys and "
                    "values, on their device; got ",
                    slot_mapping.scalar_type(), " ", slot_mapping.sym_sizes(), " on ",
                    slot_mapping.device(), ", ", key.sym_size(0), " keys and ", value.sym_size(0),
                    " values on ", key.device());
  if (!checks_values(slot_mapping) || slot_mapping.numel() == 0) return;
  const int64_t slots = key_cache.size(0) * key_cache.size(head_major ? 2 : 1);
  const auto most = slot_mapping.max().item<int64_t>(), least = slot_mapping.min().item<int64_t>();
  TORCH_CHECK_VALUE(least >= -1 && most < slots, kAppend, "slot_mapping holds ",
                    least < -1 ? least : most, ", and there are slots 0 to ", slots - 1,
                    " (-1 for none)");
}

c10::SymInt paged_plan_size(const c10::SymInt& batch) {
  return batch + (kPagedSums + 1);
}

void check_paged_plan(const PagedPlan& args) {
  const auto& lens = args.seq_lens_kv;
  TORCH_CHECK_VALUE(lens.scalar_type() == at::kInt && lens.dim() == 1, kPlan,
                    "seq_lens_kv must be an int32 tensor [batch]; got ", lens.scalar_type(), " ",
                    lens.sym_sizes());
  TORCH_CHECK_VALUE(holds(args.group.sym_ge(1)) && holds(args.queries.sym_ge(0)), kPlan,
                    "there must be a head of queries for each of keys; got ", args.group,
                    " and queries ", args.queries);
  check_options(args, lens, kPlan);
  if (!args.cu_seqlens_q) return;
  const auto& offsets = *args.cu_seqlens_q;
  TORCH_CHECK_VALUE((offsets.scalar_type() == at::kInt || offsets.scalar_type() == at::kLong) &&
                        offsets.dim() == 1 &&
                        holds(offsets.sym_size(0).sym_eq(lens.sym_size(0) + 1)) &&
                        offsets.device() == lens.device(),
                    kPlan, "cu_seqlens_q must be an int32 or int64 tensor [batch + 1], for ",
                    lens.sym_size(0), " sequences, on ", lens.device(), "; got ",
                    offsets.scalar_type(), " ", offsets.sym_sizes(), " on ", offsets.device());
}

const Operator<at::Tensor, Paged>& paged_op() {
  static const Operator<at::Tensor, Paged> op("cudnn_ops::paged_attention");
  return op;
}

const Operator<OutAndLse, Paged>& paged_with_lse_op() {
  static const Operator<OutAndLse, Paged> op("cudnn_ops::paged_attention_with_lse");
  return op;
}

namespace {

// A PagedUse.
void use_paged_kernel(int64_t use) {
  set_paged_use(static_cast<PagedUse>(use));
}

void paged_check(const PagedInto<OptionalTensor>& given) {
  check_paged(given.args);
  if (given.out) check_paged_out(given.args, *given.out);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  const std::string arguments =
      "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor page_table, "
      "Tensor seq_lens_kv, *, Tensor? cu_seqlens_q=None, SymInt max_seqlen_q=0, "
      "float? scale=None, bool is_causal=False, int[2] window_size=[-1, -1], "
      "bool bottom_right=True, float softcap=0.0, Tensor? sinks=None, bool head_major=False, "
      "Tensor? descale_k=None, Tensor? descale_v=None, Tensor? plan=None";
  m.def(("paged_attention" + arguments + ") -> Tensor").c_str(), tags);
  m.def(("paged_attention_with_lse" + arguments + ") -> (Tensor out, Tensor lse)").c_str(), tags);
  // Nothing is returned: what an operator returns must not be what it was given.
  m.def(("_paged_attention_out" + arguments + ", Tensor(a!) out) -> ()").c_str(), tags);
  m.def(("_paged_check" + arguments + ", Tensor? out=None) -> ()").c_str(),
        cudnn_ops::kernel<cudnn_ops::paged_check>, tags);
  m.def(("_paged_runs_kernel" + arguments + ") -> bool").c_str(),
        cudnn_ops::kernel<cudnn_ops::paged_runs_kernel>);
  m.def(("_paged_plan_key" + arguments + ", bool with_lse=False) -> int[]").c_str(),
        cudnn_ops::kernel<cudnn_ops::paged_plan_key>);
  const std::string append =
      "Tensor key, Tensor value, Tensor slot_mapping, bool head_major=False, "
      "Tensor? descale_k=None, Tensor? descale_v=None) -> ()";
  m.def(("paged_kv_append_(Tensor(a!) key_cache, Tensor(b!) value_cache, " + append).c_str(), tags);
  m.def(("_paged_append_check(Tensor key_cache, Tensor value_cache, " + append).c_str(),
        cudnn_ops::kernel<cudnn_ops::check_paged_append>, tags);
  const std::string plan =
      "(Tensor seq_lens_kv, Tensor? cu_seqlens_q, SymInt queries, SymInt group, bool is_causal, "
      "int[2] window_size, bool bottom_right) -> ";
  m.def(("_paged_plan" + plan + "Tensor").c_str(), tags);
  m.def(("_paged_plan_check" + plan + "()").c_str(), cudnn_ops::kernel<cudnn_ops::check_paged_plan>,
        tags);
  m.def("_paged_use_kernel(int use) -> ()", cudnn_ops::use_paged_kernel);
}
